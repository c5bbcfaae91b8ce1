"""Several numbers of a scorer's answer become one reward.

    value_k = normalise_k(part_k)                        ComponentConfig
    base    = sum_k w_k value_k                          or the weighted harmonic mean, 1 / sum_k (w_k / value_k)
    base    = sigmoid(base)                              if compose.squash says so
    total   = gate(base, error)                          GateConfig: none, exp(-beta * error), zones
    total   = max(total, feasible_floor)                 the order: a violation is below every other clip

A gate is not a summand: no other component can buy a way past it. The result is one number a clip that depends on
nothing but its answer and on the running statistics, which stay as they are within a step.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_tts.config.reward import ComponentConfig, ComposeConfig
from verl_tts.errors import CheckpointError, ScorerProtocolError
from verl_tts.types import Score

SCORE = "score"  # the part that is the scorer's score itself
VIOLATION = "violation"  # the note that says why a clip is one
MIN_STD = 1e-3  # a component that hardly varies would have its noise blown up


@dataclass
class RunningStatistics:
    """Mean and variance of everything seen so far, batch by batch (Chan, Golub and LeVeque, 1979)."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    """Sum of squared distances from the mean."""

    def add(self, values: Sequence[float]) -> None:
        """Sums are exact before they are rounded, so a batch counts the same in any order.

        Raises OverflowError for values whose squares are no floats.
        """
        if not values:
            return
        mean = math.fsum(values) / len(values)
        m2 = math.fsum((value - mean) ** 2 for value in values)
        shift, count = mean - self.mean, self.count + len(values)
        self.m2 += m2 + shift * shift * self.count * len(values) / count
        self.mean += shift * len(values) / count
        self.count = count
        if not math.isfinite(self.m2):
            raise OverflowError(f"the sum of squares is {self.m2}")

    @property
    def std(self) -> float:
        return max(math.sqrt(self.m2 / self.count), MIN_STD)


@dataclass(frozen=True)
class Composed:
    total: float
    parts: Mapping[str, float]  # ``component/<name>``, normalised, and ``component/gate``
    violation: str | None = None  # the gate says that the clip is one


@dataclass
class Composer:
    """Composes one clip at a time, with statistics that ``end_step`` moves."""

    config: ComposeConfig
    steps: int = 0  # training steps that the statistics have seen
    statistics: dict[str, RunningStatistics] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weights = self.config.chosen_weights
        self.components: dict[str, ComponentConfig] = {
            name: component for name, component in self.config.components.items() if weights[name] > 0
        }
        self._running = [name for name, c in self.components.items() if c.normaliser == "running_z"]
        for name in self._running:
            self.statistics.setdefault(name, RunningStatistics())

    @property
    def part_names(self) -> tuple[str, ...]:
        gate = ("component/gate",) if self.config.gate.part else ()
        return (*(f"component/{name}" for name in self.components), *gate)

    def compose(self, score: Score, sample_id: str) -> Composed:
        """The reward of one answer; ScorerProtocolError names a component that the answer lacks."""
        values = {name: self._normalised(name, score, sample_id) for name in self.components}
        base = self._combine(values)
        if self.config.squash == "sigmoid":
            base = _sigmoid(base)
        parts = {f"component/{name}": value for name, value in values.items()}
        gate, violation = self.config.gate, None
        total = base
        if gate.part is not None:
            error = find_part(score, gate.part, sample_id)
            if error < 0:
                raise ScorerProtocolError(f"sample {sample_id!r}: {gate.part}={error} is no error rate, being below 0")
            parts["component/gate"] = error
            if gate.kind == "exp":
                total = base * math.exp(-gate.beta * error)
            elif error > gate.limit:
                violation = f"{gate.part} {error:.3g}, limit {gate.limit:g}"
            elif error <= gate.clean:
                total = base + gate.bonus
        if not math.isfinite(total):
            raise ScorerProtocolError(f"sample {sample_id!r}: the reward composed of {values} is {total}")
        if self.config.ordered:
            total = max(total, self.config.feasible_floor)
        return Composed(total, parts, violation)

    def end_step(self, scores: Iterable[Score]) -> None:
        """Takes in the answers of a whole training step; violations are not counted.

        Raises ScorerProtocolError for numbers whose squares are no floats.
        """
        measured = [score for score in scores if VIOLATION not in score.notes]
        for name in self._running:
            part = self.components[name].part
            try:
                self.statistics[name].add([find_part(score, part, "") for score in measured])
            except OverflowError as error:
                raise ScorerProtocolError(f"the answers of a step are too large for statistics of {part}") from error
        self.steps += 1

    # ------------------------------------------------------------------ what a checkpoint keeps

    def state(self) -> dict[str, Any]:
        """JSON: ``{"steps": 3, "components": {"speaker": {"count": 48, "mean": 0.4, "m2": 1.2}}}``."""
        return {"steps": self.steps, "components": {name: vars(self.statistics[name]).copy() for name in self._running}}

    def load_state(self, state: Mapping[str, Any], *, allow_other: bool = False) -> None:
        """Continues from ``state``; CheckpointError if it is that of other components.

        With ``allow_other`` what was there before goes on, and a component that is new begins from nothing.
        """
        saved = state.get("components", {})
        if allow_other:
            saved = {name: saved.get(name, {}) for name in self._running}
        if set(saved) != set(self._running):
            raise CheckpointError(
                f"the checkpoint has running statistics of {sorted(saved)}, tts.reward.compose has running_z for "
                f"{sorted(self._running)}; resume with the components of the run, or start a new one"
            )
        self.steps = state.get("steps", 0)
        self.statistics = {name: RunningStatistics(**values) for name, values in saved.items()}

    # ------------------------------------------------------------------ parts of the formula

    def _normalised(self, name: str, score: Score, sample_id: str) -> float:
        component = self.components[name]
        value = find_part(score, component.part, sample_id)
        match component.normaliser:
            case "affine":
                value = component.scale * value + component.offset
            case "running_z":
                mean, std = self._baseline(name, component)
                value = (value - mean) / std
            case "tanh":
                value = 1.0 - math.tanh(component.scale * value)
            case "exp":
                value = math.exp(min(-component.scale * value, 700.0))  # beyond it lies infinity
        if component.low is not None:
            value = max(value, component.low)
        if component.high is not None:
            value = min(value, component.high)
        if not math.isfinite(value):
            raise ScorerProtocolError(f"sample {sample_id!r}: component {name}, normalised, is {value}")
        return value

    def _baseline(self, name: str, component: ComponentConfig) -> tuple[float, float]:
        seen = self.statistics[name]
        if self.steps < self.config.warmup_steps or seen.count < 2:
            return component.initial_mean, component.initial_std
        return seen.mean, seen.std

    def _combine(self, values: Mapping[str, float]) -> float:
        weights = self.config.chosen_weights
        if self.config.combine == "sum":
            return math.fsum(weights[name] * value for name, value in values.items())
        if min(values.values()) <= 0:
            return 0.0  # the limit: one component that is worth nothing leaves nothing
        return 1.0 / math.fsum(weights[name] / value for name, value in values.items())


def find_part(score: Score, part: str, sample_id: str) -> float:
    """The number under ``part`` in an answer, or under the one ``<scorer>.<part>`` of a server with several scorers.

    Raises ScorerProtocolError where there is none, or more than one.
    """
    if part == SCORE:
        return score.parts.get(SCORE, score.total)
    if part in score.parts:
        return score.parts[part]
    found = [name for name in score.parts if name.endswith(f".{part}")]
    if len(found) == 1:
        return score.parts[found[0]]
    problem = f"more than one {part!r}: {', '.join(found)}" if found else f"no number {part!r}"
    answered = [SCORE, *(name for name in score.parts if not name.startswith(("clip/", "guard/", "component/")))]
    raise ScorerProtocolError(
        f"sample {sample_id!r}: the answer has {problem}; it has {', '.join(answered)}, and "
        "tts.reward.compose.components.*.part and gate.part name what is composed"
    )


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))
