"""Checks during the run. Each is a metric every step, with a level to warn at and one to stop at.

A gate is a row of ``GATES``: the setting ``tts.gates.<name>``, the metric that is compared, the side of its levels that
is healthy, and what it means to be on the other one. The metrics are made where their matter is: of the rollouts in
``rollout/groups.py``, of log-probs below, of the update in ``engine/actor.py``, of the weights in ``trainer.py``.

Being beyond a stop level ends the run after ``tts.gates.steps_in_a_row`` steps, at the end of a step and with its
checkpoint saved: one odd batch is no fault. A resume does not begin the count anew: it is taken from the lines of
metrics.jsonl. What is not finite ends the run at once, before the optimizer steps.

Shapes: ``N`` sampled token of all samples.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from verl_tts.config.tts import GatesConfig, Levels
from verl_tts.errors import GateError
from verl_tts.report.history import is_number

GATE_LOGPROBS = "gate_log_probs"
"""The actor's column of log-probs as the rollout engine reports them, to be compared with the engine's own."""

FIRST_RATIO = "gate_first_ratio_max"
"""The actor worker's metric of an update: the largest ``|ratio - 1|`` before its first optimizer step."""

GATE_SECONDS = "gate_seconds_max"
"""The actor worker's metric of an update: what its clock has summed since the last one."""

BEHIND = "sync/behind"
"""Updates since the one whose weights the step's clips were sampled with: above 0 between two syncs of a longer
``tts.sync_every``."""

LARGEST_KL = 10.0  # nats that one token may count for, as in verl's
NO_GAP = 1e-4  # nats: a mean difference of log-probs below it is rounding


class GateClock:
    """Sums the seconds that a process spends in gate code."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """The sum since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


CLOCK = GateClock()


@dataclass(frozen=True)
class Gate:
    name: str
    """The setting ``tts.gates.<name>``, with its levels ``warn`` and ``stop``."""
    metric: str
    """What is compared, by its name in metrics.jsonl. A step without it is not judged by this gate."""
    healthy: Literal["below", "above"]
    means: str
    """What a value on the other side says, to end a line with."""

    def is_beyond(self, value: float, level: float | None) -> bool:
        """A level itself is allowed; a value that is not finite is beyond every one."""
        if level is None:
            return False
        return not (value <= level if self.healthy == "below" else value >= level)


GATES = (
    Gate("logprob_max_abs", "gate/logprob_max_abs", "below", "engine and actor disagree about a token"),
    Gate("logprob_mean_abs", "gate/logprob_mean_abs", "below", "engine and actor disagree about what was sampled"),
    Gate("logprob_correlation", "gate/logprob_correlation", "above", "engine and actor disagree about what is likely"),
    Gate("outside_support", "gate/outside_support", "below", "the engine samples what the actor holds impossible"),
    Gate("nearer_reference", "gate/nearer_reference", "below", "the engine holds the reference and not the actor"),
    Gate("weights_unchanged", "gate/weights_unchanged", "below", "an update did not change the engine's weights"),
    Gate("identical_clips", "rollout/identical_rate", "below", "clips of one prompt are copies of each other"),
    Gate("flat_groups", "reward/flat_group_rate", "below", "groups whose clips all score the same teach nothing"),
    Gate("eos_rate", "rollout/eos_rate", "above", "clips are cut off by data.max_response_length"),
    Gate("length_drift", "gate/length_drift", "below", "frames per character have left where they started"),
    Gate("kl", "gate/kl", "below", "the policy has left the reference"),
    Gate("first_ratio", "gate/first_ratio", "below", "the first ratio of an update is not 1: old log-probs are stale"),
    Gate("real_rows", "rollout/real_share", "above", "prompts are dropped for their failed rollouts"),
)

OF_SYNCED = frozenset({"logprob_max_abs", "logprob_mean_abs", "logprob_correlation", "nearer_reference"})
"""Those that compare an engine with the actor: where it is behind on purpose, they judge nothing."""


@dataclass(frozen=True)
class Verdict:
    warnings: tuple[str, ...]
    """A line for each gate that has just left its healthy side, or is on its way to a stop."""
    stop: str | None
    """Why the run has to end here; None: it goes on."""


