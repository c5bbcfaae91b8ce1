"""Checks during the run. Each is a metric every step; beyond its limit it stops the run.

Shapes: ``N`` sampled token of all samples.
"""

from dataclasses import dataclass
from typing import Any

import torch

from verl_tts.config.tts import GatesConfig
from verl_tts.errors import GateError

GATE_LOGPROBS = "gate_log_probs"
"""The actor's column of log-probs as the rollout engine reports them, to be compared with the engine's own."""


@dataclass(frozen=True)
class LogprobGate:
    """Do the engine and the actor hold the same policy?

    The engine's log-probs of what it sampled are compared with the actor's of the same tokens, both as the
    engine reports them (``rollout.logprobs_mode``), before the update.
    """

    limits: GatesConfig

    def check(self, engine_N: torch.Tensor, actor_N: torch.Tensor, step: int) -> dict[str, float]:
        """Metrics under ``gate/``; ``GateError`` beyond a limit. -inf in ``actor_N``: outside its support."""
        engine_N, actor_N = engine_N.double(), actor_N.double()
        inside_N = ~actor_N.isneginf()
        both = torch.stack([engine_N[inside_N], actor_N[inside_N]])
        if not bool(both.isfinite().all()):
            raise GateError(f"step {step}: a log-prob is not finite; nothing was updated")
        difference_N = (both[0] - both[1]).abs()
        outside = 1.0 - float(inside_N.double().mean())
        metrics = {
            "gate/logprob_max_abs": float(difference_N.max()) if len(difference_N) else 0.0,
            "gate/logprob_mean_abs": float(difference_N.mean()) if len(difference_N) else 0.0,
            "gate/outside_support": outside,
        }
        if len(difference_N) > 1 and bool((both.std(dim=1) > 0).all()):
            metrics["gate/logprob_correlation"] = float(torch.corrcoef(both)[0, 1])
        self._stop_beyond(metrics, "gate/logprob_max_abs", self.limits.logprob_max_abs, "logprob_max_abs", step)
        self._stop_beyond(metrics, "gate/logprob_mean_abs", self.limits.logprob_mean_abs, "logprob_mean_abs", step)
        self._stop_beyond(
            metrics, "gate/outside_support", self.limits.outside_support_share, "outside_support_share", step
        )
        return metrics

    @staticmethod
    def _stop_beyond(metrics: dict[str, Any], name: str, limit: float, setting: str, step: int) -> None:
        if metrics[name] > limit:
            raise GateError(
                f"step {step}: {name} is {metrics[name]:.3g}, the limit is {limit:g} (tts.gates.{setting}): the "
                "rollout engine and the actor disagree about what was sampled"
            )


def require_finite(what: str, values: torch.Tensor, step: int) -> None:
    """``GateError`` before the optimizer steps."""
    if not bool(values.isfinite().all()):
        raise GateError(f"step {step}: {what} is not finite; nothing was updated")
