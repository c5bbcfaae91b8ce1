"""The rollout engine without Ray and without a trainer: rows in, scored clips out.

What ``doctor``, ``screen`` and ``evaluate`` run; ``generate`` starts its engine here too:

    use_environment(config)
    async with engine(spec_alone(config)) as server:
        async for clip in roll_out_and_score(config, server, conditioner, rewards, wanted, split="train", step=0):
            ...
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from omegaconf import DictConfig

from verl_tts.config.compose import worker_environment
from verl_tts.launch import WORKER_ENVIRONMENT
from verl_tts.rewards.manager import RewardManager
from verl_tts.rollout.seeds import sample_seed
from verl_tts.rollout.spec import RolloutSpec, sampling_settings
from verl_tts.types import CodecRollout, Given, PromptRow, Score, Waveform

T = TypeVar("T")

PLUGIN = "verl_tts.plugin"  # registers our parts with verl, which takes no part here


@dataclass(frozen=True)
class Clip:
    """One sample, as a run would have it. ``score`` is None where nobody was asked."""

    row: PromptRow
    k: int
    given: Given
    rollout: CodecRollout
    waveform: Waveform
    score: Score | None


def use_environment(config: DictConfig) -> None:
    """Sets the variables that every process of a run has, here; the engine's stages inherit them at their start."""
    os.environ.update(WORKER_ENVIRONMENT | worker_environment(config))


def spec_alone(config: DictConfig) -> RolloutSpec:
    """As in a run, less the module that registers our parts with verl, which takes no part here."""
    spec = RolloutSpec.from_config(config)
    return replace(spec, external_lib=tuple(library for library in spec.external_lib if library != PLUGIN))


@asynccontextmanager
async def engine(spec: RolloutSpec) -> AsyncIterator[Any]:
    """A started ``RolloutServer``, ended with its stages when the block ends."""
    with temporary_directory():
        from verl_tts.rollout.server import RolloutServer

        server = RolloutServer(spec, replica_rank=0)
        try:
            await server.launch()
            yield server
        finally:
            await server.shutdown()


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Where this process and those that it starts put temporary files; it goes with all of them when the block ends.

    vLLM leaves its sockets behind.
    """
    before, in_environment = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="verl-tts-") as directory:
        tempfile.tempdir = os.environ["TMPDIR"] = directory
        try:
            yield Path(directory)
        finally:
            tempfile.tempdir = before
            if in_environment is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = in_environment


async def roll_out_and_score(
    config: DictConfig,
    server: Any,
    conditioner: Any,
    rewards: RewardManager | None,
    wanted: Iterable[tuple[PromptRow, int]],
    *,
    split: Literal["train", "val"],
    step: int | None = None,
) -> AsyncIterator[Clip]:
    """The clips of (row, sample number) pairs, in the order in which they are done.

    They are those of a run: of its step ``step`` with ``split`` "train", of any of its validations with "val".
    As many are under way as the engine and the scorer can work on at once. The first failure ends the others and is
    raised: a ``RolloutError`` or a ``ScorerError``.
    """
    slots = asyncio.Semaphore(server.spec.max_num_seqs + (config.tts.reward.max_in_flight if rewards else 0))
    sampling = dict(sampling_settings(config.actor_rollout_ref.rollout, split))

    async def one(row: PromptRow, k: int) -> Clip:
        async with slots:
            given = conditioner(row)
            rollout, waveform = await server.sample(
                f"{split}-{row.id}-{k}",
                prompt_ids=list(given.text_ids),
                sampling_params=sampling,
                seed=sample_seed(config.data.seed, split, row.id, k, step),
                sample_id=f"{row.id}#{k}",
                **given.request(),
            )
            score = None if rewards is None else await rewards.score(row, waveform, rollout, held_out=split == "val")
            return Clip(row, k, given, rollout, waveform, score)

    async for clip in as_done(one(row, k) for row, k in wanted):
        yield clip


async def as_done(coroutines: Iterable[Coroutine[Any, Any, T]]) -> AsyncIterator[T]:
    """Runs all at once; what each returns, as it does. The first that fails ends the others, and is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
