"""How the server ends: uvicorn and its signals are real, the engine behind is not."""

import asyncio
import signal
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from verl_tts.errors import ProcessDied
from verl_tts.serving import server


def ended(by: Any) -> None:
    """Serves until ``by`` has been called, with uvicorn's server, once it is known to answer."""
    app = Starlette(routes=[Route("/health", lambda _: Response())])
    uvicorns = uvicorn.Server(uvicorn.Config(app, log_level="error"))

    async def worker(address: str, listener: Any, args: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):  # as vLLM does
            asyncio.get_running_loop().add_signal_handler(number, lambda: None)
        await uvicorns.serve(sockets=[listener])

    def ready() -> None:
        asyncio.get_running_loop().call_later(0.01, by, uvicorns)

    with closing(server.listen("127.0.0.1", 0)) as listener:
        asyncio.run(server._run(SimpleNamespace(omni_run_server_worker=worker), None, listener, ready))


def test_a_server_that_ends_though_nobody_has_asked_it_to_is_an_engine_that_died():
    def die(uvicorns: uvicorn.Server) -> None:
        uvicorns.should_exit = True  # what vLLM sets

    with pytest.raises(ProcessDied, match="a stage of the engine died, and the server ended with it; start it again"):
        ended(by=die)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_was_asked_to_ends_in_order(number):
    before = signal.getsignal(number)
    try:
        ended(by=lambda _: signal.raise_signal(number))
    finally:
        signal.signal(number, before)
