"""What a run is doing when it says nothing: a line while a phase takes long, and an end when it takes too long.

    still in rollout and scoring: 45 s, 12 of 32 samples, waiting for en-3#1 (40 s)

A phase that shows progress (samples done) is stalled when that stops; one that shows none, when it lasts. Whoever
starts the run asks ``stalled`` and ends it: the phase that hangs cannot.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from verl_tts.report.console import Line

TICK_S = 1.0


class Progress(NamedTuple):
    """Of the samples under way."""

    done: int
    submitted: int
    slowest: str | None  # the id of the sample that has been under way for longest
    slowest_s: float


@dataclass
class _Phase:
    name: str
    began: float
    moved: float  # when something of it was last seen to get done
    limit_s: float
    done: int = 0
    said: int = 0  # lines so far


@dataclass
class Heartbeat:
    """``phase`` from the thread that works, ``tick`` from one that does not. Times are seconds of ``clock``."""

    say: Callable[[Line], None]
    every_s: float
    limit_s: float
    progress: Callable[[], Progress | None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    stalled: str | None = None
    """What hangs, since when, and the setting; None while nothing does."""
    _phases: list[_Phase] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def phase(self, name: str, limit_s: float | None = None) -> Iterator[None]:
        """Phases nest; the innermost one is what the run is doing. ``limit_s``: where it has a limit of its own."""
        self.enter(name, limit_s)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str, limit_s: float | None = None) -> None:
        """A phase whose begin and end are two calls of somebody else's; ``leave`` ends it."""
        now = self.clock()
        self._phases.append(_Phase(name, now, now, limit_s or self.limit_s))

    def leave(self) -> None:
        self._phases.pop()
        if self._phases:
            self._phases[-1].moved = self.clock()

    def tick(self) -> None:
        """Says a line for every ``every_s`` seconds of a phase; sets ``stalled`` after ``limit_s`` without progress."""
        if not (phases := self._phases[-1:]):
            return
        phase, now, progress = phases[0], self.clock(), self.progress()
        if progress is not None and progress.done != phase.done:
            phase.done, phase.moved = progress.done, now
        what = _describe(phase.name, now - phase.began, progress)
        if now - phase.moved > phase.limit_s:
            self.stalled = f"{what}; nothing has moved for {phase.limit_s:g} s (tts.stall_s)"
        elif now - phase.began >= self.every_s * (phase.said + 1):
            phase.said = int((now - phase.began) / self.every_s)
            self.say(Line(f"still in {what}", "note"))

    def start(self) -> None:
        """Ticks on a thread of its own until ``stop``."""

        def beat() -> None:
            while not self._end.wait(TICK_S):
                self.tick()

        threading.Thread(target=beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._end.set()


def _describe(name: str, seconds: float, progress: Progress | None) -> str:
    if progress is None:
        return f"{name}: {seconds:.0f} s"
    waiting = f", waiting for {progress.slowest} ({progress.slowest_s:.0f} s)" if progress.slowest else ""
    return f"{name}: {seconds:.0f} s, {progress.done} of {progress.submitted} samples{waiting}"
