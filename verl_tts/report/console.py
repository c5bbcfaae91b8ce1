"""What a person at the terminal sees, and where everything else goes.

A run is a dozen processes that each have something to say. Their output, this process's included, is appended to
``train.log``; the terminal gets the lines below: of a quiet run the results and the warnings, of a normal one the steps
and what the run is doing as well, of a verbose one the details, too. On a terminal a step's line takes the place of the
one before; anywhere else each is a line of its own.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from verl_tts.files import writing

Kind = Literal["result", "warning", "step", "note", "detail"]
CONSOLES: dict[str, tuple[Kind, ...]] = {
    "quiet": ("result", "warning"),
    "normal": ("result", "warning", "step", "note"),
    "verbose": ("result", "warning", "step", "note", "detail"),
}
"""``tts.console`` -> the kinds of lines that the terminal gets; the log gets all of them."""


class Line(NamedTuple):
    text: str
    kind: Kind = "note"


Say = Callable[[Line | str], None]
"""A text alone is a note."""


@dataclass
class Terminal:
    """Writes lines to the terminal and to the log."""

    descriptor: int
    log: Path
    """Where descriptor 1 leads."""
    kinds: Sequence[Kind]
    in_place: bool
    """Whether a step's line may be written over."""
    _is_over: bool = True  # nothing is to be written over

    def __call__(self, line: Line | str) -> None:
        if isinstance(line, str):
            line = Line(line)
        with writing(self.log):
            os.write(1, f"{line.text}\n".encode())
        if line.kind not in self.kinds:
            return
        is_step = self.in_place and line.kind == "step"
        text = ("" if self._is_over else "\r\x1b[K") + line.text + ("" if is_step else "\n")
        self._is_over = not is_step
        os.write(self.descriptor, text.encode())

    def close(self) -> None:
        if not self._is_over:
            os.write(self.descriptor, b"\n")


@contextmanager
def output_to(log: Path, console: str = "normal") -> Iterator[Say]:
    """Sends the process's and its children's output to ``log``; yields a way to speak to the terminal."""
    with log.open("ab") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        standard, errors = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    terminal = Terminal(standard, log, CONSOLES[console], in_place=os.isatty(standard))
    try:
        yield terminal
    finally:
        terminal.close()
        try:
            with writing(log):
                sys.stdout.flush()
                sys.stderr.flush()
        finally:
            os.dup2(standard, 1)
            os.dup2(errors, 2)
            os.close(standard)
            os.close(errors)


# ------------------------------------------------------------------ lines


def step_line(step: int, last_step: int, metrics: Mapping[str, Any], left_s: float | None = None) -> str:
    """One training step, and how long the others will take:

    ``step 12/40  reward 0.412  frames 28.6  eos 94 %  kl 0.003  log-prob gap 2.1e-06  11.2 s  5 min left``.
    """
    parts = [
        f"step {step}/{last_step}",
        f"reward {metrics['reward/mean']:.3f}",
        f"frames {metrics['rollout/frames/mean']:.1f}",
        f"eos {100 * metrics['rollout/eos_rate']:.0f} %",
    ]
    if "actor/kl_loss" in metrics:
        parts.append(f"kl {metrics['actor/kl_loss']:.2g}")
    parts.append(f"log-prob gap {metrics['gate/logprob_max_abs']:.2g}")
    parts.append(f"{metrics['timing_s/step']:.1f} s")
    if dropped := metrics["rollout/groups_dropped"]:
        parts.append(f"{dropped:.0f} group(s) dropped")
    if left_s:
        parts.append(f"{duration(left_s)} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """``40 s``, ``5 min``, ``1 h 20 min``, ``3 d 4 h``: two units at most, rounded."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def phases_line(metrics: Mapping[str, Any]) -> str:
    """Where the time of a step went: ``rollout 62 %  update 20 %  ...``, largest first."""
    shares = {name.removeprefix("share/"): value for name, value in metrics.items() if name.startswith("share/")}
    return "  ".join(f"{name} {100 * shares[name]:.0f} %" for name in sorted(shares, key=shares.__getitem__)[::-1])


class Clip(NamedTuple):
    """What the table of a validation needs to know of one clip."""

    name: str  # row and number: hi-7#0
    source: str
    score: float
    frames: int
    ended: bool  # by itself
    parts: Mapping[str, float]
    path: Path | None  # where it can be heard


def validation_table(step: int, clips: Sequence[Clip], seconds: float, kl: float | None) -> str:
    """A line for all clips, one for each data source where there are several, and the best and the worst clip.

    validation at step 20    clips  score    cer    eos  frames      kl  clips/s
      all                       64  0.512  0.081   97 %    41.2  0.0031      3.1
      best 0.930 en-3#0 samples/val/step_20/en-3_0.flac
    """
    error_rates = [name for name in ("cer", "wer") if any(_part(clip, name) is not None for clip in clips)]
    head = ["clips", "score", *error_rates, "eos", "frames", "kl", "clips/s"]
    rows = {"all": list(clips)}
    if len(sources := sorted({clip.source for clip in clips})) > 1:
        rows |= {source: [clip for clip in clips if clip.source == source] for source in sources}
    width = max(24, *(len(name) + 4 for name in rows))
    lines = [f"validation at step {step}".ljust(width) + "".join(f"{name:>8}" for name in head)]
    for name, some in rows.items():
        cells = [f"{len(some)}", f"{_mean([clip.score for clip in some]):.3f}"]
        cells += [f"{_mean([_part(clip, rate) for clip in some]):.3f}" for rate in error_rates]
        cells += [f"{100 * _mean([clip.ended for clip in some]):.0f} %", f"{_mean([clip.frames for clip in some]):.1f}"]
        whole = name == "all"
        cells += [f"{kl:.2g}" if whole and kl is not None else "", f"{len(some) / seconds:.1f}" if whole else ""]
        lines.append(f"  {name}".ljust(width) + "".join(f"{cell:>8}" for cell in cells).rstrip())
    ranked = sorted(clips, key=lambda clip: clip.score)
    for word, clip in (("best", ranked[-1]), ("worst", ranked[0])):
        where = clip.path or ("(not kept)" if clip.frames else "(no audio)")
        lines.append(f"  {word} {clip.score:.3f} {clip.name} {where}")
    return "\n".join(lines)


def _part(clip: Clip, name: str) -> float | None:
    """The part of that name, whatever the scorer that it came from is called."""
    return next((value for part, value in clip.parts.items() if part.rsplit("/", 1)[-1].lower() == name), None)


def _mean(values: Sequence[float | None]) -> float:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")
