"""verl's synchronous V1 trainer, with batches of whole groups, gates, and checkpoints that are whole or absent.

It is verl's class and keeps its mode string ``sync``: verl takes every other one for asynchronous.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_tts.checkpoints.manifest import REWARD_RULE, commit, prune, read_manifest, staging
from verl_tts.config.compose import tts_config
from verl_tts.config.reward import reward_rule
from verl_tts.errors import GateError
from verl_tts.gates import GATE_LOGPROBS, LogprobGate, require_finite
from verl_tts.report.console import Say, step_line, validation_line
from verl_tts.report.run_dir import Attempt, RunDir
from verl_tts.rewards.probes import ProbeWatch
from verl_tts.rewards.protocol import ScorerInfo
from verl_tts.rollout.agent_loop import AgentLoopManager
from verl_tts.rollout.groups import GroupBuffer, GroupRule, served
from verl_tts.rollout.replica import OmniReplica, PoolClient
from verl_tts.rollout.spec import RolloutSpec


class OmniTrainer(PPOTrainerSync):
    """One attempt of a run: ``init``, then ``fit``."""

    def __init__(self, config: DictConfig, *, run_dir: RunDir, attempt: Attempt, scorer: ScorerInfo, say: Say) -> None:
        self.run_dir, self.attempt, self.scorer, self.say = run_dir, attempt, scorer, say
        self.tts = tts_config(config)
        self.logprob_gate = LogprobGate(self.tts.gates)
        self.probe_watch = ProbeWatch()
        self._in_step = False
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
        if self.run_dir.last_step >= self.global_steps:
            # A resume at a step that has its line: it was validated, if it was to be.
            self.config.trainer.val_before_train = False
        super().fit(agent_loop_manager)

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
        batch = super()._compute_old_log_prob(batch, metrics)
        began = time.perf_counter()
        columns = tq.kv_batch_get(
            keys=batch.keys,
            partition_id=batch.partition_id,
            select_fields=[GATE_LOGPROBS, "rollout_log_probs", "prompts", "old_log_probs"],
        )
        prompts = columns["prompts"]
        actor = [row[len(prompt) - 1 : -1] for row, prompt in zip(columns[GATE_LOGPROBS], prompts, strict=True)]
        metrics |= self.logprob_gate.check(columns["rollout_log_probs"].values(), torch.cat(actor), self.global_steps)
        require_finite("a log-prob of the actor", columns["old_log_probs"].values(), self.global_steps)
        metrics["timing_s/gate"] = time.perf_counter() - began
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_advantage(batch, metrics)
        columns = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages"])
        require_finite("an advantage", columns["advantages"].values(), self.global_steps)
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with self._mini_batch_of(len(batch)):
            batch = super()._update_actor(batch, metrics)
        for name in ("actor/loss", "actor/grad_norm"):
            if name in metrics and not math.isfinite(metrics[name]):
                raise GateError(f"step {self.global_steps}: {name} is {metrics[name]}; the last checkpoint is intact")
        return batch

    # ------------------------------------------------------------------ steps, metrics, weights

    def on_step_begin(self) -> None:
        self._in_step = True
        super().on_step_begin()

    def on_step_end(self) -> None:
        if self.global_steps % self.tts.sync_every == 0:
            super().on_step_end()
        else:
            # A sync would have woken the engines.
            self.checkpoint_manager.wake_up_replicas()

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float], **kwargs: Any
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, **kwargs)
        metrics |= self.replay_buffer.texts
        self._write_metrics(metrics)
        self.say(step_line(self.global_steps, self.total_training_steps, metrics))
        self._in_step = False

    def _write_metrics(self, metrics: dict[str, Any]) -> None:
        """Texts, such as the id of the slowest sample, are in our line alone: verl's loggers want numbers."""
        self.run_dir.append_metrics(self.global_steps, metrics)
        for name in [name for name, value in metrics.items() if isinstance(value, str)]:
            del metrics[name]

    def _validate(self) -> dict[str, Any]:
        metrics = super()._validate()
        self.say(validation_line(self.global_steps, metrics))
        samples = self.replay_buffer.take_validated()
        metrics |= {f"val-scorer/{name}": value for name, value in served(samples).items()}
        probed, alarms = self.probe_watch.compare(
            self.global_steps, [(sample.row.id, sample.score) for sample in samples]
        )
        metrics |= probed
        for alarm in alarms:
            self.say(alarm)
        if not self._in_step:
            self._write_metrics(metrics)
        return metrics

    # ------------------------------------------------------------------ checkpoints

    def _load_checkpoint(self) -> None:
        trainer, checkpoint = self.config.trainer, self.attempt.checkpoint
        trainer.resume_mode = "resume_path" if checkpoint else "disable"
        trainer.resume_from_path = str(checkpoint) if checkpoint else None
        super()._load_checkpoint()

    def _save_checkpoint(self) -> None:
        with staging(self.config.trainer):
            super()._save_checkpoint()
        commit(
            self.run_dir.checkpoints,
            self.global_steps,
            scorer_fingerprint=self.scorer.fingerprint,
            reward_statistics={
                "composition": self.agent_loop_manager.rewards.state(),
                "probes": self.probe_watch.state(),
            },
            extra={REWARD_RULE: reward_rule(self.tts.reward)},
        )
        prune(self.run_dir.checkpoints, self.config.trainer.max_actor_ckpt_to_keep)
