"""What a report says, as numbers: each figure of the page is computed here, from a ``History`` alone.

A row's value is the mean over its clips, and a mean is that over rows, so that a prompt sampled more often does not
count more. Differences are to the first validation, over the rows that both have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from verl_tts.errors import ConfigError
from verl_tts.report.best import Candidate, Constraints, best, candidates, measured_in, validations
from verl_tts.report.history import SCORE, SECONDS, Clip, History, by_row, error_rate_part
from verl_tts.report.intervals import DRAWS, Interval, Scores, paired_difference, row_means

T = TypeVar("T")

FEATURED = 4  # clips of each kind: best, worst, most improved, most harmed
GRID_PROMPTS, GRID_STEPS = 6, 6  # the same prompts across steps
CURVE_POINTS = 60  # validations of a curve
METRIC_POINTS = 240  # points of a training curve
PREFIX_PROBE = "val-probe/"
PREFIX_TIME = "timing_s/"
# Values drawn for all intervals of a page together: some seconds of one core.
PAGE_DRAWS = 300_000_000
FEWEST_DRAWS, MOST_DRAWS = 300, DRAWS
# Rows drawn one after the other, where rows have several samples; an interval takes two a row.
PAGE_ROWS = 80_000
FEWEST_INTERVALS = 6


# ---------------------------------------------------------------- curves


@dataclass(frozen=True)
class PartPoint:
    """One part at one validation. ``low`` and ``high``: the quartiles of the rows' values."""

    step: int
    rows: int
    mean: float
    low: float
    high: float
    change: Interval | None  # to the first validation; None for that one, where it was left out as the page says, or
    # with fewer than two rows in common


@dataclass(frozen=True)
class PartCurve:
    name: str
    points: Sequence[PartPoint]
    is_share: bool  # every clip has 0 or 1, so that quartiles say nothing

    @property
    def first(self) -> PartPoint:
        return self.points[0]

    @property
    def last(self) -> PartPoint:
        return self.points[-1]

    @property
    def is_constant(self) -> bool:
        """No validation differs from the first: there is nothing to draw."""
        return len({point.mean for point in self.points}) == 1


def thinned(steps: Sequence[T], limit: int) -> list[T]:
    """At most ``limit`` of ``steps``, evenly spaced by position, the first and the last among them."""
    if len(steps) <= limit:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (limit - 1))] for i in range(limit)]


def part_curves(history: History, draws: int | None = None) -> list[PartCurve]:
    """The score, EOS and each part over the validations, at most ``CURVE_POINTS`` of them."""
    steps = thinned(history.val_steps, CURVE_POINTS)
    with_interval = set(interval_steps(history))
    draws = draws or draws_for(history)
    curves = []
    for name in history.part_names:
        scores = {step: by_row(history.val[step], name) for step in steps}
        measured = [step for step in steps if scores[step]]
        points = [
            _point(
                step,
                scores[step],
                scores[measured[0]] if step in with_interval and step != measured[0] else None,
                draws,
            )
            for step in measured
        ]
        if points:
            values = {value for rows in scores.values() for row in rows.values() for value in row}
            curves.append(PartCurve(name, points, values <= {0.0, 1.0}))
    return curves


