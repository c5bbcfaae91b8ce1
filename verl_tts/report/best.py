"""The checkpoint to keep: the highest validation score among those that got nothing worse that must not.

A score that rises while the error rate of a recogniser rises with it says that the policy has learned to please its
scorer. So a step counts only if its validation meets the constraints. By this rule the run chooses which checkpoint
stays beside the newest ones, and the report which one it names; both read metrics.jsonl, where a validation has its
means over all of its prompts, whatever clips were kept.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_tts.errors import ConfigError
from verl_tts.report.history import EOS, SCORE, in_order, is_number
from verl_tts.report.intervals import row_means

PREFIX = "val-mean/"
"""Of the metrics that a step is chosen by: ``val-mean/score``, ``val-mean/eos``, ``val-mean/PART``."""

_CONSTRAINT = re.compile(
    r"(?P<name>[^\s<>=,]+?)\s*(?P<sign><=|>=)\s*(?P<limit>first|[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
)


# ---------------------------------------------------------------- what a validation measured


def validation_means(clips: Iterable[tuple[str, Mapping[str, float]]]) -> dict[str, float]:
    """The metrics of a validation's clips, each the id of its row and its values.

    A row's value is the mean over its clips, and a mean is that over the rows in which the part was measured.
    """
    parts: dict[str, dict[str, list[float]]] = {}
    for row, values in clips:
        for name, value in values.items():
            parts.setdefault(name, {}).setdefault(row, []).append(value)
    rows = {name: row_means(scores).values() for name, scores in parts.items()}
    return {f"{PREFIX}{name}": math.fsum(means) / len(means) for name, means in rows.items()}


def validations(lines: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Step -> part -> mean, of the lines of metrics.jsonl that hold a validation with a score."""
    found = {
        line["step"]: {name.removeprefix(PREFIX): float(line[name]) for name in line if _is_mean(name, line[name])}
        for line in lines
    }
    return {step: found[step] for step in sorted(found) if SCORE in found[step]}


def measured_in(validated: Mapping[int, Mapping[str, float]]) -> list[str]:
    """The parts that any of them has: the score, EOS, then the others by name."""
    return in_order(name for means in validated.values() for name in means)


def _is_mean(name: str, value: Any) -> bool:
    return name.startswith(PREFIX) and is_number(value)


# ---------------------------------------------------------------- what it has to meet


@dataclass(frozen=True)
class Constraint:
    """``cer <= first``: no validation mean above that of the first; ``cer <= 0.1``; ``eos >= first``."""

    name: str
    sign: str
    limit: float | None  # None: the part's first value

    def __str__(self) -> str:
        sign = {"<=": "\u2264", ">=": "\u2265"}[self.sign]
        return f"{self.name} {sign} {'first' if self.limit is None else f'{self.limit:g}'}"

    @property
    def kind(self) -> str:
        """``cer`` of ``SCORER.cer``."""
        return self.name.rpartition(".")[2].lower()

    def holds(self, value: float, first: float) -> bool:
        limit = first if self.limit is None else self.limit
        return value <= limit if self.sign == "<=" else value >= limit


Constraints = tuple[Constraint, ...]


def parse_constraints(text: str) -> Constraints:
    """One, or none for ``none``. Raises ConfigError."""
    if text.strip() == "none":
        return ()
    match = _CONSTRAINT.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--keep {text!r}: it has to be PART<=LIMIT, PART>=LIMIT or none; LIMIT is a number or first")
    limit = None if match["limit"] == "first" else float(match["limit"])
    return (Constraint(match["name"], match["sign"], limit),)


def constraints_of(not_above_start: Collection[str], measured: Iterable[str]) -> Constraints:
    """What ``tts.keep.best_not_above_start`` asks of a run whose validations have ``measured`` these parts.

    ``cer`` is also ``SCORER.cer`` of several scorers. Where no part of those names is measured, EOS must not get rarer;
    with no name at all there is no constraint.
    """
    names = list(measured)
    found = [name for name in names if name.rpartition(".")[2].lower() in not_above_start]
    if not_above_start and not found and EOS in names:
        return (Constraint(EOS, ">=", None),)
    return tuple(Constraint(name, "<=", None) for name in found)


# ---------------------------------------------------------------- the choice


@dataclass(frozen=True)
class Candidate:
    step: int
    score: float
    values: Mapping[str, float]  # of every part
    holds: bool  # all constraints
    saved: bool


def candidates(
    validated: Mapping[int, Mapping[str, float]], constraints: Constraints, saved: Collection[int]
) -> list[Candidate]:
    """Every validation, the first one first.

    A part's first value is that of the first validation that measured it: a scorer may be renamed, or a first
    validation have had nothing but silence. A validation that measured no part of a kind does not meet its constraint.
    """
    first: dict[str, float] = {}
    for means in validated.values():
        first = {**means, **first}
    kinds = {constraint.kind for constraint in constraints}

    def holds(means: Mapping[str, float]) -> bool:
        measured = [constraint for constraint in constraints if constraint.name in means]
        return {constraint.kind for constraint in measured} == kinds and all(
            constraint.holds(means[constraint.name], first[constraint.name]) for constraint in measured
        )

    return [Candidate(step, means[SCORE], means, holds(means), step in saved) for step, means in validated.items()]


def best(of: Sequence[Candidate]) -> Candidate | None:
    """The saved one with the highest score that meets the constraints, of equals the earliest.

    None where there is none, or where the first validation, which has no checkpoint, scored as high: nothing is better
    than the model that the run began with.
    """
    allowed = [candidate for candidate in of if candidate.holds and candidate.saved]
    chosen = max(allowed, key=lambda candidate: (candidate.score, -candidate.step), default=None)
    is_better = chosen is not None and (chosen is of[0] or chosen.score > of[0].score)
    return chosen if is_better else None


def best_step(
    lines: Iterable[Mapping[str, Any]], not_above_start: Collection[str], saved: Collection[int]
) -> int | None:
    """The step of the best checkpoint of a run by its metrics.jsonl."""
    validated = validations(lines)
    chosen = best(candidates(validated, constraints_of(not_above_start, measured_in(validated)), saved))
    return None if chosen is None else chosen.step