@dataclass
class GateWatch:
    """Judges each step, and remembers for how long a gate has been beyond its levels."""

    limits: GatesConfig
    frames_per_char: float | None = None
    """Of the first step of the run, None before it: where ``length_drift`` is measured from."""
    _warned: set[str] = field(default_factory=set)
    _in_a_row: dict[str, int] = field(default_factory=dict)

    def judge(self, step: int, metrics: dict[str, Any]) -> Verdict:
        """Adds ``gate/length_drift``, ``gate/warned`` and ``gate/in_a_row`` to the metrics of a step."""
        self._measure_drift(metrics)
        warnings, stop, warned = [], None, set()
        for gate in GATES:
            levels: Levels = getattr(self.limits, gate.name)
            value = metrics.get(gate.metric)
            if value is None or (gate.name in OF_SYNCED and metrics.get(BEHIND, 0) > 0):
                continue
            if gate.is_beyond(value, levels.stop):
                steps = self._in_a_row[gate.name] = self._in_a_row.get(gate.name, 0) + 1
                line = _line(gate, value, "stop", levels.stop, step)
                if steps >= self.limits.steps_in_a_row:
                    stop = stop or f"{line}, for {steps} step(s) in a row"
                else:
                    warnings.append(f"{line}, for {steps} of {self.limits.steps_in_a_row} steps")
            else:
                self._in_a_row.pop(gate.name, None)
            if gate.is_beyond(value, levels.warn):
                warned.add(gate.name)
                if gate.name not in self._warned | self._in_a_row.keys():
                    warnings.append(_line(gate, value, "warn", levels.warn, step))
        self._warned = warned
        metrics["gate/warned"] = len(warned)
        metrics["gate/in_a_row"] = max(self._in_a_row.values(), default=0)
        return Verdict(tuple(warnings), stop)

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Takes up the steps of the attempts before from their lines of metrics.jsonl, judged by the present levels.

        What is no number there, as in a file that was edited, is not judged.
        """
        for line in lines:
            numbers = {name: value for name, value in line.items() if is_number(value)}
            self.judge(line["step"], numbers | dict.fromkeys(line.get("non_finite", ()), math.nan))

    def _measure_drift(self, metrics: dict[str, Any]) -> None:
        """How many times longer or shorter speech has become: 1 at the start, never below."""
        now = metrics.get("rollout/frames_per_char", 0.0)
        if not now > 0:
            return
        if self.frames_per_char is None:
            self.frames_per_char = float(now)
        metrics["gate/length_drift"] = max(now / self.frames_per_char, self.frames_per_char / now)


def _line(gate: Gate, value: float, level: str, limit: float | None, step: int) -> str:
    side = "above" if gate.healthy == "below" else "below"
    return f"step {step}: {gate.metric} is {value:.3g}, {side} {limit:g} (tts.gates.{gate.name}.{level}): {gate.means}"


# ------------------------------------------------------------------ log-probs


def compare_logprobs(engine_N: torch.Tensor, actor_N: torch.Tensor, step: int) -> dict[str, float]:
    """Do the engine and the actor hold the same policy? Metrics under ``gate/``, differences in nats.

    Both are of what was sampled, as the engine reports them (``rollout.logprobs_mode``), before the update. -inf in
    ``actor_N``: outside its support. Anything else that is not finite raises ``GateError``.
    """
    engine_N, actor_N = engine_N.double(), actor_N.double()
    inside_N = ~actor_N.isneginf()
    both = torch.stack([engine_N[inside_N], actor_N[inside_N]])
    require_finite("a log-prob of the engine or the actor", both, step)
    difference_N = (both[0] - both[1]).abs()
    metrics = {
        "gate/logprob_max_abs": float(difference_N.max()) if len(difference_N) else 0.0,
        "gate/logprob_mean_abs": float(difference_N.mean()) if len(difference_N) else 0.0,
        "gate/outside_support": 1.0 - float(inside_N.double().mean()),
    }
    if len(difference_N) > 1 and bool((both.std(dim=1) > 0).all()):
        metrics["gate/logprob_correlation"] = float(torch.corrcoef(both)[0, 1])
    return metrics


def compare_with_reference(engine_N: torch.Tensor, reference_N: torch.Tensor, actor_gap: float) -> dict[str, float]:
    """Is the engine nearer to the reference than to the actor, and how far is it? Metrics under ``gate/``.

    ``actor_gap`` is ``gate/logprob_mean_abs``. After an update that did not arrive, the engine agrees with the
    reference to the last digit, and with the actor less and less; that gap alone may stay small for a long time.
    ``gate/kl`` is the estimator that verl calls low_var_kl, whatever the loss uses. Tokens outside the reference's
    support are left out.
    """
    difference_N = reference_N.double() - engine_N.double()
    difference_N = difference_N[difference_N.isfinite()]
    if not len(difference_N):
        return {}
    reference_gap = float(difference_N.abs().mean())
    return {
        "gate/reference_mean_abs": reference_gap,
        "gate/nearer_reference": actor_gap / max(reference_gap, NO_GAP),
        "gate/kl": float((difference_N.exp() - difference_N - 1).clamp(max=LARGEST_KL).mean()),
    }


def require_finite(what: str, values: torch.Tensor, step: int) -> None:
    """``GateError`` before the optimizer steps."""
    if not bool(values.isfinite().all()):
        raise GateError(f"step {step}: {what} is not finite; nothing was updated, the last checkpoint is intact")
