"""The audio scorer protocol, held from three sides.

The same cases go to our server through our client, and through a client that is written from the specification and
shares no line with ours; and our client meets a server that misbehaves in every way of the table of faults. Random
requests and answers follow: nothing crashes, and no reward comes of nonsense.
"""

import asyncio
import base64
import json
import math
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.scorer_rig import (
    OK,
    QUICK,
    SPEECH,
    FastForward,
    ask,
    drip,
    http,
    raw,
    reset,
    rigged,
    running,
    silence,
    unused_url,
)
from verl_tts.config.reward import ClientConfig
from verl_tts.errors import ScorerError, ScorerProtocolError, ScorerRejected, ScorerUnavailable
from verl_tts.rewards import client as client_module
from verl_tts.rewards.client import ScorerClient
from verl_tts.rewards.protocol import BadRequestError, Clip
from verl_tts.scorers.app import DEFAULT_PORT, ServerSettings, create_app
from verl_tts.types import Waveform

ALL_RETRIES_USED = 3  # max_retries is 2


@pytest.fixture(autouse=True)
def _no_token_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCORER_TOKEN", raising=False)


# --- our server, through two clients ---------------------------------------------------------------------------------


class Loudness:
    """The scorer of these cases: the mean of the samples, told in its metadata to fail, to refuse or to wait."""

    name, version, model, revision = "loudness", "1", None, None
    score_range = (-1.0, 1.0)
    part_names = ("seconds",)
    details: dict[str, object] = {}

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def fingerprint(self) -> str:
        return "f" * 64

    def check(self, clip: Clip) -> None:
        if clip.metadata.get("refuse"):
            raise BadRequestError("metadata.refuse", "this one is refused in a test")

    def score_batch(self, clips: Sequence[Clip]) -> list[dict]:
        self.may_go_on.wait(20)
        if any(clip.metadata.get("fail") for clip in clips):
            raise RuntimeError("this one fails in a test")
        return [
            {"score": float(c.waveform.samples_S.mean()), "seconds": c.waveform.seconds, "heard": c.prompt}
            for c in clips
        ]


Outcome = tuple[str, float | int]  # ("score", total) or ("rejected", status) or ("unavailable", status)


def through_our_client(url: str, waveform: Waveform, prompt: str, metadata: dict, token: str = "") -> Outcome:
    async def main() -> Outcome:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("SCORER_TOKEN", token)
            client = ScorerClient(ClientConfig(scorer_url=url, **QUICK))
        async with client:
            try:
                return "score", (await client.score(waveform, prompt, metadata)).total
            except ScorerRejected as error:
                return "rejected", int(str(error).partition("HTTP ")[2][:3])
            except ScorerUnavailable as error:
                return "unavailable", int(str(error).partition("HTTP ")[2][:3])

    return asyncio.run(main())


def through_a_plain_client(url: str, waveform: Waveform, prompt: str, metadata: dict, token: str = "") -> Outcome:
    """As the specification reads, with nothing of ours."""
    samples = [float(sample) for sample in waveform.samples_S]
    request = {
        "protocol_version": "1",
        "waveform_f32_base64": base64.b64encode(struct.pack(f"<{len(samples)}f", *samples)).decode(),
        "num_samples": len(samples),
        "sample_rate": waveform.sample_rate_hz,
        "prompt": prompt,
        "metadata": metadata,
    }
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    for _ in range(ALL_RETRIES_USED):
        while True:
            response = httpx.post(url, json=request, headers=headers, timeout=10)
            if response.status_code not in (429, 503) or "retry-after" not in response.headers:
                break
            time.sleep(float(response.headers["retry-after"]))
        if response.status_code < 500:
            break
    if response.status_code == 200:
        answer = response.json()
        assert type(answer["score"]) in (int, float)
        assert answer.get("error") is None
        return "score", float(answer["score"])
    assert response.json()["error"], "every refusal says why"
    return ("unavailable" if response.status_code >= 500 else "rejected"), response.status_code


