"""A scorer that misbehaves on purpose: a real HTTP server whose every answer a test writes itself."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from verl_tts.types import CodecRollout, PromptRow, Waveform

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
    """Gives its POSTs the ``replies`` in order, the last one for ever; GETs get what ``pages`` says, else 404."""

    replies: Sequence[Reply] = (OK,)
    pages: dict[str, Reply] = field(default_factory=dict)
    url: str = ""
    posts: list[dict] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                method, path, _ = head.split(" ", 2)
                if method == "GET":
                    await self.pages.get(path, http(404))(reader, writer)
                    continue
                length = next(int(x.split(":")[1]) for x in head.lower().splitlines() if x.startswith("content-length"))
                self.headers.append(head)
                self.posts.append(json.loads(await reader.readexactly(length)))
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


class Rig:
    """What a test needs, in one fixture, since conftest files are not there to be imported."""

    http, raw, drip, OK = staticmethod(http), staticmethod(raw), staticmethod(drip), staticmethod(OK)
    reset, silence, serve = staticmethod(reset), staticmethod(silence), staticmethod(rigged)


@pytest.fixture(scope="session")
def rig() -> type[Rig]:
    return Rig


@pytest.fixture(autouse=True)
def _no_token_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCORER_TOKEN", raising=False)


@pytest.fixture(scope="session")
def speech() -> Waveform:
    """A second of noise, loud enough to be taken for speech by a guard."""
    return Waveform(np.random.default_rng(0).normal(0, 0.1, 24_000).astype(np.float32), 24_000)


@pytest.fixture(scope="session")
def row() -> PromptRow:
    return PromptRow(
        id="en-1",
        text="Good morning.",
        split="train",
        index=3,
        data_source="test",
        ground_truth="Good morning.",
        speaker="anna",
        extra={"target_seconds": 2.0},
    )


@pytest.fixture(scope="session")
def rollout() -> CodecRollout:
    """Twelve frames and an EOS."""
    return CodecRollout(
        tokens_T=np.zeros(13, np.int64),
        codes_FQ=np.zeros((12, 16), np.int64),
        logprobs_T=np.zeros(13, np.float32),
        stop_reason="eos",
        seed=0,
    )
