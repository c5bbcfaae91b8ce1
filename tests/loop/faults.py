"""Faults for the runs of the tests, put in through verl's own hook for external modules.

``actor_rollout_ref.model.external_lib=[verl_tts.plugin,tests.loop.faults]`` imports this module in the trainer, in
the actor workers and in the rollout servers; ``VERL_TTS_TEST_FAULT`` names the fault.
"""

import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_tts.errors import RolloutError

FAULT = os.environ.get("VERL_TTS_TEST_FAULT", "")


def inject(fault: str) -> None:
    match fault:
        case "rollout_fails_in_step_1":
            _fail_one_rollout(step=1)
        case "rewards_permuted":
            _permute_rewards()
        case "sync_skipped_in_step_1":
            _skip_the_sync(step=1)
        case "receiver_raises":
            _break_the_receiver()
        case "waits_after_saving_step_2":
            _wait_after_saving(step=2)
        case "waits_after_validating":
            _wait_after_validating()
        case "disk_is_full_in_step_2":
            _fill_the_disk(step=2)
        case "second_update_hangs":
            _hang_in_the_second_update()
        case "":
            pass
        case _:
            raise ValueError(f"there is no fault {fault!r}")


def _fail_one_rollout(step: int) -> None:
    from verl_tts.rollout.agent_loop import AgentLoopManager

    original = AgentLoopManager._run_sample
    failed: list[str] = []

    async def run_sample(self: Any, row: Any, split: str, at_step: int, k: int, is_kept: bool) -> Any:
        if split == "train" and at_step == step and k == 1 and (not failed or failed == [row.id]):
            failed.append(row.id)
            raise RolloutError(f"sample {row.id}#{k}: this one fails in a test")
        return await original(self, row, split, at_step, k, is_kept)

    AgentLoopManager._run_sample = run_sample  # type: ignore[method-assign]


def _permute_rewards() -> None:
    """Each sample of a step gets the score of another one, so that nothing can be learned from it."""
    from verl_tts.rollout.groups import GroupRule

    original, draws = GroupRule.apply, random.Random(0)

    def apply(self: Any, groups: Any) -> Any:
        whole = original(self, groups)
        scores = [sample.score for group in whole for sample in group.samples]
        draws.shuffle(scores)
        pool = iter(scores)
        return [replace(group, samples=[replace(s, score=next(pool)) for s in group.samples]) for group in whole]

    GroupRule.apply = apply  # type: ignore[method-assign]


def _skip_the_sync(step: int) -> None:
    """The update of that step reaches no engine, and the trainer does not know."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    original = PPOTrainerSync.on_step_end

    def on_step_end(self: Any) -> None:
        if self.global_steps == step:
            self.checkpoint_manager.wake_up_replicas()
        else:
            original(self)

    PPOTrainerSync.on_step_end = on_step_end


def _break_the_receiver() -> None:
    from verl_tts.rollout import qwen3_tts

    original = qwen3_tts.topology

    def topology(spec: Any, config: Any) -> dict[str, Any]:
        stages = original(spec, config)
        stages["stages"][qwen3_tts.TALKER]["worker_extension_cls"] = "tests.loop.receiver.RaisingReceiver"
        return stages

    qwen3_tts.topology = topology


def _wait_after_saving(step: int) -> None:
    """Between a checkpoint and the line of its step there is time to be killed."""
    from verl_tts.report.console import Line
    from verl_tts.trainer import OmniTrainer

    original = OmniTrainer._save

    def save(self: Any, metrics: Any) -> None:
        original(self, metrics)
        if self.global_steps == step:
            self.say(Line(f"saved step {step}"))
            time.sleep(60)

    OmniTrainer._save = save  # type: ignore[method-assign]


def _wait_after_validating() -> None:
    """The clips of a validation are there, and its numbers are not."""
    from verl_tts.report.console import Line
    from verl_tts.trainer import OmniTrainer

    original = OmniTrainer._validate

    def validate(self: Any) -> Any:
        metrics = original(self)
        self.say(Line(f"validated step {self.global_steps}"))
        time.sleep(60)
        return metrics

    OmniTrainer._validate = validate  # type: ignore[method-assign]


def _fill_the_disk(step: int) -> None:
    """The optimizer's file of that step leads to a device that takes no byte."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    original = PPOTrainerSync._save_checkpoint

    def save(self: Any) -> None:
        if self.global_steps == step:
            actor = Path(self.config.trainer.default_local_dir, f"global_step_{step}", "actor")
            actor.mkdir(parents=True)
            (actor / "optim_world_size_1_rank_0.pt").symlink_to("/dev/full")
        original(self)

    PPOTrainerSync._save_checkpoint = save


def _hang_in_the_second_update() -> None:
    if "verl.workers.engine_workers" not in sys.modules:
        return  # not an actor worker
    from verl_tts.engine.actor import PolicyEngine

    original, updates = PolicyEngine.train_batch, iter(range(99))

    def this_update_hangs(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(updates) > 0:
            time.sleep(600)
        return original(self, *args, **kwargs)

    PolicyEngine.train_batch = this_update_hangs  # type: ignore[method-assign]


inject(FAULT)