CLIENTS = {"our client": through_our_client, "a plain client": through_a_plain_client}
RAMP_S = np.linspace(0, 0.5, 100, dtype=np.float32)
CASES: dict[str, tuple[Waveform, str, dict, Outcome]] = {
    "a clip": (Waveform(RAMP_S, 24_000), "Good morning.", {"id": "en-1"}, ("score", 0.25)),
    "one sample": (Waveform(RAMP_S[-1:], 24_000), "Hi.", {"id": "a"}, ("score", 0.5)),
    "8 s at 48 kHz": (Waveform(np.full(384_000, 0.5, np.float32), 48_000), "Hi.", {}, ("score", 0.5)),
    "samples beyond full scale": (Waveform(np.float32([2.0, -1.0, -0.25]), 8_000), "Hi.", {}, ("score", 0.25)),
    "a score of zero": (Waveform(np.zeros(10, np.float32), 24_000), "Hi.", {}, ("score", 0.0)),
    "a score below zero": (Waveform(-RAMP_S, 24_000), "Hi.", {}, ("score", -0.25)),
    "any script": (Waveform(RAMP_S, 24_000), "नमस्ते 你好 🙂", {"id": "हि-1", "speaker": "श्री"}, ("score", 0.25)),
    "every scalar": (
        Waveform(RAMP_S, 24_000), "Hi.", {"a": 1, "b": -1.5, "c": True, "d": None, "e": ""}, ("score", 0.25),
    ),
    "an integer of 64 bits": (Waveform(RAMP_S, 24_000), "Hi.", {"index": 2**63 - 1}, ("score", 0.25)),
    "what the scorer refuses": (Waveform(RAMP_S, 24_000), "Hi.", {"refuse": True}, ("rejected", 400)),
    "what the scorer fails on": (Waveform(RAMP_S, 24_000), "Hi.", {"fail": True}, ("unavailable", 500)),
    "more than the limit": (Waveform(np.zeros(1_000_000, np.float32), 24_000), "Hi.", {}, ("rejected", 413)),
    "a text of nothing": (Waveform(RAMP_S, 24_000), "  ", {}, ("rejected", 400)),
}  # fmt: skip


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    with running(create_app(Loudness(), ServerSettings(max_body_bytes=3_000_000))) as address:
        yield address


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("case", CASES)
def test_a_case_has_one_outcome_whoever_asks(origin, case, client):
    waveform, prompt, metadata, outcome = CASES[case]
    kind, value = CLIENTS[client](f"{origin}/score", waveform, prompt, metadata)
    assert (kind, value) == (outcome[0], pytest.approx(outcome[1], abs=1e-6))


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("path", ["/score", "/", ""])
def test_a_bare_origin_scores_too(origin, path, client):
    assert CLIENTS[client](f"{origin}{path}", Waveform(RAMP_S, 24_000), "Hi.", {})[0] == "score"


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(("token", "outcome"), [("s3cret", "score"), ("other", "rejected"), ("", "rejected")])
def test_a_server_with_a_token_scores_for_those_who_have_it(client, token, outcome):
    with running(create_app(Loudness(), ServerSettings(token="s3cret"))) as address:
        asked = CLIENTS[client](f"{address}/score", Waveform(RAMP_S, 24_000), "Hi.", {}, token)
    assert asked[0] == outcome
    assert outcome == "score" or asked[1] == 401


@pytest.mark.parametrize("client", CLIENTS)
def test_a_full_queue_says_when_to_come_back_and_then_scores(client):
    """One clip is being scored and holds the only place until the second one has been told to wait."""
    scorer = Loudness()
    scorer.may_go_on.clear()
    settings = ServerSettings(max_queue=1, batch_size=1)
    clip = (Waveform(RAMP_S, 24_000), "Hi.", {})
    with running(create_app(scorer, settings)) as address:
        first = threading.Thread(target=through_a_plain_client, args=(f"{address}/score", *clip))
        first.start()
        while "scorer_requests_in_flight 1.0" not in httpx.get(f"{address}/metrics").text:
            time.sleep(0.01)
        threading.Timer(0.3, scorer.may_go_on.set).start()
        assert CLIENTS[client](f"{address}/score", *clip)[0] == "score"
        first.join()
        assert 'scorer_requests_total{status="429"}' in httpx.get(f"{address}/metrics").text


