"""Is there something to learn? The starting policy speaks some prompts, a group of clips each, and is scored.

GRPO learns from differences within a group: no spread, no update. What the best of a group is above its mean is what
choosing among samples would gain without any training, the Best-of-N baseline: a rough idea of the headroom.

    ``B`` prompt, ``G`` sample of a group
"""

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from omegaconf import DictConfig

from verl_tts.config.validate import data_files
from verl_tts.data.prompts import read_prompts
from verl_tts.launch import check_prompts, reward_manager
from verl_tts.rewards.compose import VIOLATION
from verl_tts.rollout.alone import Clip, engine, roll_out_and_score, spec_alone, use_environment
from verl_tts.types import PromptRow

PROMPTS = 50
RESCORED = 8  # clips that are scored again, for the noise of the scorer itself
FLAT = 1e-6  # spread below which a group says nothing
MANY_FLAT = 0.5
FEW_ENDS = 0.5
SMALL_HEADROOM = 0.01  # of the reward's unit; what is below drowns in the noise of 50 prompts
NOISY = 0.5  # noise of the scorer over the spread within groups


@dataclass(frozen=True)
class Screened:
    """Numbers of one screening. ``spread`` is the standard deviation within a group, averaged over the groups."""

    prompts: int
    samples: int
    mean: float
    standard_error: float
    spread: float
    spread_of_parts: Mapping[str, float]
    flat_groups: float
    violations: float
    eos_rate: float
    best_of_group: float
    noise_over_seeds: float
    """Standard deviation, over the samples of a group, of the mean over all prompts: how much a validation with one
    clip a prompt changes with another seed."""
    scorer_noise: float
    """Mean difference of two scores of one clip."""
    seconds_a_clip: float
    rtf: float
    """Wall time over seconds of audio."""

    @property
    def headroom(self) -> float:
        """Best of a group less its mean."""
        return self.best_of_group - self.mean


def choose(rows: Sequence[PromptRow], number: int, seed: int) -> list[PromptRow]:
    """``number`` of the rows, the same for the same seed."""
    return [*rows] if number >= len(rows) else random.Random(seed).sample([*rows], number)


def screen(config: DictConfig, number: int = PROMPTS) -> Screened:
    """Starts the engine and the scorer's client, and ends both. Raises a ``TTSError``."""
    use_environment(config)
    rows = choose(read_prompts(*data_files(config.data.train_files)), number, config.data.seed)
    return asyncio.run(_screen(config, check_prompts(config), rows))


async def _screen(config: DictConfig, conditioner: Any, rows: Sequence[PromptRow]) -> Screened:
    rewards = reward_manager(config)
    try:
        await rewards.probe()
        async with engine(spec_alone(config)) as server:
            wanted = [(row, k) for row in rows for k in range(config.actor_rollout_ref.rollout.n)]
            began = time.monotonic()
            clips = [
                clip
                async for clip in roll_out_and_score(
                    config, server, conditioner, rewards, wanted, split="train", step=0
                )
            ]
            seconds = time.monotonic() - began
        again = [
            (clip.score.total, (await rewards.score(clip.row, clip.waveform, clip.rollout)).total)
            for clip in clips[:RESCORED]
            if clip.score is not None
        ]
        return summed_up(clips, again, seconds)
    finally:
        await rewards.aclose()


