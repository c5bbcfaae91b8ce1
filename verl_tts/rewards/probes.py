"""Held-out probes: scorers that are asked in validations, logged, and never optimised.

A reward that rises says that the policy pleases its scorer. Another recogniser, another speaker model, a predictor of
quality say whether it does so by speaking better. Each validation is compared with the first one of the run, row by
row, so that the difficulty of the rows is no noise:

    d_i     change of row i: its mean over the row's clips now, minus the same in the first validation
    change  mean of d over the rows that both have
    noise   2 standard errors of that mean, 2 * std(d) / sqrt(rows)
    alarm   the change of the optimised score is above 0, and that of a probe is below -noise

With fewer than ``MIN_ROWS`` rows a standard error means little, and no alarm is given. Every probe is a scorer of the
protocol, so higher is better. A clip that a probe could not be asked about (no audio) is left out of that probe's rows.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from verl_tts.types import Score

MIN_ROWS = 8
STANDARD_ERRORS = 2.0
PART = "probe/"
SCORE = "score"

Values = dict[str, dict[str, float]]  # "score" or "probe/<name>" -> row id -> mean over the row's clips


@dataclass
class ProbeWatch:
    """Remembers the first validation and compares the others with it."""

    first_step: int | None = None
    first: Values = field(default_factory=dict)

    def compare(self, step: int, scores: Sequence[tuple[str, Score]]) -> tuple[dict[str, float], list[str]]:
        """Metrics under ``val-probe/`` and a line for each alarm, from the (row id, score) pairs of a validation.

        Nothing without probes. For each: ``<name>/mean``, and after the first validation ``/change``, ``/noise``,
        ``/rows`` and ``/alarm``, 0 or 1.
        """
        now = _by_row(scores)
        probes = [name for name in now if name != SCORE]
        if not probes:
            return {}, []
        metrics = {f"val-{name}/mean": _mean(now[name].values()) for name in probes}
        if self.first_step is None:
            self.first_step, self.first = step, now
            return metrics, []
        gained, _, _ = _change(self.first.get(SCORE, {}), now[SCORE])
        alarms = []
        for name in probes:
            change, noise, rows = _change(self.first.get(name, {}), now[name])
            alarm = rows >= MIN_ROWS and gained > 0 and change < -noise
            metrics |= {
                f"val-{name}/change": change,
                f"val-{name}/noise": noise,
                f"val-{name}/rows": rows,
                f"val-{name}/alarm": float(alarm),
            }
            if alarm:
                alarms.append(
                    f"ALARM at step {step}: the validation score rose by {gained:.3g} and {name} fell by "
                    f"{-change:.3g}, noise {noise:.2g}, {rows} rows, both since step {self.first_step}"
                )
        return metrics, alarms

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {} if self.first_step is None else {"step": self.first_step, "rows": self.first}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        return cls(state["step"], state["rows"]) if state else cls()


def _by_row(scores: Iterable[tuple[str, Score]]) -> Values:
    clips: dict[str, dict[str, list[float]]] = {}
    for row_id, score in scores:
        probed = {name: value for name, value in score.parts.items() if name.startswith(PART)}
        for name, value in {**probed, SCORE: score.total}.items():
            if not math.isnan(value):
                clips.setdefault(name, {}).setdefault(row_id, []).append(value)
    return {name: {row_id: _mean(values) for row_id, values in rows.items()} for name, rows in clips.items()}


def _mean(values: Collection[float]) -> float:
    return math.fsum(values) / len(values)


def _change(before: Mapping[str, float], now: Mapping[str, float]) -> tuple[float, float, int]:
    """(mean change, its noise, rows) over the rows that both have; without two of them there is no noise to tell."""
    changes = [now[row_id] - before[row_id] for row_id in now.keys() & before.keys()]
    if len(changes) < 2:
        return 0.0, math.inf, len(changes)
    mean = _mean(changes)
    variance = math.fsum((change - mean) ** 2 for change in changes) / (len(changes) - 1)
    return mean, STANDARD_ERRORS * math.sqrt(variance / len(changes)), len(changes)
