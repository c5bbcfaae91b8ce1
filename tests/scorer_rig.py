"""Scorers for tests: a real HTTP server whose every answer a test writes itself, and the package's own in a thread."""

import asyncio
import json
import selectors
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import numpy as np
import uvicorn

from verl_tts.config.reward import ClientConfig
from verl_tts.errors import ScorerError
from verl_tts.rewards.client import SILENCE, ScorerClient
from verl_tts.types import Waveform

SPEECH = Waveform(np.random.default_rng(0).normal(0, 0.1, 24_000).astype(np.float32), 24_000)
Reply = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def http(status: int = 200, body: bytes | str | dict = b"", headers: Sequence[tuple[str, str]] = ()) -> Reply:
    """A whole answer."""
    payload = json.dumps(body).encode() if isinstance(body, dict) else body.encode() if isinstance(body, str) else body

    async def reply(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(payload)}", *(f"{k}: {v}" for k, v in headers)]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + payload)
        await writer.drain()

    return reply


def raw(data: bytes) -> Reply:
    """Any bytes, then the connection closes."""

    async def reply(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        writer.close()

    return reply


def drip(status: int) -> Reply:
    """An answer that arrives a byte at a time and never ends."""

    async def reply(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: 100000\r\n\r\n".encode())
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.02)

    return reply


async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def silence(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


OK = http(200, {"score": 0.5})


@dataclass
class RiggedServer:
    """Gives its POSTs the ``replies`` in order, the last one for ever; GETs get what ``pages`` says, else 404.

    The request with which a client finds out whether the path is right gets ``greeting`` and is not counted.
    """

    replies: Sequence[Reply] = (OK,)
    pages: dict[str, Reply] = field(default_factory=dict)
    greeting: Reply = field(default_factory=lambda: http(400))
    url: str = ""
    posts: list[dict] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    connections: int = 0
    in_flight: int = 0
    most_in_flight: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                method, path, _ = head.split(" ", 2)
                if method == "GET":
                    await self.pages.get(path, http(404))(reader, writer)
                    continue
                length = next(int(x.split(":")[1]) for x in head.lower().splitlines() if x.startswith("content-length"))
                request = json.loads(await reader.readexactly(length))
                if request["metadata"].get("id") == SILENCE.id:
                    await self.greeting(reader, writer)
                    continue
                self.headers.append(head)
                self.posts.append(request)
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                try:
                    await self.replies[min(len(self.posts), len(self.replies)) - 1](reader, writer)
                finally:
                    self.in_flight -= 1
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the client has gone, or the test is over
        finally:
            writer.close()


@asynccontextmanager
async def rigged(*replies: Reply, pages: dict[str, Reply] | None = None) -> AsyncIterator[RiggedServer]:
    scorer = RiggedServer(replies or (OK,), pages or {})
    server = await asyncio.start_server(scorer.serve, "127.0.0.1", 0, limit=1 << 24)
    scorer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/score"
    try:
        yield scorer
    finally:
        server.close()


QUICK = {"timeout_s": 10.0, "retry_backoff_s": 0.01, "busy_timeout_s": 2.0, "startup_timeout_s": 0.5}


def unused_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}/score"


def ask(speech: Waveform, *replies: Reply, clips: int = 1, probe: bool = False, pages=None, **settings):
    """The server, and what the client made of it: a list of scores, or the error."""

    async def main():
        async with rigged(*replies, pages=pages) as server:
            config = ClientConfig(**{"scorer_url": server.url, **QUICK, **settings})
            async with ScorerClient(config) as client:
                try:
                    if probe:
                        await client.probe()
                    work = [client.score(speech, "Good morning.", {"id": f"en-{i}"}) for i in range(clips)]
                    return server, await asyncio.gather(*work)
                except ScorerError as error:
                    return server, error

    return asyncio.run(main())


class FastForward(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer as soon as nothing else can happen.

    Server and client in one of these meet every wait and every deadline in order, and an hour takes a moment.
    """

    def __init__(self) -> None:
        self.skipped_s = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return super().time() + self.skipped_s


class _Skipping(selectors.DefaultSelector):
    QUIET_S = 0.02  # what is on its way between two sockets of one process has arrived by then

    def __init__(self, loop: FastForward) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(timeout if timeout is None else min(timeout, self.QUIET_S))
        if not ready and timeout is not None and timeout > self.QUIET_S:
            self._loop.skipped_s += timeout - self.QUIET_S
        return ready


@contextmanager
def running(app) -> Iterator[str]:
    """The origin of an ASGI application in a thread of its own."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()
