"""verl's synchronous V1 trainer, with batches of whole groups, gates, and checkpoints that are whole or absent.

It is verl's class and keeps its mode string ``sync``: verl takes every other one for asynchronous.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_tts.checkpoints.manifest import (
    REWARD_RULE,
    TRAINED,
    commit,
    list_checkpoints,
    prune,
    read_manifest,
    staging,
    step_of,
)
from verl_tts.config.compose import trained_rule, tts_config
from verl_tts.config.reward import reward_rule
from verl_tts.errors import GateError, WeightSyncError
from verl_tts.files import writing
from verl_tts.gates import (
    BEHIND,
    CLOCK,
    FIRST_RATIO,
    GATE_LOGPROBS,
    GATE_SECONDS,
    GateWatch,
    compare_logprobs,
    compare_with_reference,
    require_finite,
)
from verl_tts.heartbeat import Heartbeat
from verl_tts.report.best import best_step, validation_means
from verl_tts.report.console import Clip, Line, Say, phases_line, step_line, validation_table
from verl_tts.report.history import values_of
from verl_tts.report.run_dir import LINE, Attempt, RunDir, is_validated, read_metrics
from verl_tts.report.throughput import throughput
from verl_tts.report.trackers import Heard, log_audio
from verl_tts.rewards.probes import ProbeWatch
from verl_tts.rewards.protocol import ScorerInfo
from verl_tts.rollout.agent_loop import AgentLoopManager, Sample
from verl_tts.rollout.groups import GroupBuffer, GroupRule, served
from verl_tts.rollout.replica import OmniReplica, PoolClient
from verl_tts.rollout.spec import RolloutSpec


class OmniTrainer(PPOTrainerSync):
    """One attempt of a run: ``init``, then ``fit``."""

    total_training_steps: int
    steps_per_epoch: int

    def __init__(
        self,
        config: DictConfig,
        *,
        run_dir: RunDir,
        attempt: Attempt,
        scorer: ScorerInfo,
        say: Say,
        heartbeat: Heartbeat,
    ) -> None:
        self.run_dir, self.attempt, self.scorer, self.say, self.heartbeat = run_dir, attempt, scorer, say, heartbeat
        self.tts = tts_config(config)
        self.gates = GateWatch(self.tts.gates)
        self.probe_watch = ProbeWatch()
        self.is_training = False
        """Whether there is a step in hand."""
        self.stop_asked = False
        """Whether to end, as if finished, at the end of the step in hand."""
        self._in_step = False
        self._metrics: dict[str, Any] = {}  # of the step in hand; verl adds to it until the step has its line
        self._saved_step: int | None = None
        self._synced_step = attempt.step  # whose weights the rollout engines have
        self._gate_s = 0.0  # that other processes have spent in gate code for the step in hand
        self._held_digest: int | None = None  # of the weights in the rollout engines
        self._learning_rate: float | None = None  # that the next update will have; None: not known yet
        # Optimizer steps of one epoch over a step's batch; it stays when groups are dropped.
        self._mini_batches = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
        OmniReplica.spec = RolloutSpec.from_config(config)
        super().__init__(config)

    def fit(self, agent_loop_manager: AgentLoopManager) -> None:
        self.replay_buffer.agent_loop = agent_loop_manager
        if self.attempt.checkpoint is not None:
            saved = read_manifest(self.attempt.checkpoint).reward_statistics
            agent_loop_manager.rewards.load_state(saved.get("composition", {}))
            self.probe_watch = ProbeWatch.from_state(saved.get("probes", {}))
            self._saved_step = self.global_steps
        self.gates.recall(read_metrics(self.run_dir.metrics))
        if self.run_dir.last_step >= self.global_steps:
            # A resume at a step that has its line: it is validated if its attempt did not live to do so.
            every, last_step = self.config.trainer.test_freq, self.total_training_steps
            is_owed = self.global_steps > 0 and self.run_dir.owes_validation(self.global_steps, every, last_step)
            self.config.trainer.val_before_train = is_owed
            if is_owed:
                self.run_dir.discard_samples("val", self.global_steps)
        super().fit(agent_loop_manager)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        # Behind the last epoch verl leaves its loop with the last step neither saved nor validated.
        epochs_end = self.steps_per_epoch * self.config.trainer.total_epochs
        self.total_training_steps = min(self.total_training_steps, epochs_end)

    # ------------------------------------------------------------------ rollouts

    def _build_replay_buffer(self) -> GroupBuffer:
        return GroupBuffer(GroupRule(self.tts.failed_group, self.tts.min_groups, self._groups_divisor))

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        """Nothing is announced in the transfer queue: groups enter it whole, when they are done."""
        self.agent_loop_manager.generate_sequences(batch)
        return len(batch)

    def _groups_divisor(self) -> int:
        """The number of groups of a step divides by it: each mini-batch is whole groups, spread over all ranks."""
        ranks = self.actor_rollout_wg.world_size
        per_rank = ranks // math.gcd(ranks, self.config.actor_rollout_ref.rollout.n)
        return self._mini_batches * per_rank

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        rows = len(batch)
        with self._mini_batch_of(rows):
            balanced = super()._balance_batch(batch, metrics, *args, **kwargs)
        # verl fills a batch that does not divide with synthetic rows; the group rule leaves it none to fill.
        assert len(balanced) == rows, f"verl added {len(balanced) - rows} synthetic rows to {rows}"
        return balanced

    @contextmanager
    def _mini_batch_of(self, rows: int) -> Iterator[None]:
        """With dropped groups the mini-batches get smaller, not fewer."""
        actor, prompts = self.config.actor_rollout_ref.actor, rows // self.config.actor_rollout_ref.rollout.n
        configured, actor.ppo_mini_batch_size = actor.ppo_mini_batch_size, prompts // self._mini_batches
        try:
            yield
        finally:
            actor.ppo_mini_batch_size = configured

    def get_llm_client(self) -> Any:
        """verl's knows one server of each replica; a pool has more."""
        if OmniReplica.spec.servers is None:
            return super().get_llm_client()
        replicas = self.llm_server_manager.get_replicas()
        return PoolClient([server for replica in replicas for server in replica.servers])

    # ------------------------------------------------------------------ gates

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with self.heartbeat.phase("log-probs of the actor"):
            batch = super()._compute_old_log_prob(batch, metrics)
        with CLOCK.running():
            columns = self._columns(batch, "rollout_log_probs", GATE_LOGPROBS, "prompts", "old_log_probs")
            metrics |= compare_logprobs(columns["rollout_log_probs"].values(), _sampled(columns), self.global_steps)
            require_finite("a log-prob of the actor", columns["old_log_probs"].values(), self.global_steps)
        return batch

    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with self.heartbeat.phase("log-probs of the reference"):
            batch = super()._compute_ref_log_prob(batch, metrics)
        with CLOCK.running():
            columns = self._columns(batch, "rollout_log_probs", GATE_LOGPROBS, "prompts")
            engine_N, reference_N = columns["rollout_log_probs"].values(), _sampled(columns)
            metrics |= compare_with_reference(engine_N, reference_N, metrics["gate/logprob_mean_abs"])
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_advantage(batch, metrics)
        with CLOCK.running():
            columns = self._columns(batch, "advantages")
            require_finite("an advantage", columns["advantages"].values(), self.global_steps)
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with self.heartbeat.phase("the update"), self._mini_batch_of(len(batch)):
            batch = super()._update_actor(batch, metrics)
        if (ratio := metrics.pop(f"actor/{FIRST_RATIO}", None)) is not None:
            metrics["gate/first_ratio"] = ratio
        self._gate_s += metrics.pop(f"actor/{GATE_SECONDS}", 0.0)
        return batch

    @staticmethod
    def _columns(batch: Any, *names: str) -> Any:
        return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names))

    def _look_at_weights(self) -> dict[str, float]:
        """What the engines hold after a sync; each has compared it with what it was sent."""
        servers = [server for replica in self.llm_server_manager.get_replicas() for server in replica.servers]
        held = ray.get([server.held_weights.remote() for server in servers], timeout=self.tts.rpc_timeout_s)
        digests = {weights["digest"] for weights in held}
        if len(digests) > 1:
            raise WeightSyncError(f"step {self.global_steps}: the rollout engines hold different weights")
        before, self._held_digest = self._held_digest, digests.pop()
        changed = self._held_digest != before
        metrics = {"sync/servers": len(held), "sync/tensors": held[0]["tensors"], "sync/changed": float(changed)}
        if before is not None and self._learning_rate is not None:
            could_change = self._learning_rate > 0 and self._metrics.get("actor/grad_norm", 0) > 0
            metrics["gate/weights_unchanged"] = float(could_change and not changed)
        self._learning_rate = self._metrics.get("actor/lr")
        self._gate_s += max(weights["proof_s"] for weights in held)
        return metrics

    # ------------------------------------------------------------------ a step

    def on_init_end(self) -> None:
        with self.heartbeat.phase("the first weight sync"):
            super().on_init_end()
        self._look_at_weights()

    def on_train_begin(self) -> None:
        super().on_train_begin()
        if self.attempt.restored:
            numbers = {name: value for name, value in self.run_dir.last_line.items() if isinstance(value, int | float)}
            # A validation that was made up for has been logged by verl.
            line = {name: value for name, value in numbers.items() if not name.startswith("val-")}
            self.logger.log(data=line, step=self.attempt.step)
        self._began, self._first_step, self.is_training = time.monotonic(), self.global_steps, True

    def on_step_begin(self) -> None:
        self._in_step, self._step_began = True, time.perf_counter()
        super().on_step_begin()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        self._metrics = metrics
        metrics[BEHIND] = self.global_steps - 1 - self._synced_step
        self._batch = super().step(metrics, timing_raw)
        return self._batch

    def on_sample_begin(self) -> None:
        self.heartbeat.enter("rollout and scoring")
        super().on_sample_begin()

    def on_sample_end(self) -> None:
        super().on_sample_end()
        self.heartbeat.leave()

    def on_step_end(self) -> None:
        with self.heartbeat.phase("the weight sync"):
            # What is validated is what is saved: not the weights of up to sync_every - 1 updates before.
            is_heard = is_validated(self.global_steps, self.config.trainer.test_freq, self.total_training_steps)
            if self.global_steps % self.tts.sync_every == 0 or is_heard:
                super().on_step_end()
                self._metrics |= self._look_at_weights()
                self._synced_step = self.global_steps
            else:
                # A sync would have woken the engines.
                self.checkpoint_manager.wake_up_replicas()

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float], **kwargs: Any
    ) -> None:
        """The end of a step: its metrics are complete, the gates judge them, the line is written."""
        is_last = self.stop_asked  # asked for from here on, it is the next step that is saved and the last one
        self._complete(batch, metrics, timing_raw, **kwargs)
        with CLOCK.running():
            verdict = self.gates.judge(self.global_steps, metrics)
        metrics["timing_s/gate"], self._gate_s = self._gate_s + CLOCK.take(), 0.0
        for warning in verdict.warnings:
            self.say(Line(f"warning: {warning}", "warning"))
        if (verdict.stop or is_last) and self._saved_step != self.global_steps:
            self.checkpoint_manager.sleep_replicas()  # as it is when verl saves
            self._save(metrics)
        self._write_metrics(metrics)
        self.say(Line(step_line(self.global_steps, self.total_training_steps, metrics, self._left_s()), "step"))
        self.say(Line(phases_line(metrics), "detail"))
        self._in_step = False
        keep = self.tts.keep.train_steps_back
        if keep >= 0:
            self.run_dir.prune_samples("train", self.global_steps, keep)
        if verdict.stop:
            raise GateError(f"{verdict.stop}; the checkpoint of step {self.global_steps} is saved")
        if is_last:
            self.total_training_steps = self.global_steps  # verl's loop ends behind it

    def _complete(self, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float], **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, **kwargs)
        metrics |= self.replay_buffer.texts
        metrics |= throughput(
            metrics, self._get_n_gpus_for_throughput(), self.run_dir.last_line.get("speed/gpu_hours", 0.0)
        )

    def _left_s(self) -> float:
        """Until the last step, at the pace of this attempt, its validations and checkpoints included."""
        done = self.global_steps - self._first_step + 1
        return (time.monotonic() - self._began) / done * (self.total_training_steps - self.global_steps)

    def _write_metrics(self, metrics: dict[str, Any]) -> None:
        """Texts, such as the id of the slowest sample, are in our line alone: verl's loggers want numbers."""
        self.run_dir.append_metrics(self.global_steps, metrics)
        for name in [name for name, value in metrics.items() if isinstance(value, str)]:
            del metrics[name]

    # ------------------------------------------------------------------ validations

    def _validate(self) -> dict[str, Any]:
        began = time.monotonic()
        with self.heartbeat.phase("validation"):
            metrics = super()._validate()
        samples = self.replay_buffer.take_validated()
        self._show(samples, time.monotonic() - began)
        metrics |= validation_means(
            (sample.row.id, values_of(sample.rollout.stop_reason, sample.score.total, sample.score.parts))
            for sample in samples
        )
        metrics |= {f"val-scorer/{name}": value for name, value in served(samples).items()}
        probed, alarms = self.probe_watch.compare(
            self.global_steps, [(sample.row.id, sample.score) for sample in samples]
        )
        metrics |= probed
        for alarm in alarms:
            self.say(Line(alarm, "warning"))
        if not self._in_step:
            if self.run_dir.last_step == self.global_steps:
                self.run_dir.add_to_line(self.global_steps, metrics)
            else:
                self._write_metrics(metrics)
        return metrics

    def _show(self, samples: list[Sample], seconds: float) -> None:
        """The table on the terminal, and the clips in the trackers."""
        clips, heard, seen = [], [], dict[str, int]()
        for sample in samples:
            number = seen[sample.row.id] = seen.get(sample.row.id, -1) + 1
            name, total = f"{sample.row.id}#{number}", sample.score.total
            path = sample.clip and sample.clip.relative_to(self.run_dir.path)
            ended = sample.rollout.stop_reason == "eos"
            frames = len(sample.rollout.codes_FQ)
            clips.append(Clip(name, sample.row.data_source, total, frames, ended, sample.score.parts, path))
            if sample.clip:
                heard.append(Heard(name, sample.clip, sample.row.text, total))
        self.say(
            Line(validation_table(self.global_steps, clips, seconds, self._metrics.get("actor/kl_loss")), "result")
        )
        log_audio(self.logger.logger, heard, self.global_steps)

    # ------------------------------------------------------------------ checkpoints

    def _load_checkpoint(self) -> None:
        trainer, checkpoint = self.config.trainer, self.attempt.checkpoint
        trainer.resume_mode = "resume_path" if checkpoint else "disable"
        trainer.resume_from_path = str(checkpoint) if checkpoint else None
        super()._load_checkpoint()

    def _save_checkpoint(self) -> None:
        """verl's call, in the middle of a step: the line in the checkpoint has what is known of it by now."""
        so_far, timing = self._metrics.copy(), self.timing_raw | {"step": time.perf_counter() - self._step_began}
        epoch = (self.global_steps - 1) // self.steps_per_epoch
        self._complete(self._batch, so_far, timing, global_steps=self.global_steps, epoch=epoch)
        self._save(so_far)

    def _save(self, metrics: dict[str, Any]) -> None:
        with self.heartbeat.phase("saving a checkpoint"):
            with writing(self.run_dir.checkpoints), staging(self.config.trainer):
                super()._save_checkpoint()
            commit(
                self.run_dir.checkpoints,
                self.global_steps,
                scorer_fingerprint=self.scorer.fingerprint,
                reward_statistics={
                    "composition": self.agent_loop_manager.rewards.state(),
                    "probes": self.probe_watch.state(),
                },
                extra={
                    LINE: self.run_dir.metrics_line(self.global_steps, metrics),
                    REWARD_RULE: reward_rule(self.tts.reward),
                    TRAINED: trained_rule(self.config),
                },
            )
        self._saved_step = self.global_steps
        prune(self.run_dir.checkpoints, self.config.trainer.max_actor_ckpt_to_keep, protect=self._best())

    def _best(self) -> list[int]:
        """The step of the best checkpoint that is there, where one is better than what the run began with."""
        there = [step_of(checkpoint) for checkpoint in list_checkpoints(self.run_dir.checkpoints)]
        best = best_step(read_metrics(self.run_dir.metrics), self.tts.keep.best_not_above_start, there)
        return [] if best is None else [best]


def _sampled(columns: Any) -> torch.Tensor:
    """The gate's log-probs of the sampled tokens, which stand one position before their token, behind the prompt."""
    rows = zip(columns[GATE_LOGPROBS], columns["prompts"], strict=True)
    return torch.cat([row[len(prompt) - 1 : -1] for row, prompt in rows])