def test_who_scores_is_told_as_the_specification_has_it(origin):
    info = httpx.get(f"{origin}/info").json()
    assert {"name", "version", "model", "revision", "score_range", "fingerprint"} <= info.keys()
    assert info["score_range"] == [-1.0, 1.0]
    assert httpx.get(f"{origin}/healthz").json() == {"status": "ok"}


async def _probe_and_score(origin: str):
    async with ScorerClient(ClientConfig(scorer_url=f"{origin}/score")) as client:
        return await client.probe(), await client.score(Waveform(RAMP_S, 24_000), "Hi.", {"id": "a"})


def test_our_client_learns_from_our_server_who_scores(origin):
    info, score = asyncio.run(_probe_and_score(origin))
    assert (info.name, info.fingerprint, info.score_range) == ("loudness", "f" * 64, (-1.0, 1.0))
    assert set(score.parts) == set(info.part_names or ())
    assert score.notes["heard"] == "Hi."


# --- our client, and a server that misbehaves ------------------------------------------------------------------------


TIMEOUT_S = {"no answer": 0.4, "a body that drips in": 0.4}  # of the faults that only time ends


def is_retried():
    return {
        "the connection is reset": reset,
        "the connection closes in the head": raw(b"HTTP/1.1 200 OK\r\nContent-Le"),
        "half a body": raw(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"score"'),
        "it does not speak HTTP": raw(b"220 smtp ready\r\n"),
        "no answer": silence,
        "a body that drips in": drip(200),
        "408": http(408),
        "500": http(500, "<html>oops</html>"),
        "500 with an error in it": http(500, {"error": "out of memory"}),
        "502": http(502),
        "503 without Retry-After": http(503),
        "503 with a Retry-After that nobody can read": http(503, headers=[("Retry-After", "soon")]),
        "a 500 with a score in it": http(500, {"score": 0.5}),
    }


def is_rejected():
    statuses = (300, 301, 302, 303, 304, 307, 308, 400, 401, 403, 404, 405, 409, 413, 422)
    return {
        **{str(status): http(status, {"score": 0.5}) for status in statuses if status != 304},
        "304": http(304),
        "a 400 that drips in": drip(400),
        "error in the answer": http(200, {"error": "model is broken"}),
        "error beside a score": http(200, {"score": 0.5, "error": "model is broken"}),
        "an error that is empty": http(200, {"score": 0.5, "error": ""}),
        "an error that is false": http(200, {"score": 0.5, "error": False}),
    }


def is_no_answer():
    bodies = {
        "nothing": b"",
        "HTML": b"<html>proxy login</html>",
        "half of a JSON text": b'{"score": 0.5',
        "not UTF-8": b'{"score": 0.5, "text": "\xff"}',
        "a list": b"[0.5]",
        "a number": b"0.5",
        "null": b"null",
        "no score": b'{"cer": 0.5}',
        "score true": b'{"score": true}',
        "score as a text": b'{"score": "0.7"}',
        "score NaN": b'{"score": NaN}',
        'score "NaN"': b'{"score": "NaN"}',
        "score Infinity": b'{"score": Infinity}',
        "score -Infinity": b'{"score": -Infinity}',
        "score 1e400": b'{"score": 1e400}',
        "score null": b'{"score": null}',
        "score as a list": b'{"score": [0.5]}',
        "score as an object": b'{"score": {"value": 0.5}}',
        "an integer beyond every float": b'{"score": 1' + b"0" * 400 + b"}",
        "a part that is NaN": b'{"score": 0.5, "cer": NaN}',
        "a part that is 1e400": b'{"score": 0.5, "cer": 1e400}',
        "a part that is a list": b'{"score": 0.5, "words": ["a"]}',
        "a part that is an object": b'{"score": 0.5, "cer": {"raw": 1}}',
        "the id of another sample": b'{"score": 0.5, "id": "en-7"}',
        "an id of another type": b'{"score": 0.5, "id": 0}',
        "num_samples of another sample": b'{"score": 0.5, "num_samples": 1}',
        "num_samples as a float": b'{"score": 0.5, "num_samples": 24000.0}',
        "more than 1 MiB": b'{"score": 0.5, "log": "' + b"x" * (1 << 20) + b'"}',
        "a hundred thousand brackets": b"[" * 100_000,
    }
    return {
        **{name: http(200, body) for name, body in bodies.items()},
        **{f"{status} with a score": http(status, {"score": 0.5}) for status in (201, 202, 203, 206)},
        "204": raw(b"HTTP/1.1 204 No Content\r\n\r\n"),
        "a body that is not the gzip it says": http(200, b"nope", headers=[("Content-Encoding", "gzip")]),
    }


def test_a_fault_that_may_pass_is_tried_again_and_then_is_unavailable():
    wrong = {}
    for name, reply in is_retried().items():
        server, error = ask(SPEECH, reply, timeout_s=TIMEOUT_S.get(name, QUICK["timeout_s"]))
        if not isinstance(error, ScorerUnavailable) or len(server.posts) != ALL_RETRIES_USED:
            wrong[name] = (error, len(server.posts))
    assert not wrong


def test_a_fault_that_passes_costs_a_retry_and_nothing_else():
    wrong = {}
    for name, reply in is_retried().items():
        server, result = ask(SPEECH, reply, OK, timeout_s=TIMEOUT_S.get(name, QUICK["timeout_s"]))
        if isinstance(result, ScorerError) or result[0].total != 0.5 or result[0].notes["scorer_retries"] != 1:
            wrong[name] = (result, len(server.posts))
    assert not wrong


def test_what_will_not_pass_is_rejected_at_once():
    wrong = {}
    for name, reply in is_rejected().items():
        server, error = ask(SPEECH, reply, OK)
        if not isinstance(error, ScorerRejected) or len(server.posts) != 1:
            wrong[name] = (error, len(server.posts))
    assert not wrong


def test_an_answer_that_is_none_is_a_protocol_error_at_once():
    wrong = {}
    for name, reply in is_no_answer().items():
        server, error = ask(SPEECH, reply, OK)
        if not isinstance(error, ScorerProtocolError) or len(server.posts) != 1:
            wrong[name] = (error, len(server.posts))
    assert not wrong


@pytest.mark.parametrize("url", [unused_url(), "http://no-such-host.invalid/score"], ids=["refused", "unknown host"])
def test_a_scorer_that_is_not_there_is_unavailable(url):
    _, error = ask(SPEECH, scorer_url=url, timeout_s=5.0)
    assert isinstance(error, ScorerUnavailable)
    assert "after 3 attempts" in str(error)


def test_a_body_that_drips_in_is_over_when_the_attempt_is():
    started_s = time.monotonic()
    _, error = ask(SPEECH, drip(200), timeout_s=0.3, max_retries=0)
    assert isinstance(error, ScorerUnavailable)
    assert 0.3 <= time.monotonic() - started_s < 5.0


def test_a_redirect_is_not_followed():
    async def main():
        async with rigged() as elsewhere, rigged(http(307, headers=[("Location", elsewhere.url)])) as server:
            async with ScorerClient(ClientConfig(scorer_url=server.url, **QUICK)) as client:
                with pytest.raises(ScorerRejected, match="redirects are not followed"):
                    await client.score(SPEECH, "Hi.", {"id": "a"})
            assert elsewhere.posts == []

    asyncio.run(main())


def test_defaults_are_those_of_the_specification():
    client = ClientConfig()
    assert (client.timeout_s, client.max_retries, client.retry_backoff_s) == (120.0, 2, 0.5)
    assert (client.busy_timeout_s, client.startup_timeout_s, client.max_in_flight) == (600.0, 60.0, 32)
    assert (client_module.MAX_ANSWER_BYTES, client_module.MAX_BUSY_WAIT_S) == (1 << 20, 30.0)
    assert ServerSettings().max_body_bytes == 32 << 20
    assert ServerSettings().max_queue >= 64
    assert DEFAULT_PORT == 18080


def test_one_pool_of_connections_serves_all_requests_of_a_worker():
    server, scores = ask(SPEECH, OK, clips=40, max_in_flight=4)
    assert len(scores) == 40
    assert server.connections <= 4


# --- busy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
def test_being_told_to_wait_uses_up_no_retry(status):
    busy = http(status, headers=[("Retry-After", "0")])
    server, (score,) = ask(SPEECH, *[busy] * 5, OK, max_retries=0)
    assert score.total == 0.5
    assert score.notes["scorer_retries"] == 0
    assert score.notes["scorer_waiting_s"] > 0
    assert len(server.posts) == 6


def test_429_without_a_time_waits_for_the_back_off():
    server, (score,) = ask(SPEECH, http(429), OK, max_retries=0)
    assert score.total == 0.5
    assert len(server.posts) == 2


def test_retry_after_may_be_a_date():
    moment = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    started_s = time.monotonic()
    _, (score,) = ask(SPEECH, http(429, headers=[("Retry-After", moment)]), OK, busy_timeout_s=5.0)
    assert score.total == 0.5
    assert time.monotonic() - started_s > 0.9  # a date has whole seconds


def test_no_single_wait_is_longer_than_the_limit(monkeypatch):
    monkeypatch.setattr(client_module, "MAX_BUSY_WAIT_S", 0.1)
    _, (score,) = ask(SPEECH, http(429, headers=[("Retry-After", "3600")]), OK)
    assert score.total == 0.5
    assert score.notes["scorer_waiting_s"] < 1.0


def test_a_scorer_that_stays_busy_is_unavailable_after_busy_timeout():
    started_s = time.monotonic()
    _, error = ask(SPEECH, http(429, "queue full", headers=[("Retry-After", "0")]), busy_timeout_s=0.5)
    assert isinstance(error, ScorerUnavailable)
    assert "of waiting as told: HTTP 429: queue full" in str(error)
    assert time.monotonic() - started_s < 5.0


def test_a_wait_that_would_go_beyond_busy_timeout_is_not_begun():
    started_s = time.monotonic()
    server, error = ask(SPEECH, http(503, headers=[("Retry-After", "20")]), busy_timeout_s=5.0)
    assert isinstance(error, ScorerUnavailable)
    assert len(server.posts) == 1
    assert time.monotonic() - started_s < 4.0


MINUTE_S = 60.0


def busy_for(seconds: float, told: str) -> Callable:
    """429 with ``Retry-After: told`` from the first request on, for ``seconds`` of the event loop's clock."""
    over_at: list[float] = []

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        now = asyncio.get_running_loop().time()
        over_at.append(now + seconds)
        busy = http(429, "queue full", headers=[("Retry-After", told)])
        await (busy if now < over_at[0] else OK)(reader, writer)
        reply.asked_at.append(now - over_at[0] + seconds)

    reply.asked_at = []
    return reply


def ask_in_no_time(reply: Callable, *, clips: int = 1, **settings) -> tuple[list, float]:
    """What became of the clips, and how long that took by the clock that they saw."""

    async def main():
        async with rigged(reply) as server:
            config = ClientConfig(scorer_url=server.url, **{"retry_backoff_s": 0.5, **settings})
            async with ScorerClient(config) as client:
                began_s = asyncio.get_running_loop().time()
                work = [client.score(SPEECH, "Hi.", {"id": f"en-{i}"}) for i in range(clips)]
                results = await asyncio.gather(*work, return_exceptions=True)
                return results, asyncio.get_running_loop().time() - began_s

    with asyncio.Runner(loop_factory=FastForward) as runner:
        return runner.run(main())


@pytest.mark.parametrize(("told", "waits"), [("7", 9), ("25", 3), ("3600", 2)])
def test_a_minute_of_429_is_waited_out_as_told_and_costs_no_retry(told, waits):
    """An hour is cut to the 30 s that one wait may take."""
    reply = busy_for(MINUTE_S, told)
    (score,), _ = ask_in_no_time(reply, max_retries=0)
    assert score.total == 0.5
    assert score.notes["scorer_retries"] == 0
    assert len(reply.asked_at) == waits + 1
    gaps_s = np.diff(reply.asked_at)
    each_s = min(float(told), 30.0)
    assert (gaps_s >= each_s).all(), "never before it was told"
    assert (gaps_s < each_s + 1.0).all()
    assert MINUTE_S <= score.notes["scorer_waiting_s"] < MINUTE_S + each_s


@pytest.mark.parametrize("told", ["14", "3600"])
def test_a_scorer_that_is_busy_for_ever_is_unavailable_within_ten_minutes(told):
    """``busy_timeout_s`` as it is by default, and for each of many samples at once."""
    results, took_s = ask_in_no_time(busy_for(math.inf, told), clips=3)
    assert all(isinstance(result, ScorerUnavailable) for result in results)
    assert all("queue full" in str(result) for result in results)
    assert 600 - 31 < took_s <= 601


@pytest.mark.parametrize("busy_s", [0.0, 5.0, 45.0])
def test_the_bound_of_all_waits_is_the_setting(busy_s):
    (error,), took_s = ask_in_no_time(busy_for(math.inf, "10"), busy_timeout_s=busy_s)
    assert isinstance(error, ScorerUnavailable)
    assert took_s <= busy_s + 1.0
    assert took_s >= busy_s - 11.0


@pytest.mark.faults
def test_a_minute_of_429_in_real_time():
    reply = busy_for(MINUTE_S, "5")
    began_s = time.monotonic()
    _, (score,) = ask(SPEECH, reply, max_retries=0, busy_timeout_s=120.0)
    assert score.total == 0.5
    assert MINUTE_S <= time.monotonic() - began_s < MINUTE_S + 10
    assert 10 <= len(reply.asked_at) <= 13


# --- random requests -------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.none() | st.booleans() | TEXT | st.integers(-(2**64), 2**64) | st.floats()
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=5
)
ANYTHING = st.binary(max_size=60) | JSON.map(json.dumps).map(str.encode)
REQUEST = {
    "protocol_version": "1",
    "waveform_f32_base64": base64.b64encode(np.float32([0.5, -0.25, 0.5]).tobytes()).decode(),
    "num_samples": 3,
    "sample_rate": 24_000,
    "prompt": "Hi.",
    "metadata": {"id": "a"},
}
REMOVED = object()


