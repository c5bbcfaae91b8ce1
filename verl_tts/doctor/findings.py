"""What a look may say: ok, a warning, or a failure with its remedy; and that a look was left out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from verl_tts.errors import TTSError

State = Literal["ok", "warn", "fail", "skip"]
MARKS: dict[State, str] = {"ok": "ok", "warn": "warn", "fail": "FAIL", "skip": "-"}
FOUND_SOMETHING = 2


@dataclass(frozen=True)
class Finding:
    look: str
    state: State
    said: str
    remedy: str = ""

    @property
    def lines(self) -> list[str]:
        """For a terminal."""
        line = f"{MARKS[self.state]:5} {self.look:13} {self.said}"
        return [line, f"{'':20}{self.remedy}"] if self.remedy else [line]


def looked_at(look: str, at: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of one look; an error that would end a run is one of them, and the other looks go on."""
    try:
        yield from at()
    except TTSError as error:
        yield Finding(look, "fail", str(error))
