"""From a prompt to a scored sample, for many prompts at once.

    row -> seed -> rollout server (talker, code predictor, code2wav) -> waveform -> reward -> Sample

One event loop on a thread of the trainer's process drives all of them: a sample is two awaits, the engine and
the scorer, and no work of its own. So a failure reaches the trainer as the exception that it was, the trainer
wakes when the last sample is done instead of polling for it, and waveforms never enter the transfer queue.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_tts.data.schema import row_from_verl
from verl_tts.data.voices import read_references, with_reference
from verl_tts.errors import RolloutError
from verl_tts.heartbeat import Progress
from verl_tts.launch import root_cause
from verl_tts.report.run_dir import RunDir
from verl_tts.rewards.manager import RewardManager
from verl_tts.rollout.seeds import sample_seed
from verl_tts.rollout.spec import sampling_settings
from verl_tts.types import CodecRollout, Given, PromptRow, Score, Waveform

T = TypeVar("T")
Split = Literal["train", "val"]


@dataclass(frozen=True)
class Sample:
    row: PromptRow
    given: Given
    rollout: CodecRollout
    waveform: Waveform
    score: Score
    weights_step: int | None  # the step whose weights the engine had
    clip: Path | None = None  # where it is kept


@dataclass(frozen=True)
class Group:
    """The samples of one prompt: all of them, or none and the failure of one."""

    row: PromptRow
    samples: Sequence[Sample]
    failure: RolloutError | None = None


class AgentLoopManager:
    """``submit`` starts groups, ``collect`` waits for them. Use from one thread; ``close`` when done."""

    def __init__(
        self,
        config: DictConfig,
        *,
        rewards: RewardManager,
        run_dir: RunDir,
    ) -> None:
        self.config, self.rollout_config = config, config.actor_rollout_ref.rollout
        self.rewards, self.run_dir = rewards, run_dir
        self.references = None if config.tts.references is None else read_references(config.tts.references)
        self.llm_client: Any = None
        self.conditioner: Callable[[PromptRow], Given] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agent-loop", daemon=True)
        self._thread.start()
        self._open: dict[Split, list[concurrent.futures.Future[Group]]] = {"train": [], "val": []}
        self._submitted = 0  # samples, since all of them were collected for the last time
        self._began: dict[str, float] = {}  # id -> when, of the samples under way, oldest first
        self._done = 0

    # ------------------------------------------------------------------ the trainer's side

    def probe(self) -> Any:
        """Asks the scorer who it is, before anything heavy is started. Raises as the protocol says."""
        return self._call(self.rewards.probe())

    def connect(self, llm_client: Any, conditioner: Callable[[PromptRow], Given]) -> None:
        """What exists only once the trainer does: the way to the rollout servers, and the tokenizer."""
        self.llm_client, self.conditioner = llm_client, conditioner

    def generate_sequences(self, batch: TensorDict) -> None:
        """verl's call: ``batch`` has the dataset's columns, ``global_steps``, and ``validate`` in a validation."""
        columns = {name: list(batch[name]) for name in ("raw_prompt", "data_source", "reward_model", "extra_info")}
        rows = [
            row_from_verl(dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)
        ]
        split: Split = "val" if tu.get(batch, "validate", default=False) else "train"
        self.submit(rows, split, int(tu.get(batch, "global_steps")))

    def submit(self, rows: Sequence[PromptRow], split: Split, step: int) -> None:
        """Starts one group for each row. The clips of the first groups are kept, up to ``tts.keep``."""
        samples = self.rollout_config.n if split == "train" else self.rollout_config.val_kwargs.n
        keep = self.config.tts.keep
        limit = keep.val_samples_per_step
        if split == "train":
            limit = keep.train_samples_per_step if step % keep.train_every == 0 else 0
        self._submitted += samples * len(rows)
        for index, row in enumerate(rows, start=len(self._open[split])):
            kept = samples if limit < 0 else min(samples, max(0, limit - index * samples))
            group = self._run_group(row, split, step, samples, kept)
            self._open[split].append(asyncio.run_coroutine_threadsafe(group, self._loop))

    def collect(self, split: Split) -> list[Group]:
        """The groups that were submitted, in that order, as soon as the last of them is done.

        A failed rollout is a ``Group`` with its failure. Everything else that goes wrong, a scorer's error
        first of all, is raised at once.
        """
        futures, self._open[split] = self._open[split], []
        concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        for future in futures:
            error = future.exception() if future.done() else None
            if error is not None:
                for other in futures:
                    other.cancel()
                raise root_cause(error) from error
        if not self._began:
            self._submitted = self._done = 0
        return [future.result() for future in futures]

    def progress(self) -> Progress | None:
        """Of the samples under way; None where there are none. May be asked from any thread."""
        if not (began := self._began.copy()):
            return None
        slowest = next(iter(began))
        return Progress(self._done, self._submitted, slowest, time.monotonic() - began[slowest])

    def close(self) -> None:
        """Ends what is under way and closes the connections to the scorer. A ``collect`` that waits is cancelled."""
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # ------------------------------------------------------------------ inside the event loop

    async def _end(self) -> None:
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self.rewards.aclose()
        await self._loop.shutdown_default_executor()  # clips that are being written

    async def _run_group(self, row: PromptRow, split: Split, step: int, samples: int, kept: int) -> Group:
        if self.references is not None:
            row = with_reference(row, self.references, self.config.data.seed, step if split == "train" else None)
        tasks = [asyncio.create_task(self._run_sample(row, split, step, k, k < kept)) for k in range(samples)]
        failure: RolloutError | None = None
        try:
            # Every sibling of a failed rollout is waited for: none may run on under the next weights.
            for task in asyncio.as_completed(tasks):
                try:
                    await task
                except RolloutError as error:
                    failure = failure or error
        finally:
            for unfinished in tasks:
                unfinished.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if failure is not None:
            cause = root_cause(failure)
            return Group(row, (), cause if isinstance(cause, RolloutError) else RolloutError(str(cause)))
        return Group(row, [task.result() for task in tasks])

    async def _run_sample(self, row: PromptRow, split: Split, step: int, k: int, is_kept: bool) -> Sample:
        name = f"{row.id}#{k}"
        self._began[name] = time.monotonic()
        try:
            return await self._roll_out_and_score(row, split, step, k, is_kept)
        finally:
            self._began.pop(name, None)
            self._done += 1

    async def _roll_out_and_score(self, row: PromptRow, split: Split, step: int, k: int, is_kept: bool) -> Sample:
        assert self.conditioner is not None, "connect() comes before the first rollout"
        given = await asyncio.to_thread(self.conditioner, row)  # it may read and encode a recording
        seed = sample_seed(self.config.data.seed, split, row.id, k, step if split == "train" else None)
        output = await self.llm_client.generate(
            request_id=f"{split}-{step}-{row.id}-{k}",
            prompt_ids=list(given.text_ids),
            sampling_params=sampling_settings(self.rollout_config, split),
            seed=seed,
            sample_id=f"{row.id}#{k}",
            **given.request(),
        )
        rollout, waveform = output.extra_fields["rollout"], output.extra_fields["waveform"]
        score = await self.rewards.score(row, waveform, rollout, held_out=split == "val")
        clip = None
        if is_kept:
            clip = await asyncio.to_thread(
                self.run_dir.save_sample,
                row,
                rollout,
                waveform,
                score,
                split=split,
                step=step,
                sample=k,
                language=given.language,
                speaker=row.speaker,
            )
        return Sample(row, given, rollout, waveform, score, output.extra_fields["global_steps"], clip)