@st.composite
def edited(draw: Callable, body: bytes) -> bytes:
    """``body`` with up to three places overwritten, cut out or filled in."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(body)))
        body = body[:start] + draw(st.binary(max_size=4)) + body[start + draw(st.integers(0, 6)) :]
    return body


@st.composite
def changed(draw: Callable, fields: dict[str, Any]) -> bytes:
    """``fields`` as JSON, with some of them other values, or gone; Python's JSON may write NaN."""
    names = draw(st.sets(st.sampled_from([*fields, "more"]), min_size=1, max_size=3))
    values = {**fields, **{name: draw(JSON | st.just(REMOVED)) for name in sorted(names)}}
    return json.dumps({name: value for name, value in values.items() if value is not REMOVED}).encode()


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def is_request(body: bytes) -> bool:
    """Whether a body is a request, as the specification reads."""
    try:
        request = json.loads(body, parse_constant=_refuse)
        samples = base64.b64decode(request["waveform_f32_base64"], validate=True)
        values = struct.unpack(f"<{len(samples) // 4}f", samples)
        return (
            request["protocol_version"] == "1"
            and len(values) >= 1
            and all(map(math.isfinite, values))
            and type(request["num_samples"]) is int
            and request["num_samples"] == len(values)
            and type(request["sample_rate"]) is int
            and request["sample_rate"] > 0
            and isinstance(request["prompt"], str)
            and bool(request["prompt"].strip())
            and isinstance(request["metadata"], dict)
            and not any(isinstance(value, dict | list) for value in request["metadata"].values())
        )
    except (ValueError, TypeError, KeyError, struct.error):
        return False


