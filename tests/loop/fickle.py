"""A scorer that is right until it is told not to be: the server of ``duration``, with a fault in front of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from tests.scorer_rig import running
from verl_tts.scorers.app import ServerSettings, create_app
from verl_tts.scorers.duration import DurationScorer

Fault = Literal["hangs", "lies"]
NONSENSE = b'{"score": NaN}'


class Fickle:
    """An ASGI application. ``turn`` is called from another thread, in the middle of a run."""

    def __init__(self) -> None:
        self.url = ""
        self.seconds: dict[Fault, float] = {}
        """From the first request that met the fault to the last line that the run had to say."""
        self._met_at_s: float | None = None
        self._app = create_app(DurationScorer(), ServerSettings())
        self._fault: Fault | None = None
        self._right_ones_left = 0

    def turn(self, fault: Fault, after: int) -> None:
        """To ``fault``, once ``after`` more requests have got their score; a second call changes nothing."""
        if self._fault is None:
            self._right_ones_left = after
            self._fault = fault

    def recover(self) -> None:
        self._fault = self._met_at_s = None

    def line_came(self) -> None:
        """The run has said something."""
        if self._fault is not None and self._met_at_s is not None:
            self.seconds[self._fault] = time.monotonic() - self._met_at_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        fault = self._fault if scope["type"] == "http" and scope["method"] == "POST" else None
        if fault is None or self._right_ones_left > 0:
            self._right_ones_left -= fault is not None
            return await self._app(scope, receive, send)
        self._met_at_s = self._met_at_s or time.monotonic()
        if fault == "hangs":
            while (await receive())["type"] != "http.disconnect":
                pass
            return None
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": NONSENSE})
        return None


@contextmanager
def fickle_scorer() -> Iterator[Fickle]:
    scorer = Fickle()
    with running(scorer) as origin:
        scorer.url = f"{origin}/score"
        yield scorer
