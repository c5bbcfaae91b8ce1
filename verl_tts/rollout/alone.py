"""The rollout engine without Ray and without a trainer: rows in, scored clips out. What `doctor` and `screen` run.

use_environment(config)
async with engine(config) as server:
    async for clip in roll_out_and_score(config, server, conditioner, rewards, wanted, step=0):
        ...
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from verl_tts.config.compose import worker_environment
from verl_tts.launch import WORKER_ENVIRONMENT
from verl_tts.rewards.manager import RewardManager
from verl_tts.rollout.seeds import sample_seed
from verl_tts.rollout.spec import RolloutSpec, sampling_settings
from verl_tts.types import CodecRollout, Given, PromptRow, Score, Waveform

PLUGIN = "verl_tts.plugin"  # registers our parts with verl, which takes no part here


@dataclass(frozen=True)
class Clip:
    """One sample, as the training would have it at ``step``. ``score`` is None where nobody was asked."""

    row: PromptRow
    k: int
    given: Given
    rollout: CodecRollout
    waveform: Waveform
    score: Score | None


def use_environment(config: DictConfig) -> None:
    """Sets the variables that every process of a run has, here; the engine's stages inherit them at their start."""
    os.environ.update(WORKER_ENVIRONMENT | worker_environment(config))


@asynccontextmanager
async def engine(config: DictConfig) -> AsyncIterator[Any]:
    """A started ``RolloutServer``, ended with its stages when the block ends."""
    from verl_tts.rollout.server import RolloutServer

    spec = RolloutSpec.from_config(config)
    server = RolloutServer(replace(spec, external_lib=tuple(lib for lib in spec.external_lib if lib != PLUGIN)), 0)
    try:
        await server.launch()
        yield server
    finally:
        await server.shutdown()


async def roll_out_and_score(
    config: DictConfig,
    server: Any,
    conditioner: Any,
    rewards: RewardManager | None,
    wanted: Iterable[tuple[PromptRow, int]],
    *,
    step: int = 0,
) -> AsyncIterator[Clip]:
    """The clips of (row, sample number) pairs, in the order in which they are done; as in training, not validation.

    As many are under way as the engine and the scorer can work on at once. The first failure ends the others and is
    raised: a ``RolloutError`` or a ``ScorerError``.
    """
    slots = asyncio.Semaphore(server.spec.max_num_seqs + (config.tts.reward.max_in_flight if rewards else 0))
    sampling = dict(sampling_settings(config.actor_rollout_ref.rollout, "train"))

    async def one(row: PromptRow, k: int) -> Clip:
        async with slots:
            given = conditioner(row)
            rollout, waveform = await server.sample(
                f"{row.id}-{k}-{time.monotonic_ns()}",
                prompt_ids=list(given.text_ids),
                sampling_params=sampling,
                seed=sample_seed(config.data.seed, "train", row.id, k, step),
                sample_id=f"{row.id}#{k}",
                **given.request(),
            )
            score = None if rewards is None else await rewards.score(row, waveform, rollout)
            return Clip(row, k, given, rollout, waveform, score)

    tasks = [asyncio.create_task(one(row, k)) for row, k in wanted]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
