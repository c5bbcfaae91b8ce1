"""The trainer's own decisions, without Ray: how many groups divide, what a mini-batch is, when weights go out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_tts import trainer as module
from verl_tts.checkpoints.manifest import read_manifest
from verl_tts.config.compose import compose, tts_config
from verl_tts.config.reward import reward_rule
from verl_tts.errors import GateError
from verl_tts.gates import LogprobGate
from verl_tts.report.run_dir import Attempt, RunDir, read_jsonl
from verl_tts.rewards.manager import RewardManager
from verl_tts.rewards.probes import ProbeWatch
from verl_tts.rewards.protocol import ScorerInfo
from verl_tts.trainer import OmniTrainer, PPOTrainerSync
from verl_tts.types import Score


def trainer(*overrides: str, ranks: int = 1) -> OmniTrainer:
    """Without verl's ``__init__``, which starts to build a run."""
    made = object.__new__(OmniTrainer)
    made.config = compose(["tts.platform=cpu", *overrides])
    made.tts = tts_config(made.config)
    made.logprob_gate = LogprobGate(made.tts.gates)
    actor, data = made.config.actor_rollout_ref.actor, made.config.data
    made._mini_batches = data.train_batch_size // actor.ppo_mini_batch_size
    made.actor_rollout_wg = SimpleNamespace(world_size=ranks)
    made.global_steps = 6
    return made


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.integers(1, 6))
def test_groups_that_divide_give_every_worker_equal_whole_mini_batches(mini_batches, ranks, n, times):
    made = object.__new__(OmniTrainer)
    made._mini_batches = mini_batches
    made.actor_rollout_wg = SimpleNamespace(world_size=ranks)
    made.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=n)))
    groups = times * made._groups_divisor()
    rows = groups * n
    assert groups % mini_batches == 0, "a mini-batch is whole groups"
    assert rows % (mini_batches * ranks) == 0, "its rows are spread over all workers"


def test_with_dropped_groups_mini_batches_get_smaller_and_not_fewer():
    made = trainer(
        "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2"
    )
    actor = made.config.actor_rollout_ref.actor
    with made._mini_batch_of(6 * 2):
        assert actor.ppo_mini_batch_size == 3
    assert actor.ppo_mini_batch_size == 4
    with pytest.raises(KeyError, match="update"), made._mini_batch_of(2 * 2):
        raise KeyError("update")
    assert actor.ppo_mini_batch_size == 4, "also after an error"


def test_a_synthetic_row_never_reaches_the_actor(monkeypatch):
    made = trainer("actor_rollout_ref.rollout.n=2")
    monkeypatch.setattr(PPOTrainerSync, "_balance_batch", lambda self, batch, metrics, **_: [*batch, "synthetic"])
    with pytest.raises(AssertionError, match="verl added 1 synthetic rows to 4"):
        made._balance_batch(["a", "b", "c", "d"], {})
    monkeypatch.setattr(PPOTrainerSync, "_balance_batch", lambda self, batch, metrics, **_: batch[::-1])
    assert made._balance_batch(["a", "b"], {}) == ["b", "a"]


@pytest.mark.parametrize(("every", "synced"), [(1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4])])
def test_weights_go_out_every_so_many_updates_and_the_engines_wake_after_each(monkeypatch, every, synced):
    made, sent, woken = trainer(f"tts.sync_every={every}"), [], []
    monkeypatch.setattr(PPOTrainerSync, "on_step_end", lambda self: sent.append(self.global_steps))
    made.checkpoint_manager = SimpleNamespace(wake_up_replicas=lambda: woken.append(made.global_steps))
    for step in range(1, 7):
        made.global_steps = step
        made.on_step_end()
    assert sent == synced
    assert sorted(sent + woken) == [1, 2, 3, 4, 5, 6]