def summed_up(clips: Sequence[Clip], again: Sequence[tuple[float, float]], seconds: float) -> Screened:
    """``again``: pairs of scores of one clip. ``seconds``: of the whole, many clips at a time."""
    groups: dict[str, list[Clip]] = {}
    for clip in clips:
        groups.setdefault(clip.row.id, []).append(clip)
    for group in groups.values():
        group.sort(key=lambda clip: clip.k)
    score_BG = np.array([[_score(clip) for clip in group] for group in groups.values()])
    mean_B, spread_B = score_BG.mean(axis=1), score_BG.std(axis=1)
    audio_s = sum(clip.waveform.seconds for clip in clips)
    return Screened(
        prompts=len(groups),
        samples=score_BG.shape[1],
        mean=float(score_BG.mean()),
        standard_error=float(mean_B.std(ddof=1) / math.sqrt(len(mean_B))) if len(mean_B) > 1 else math.nan,
        spread=float(spread_B.mean()),
        spread_of_parts=_spread_of_parts([*groups.values()]),
        flat_groups=float((spread_B < FLAT).mean()),
        violations=sum(VIOLATION in (clip.score.notes if clip.score else {}) for clip in clips) / len(clips),
        eos_rate=sum(clip.rollout.stop_reason == "eos" for clip in clips) / len(clips),
        best_of_group=float(score_BG.max(axis=1).mean()),
        noise_over_seeds=float(score_BG.mean(axis=0).std(ddof=1)) if score_BG.shape[1] > 1 else math.nan,
        scorer_noise=float(np.mean([abs(one - other) for one, other in again])) if again else math.nan,
        seconds_a_clip=seconds / len(clips),
        rtf=seconds / audio_s if audio_s else math.inf,
    )


def _score(clip: Clip) -> float:
    assert clip.score is not None
    return clip.score.total


def _spread_of_parts(groups: Sequence[Sequence[Clip]]) -> dict[str, float]:
    """Of each part that was measured in two clips of a group and more."""
    spreads: dict[str, list[float]] = {}
    for group in groups:
        names = sorted({name for clip in group if clip.score for name in clip.score.parts})
        for name in names:
            values = [clip.score.parts.get(name, math.nan) for clip in group if clip.score]
            known = [value for value in values if not math.isnan(value)]
            if len(known) > 1:
                spreads.setdefault(name, []).append(float(np.std(known)))
    return {name: float(np.mean(values)) for name, values in spreads.items()}


def verdict(found: Screened) -> tuple[bool, list[str]]:
    """Whether there is something to learn, and what speaks for and against it."""
    against = []
    if found.flat_groups > MANY_FLAT:
        against.append(
            f"{found.flat_groups:.0%} of the groups are flat: their clips score the same and teach nothing; use a "
            "finer reward, harder prompts, or a higher temperature"
        )
    if found.headroom < SMALL_HEADROOM:
        against.append(
            f"the best of {found.samples} is {found.headroom:.3g} above the mean: there is little to choose from"
        )
    if found.spread > 0 and found.scorer_noise > NOISY * found.spread:
        against.append(
            f"two scores of one clip differ by {found.scorer_noise:.3g}, the clips of a group by {found.spread:.3g}: "
            "the scorer's noise would be learned"
        )
    if found.eos_rate < FEW_ENDS:
        against.append(
            f"{found.eos_rate:.0%} of the clips end by themselves: raise data.max_response_length, or length is all "
            "that is learned"
        )
    return not against, against


def _size(part: tuple[str, float]) -> float:
    """The larger spread comes first."""
    return -part[1]


def shown(found: Screened) -> list[str]:
    """For a terminal, the verdict last."""
    learns, against = verdict(found)
    parts = sorted(((name, spread) for name, spread in found.spread_of_parts.items() if spread > FLAT), key=_size)
    return [
        f"{found.prompts} prompts x {found.samples} clips, {found.seconds_a_clip:.2f} s a clip, many at a time "
        f"({found.rtf:.2f} s a second of audio)",
        f"reward      {found.mean:.3f} +- {found.standard_error:.3f} (standard error over prompts)",
        f"spread      {found.spread:.3f} within a group; {found.flat_groups:.0%} of the groups are flat",
        *(f"            {name} {spread:.3g}" for name, spread in parts),
        f"headroom    {found.headroom:.3f}: the best of {found.samples} scores {found.best_of_group:.3f},"
        " which is Best-of-N",
        f"ends        {found.eos_rate:.0%} by themselves, {found.violations:.0%} violations",
        f"noise       {found.noise_over_seeds:.3g} of the mean over seeds; {found.scorer_noise:.3g} between two "
        "scores of one clip",
        "there is something to learn" if learns else "there is hardly anything to learn:",
        *(f"  {reason}" for reason in against),
    ]
