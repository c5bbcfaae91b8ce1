"""How fast a step was, in the units that its user thinks in."""

from collections.abc import Mapping
from typing import Any

PHASES = {
    "rollout": "timing_s/gen",
    "actor_log_probs": "timing_s/old_log_prob",
    "reference_log_probs": "timing_s/ref",
    "advantages": "timing_s/adv",
    "update": "timing_s/update_actor",
    "sync": "timing_s/update_weights",
    "checkpoint": "timing_s/save_checkpoint",
    "validation": "timing_s/testing",
}
"""Name below ``share/`` -> verl's timer. Scoring is part of the rollout: a clip is scored while others are sampled."""


def throughput(metrics: Mapping[str, Any], devices: int, gpu_hours_before: float) -> dict[str, float]:
    """Metrics under ``speed/`` and ``share/`` from a step's own.

    ``steps_per_hour``, ``samples_per_s`` and ``audio_s_per_s`` (seconds of speech made in a second) are over all that
    the step took, its validation included; ``actor_tokens_per_s`` is of the update alone. ``gpu_hours`` is of the run
    so far, its start-up left out. ``share/other`` is what no phase accounts for.
    """
    phases = {name: metrics[timer] for name, timer in PHASES.items() if timer in metrics}
    wall_s = metrics["timing_s/step"] + phases.get("validation", 0.0)
    speed = {
        "speed/steps_per_hour": 3600 / wall_s,
        "speed/samples_per_s": metrics["rollout/rows_real"] / wall_s,
        "speed/audio_s_per_s": metrics["rollout/audio_s"] / wall_s,
        "speed/gpu_hours": gpu_hours_before + devices * wall_s / 3600,
    }
    if update_s := phases.get("update"):
        speed["speed/actor_tokens_per_s"] = metrics["rollout/tokens"] / update_s
    shares = {f"share/{name}": seconds / wall_s for name, seconds in phases.items()}
    return speed | shares | {"share/other": 1 - sum(shares.values())}