def jagged(*rows: list[float]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def with_columns(monkeypatch, **columns: torch.Tensor) -> Any:
    """A batch whose columns come from here, as from the transfer queue; verl's own part of a phase is left out."""
    monkeypatch.setattr(module.tq, "kv_batch_get", lambda keys, partition_id, select_fields: columns)
    for name in ("_compute_old_log_prob", "_compute_advantage"):
        monkeypatch.setattr(PPOTrainerSync, name, lambda self, batch, metrics: batch)
    return SimpleNamespace(keys=["a", "b"], partition_id="train")


def test_the_gate_compares_each_sampled_token_with_its_own(monkeypatch):
    """The actor's stand one position before their token, behind a prompt of any length."""
    columns = {
        "prompts": jagged([1.0, 1.0, 1.0], [1.0, 1.0]),
        "gate_log_probs": jagged([0.0, 0.0, -1.0, -2.0, 0.0], [0.0, -3.0, 0.0]),
        "rollout_log_probs": jagged([-1.0, -2.1], [-3.0]),
        "old_log_probs": jagged([-1.0, -2.0], [-3.0]),
    }
    batch, metrics = with_columns(monkeypatch, **columns), {}
    assert trainer("tts.gates.logprob_mean_abs=0.1")._compute_old_log_prob(batch, metrics) is batch
    assert metrics["gate/logprob_max_abs"] == pytest.approx(0.1, abs=1e-6)
    assert metrics["gate/logprob_mean_abs"] == pytest.approx(0.1 / 3, abs=1e-6)
    assert metrics["timing_s/gate"] >= 0
    with pytest.raises(GateError, match=r"step 6: gate/logprob_max_abs is 0\.1, the limit is 0\.05"):
        trainer("tts.gates.logprob_max_abs=0.05")._compute_old_log_prob(batch, {})
    batch = with_columns(monkeypatch, **(columns | {"old_log_probs": jagged([-1.0, float("nan")], [-3.0])}))
    with pytest.raises(GateError, match="step 6: a log-prob of the actor is not finite"):
        trainer("tts.gates.logprob_mean_abs=0.1")._compute_old_log_prob(batch, {})


def test_an_advantage_that_is_not_finite_stops_the_run_before_the_update(monkeypatch):
    batch = with_columns(monkeypatch, advantages=jagged([0.5, 0.5], [float("inf")]))
    with pytest.raises(GateError, match="step 6: an advantage is not finite; nothing was updated"):
        trainer()._compute_advantage(batch, {})
    batch = with_columns(monkeypatch, advantages=jagged([0.5, 0.5], [-0.5]))
    assert trainer()._compute_advantage(batch, {}) is batch


@pytest.mark.parametrize("name", ["actor/loss", "actor/grad_norm"])
def test_a_loss_that_is_not_finite_stops_the_run(monkeypatch, name):
    def update(self, batch, metrics):
        metrics |= {"actor/loss": 0.1, "actor/grad_norm": 0.2, name: float("nan")}
        return batch

    monkeypatch.setattr(PPOTrainerSync, "_update_actor", update)
    with pytest.raises(GateError, match=rf"step 6: {name} is nan; the last checkpoint is intact"):
        trainer("actor_rollout_ref.rollout.n=2")._update_actor(["a"] * 8, {})


# ------------------------------------------------------------------ rewards across a restart

Z_SCORE = (
    "tts.reward.compose.components={a: {part: seconds, normaliser: running_z}}",
    "tts.reward.compose.weights={a: 1.0}",
    "tts.reward.violation_score=-1",
)


def rewards_of(made: OmniTrainer) -> RewardManager:
    function = {"path": "pkg://verl_tts.rewards.functions", "name": "duration"}
    return RewardManager.from_config(OmegaConf.to_container(made.config.tts.reward), function)


def test_a_checkpoint_keeps_the_reward_statistics_and_a_resume_takes_them_up(monkeypatch, tmp_path):
    stopped = trainer(*Z_SCORE, f"tts.output_dir={tmp_path}")
    stopped.run_dir, stopped.scorer = RunDir(tmp_path), ScorerInfo(fingerprint="f" * 64)
    stopped.agent_loop_manager = SimpleNamespace(rewards=rewards_of(stopped))
    stopped.agent_loop_manager.rewards.end_step([Score(0.0, {"seconds": 1.0}), Score(0.0, {"seconds": 3.0})])
    stopped.probe_watch = ProbeWatch()
    stopped.probe_watch.compare(0, [("row-1", Score(0.25, {"probe/dnsmos": 3.0}))])

    def save(self):
        actor = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}" / "actor"
        actor.mkdir(parents=True)
        (actor / "model_world_size_1_rank_0.pt").write_bytes(b"shard")

    monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", save)
    stopped._save_checkpoint()

    sealed = read_manifest(tmp_path / "checkpoints" / "global_step_6")
    assert sealed.extra["reward"] == reward_rule(stopped.tts.reward)
    assert sealed.extra["reward"]["compose.components.a.part"] == "seconds"

    resumed = trainer(*Z_SCORE, f"tts.output_dir={tmp_path}")
    resumed.run_dir, resumed.replay_buffer = RunDir(tmp_path), SimpleNamespace()
    resumed.attempt = Attempt(1, 6, tmp_path / "checkpoints" / "global_step_6", ())
    agent_loop = SimpleNamespace(rewards=rewards_of(resumed))
    monkeypatch.setattr(PPOTrainerSync, "fit", lambda self, manager: None)
    resumed.fit(agent_loop)
    assert agent_loop.rewards.state() == {"steps": 1, "components": {"a": {"count": 2, "mean": 2.0, "m2": 2.0}}}
    assert resumed.probe_watch == stopped.probe_watch


