"""The scorer server: the audio scorer protocol over FastAPI and uvicorn.

    POST /score, POST /      one clip -> one answer, which echoes ``id`` and ``num_samples``
    GET  /healthz            {"status": "ok"}; open, so that a supervisor needs no token
    GET  /info               who scores, in which range, with which fingerprint
    GET  /metrics            Prometheus' text format

A request takes one of ``max_queue`` places before its body is read, so memory is bounded; without a
place it gets 429. Requests that wait are scored together by one worker thread, so a slow scorer never
stops the server from answering. SIGTERM finishes what was accepted.
"""

import asyncio
import hmac
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson
import prometheus_client
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from verl_tts.errors import ConfigError
from verl_tts.rewards.protocol import BadRequestError, Clip, decode_request, encode_answer, excerpt
from verl_tts.scorers.base import Scorer, info_of
from verl_tts.types import Scalar

DEFAULT_PORT = 18080
MAX_PORT = 65535
MAX_BATCH_WAIT_MS = 60_000
SHUTDOWN_TIMEOUT_S = 120  # for what was accepted; a client that never finishes its upload must not hold the exit

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerSettings:
    max_queue: int = 256  # requests accepted and not yet answered
    batch_size: int = 16
    batch_wait_ms: float = 5.0  # how long a batch that is not full waits for more
    max_body_bytes: int = 32 << 20
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for name, low in (("max_queue", 1), ("batch_size", 1), ("batch_wait_ms", 0), ("max_body_bytes", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < math.inf:
                raise ConfigError(f"{name}={value!r} must be a number of at least {low}")
        for name in ("max_queue", "batch_size", "max_body_bytes"):
            if not isinstance(getattr(self, name), int):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a whole number")
        if self.batch_wait_ms > MAX_BATCH_WAIT_MS:
            raise ConfigError(f"batch_wait_ms={self.batch_wait_ms!r} must be at most {MAX_BATCH_WAIT_MS}")


class Batcher:
    """Collects clips from many requests and scores them together in one thread."""

    def __init__(self, scorer: Scorer, settings: ServerSettings, batch_sizes: prometheus_client.Histogram) -> None:
        self._scorer = scorer
        self._settings = settings
        self._batch_sizes = batch_sizes
        self._queue: asyncio.Queue[tuple[Clip, asyncio.Future]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scorer")
        self.seconds_per_clip = 0.0  # of the last batch

    async def score(self, clip: Clip) -> dict[str, Scalar]:
        """The answer to one clip, or what its scoring raised."""
        answer: asyncio.Future = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((clip, answer))
        return await answer

    async def run(self) -> None:
        """Score batches until cancelled."""
        while True:
            await self._answer_batch()  # whose clips go with it: the wait for the next batch may be long

    def close(self) -> None:
        self._thread.shutdown()

    async def _answer_batch(self) -> None:
        loop = asyncio.get_running_loop()
        clips, answers = zip(*await self._next_batch(), strict=True)
        self._batch_sizes.observe(len(clips))
        started_s = loop.time()
        results = await loop.run_in_executor(self._thread, self._score, clips)
        self.seconds_per_clip = (loop.time() - started_s) / len(clips)
        for answer, result in zip(answers, results, strict=True):
            if answer.cancelled():
                continue  # its client has gone
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)

    async def _next_batch(self) -> list[tuple[Clip, asyncio.Future]]:
        batch = [await self._queue.get()]
        try:
            async with asyncio.timeout(self._settings.batch_wait_ms / 1000):
                while len(batch) < self._settings.batch_size:
                    batch.append(await self._queue.get())
        except TimeoutError:
            pass  # nobody else came
        return batch

    def _score(self, clips: Sequence[Clip]) -> list[dict[str, Scalar] | Exception]:
        """In the worker thread: an answer or an exception a clip. One bad clip does not spoil its batch."""
        try:
            answers = self._scorer.score_batch(clips)
            if len(answers) != len(clips):
                raise RuntimeError(f"scorer {self._scorer.name} gave {len(answers)} answers for {len(clips)} clips")
            return list(answers)
        except Exception as error:  # noqa: BLE001  a scorer may raise anything: a 500 for the clip, not our end
            if len(clips) == 1:
                return [error]
            return [self._score([clip])[0] for clip in clips]


class Metrics:
    """What ``/metrics`` shows; a registry of its own, so that several apps fit into one process."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self.requests = prometheus_client.Counter(
            "scorer_requests", "Answers, by HTTP status", ["status"], registry=self.registry
        )
        self.seconds = prometheus_client.Histogram(
            "scorer_request_seconds", "From the first byte to the answer", registry=self.registry
        )
        self.batch_size = prometheus_client.Histogram(
            "scorer_batch_size", "Clips scored together", registry=self.registry, buckets=(1, 2, 4, 8, 16, 32, 64, 128)
        )
        self.accepted = prometheus_client.Gauge(
            "scorer_requests_in_flight", "Accepted and not yet answered", registry=self.registry
        )


def create_app(scorer: Scorer, settings: ServerSettings) -> FastAPI:
    """The server of one scorer; a server starts with ``serve``."""
    metrics = Metrics()
    batcher = Batcher(scorer, settings, metrics.batch_size)
    info = orjson.dumps(info_of(scorer))
    accepted = 0

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()
        batcher.close()

    app = FastAPI(title=f"scorer {scorer.name}", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    def authorised(request: Request) -> bool:
        expected = f"Bearer {settings.token}".encode()
        given = request.headers.get("authorization", "").encode()
        return not settings.token or hmac.compare_digest(given, expected)

    async def scored(request: Request) -> Response:
        clip = decode_request(await _read_body(request, settings.max_body_bytes))  # no body waits with its clip
        scorer.check(clip)
        echo: dict[str, Scalar] = {"num_samples": len(clip.waveform.samples_S)}
        if "id" in clip.metadata:
            echo["id"] = clip.metadata["id"]
        answer = {**await batcher.score(clip), **echo}
        return Response(encode_answer(answer), media_type="application/json")

    async def answer_to(request: Request) -> Response:
        nonlocal accepted
        refusal = None
        if not authorised(request):
            refusal = _error(401, "authorization: a bearer token is required")
        elif accepted >= settings.max_queue:
            refusal = _error(429, f"queue: {accepted} requests are waiting, which is the limit")
            wait_s = min(30, max(1, math.ceil(accepted * batcher.seconds_per_clip)))
            refusal.headers["Retry-After"] = str(wait_s)
        if refusal is not None:
            await _discard(request.stream(), settings.max_body_bytes)
            return refusal

        accepted += 1
        metrics.accepted.set(accepted)
        try:
            return await scored(request)
        finally:
            accepted -= 1
            metrics.accepted.set(accepted)

    @app.post("/score")
    @app.post("/")
    async def score(request: Request) -> Response:
        started_s = time.monotonic()
        try:
            response = await answer_to(request)
        except BadRequestError as error:
            response = _error(400, str(error))
        except BodyTooLarge:
            response = _error(413, f"body: larger than {settings.max_body_bytes} bytes")
        except ClientDisconnect:
            response = _error(400, "body: the client has gone")  # for the metrics; nobody reads it
        except Exception as error:  # the scorer's own code, which may raise anything
            log.exception("scoring failed")
            response = _error(500, f"scoring failed: {type(error).__name__}: {excerpt(error)}")
        metrics.requests.labels(response.status_code).inc()
        metrics.seconds.observe(time.monotonic() - started_s)
        return response

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    @app.get("/info")
    async def show_info(request: Request) -> Response:
        if not authorised(request):
            return _error(401, "authorization: a bearer token is required")
        return Response(info, media_type="application/json")

    @app.get("/metrics")
    async def show_metrics(request: Request) -> Response:
        if not authorised(request):
            return _error(401, "authorization: a bearer token is required")
        return Response(
            prometheus_client.generate_latest(metrics.registry), media_type=prometheus_client.CONTENT_TYPE_LATEST
        )

    return app


def _error(status: int, problem: str) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return Response(orjson.dumps({"error": problem}), status, headers=headers, media_type="application/json")


class BodyTooLarge(Exception):
    """A request is larger than ``max_body_bytes``."""


async def _read_body(request: Request, limit_bytes: int) -> bytes:
    stream = request.stream()
    chunks: list[bytes] = []
    size = 0
    async for chunk in stream:
        size += len(chunk)
        if size > limit_bytes:
            chunks.clear()
            await _discard(stream, limit_bytes)
            raise BodyTooLarge
        chunks.append(chunk)
    return b"".join(chunks)


async def _discard(stream: AsyncIterator[bytes], limit_bytes: int) -> None:
    """Read what is not wanted and throw it away, up to four limits.

    A client that is still sending when the connection closes sees a broken pipe instead of the answer.
    """
    size = 0
    async for chunk in stream:
        size += len(chunk)
        if size > 4 * limit_bytes:
            break


def serve(scorer: Scorer, settings: ServerSettings, host: str, port: int) -> None:
    """Answer requests until SIGTERM or SIGINT; ``port`` 0 takes a free one. Prints the address."""
    if not isinstance(host, str) or not host:
        raise ConfigError(f"host={host!r} must be an address to listen on; 0.0.0.0 is every one")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= MAX_PORT:
        raise ConfigError(f"port={port!r} must be a whole number from 0 to {MAX_PORT}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port or --host"
        ) from error
    shown_host = f"[{host}]" if family == socket.AF_INET6 else host
    config = uvicorn.Config(
        create_app(scorer, settings),
        access_log=False,
        log_level="warning",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    print(f"scorer {scorer.name} listening on http://{shown_host}:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run(sockets=[listener])