def draws_for(history: History) -> int:
    """Bootstrap draws of each interval, so that a page of any run is written in seconds; the page says how many."""
    values = sum(len(history.val[step]) for step in interval_steps(history)) * max(1, len(history.part_names))
    return int(np.clip(PAGE_DRAWS // max(1, 2 * values), FEWEST_DRAWS, MOST_DRAWS))


def interval_steps(history: History) -> list[int]:
    """The validations that get an interval: all of a curve's, or fewer where rows times parts are many."""
    steps = thinned(history.val_steps, CURVE_POINTS)
    rows = max((len(history.val[step]) for step in steps), default=0)
    affordable = PAGE_ROWS // max(1, 2 * rows * len(history.part_names))
    return thinned(steps, max(FEWEST_INTERVALS, affordable))


def change_between(before: Scores, after: Scores, draws: int = DRAWS) -> Interval | None:
    """The paired difference over the rows that both have; None with fewer than two of them."""
    shared = before.keys() & after.keys()
    if len(shared) < 2:
        return None
    sides = ({row: scores[row] for row in shared} for scores in (before, after))
    return paired_difference(*sides, draws=draws)


def _point(step: int, scores: Scores, first: Scores | None, draws: int) -> PartPoint:
    values = row_means(scores)
    low, high = np.percentile(list(values.values()), [25, 75])
    change = None if first is None else change_between(first, scores, draws)
    return PartPoint(step, len(values), float(np.mean(list(values.values()))), float(low), float(high), change)


# ---------------------------------------------------------------- clips to listen to


@dataclass(frozen=True)
class Pair:
    """One sample of one row, at two validations; ``change`` is that of the row's score."""

    before: Clip
    after: Clip
    change: float


@dataclass(frozen=True)
class Featured:
    step: int
    best: Sequence[Clip]
    worst: Sequence[Clip]
    improved: Sequence[Pair]
    harmed: Sequence[Pair]


def featured(history: History) -> Featured | None:
    """By score at the last validation, or without one at the last step that kept training clips.

    Improved and harmed: rows by the change of their score since the first validation.
    """
    split = history.val or history.train
    if not split:
        return None
    first, last = min(split), max(split)
    scored = sorted((clip for clip in split[last] if clip.score is not None), key=lambda clip: (-clip.score, clip.key))  # type: ignore[operator]
    pairs = sorted(_pairs(split[first], split[last]), key=lambda pair: (-pair.change, pair.after.key))
    if not history.val or first == last:
        pairs = []
    best = scored[:FEATURED]
    return Featured(
        last,
        best,
        [clip for clip in reversed(scored[-FEATURED:]) if clip not in best],
        [pair for pair in pairs[:FEATURED] if pair.change > 0],
        [pair for pair in reversed(pairs[-FEATURED:]) if pair.change < 0],
    )


def _pairs(before: Sequence[Clip], after: Sequence[Clip]) -> list[Pair]:
    """One for each row in both; its clips are those of the first sample number that both have."""
    was, now = (row_means(by_row(clips, SCORE)) for clips in (before, after))
    early = {clip.key: clip for clip in before}
    pairs: dict[str, Pair] = {}
    for clip in after:
        if clip.key in early and clip.row_id in was and clip.row_id in now:
            pairs.setdefault(clip.row_id, Pair(early[clip.key], clip, now[clip.row_id] - was[clip.row_id]))
    return list(pairs.values())


@dataclass(frozen=True)
class Grid:
    """The same prompts across steps: ``clips[row id][step]``, absent where the step has none."""

    steps: Sequence[int]
    clips: Mapping[str, Mapping[int, Clip]]
    rows_in_all: int
    steps_in_all: int


def grid(history: History) -> Grid | None:
    """Evenly spaced validations and rows, in the order of their ids: chosen by nobody for how they sound."""
    if not history.val:
        return None
    steps = thinned(history.val_steps, GRID_STEPS)
    by_step = {step: {} for step in steps}  # type: dict[int, dict[str, Clip]]
    for step in steps:
        for clip in history.val[step]:
            by_step[step].setdefault(clip.row_id, clip)
    rows = sorted({row for clips in by_step.values() for row in clips})
    chosen = [rows[i] for i in thinned(range(len(rows)), GRID_PROMPTS)]
    clips = {row: {step: by_step[step][row] for step in steps if row in by_step[step]} for row in chosen}
    return Grid(steps, clips, len(rows), len(history.val_steps))


# ---------------------------------------------------------------- distributions


@dataclass(frozen=True)
class Distribution:
    """Values of all clips at the first and at the last validation, or at the last step that kept training clips."""

    name: str
    values: Mapping[int, Sequence[float]]  # step -> one value a clip
    missing: Mapping[int, int]  # step -> clips in which it was not measured


def distributions(history: History) -> list[Distribution]:
    """Duration and the error rate, where there are any."""
    split = history.val or history.train
    if not split:
        return []
    steps = sorted({min(split), max(split)}) if history.val else [max(split)]
    names = {name for step in steps for clip in split[step] for name in clip.values}
    wanted = [SECONDS, error_rate_part(names)]
    found = []
    for name in wanted:
        if name in names:
            assert name is not None
            values = {step: [clip.values[name] for clip in split[step] if name in clip.values] for step in steps}
            missing = {step: len(split[step]) - len(values[step]) for step in steps}
            found.append(Distribution(name, values, missing))
    return found


@dataclass(frozen=True)
class Endings:
    """How the clips of a step ended."""

    step: int
    clips: int
    eos: int
    silent: int  # no frame at all

    @property
    def cut_off(self) -> int:
        return self.clips - self.eos


def endings(history: History) -> list[Endings]:
    split = history.val or history.train
    return [
        Endings(
            step,
            len(split[step]),
            sum(clip.stop_reason == "eos" for clip in split[step]),
            sum(clip.frames == 0 for clip in split[step]),
        )
        for step in thinned(sorted(split), GRID_STEPS)
    ]


# ---------------------------------------------------------------- probes


@dataclass(frozen=True)
class ProbePoint:
    """What verl_tts/rewards/probes.py wrote at one validation; changes are to the first one of the run."""

    step: int
    mean: float
    change: float | None
    noise: float | None
    rows: int | None
    alarm: bool


def probes(history: History) -> dict[str, list[ProbePoint]]:
    points: dict[str, list[ProbePoint]] = {}
    for line in history.metrics:
        for key, value in line.items():
            if key.startswith(PREFIX_PROBE) and key.endswith("/mean") and value is not None:
                name = key.removeprefix(PREFIX_PROBE).removesuffix("/mean")
                stem = f"{PREFIX_PROBE}{name}"
                points.setdefault(name, []).append(
                    ProbePoint(
                        line["step"],
                        value,
                        line.get(f"{stem}/change"),
                        line.get(f"{stem}/noise"),
                        _whole(line.get(f"{stem}/rows")),
                        bool(line.get(f"{stem}/alarm")),
                    )
                )
    return points


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


# ---------------------------------------------------------------- throughput


@dataclass(frozen=True)
class Phase:
    name: str  # as below timing_s/
    seconds: float  # mean over the steps that have it
    share: float  # its seconds in all, of those of the steps


@dataclass(frozen=True)
class Throughput:
    steps: int
    step_seconds: float  # mean
    phases: Sequence[Phase]


def throughput(history: History) -> Throughput | None:
    """Training steps by phase. Phases nest or run side by side now and then, so shares need not sum to 1."""
    lines = [line for line in history.metrics if isinstance(line.get(f"{PREFIX_TIME}step"), int | float)]
    total = sum(line[f"{PREFIX_TIME}step"] for line in lines)
    if not lines or total <= 0:
        return None
    seconds: dict[str, list[float]] = {}
    for line in lines:
        for key, value in line.items():
            name = key.removeprefix(PREFIX_TIME)
            if key.startswith(PREFIX_TIME) and "/" not in name and name != "step" and isinstance(value, int | float):
                seconds.setdefault(name, []).append(value)
    phases = sorted(
        (Phase(name, sum(values) / len(values), sum(values) / total) for name, values in seconds.items()),
        key=lambda phase: -phase.share,
    )
    return Throughput(len(lines), total / len(lines), phases)


# ---------------------------------------------------------------- the checkpoint to keep


@dataclass(frozen=True)
class Keep:
    """``step`` is the checkpoint to keep, None where none is worth it; ``reason`` is one or two sentences."""

    step: int | None
    reason: str
    change: Interval | None
    constraints: Constraints
    candidates: Sequence[Candidate]

    @property
    def condition(self) -> str:
        return " and ".join(map(str, self.constraints))


def keep(history: History, constraints: Constraints) -> Keep | None:
    """The choice of verl_tts/report/best.py, with its reason; None without validations.

    Raises ConfigError for a part that no validation has.
    """
    validated = validations(history.metrics)
    if not validated:
        return None
    measured = measured_in(validated)
    for constraint in constraints:
        if constraint.name not in measured:
            raise ConfigError(
                f"--keep {constraint}: validations have no part {constraint.name}; they have {', '.join(measured)}"
            )
    of = candidates(validated, constraints, history.checkpoints)
    first, later = of[0], of[1:]

    def choice(step: int | None, reason: str, change: Interval | None = None) -> Keep:
        return Keep(step, reason, change, constraints, of)

    condition = choice(None, "").condition
    where = f" with {condition}" if condition else ""
    chosen = best(of)
    if not later:
        only = f"Step {first.step} is the only validation: nothing to compare it with."
        return choice(None if chosen is None else chosen.step, only)
    if chosen is None:
        if not any(candidate.holds for candidate in later):
            return choice(None, f"No later validation meets {condition}.")
        if not any(candidate.holds and candidate.saved for candidate in later):
            return choice(None, f"No validated step{where} has a whole checkpoint in this directory.")
        return choice(
            None, f"No saved checkpoint{where} scores above step {first.step}: keep the model that the run began with."
        )
    change = None
    if chosen is not first and {first.step, chosen.step} <= history.val.keys():
        change = change_between(by_row(history.val[first.step], SCORE), by_row(history.val[chosen.step], SCORE))
    reason = f"The best validation score of the saved checkpoints{where}."
    if change is not None and not change.excludes_zero:
        reason += " Its gain is within chance: more validation rows would tell."
    top = max(of, key=lambda candidate: (candidate.score, -candidate.step))
    if top.score > chosen.score:
        why = f"it breaks {condition}" if not top.holds else "it was not saved or is no longer there"
        reason += f" Step {top.step} scores higher, but {why}."
    return choice(chosen.step, reason, change)