def test_a_validation_logs_what_the_scorer_took_and_what_the_probes_say(monkeypatch, tmp_path):
    made = trainer(f"tts.output_dir={tmp_path}")
    made.run_dir, made._in_step, said = RunDir(tmp_path), True, []
    made.say, made.probe_watch = said.append, ProbeWatch()
    monkeypatch.setattr(PPOTrainerSync, "_validate", lambda self: {})

    def validated(total: float, probe: float) -> dict:
        notes = {"scorer_latency_s": 0.5, "scorer_retries": 1, "scorer_waiting_s": 0.0}
        rows = [SimpleNamespace(id=f"row-{index}") for index in range(8)]
        samples = [SimpleNamespace(row=row, score=Score(total, {"probe/dnsmos": probe}, notes)) for row in rows]
        made.replay_buffer = SimpleNamespace(take_validated=lambda: samples)
        return made._validate()

    metrics = validated(0.5, 3.0)
    assert metrics["val-scorer/latency_p95_s"] == 0.5
    assert metrics["val-scorer/retries"] == 8
    assert metrics["val-probe/dnsmos/mean"] == 3.0
    assert validated(0.6, 2.0)["val-probe/dnsmos/alarm"] == 1.0
    assert said[-1].startswith("ALARM at step 6: the validation score rose by 0.1 and probe/dnsmos fell by 1")


def test_a_text_among_the_metrics_is_in_our_line_and_kept_from_verls_loggers(monkeypatch, tmp_path):
    made = trainer(f"tts.output_dir={tmp_path}")
    made.run_dir, made.say, made.total_training_steps = RunDir(tmp_path), lambda _: None, 8
    monkeypatch.setattr(PPOTrainerSync, "_compute_metrics", lambda self, batch, metrics, timing_raw: None)
    monkeypatch.setattr(module, "step_line", lambda *_: "")
    made.replay_buffer = SimpleNamespace(texts={"reward/scorer/slowest_id": "en-1"})
    metrics = {"reward/mean": 0.5}
    made._compute_metrics(None, metrics, {})
    assert metrics == {"reward/mean": 0.5}
    assert next(read_jsonl(made.run_dir.metrics))["reward/scorer/slowest_id"] == "en-1"
