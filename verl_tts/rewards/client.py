"""Asks scorers over HTTP, and turns every fault into the error that the protocol names for it.

    async with ScorerClient(ClientConfig(scorer_url="http://127.0.0.1:18080/score")) as client:
        info = await client.probe()
        score = await client.score(waveform, prompt="Good morning.", metadata={"id": "en-00000001"})

One client per worker, used from one event loop: its connection pool belongs to the loop that opened it.
An attempt either ends in a Score, or in a ScorerError, or is tried again:

    refused, reset, timed out, DNS, 408, 5xx     again after a back-off, ``max_retries`` times
    429, 503 with Retry-After                    again when told, for ``busy_timeout_s`` in all
    3xx, other 4xx, ``error`` in the answer      ScorerRejected
    another 2xx, an answer that is none          ScorerProtocolError
"""

import asyncio
import itertools
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Self, TypeVar
from urllib.parse import urlsplit

import httpx
import numpy as np
import tenacity

from verl_tts.config.reward import ClientConfig
from verl_tts.errors import ConfigError, ScorerError, ScorerProtocolError, ScorerRejected, ScorerUnavailable
from verl_tts.rewards.protocol import (
    LATENCY_NOTE,
    RETRIES_NOTE,
    UNBOUNDED,
    WAITING_NOTE,
    Clip,
    ScoreRange,
    ScorerInfo,
    decode_answer,
    decode_info,
    encode_request,
    excerpt,
    is_object,
)
from verl_tts.types import Scalar, Score, Waveform

MAX_ANSWER_BYTES = 1 << 20
ADDRESS_TIMEOUT_S = 5.0  # for the request that only asks whether the path is right
MAX_BUSY_WAIT_S = 30.0  # at a time, whatever Retry-After says
EXCERPT_TIMEOUT_S = 1.0  # for the body of an answer whose status has decided already
PROBE_INTERVAL_S = 0.25

SILENCE = Clip(Waveform(np.zeros(2_400, np.float32), 24_000), "Hello.", {"id": "verl-tts-start-up"})
_WRONG_PATH = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.GONE, HTTPStatus.NOT_IMPLEMENTED)

T = TypeVar("T")