@pytest.fixture(scope="module")
def connection(origin) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=origin) as client:
        yield client


@settings(max_examples=1050)
@given(ANYTHING | changed(REQUEST) | edited(json.dumps(REQUEST).encode()))
def test_a_random_request_is_scored_only_if_it_is_one_and_otherwise_answered_with_what_is_wrong(connection, body):
    response = connection.post("/score", content=body)
    if response.status_code == 200:
        assert is_request(body)
        assert math.isfinite(response.json()["score"])
    else:
        assert response.status_code in (400, 500 if is_request(body) else 400)
        assert response.json()["error"]


def test_after_all_of_that_the_server_still_scores(connection):
    assert connection.post("/score", json=REQUEST).json()["score"] == pytest.approx(0.25)


# --- random answers --------------------------------------------------------------------------------------------------

ANSWER = {"score": 0.25, "cer": 0.5, "asr_text": "hi", "id": "a", "num_samples": 3, "error": None}
STATUSES = st.sampled_from([200] * 16 + [201, 204, 302, 400, 404, 500])


def is_answer(body: bytes) -> bool:
    """Whether a body holds a score for the clip below, as the specification reads."""
    try:
        answer = json.loads(body)
    except ValueError:
        return False
    return (
        isinstance(answer, dict)
        and type(answer.get("score")) in (int, float)
        and -1 <= answer["score"] <= 1
        and answer.get("error") is None
        and answer.get("id", "a") == "a"
        and answer.get("num_samples", 3) == 3
    )


