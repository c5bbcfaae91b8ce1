"""Scoring functions that need no server: ``reward.custom_reward_function.path=pkg://verl_tts.rewards.functions``.

Each is called as ``fn(samples_S, sample_rate_hz, prompt, metadata, **reward_kwargs)`` and returns a
number or ``{"score": number, ...}``. Legend: ``S`` audio sample.
"""

from collections.abc import Mapping

import numpy as np

from verl_tts.types import Scalar


def duration_score(seconds: float, target_seconds: float) -> float:
    """How close two lengths are, in [0, 1]: the shorter one divided by the longer one.

    Equal to ``exp(-|log(seconds / target_seconds)|)``. A group of samples that all miss by far still
    differs in it, so GRPO has a direction to go; ``1 - |error| / target`` is 0 for everything beyond
    twice the target and teaches nothing there.
    """
    return min(seconds, target_seconds) / max(seconds, target_seconds)


def target_seconds_of(metadata: Mapping[str, Scalar]) -> float:
    """The row's target length; ValueError if it has none above 0."""
    target_seconds = metadata.get("target_seconds")
    if isinstance(target_seconds, bool) or not isinstance(target_seconds, (int, float)) or target_seconds <= 0:
        raise ValueError(f"target_seconds: a number above 0 is expected, not {target_seconds!r}")
    return float(target_seconds)


def duration(
    samples_S: np.ndarray, sample_rate_hz: int, prompt: str, metadata: Mapping[str, Scalar]
) -> dict[str, Scalar]:
    """Closeness of the clip's length to ``metadata["target_seconds"]``; ValueError without a target above 0."""
    seconds = len(samples_S) / sample_rate_hz
    target_seconds = target_seconds_of(metadata)
    return {"score": duration_score(seconds, target_seconds), "seconds": seconds, "target_seconds": target_seconds}
