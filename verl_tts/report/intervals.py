"""Is the difference more than chance? The one interval that evaluation, report and tests use.

Scores of one evaluation are ``row id -> the scores of its samples``. Two things are drawn: the rows, which stand for
the texts that might have been asked for, and within each row its samples, which stand for the seeds that might have
been used. An interval that draws rows alone takes one clip's luck for a property of its text.

The method is the two-stage bootstrap with percentile limits (Davison and Hinkley, Bootstrap Methods and their
Application, 1997, section 3.8); a row with one sample keeps that sample, and its luck is then part of the spread over
rows.

Shapes: ``D`` bootstrap draw, ``R`` row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Scores = Mapping[str, Sequence[float]]
"""Row id -> the scores of its samples, at least one, finite."""

DRAWS = 10_000


def row_means(scores: Scores) -> dict[str, float]:
    return {row: math.fsum(values) / len(values) for row, values in scores.items()}


@dataclass(frozen=True)
class Interval:
    """An estimate and the limits that hold it in ``level`` of the draws."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def mean_interval(scores: Scores, *, level: float = 0.95, draws: int = DRAWS, seed: int = 0) -> Interval:
    """The mean over rows of each row's mean, with its interval; ValueError without rows or with an empty one."""
    rows = sorted(scores)
    drawn_D = _drawn_means([scores], rows, draws, seed)[0]
    return _interval(_mean(scores, rows), drawn_D, level)


def paired_difference(
    before: Scores, after: Scores, *, level: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """Mean of ``after`` minus mean of ``before``, over the same rows, with its interval.

    Each draw takes the same rows on both sides, and samples on each side on their own. ValueError where the two do not
    hold the same rows: a difference over other texts says nothing about the policy.
    """
    if set(before) != set(after):
        lone = sorted(set(before) ^ set(after))
        raise ValueError(f"{len(lone)} row(s) are on one side only, the first is {lone[0]!r}: compare the same rows")
    rows = sorted(before)
    before_D, after_D = _drawn_means([before, after], rows, draws, seed)
    return _interval(_mean(after, rows) - _mean(before, rows), after_D - before_D, level)


def _mean(scores: Scores, rows: Sequence[str]) -> float:
    return float(np.mean([np.mean(scores[row]) for row in rows]))


def _drawn_means(sides: Sequence[Scores], rows: Sequence[str], draws: int, seed: int) -> list[np.ndarray]:
    """For each side the mean of every draw, (D,); the sides share the rows of a draw."""
    if not rows or any(len(side[row]) == 0 for side in sides for row in rows):
        raise ValueError("no interval without rows, and none of a row without samples")
    random = np.random.default_rng(seed)
    chosen_DR = random.integers(len(rows), size=(draws, len(rows)))
    return [_side_means(side, rows, chosen_DR, random) for side in sides]


def _side_means(scores: Scores, rows: Sequence[str], chosen_DR: np.ndarray, random: np.random.Generator) -> np.ndarray:
    counts_R = np.array([len(scores[row]) for row in rows])
    starts_R = np.concatenate([[0], np.cumsum(counts_R)[:-1]])
    flat = np.concatenate([np.asarray(scores[row], dtype=np.float64) for row in rows])
    if counts_R.max() == 1:
        return flat[chosen_DR].mean(axis=1)
    total_D = np.zeros(len(chosen_DR))
    # One row of the draw at a time: all at once would be draws x rows x samples numbers.
    for column in range(chosen_DR.shape[1]):
        row_D = chosen_DR[:, column]
        count_D = counts_R[row_D]
        sample_DK = (random.random((len(row_D), counts_R.max())) * count_D[:, None]).astype(np.int64)
        kept_DK = np.arange(counts_R.max()) < count_D[:, None]
        drawn_DK = np.where(kept_DK, flat[starts_R[row_D][:, None] + sample_DK], 0.0)
        total_D += drawn_DK.sum(axis=1) / count_D
    return total_D / chosen_DR.shape[1]


def _interval(mean: float, drawn_D: np.ndarray, level: float) -> Interval:
    tail = 50 * (1 - level)
    low, high = np.percentile(drawn_D, [tail, 100 - tail])
    return Interval(mean, float(low), float(high))