@dataclass
class Exchange:
    """A client and a server that stay for all examples; ``reply`` is what the server says next."""

    loop: asyncio.Runner
    client: ScorerClient
    replies: list

    def ask(self, status: int, body: bytes):
        self.replies[0] = raw(b"HTTP/1.1 204 X\r\n\r\n") if status == 204 else http(status, body)
        clip = Waveform(np.float32([0.5, -0.25, 0.5]), 24_000)
        try:
            return self.loop.run(self.client.score(clip, "Hi.", {"id": "a"}))
        except ScorerError as error:
            return error


@pytest.fixture(scope="module")
def exchange() -> Iterator[Exchange]:
    with asyncio.Runner() as loop:
        replies = [OK]
        pages = {"/info": http(200, {"score_range": [-1, 1]})}
        context = rigged(pages=pages)
        server = loop.run(context.__aenter__())
        server.replies = replies
        client = ScorerClient(ClientConfig(scorer_url=server.url, max_retries=0, busy_timeout_s=0))
        loop.run(client.probe())
        yield Exchange(loop, client, replies)
        loop.run(client.aclose())
        loop.run(context.__aexit__(None, None, None))


@settings(max_examples=1050)
@given(
    STATUSES,
    ANYTHING | changed(ANSWER) | edited(json.dumps(ANSWER).encode()),
)
def test_a_random_answer_is_a_reward_only_if_it_is_one_and_otherwise_an_error_of_one_line(exchange, status, body):
    result = exchange.ask(status, body)
    if isinstance(result, ScorerError):
        assert "sample 'a'" in str(result)
        assert "\n" not in str(result)
        assert len(str(result)) < 600
    else:
        assert status == 200
        assert is_answer(body)
        assert result.total == json.loads(body)["score"]
        assert all(map(math.isfinite, result.parts.values()))


def test_after_all_of_that_a_right_answer_is_still_a_score(exchange):
    assert exchange.ask(200, json.dumps(ANSWER).encode()).total == 0.25