class _RetryableError(Exception):
    """An attempt that came to nothing; ``wait_s`` is set if the scorer said that it is busy."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass
class _History:
    """What has happened to one sample so far."""

    attempts: int = 0
    started_s: float = 0.0  # of the first attempt, when it had got its slot
    faults: int = 0  # attempts that count as a retry
    waiting_s: float = 0.0  # told by the scorer to wait, or waiting for its answer "busy"

    def note_wait(self, state: tenacity.RetryCallState) -> None:
        self.waiting_s += _busy_wait_s(state) or 0.0


def _busy_wait_s(state: tenacity.RetryCallState) -> float | None:
    """What the scorer told us to wait after the attempt of ``state``; None if it is not busy but failing."""
    fault = state.outcome.exception() if state.outcome else None
    return fault.wait_s if isinstance(fault, _RetryableError) else None


class ScorerClient:
    """Scores waveforms at one or several addresses; a sample stays with the address that it got."""

    def __init__(self, config: ClientConfig) -> None:
        if not config.urls:
            raise ConfigError("tts.reward.scorer_url is not set; set it to the address of a scorer, path included")
        for url in config.urls:
            try:
                httpx.URL(url).host  # noqa: B018  which is decoded only now
            except (httpx.InvalidURL, UnicodeError) as error:
                raise ConfigError(f"tts.reward.scorer_url: {url!r} is not an HTTP address: {error}") from error
        self._config = config
        self._token = _read_token(config.token_env)
        self._score_range: ScoreRange = UNBOUNDED
        self._next_url = itertools.cycle(config.urls).__next__
        self._slots = asyncio.Semaphore(config.max_in_flight)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=None,  # the deadline of the whole attempt counts, see _attempt
            follow_redirects=False,
            trust_env=False,  # audio goes where scorer_url says, not through the proxy that the shell names
            limits=httpx.Limits(max_connections=config.max_in_flight, keepalive_expiry=2.0),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    # --- start-up ------------------------------------------------------------------------------------------------

    async def probe(self) -> ScorerInfo:
        """Wait until every scorer answers, and learn who they are.

        Raises ScorerUnavailable after ``startup_timeout_s``, ConfigError for a path at which nobody scores,
        ScorerProtocolError if ``/info`` breaks the protocol or the addresses do not show one fingerprint.
        """
        infos = await asyncio.gather(*map(self._probe_one, self._config.urls))
        for url, info in zip(self._config.urls, infos, strict=True):
            if info.fingerprint != infos[0].fingerprint:
                raise ScorerProtocolError(
                    f"{url} and {self._config.urls[0]} are not the same scorer: fingerprints {info.fingerprint} "
                    f"and {infos[0].fingerprint}; start all addresses of tts.reward.scorer_url with equal settings"
                )
        self._score_range = infos[0].score_range
        return infos[0]

    async def _probe_one(self, url: str) -> ScorerInfo:
        origin = "{0.scheme}://{0.netloc}".format(urlsplit(url))
        deadline_s = time.monotonic() + self._config.startup_timeout_s
        await self._get(f"{origin}/healthz", deadline_s, patient=True)
        await self._check_path(url)
        body = await self._get(f"{origin}/info", deadline_s, patient=False)
        if body is None:
            return ScorerInfo()
        try:
            return decode_info(body)
        except ScorerProtocolError as error:
            raise ScorerProtocolError(f"{origin}: {error}") from error

    async def _check_path(self, url: str) -> None:
        """Ask for the score of a moment of silence; only what no right address answers counts against this one.

        A scorer may refuse that clip, fail on it or take long: the clips of the run will tell. A page that is not
        there, one that takes no POST, one that has moved, and a 200 that is no JSON object are a wrong path.
        """

        async def attempt(deadline: asyncio.Timeout) -> str:
            async with self._http.stream("POST", url, content=encode_request(SILENCE)) as response:
                if response.status_code == HTTPStatus.OK:
                    body = await self._read_body(response)
                    return "" if is_object(body) else f"HTTP 200 without a JSON object: {self._shown(body)}"
                answer = await self._describe(response, deadline)
                wrong = response.status_code in _WRONG_PATH or 300 <= response.status_code < 400
                return answer if wrong else ""

        try:
            problem = await _within(min(self._config.timeout_s, ADDRESS_TIMEOUT_S), attempt)
        except _RetryableError:
            return
        except ScorerProtocolError as error:
            problem = str(error)
        if problem:
            parts = urlsplit(url)
            raise ConfigError(
                f"{url}: nobody scores at the path {parts.path or '/'!r} ({problem}); give the full address of the "
                f"scorer, path included, such as {parts.scheme}://{parts.netloc}/score"
            )

    async def _get(self, url: str, deadline_s: float, *, patient: bool) -> bytes | None:
        """The body at ``url``, None for a 404. Any other 3xx or 4xx is final unless ``patient``."""

        async def attempt(deadline: asyncio.Timeout) -> bytes | None:
            async with self._http.stream("GET", url) as response:
                if response.status_code == HTTPStatus.OK:
                    return await self._read_body(response)
                if response.status_code == HTTPStatus.NOT_FOUND:
                    return None
                answer = await self._describe(response, deadline)
                final = 300 <= response.status_code < 500 and response.status_code not in (408, 429)
                if final and not patient:
                    raise ScorerRejected(f"{url}: {answer}")
                raise _RetryableError(answer)

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_RetryableError),
            wait=tenacity.wait_fixed(PROBE_INTERVAL_S),
            stop=lambda state: time.monotonic() + state.upcoming_sleep > deadline_s,
            reraise=True,
        )

        async def attempt_in_time() -> bytes | None:
            # The last attempt gets a moment even if nothing is left of the time, so that 0 asks once.
            left_s = max(deadline_s - time.monotonic(), 1.0)
            return await _within(min(self._config.timeout_s, left_s), attempt)

        try:
            return await retrying(attempt_in_time)
        except _RetryableError as error:
            raise ScorerUnavailable(
                f"{url}: no scorer within {self._config.startup_timeout_s:g} s of the start: {error}; "
                "start the scorer first, or raise tts.reward.startup_timeout_s"
            ) from error
        except ScorerProtocolError as error:
            raise ScorerProtocolError(f"{url}: {error}") from error

    # --- scoring -------------------------------------------------------------------------------------------------

    async def score(self, waveform: Waveform, prompt: str, metadata: Mapping[str, Scalar]) -> Score:
        """The score of one clip; its notes say how long the scorer took (``request_metrics`` reads them).

        Raises ScorerUnavailable, ScorerRejected or ScorerProtocolError. The message names the URL, the
        sample, the attempts made and what came back.
        """
        clip = Clip(waveform, prompt, metadata)
        url = self._next_url()
        history = _History()
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_RetryableError),
            wait=lambda state: self._wait_s(state, history),
            stop=lambda state: self._is_over(state, history),
            before_sleep=history.note_wait,
            reraise=True,
        )
        try:
            score = decode_answer(await retrying(self._attempt, url, clip, history), clip, self._score_range)
        except _RetryableError as error:
            raise ScorerUnavailable(self._message(url, clip, history, error)) from error
        except ScorerError as error:
            raise type(error)(self._message(url, clip, history, error)) from error
        notes = {
            LATENCY_NOTE: time.monotonic() - history.started_s,
            RETRIES_NOTE: history.faults,
            WAITING_NOTE: history.waiting_s,
        }
        return replace(score, notes={**score.notes, **notes})

    async def _attempt(self, url: str, clip: Clip, history: _History) -> bytes:
        """The body of a 200. Everything else raises."""

        async def post(deadline: asyncio.Timeout) -> bytes:
            # Encoded here, not once per clip: clips that wait for a slot should not hold their bodies in memory.
            async with self._http.stream("POST", url, content=encode_request(clip)) as response:
                if response.status_code == HTTPStatus.OK:
                    return await self._read_body(response)
                raise self._fault(response, await self._describe(response, deadline))

        async with self._slots:
            started_s = time.monotonic()
            history.attempts += 1
            if history.attempts == 1:
                history.started_s = started_s
            try:
                return await _within(self._config.timeout_s, post)
            except _RetryableError as error:
                if error.wait_s is None:
                    history.faults += 1
                else:
                    history.waiting_s += time.monotonic() - started_s
                raise

    def _fault(self, response: httpx.Response, answer: str) -> Exception:
        """What a status other than 200 means."""
        status = response.status_code
        told_s = _retry_after_s(response)
        if status == HTTPStatus.TOO_MANY_REQUESTS or (status == HTTPStatus.SERVICE_UNAVAILABLE and told_s is not None):
            # A little chance spreads the clients that were all told the same, and keeps a 0 from spinning.
            wait_s = self._config.retry_backoff_s if told_s is None else told_s
            return _RetryableError(answer, wait_s=min(wait_s, MAX_BUSY_WAIT_S) + random.uniform(0.05, 0.25))
        if status == HTTPStatus.REQUEST_TIMEOUT or status >= 500:
            return _RetryableError(answer)
        if 200 <= status < 300:
            return ScorerProtocolError(answer)
        return ScorerRejected(answer)

    def _wait_s(self, state: tenacity.RetryCallState, history: _History) -> float:
        busy_wait_s = _busy_wait_s(state)
        if busy_wait_s is not None:
            return busy_wait_s
        wait_s = self._config.retry_backoff_s * 2 ** (history.faults - 1)
        return wait_s * random.uniform(1.0, 1.5)

    def _is_over(self, state: tenacity.RetryCallState, history: _History) -> bool:
        busy_wait_s = _busy_wait_s(state)
        if busy_wait_s is not None:
            return history.waiting_s + busy_wait_s > self._config.busy_timeout_s
        return history.faults > self._config.max_retries

    # --- what came back --------------------------------------------------------------------------------------------

    async def _read_body(self, response: httpx.Response) -> bytes:
        coding = response.headers.get("content-encoding", "identity")
        if coding != "identity":  # a few bytes of it could be all our memory
            raise ScorerProtocolError(f"the answer is compressed ({excerpt(coding)}), which nobody has asked for")
        body = b""
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                raise ScorerProtocolError(f"the answer is larger than {MAX_ANSWER_BYTES} bytes: {self._shown(body)}")
        return self._without_token(body)

    async def _describe(self, response: httpx.Response, deadline: asyncio.Timeout) -> str:
        """Status and the beginning of the body; the body cannot change what the status has decided."""
        deadline.reschedule(None)
        body = b""
        try:
            async with asyncio.timeout(EXCERPT_TIMEOUT_S):
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > 1024:
                        break
        except (TimeoutError, httpx.HTTPError, httpx.StreamError):
            pass  # what has arrived is enough for a message
        words = f"HTTP {response.status_code}"
        if "location" in response.headers:
            words += f" to {self._shown(response.headers['location'].encode())} (redirects are not followed)"
        return f"{words}: {self._shown(body)}" if body else words

    def _without_token(self, answer: bytes) -> bytes:
        """What came back, fit for a log: a server may send back what it was sent."""
        return answer.replace(self._token.encode(), b"***") if self._token else answer

    def _shown(self, answer: bytes) -> str:
        return excerpt(self._without_token(answer).decode(errors="replace"))

    def _message(self, url: str, clip: Clip, history: _History, problem: Exception) -> str:
        attempts = "1 attempt" if history.attempts == 1 else f"{history.attempts} attempts"
        waited = f", {history.waiting_s:.1f} s of waiting as told" if history.waiting_s else ""
        return f"{url}: sample {clip.id!r} has no score after {attempts}{waited}: {problem}"


async def _within(timeout_s: float, request: Callable[[asyncio.Timeout], Awaitable[T]]) -> T:
    """Await ``request(deadline)``; a network fault or more than ``timeout_s`` in all is worth another attempt."""
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            return await request(deadline)
    except TimeoutError as error:
        raise _RetryableError(f"no complete answer within {timeout_s:g} s") from error
    except httpx.TransportError as error:
        raise _RetryableError(f"{type(error).__name__}: {excerpt(error) or 'the connection broke'}") from error


def _retry_after_s(response: httpx.Response) -> float | None:
    """Seconds that Retry-After asks for: a number, or an HTTP date. None if it is missing or neither."""
    value = response.headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return min(float(value), MAX_BUSY_WAIT_S)
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


def _read_token(variable: str) -> str:
    token = os.environ.get(variable, "") if variable else ""
    if not (token.isascii() and (token.isprintable() or not token)):
        # The value itself must not reach a log.
        raise ConfigError(f"{variable} holds characters that no HTTP header can carry; set it to printable ASCII")
    return token


def request_metrics(scores: Iterable[tuple[str, Score]]) -> dict[str, float | str]:
    """How the scorer served ``(sample id, score)`` pairs; clips that were not sent do not count.

    Keys: ``requests``, ``latency_p50_s``, ``latency_p95_s``, ``latency_max_s``, ``slowest_id``, ``retries``,
    ``waiting_s``. Empty if nothing was sent.
    """
    sent = [(sample_id, score.notes) for sample_id, score in scores if LATENCY_NOTE in score.notes]
    if not sent:
        return {}
    latencies_s = np.array([notes[LATENCY_NOTE] for _, notes in sent], dtype=float)
    return {
        "requests": len(sent),
        "latency_p50_s": float(np.percentile(latencies_s, 50)),
        "latency_p95_s": float(np.percentile(latencies_s, 95)),
        "latency_max_s": float(latencies_s.max()),
        "slowest_id": sent[int(latencies_s.argmax())][0],
        "retries": sum(int(notes[RETRIES_NOTE] or 0) for _, notes in sent),
        "waiting_s": sum(float(notes[WAITING_NOTE] or 0.0) for _, notes in sent),
    }
