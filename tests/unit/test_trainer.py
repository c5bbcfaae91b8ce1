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
from verl_tts.checkpoints.manifest import read_manifest, verify
from verl_tts.config.compose import compose, tts_config
from verl_tts.config.reward import reward_rule
from verl_tts.errors import GateError, RunStopped, WeightSyncError
from verl_tts.gates import BEHIND, GateWatch
from verl_tts.heartbeat import Heartbeat
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
    made.gates = GateWatch(made.tts.gates)
    made.said = []
    made.say = made.said.append
    made.heartbeat = Heartbeat(made.say, every_s=1e9, limit_s=1e9)
    made.stop_asked = made.is_training = made._in_step = False
    made._metrics, made._gate_s, made._saved_step = {}, 0.0, None
    made._held_digest = made._learning_rate = None
    made._synced_step = 0
    actor, data = made.config.actor_rollout_ref.actor, made.config.data
    made._mini_batches = data.train_batch_size // actor.ppo_mini_batch_size
    made.actor_rollout_wg = SimpleNamespace(world_size=ranks)
    made.global_steps = made.total_training_steps = 6
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
    made, sent, woken = trainer(f"tts.sync_every={every}", "trainer.test_freq=-1"), [], []
    monkeypatch.setattr(OmniTrainer, "_look_at_weights", lambda self: {})
    monkeypatch.setattr(PPOTrainerSync, "on_step_end", lambda self: sent.append(self.global_steps))
    made.checkpoint_manager = SimpleNamespace(wake_up_replicas=lambda: woken.append(made.global_steps))
    monkeypatch.setattr(PPOTrainerSync, "step", lambda self, metrics, timing: None)
    behind = []
    for step in range(1, 7):
        made.global_steps = step
        made.step(metrics := {}, {})
        behind.append(metrics[BEHIND])
        made.on_step_end()
    assert behind == [step - 1 - max([0, *(sync for sync in synced if sync < step)]) for step in range(1, 7)]
    assert sent == synced
    assert sorted(sent + woken) == [1, 2, 3, 4, 5, 6]


def test_weights_go_out_before_a_validation_so_that_it_hears_what_is_saved(monkeypatch):
    made, sent = trainer("tts.sync_every=4", "trainer.test_freq=3"), []
    monkeypatch.setattr(OmniTrainer, "_look_at_weights", lambda self: {})
    monkeypatch.setattr(PPOTrainerSync, "on_step_end", lambda self: sent.append(self.global_steps))
    made.checkpoint_manager = SimpleNamespace(wake_up_replicas=lambda: None)
    made.total_training_steps = 7
    for made.global_steps in range(1, 8):
        made.on_step_end()
    assert sent == [3, 4, 6, 7]


def jagged(*rows: list[float]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def with_columns(monkeypatch, **columns: torch.Tensor) -> Any:
    """A batch whose columns come from here, as from the transfer queue; verl's own part of a phase is left out."""
    monkeypatch.setattr(module.tq, "kv_batch_get", lambda keys, partition_id, select_fields: columns)
    for name in ("_compute_old_log_prob", "_compute_ref_log_prob", "_compute_advantage"):
        monkeypatch.setattr(PPOTrainerSync, name, lambda self, batch, metrics: batch)
    return SimpleNamespace(keys=["a", "b"], partition_id="train")


def test_the_gate_compares_each_sampled_token_with_its_own(monkeypatch):
    """The actor's and the reference's stand one position before their token, behind a prompt of any length."""
    columns = {
        "prompts": jagged([1.0, 1.0, 1.0], [1.0, 1.0]),
        "gate_log_probs": jagged([0.0, 0.0, -1.0, -2.0, 0.0], [0.0, -3.0, 0.0]),
        "rollout_log_probs": jagged([-1.0, -2.1], [-3.0]),
        "old_log_probs": jagged([-1.0, -2.0], [-3.0]),
    }
    batch, metrics, made = with_columns(monkeypatch, **columns), {}, trainer()
    assert made._compute_old_log_prob(batch, metrics) is batch
    assert metrics["gate/logprob_max_abs"] == pytest.approx(0.1, abs=1e-6)
    assert metrics["gate/logprob_mean_abs"] == pytest.approx(0.1 / 3, abs=1e-6)
    batch = with_columns(monkeypatch, **(columns | {"gate_log_probs": jagged([9, 9, -1, -2.1, 9], [9, -3.3, 9])}))
    assert made._compute_ref_log_prob(batch, metrics) is batch
    assert metrics["gate/reference_mean_abs"] == pytest.approx(0.1, abs=1e-6)
    assert metrics["gate/nearer_reference"] == pytest.approx(1 / 3, abs=1e-4)
    batch = with_columns(monkeypatch, **(columns | {"old_log_probs": jagged([-1.0, float("nan")], [-3.0])}))
    with pytest.raises(GateError, match="step 6: a log-prob of the actor is not finite"):
        made._compute_old_log_prob(batch, {})


def test_an_advantage_that_is_not_finite_stops_the_run_before_the_update(monkeypatch):
    batch = with_columns(monkeypatch, advantages=jagged([0.5, 0.5], [float("inf")]))
    with pytest.raises(GateError, match="step 6: an advantage is not finite; nothing was updated"):
        trainer()._compute_advantage(batch, {})
    batch = with_columns(monkeypatch, advantages=jagged([0.5, 0.5], [-0.5]))
    assert trainer()._compute_advantage(batch, {}) is batch


def test_the_first_ratio_and_the_workers_gate_time_are_taken_from_an_update(monkeypatch):
    def update(self, batch, metrics):
        metrics |= {"actor/gate_first_ratio_max": 0.01, "actor/gate_seconds_max": 0.5, "actor/loss": 0.1}
        return batch

    monkeypatch.setattr(PPOTrainerSync, "_update_actor", update)
    made, metrics = trainer("actor_rollout_ref.rollout.n=2"), {}
    made._update_actor(["a"] * 8, metrics)
    assert metrics == {"gate/first_ratio": 0.01, "actor/loss": 0.1}
    assert made._gate_s == 0.5


def with_engines(monkeypatch, made: OmniTrainer, *digests: int) -> None:
    """Rollout servers that hold weights of these digests."""
    held = [{"tensors": 3, "digest": digest, "proof_s": 0.1} for digest in digests]
    servers = [
        SimpleNamespace(held_weights=SimpleNamespace(remote=lambda weights=weights: weights)) for weights in held
    ]
    replicas = [SimpleNamespace(servers=[server]) for server in servers]
    made.llm_server_manager = SimpleNamespace(get_replicas=lambda: replicas)
    monkeypatch.setattr(module.ray, "get", lambda answers, timeout: answers)


@pytest.mark.parametrize(
    ("learning_rate", "grad_norm", "digest", "unchanged"),
    [(1e-6, 0.5, 8, 0.0), (1e-6, 0.5, 7, 1.0), (0.0, 0.5, 7, 0.0), (1e-6, 0.0, 7, 0.0), (None, 0.5, 7, None)],
)
def test_an_update_that_could_and_did_not_change_the_engines_weights_is_a_metric(
    monkeypatch, learning_rate, grad_norm, digest, unchanged
):
    """The learning rate in a step's metrics is that of the next update, so the first one is not judged."""
    made = trainer()
    with_engines(monkeypatch, made, 7)
    made._look_at_weights()
    made._learning_rate, made._metrics = learning_rate, {"actor/grad_norm": grad_norm, "actor/lr": 2e-6}
    with_engines(monkeypatch, made, digest)
    metrics = made._look_at_weights()
    assert metrics.get("gate/weights_unchanged") == unchanged
    assert metrics["sync/servers"] == 1
    assert (metrics["sync/tensors"], metrics["sync/changed"]) == (3, float(digest != 7))
    assert made._learning_rate == 2e-6


def test_engines_that_hold_different_weights_end_the_run(monkeypatch):
    made = trainer()
    with_engines(monkeypatch, made, 7, 8)
    with pytest.raises(WeightSyncError, match="step 6: the rollout engines hold different weights"):
        made._look_at_weights()


# ------------------------------------------------------------------ the end of a step

DONE = {
    "reward/mean": 0.5,
    "reward/flat_group_rate": 0.0,
    "rollout/frames/mean": 20.0,
    "rollout/eos_rate": 1.0,
    "rollout/groups_dropped": 0,
    "rollout/rows_real": 16,
    "rollout/tokens": 320,
    "rollout/audio_s": 25.6,
    "gate/logprob_max_abs": 1e-6,
    "timing_s/step": 4.0,
    "timing_s/update_actor": 1.0,
}


def in_a_step(monkeypatch, made: OmniTrainer, directory: Path) -> list[str]:
    """A trainer at the end of step 6 of 9, verl's own part left out; returns what is done in which order."""
    done: list[str] = []
    made.run_dir, made.replay_buffer = RunDir(directory), SimpleNamespace(texts={"reward/scorer/slowest_id": "en-1"})
    made.total_training_steps, made._began, made._first_step, made._in_step = 9, 0.0, 6, True
    made.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: done.append("sleep"))
    monkeypatch.setattr(OmniTrainer, "_get_n_gpus_for_throughput", lambda self: 2)
    monkeypatch.setattr(PPOTrainerSync, "_compute_metrics", lambda self, batch, metrics, timing_raw, **_: None)
    monkeypatch.setattr(OmniTrainer, "_save", lambda self, metrics: done.append("save"))
    return done


def test_a_step_that_ends_has_its_line_and_goes_on(monkeypatch, tmp_path):
    made = trainer()
    done = in_a_step(monkeypatch, made, tmp_path)
    metrics = dict(DONE)
    made._compute_metrics(None, metrics, {})
    line = next(read_jsonl(made.run_dir.metrics))
    assert done == []
    assert made.total_training_steps == 9
    assert line["gate/warned"] == 0
    assert line["timing_s/gate"] >= 0
    assert line["speed/gpu_hours"] == pytest.approx(2 * 4 / 3600)
    assert line["reward/scorer/slowest_id"] == "en-1"
    assert "reward/scorer/slowest_id" not in metrics, "verl's loggers want numbers"
    assert made.said[0].text.startswith("step 6/9  reward 0.500")


def test_a_gate_stops_with_the_checkpoint_saved_the_line_written_and_its_key_named(monkeypatch, tmp_path):
    made = trainer("tts.gates.steps_in_a_row=1")
    done = in_a_step(monkeypatch, made, tmp_path)
    with pytest.raises(GateError, match=r"rollout/eos_rate is 0, below 0\.05 \(tts\.gates\.eos_rate\.stop\).*saved"):
        made._compute_metrics(None, DONE | {"rollout/eos_rate": 0.0}, {})
    assert done == ["sleep", "save"]
    assert made.run_dir.last_step == 6


def test_a_run_that_was_at_two_of_three_bad_steps_stops_at_the_next_one_after_a_resume(monkeypatch, tmp_path):
    bad = DONE | {"rollout/eos_rate": 0.0, "rollout/frames_per_char": 2.0}
    stopped = trainer("tts.gates.steps_in_a_row=3")
    in_a_step(monkeypatch, stopped, tmp_path)
    for stopped.global_steps in (1, 2):
        stopped._compute_metrics(None, dict(bad), {})

    resumed = trainer("tts.gates.steps_in_a_row=3")
    done = in_a_step(monkeypatch, resumed, tmp_path)
    resumed.attempt, resumed.global_steps = Attempt(1, 2, None, ()), 2
    monkeypatch.setattr(PPOTrainerSync, "fit", lambda self, manager: None)
    resumed.fit(SimpleNamespace())
    resumed.global_steps = 3
    with pytest.raises(GateError, match=r"eos_rate.*for 3 step\(s\) in a row; the checkpoint of step 3 is saved"):
        resumed._compute_metrics(None, bad | {"rollout/frames_per_char": 1.0}, {})
    assert done == ["sleep", "save"]
    assert resumed.run_dir.last_line["gate/length_drift"] == 2.0, "from the run's first step, not the resume's"


def test_a_step_that_was_saved_already_is_not_saved_again_for_a_gate(monkeypatch, tmp_path):
    made = trainer("tts.gates.steps_in_a_row=1")
    done = in_a_step(monkeypatch, made, tmp_path)
    made._saved_step = 6
    with pytest.raises(GateError):
        made._compute_metrics(None, DONE | {"rollout/eos_rate": 0.0}, {})
    assert done == []


def test_a_run_that_is_asked_to_stop_saves_the_step_in_hand_and_makes_it_the_last(monkeypatch, tmp_path):
    made = trainer()
    done = in_a_step(monkeypatch, made, tmp_path)
    made.stop_asked = True
    made._compute_metrics(None, dict(DONE), {})
    assert done == ["sleep", "save"]
    assert made.total_training_steps == 6
    assert made.run_dir.last_step == 6


def test_a_run_that_is_asked_to_stop_while_a_step_is_written_saves_the_next_one(monkeypatch, tmp_path):
    """A last step that nobody saved would be lost."""
    made = trainer()
    done = in_a_step(monkeypatch, made, tmp_path)
    write = made._write_metrics

    def asked_meanwhile(metrics):
        made.stop_asked = True
        write(metrics)

    monkeypatch.setattr(made, "_write_metrics", asked_meanwhile)
    made._compute_metrics(None, dict(DONE), {})
    assert (done, made.total_training_steps) == ([], 9)
    made.global_steps += 1
    made._compute_metrics(None, dict(DONE), {})
    assert (done, made.total_training_steps) == (["sleep", "save"], 7)


def test_clips_of_older_training_steps_are_removed(monkeypatch, tmp_path):
    made = trainer("tts.keep.train_steps_back=2")
    in_a_step(monkeypatch, made, tmp_path)
    for split, step in (("train", 3), ("train", 4), ("train", 5), ("val", 3)):
        (tmp_path / "samples" / split / f"step_{step}").mkdir(parents=True)
    made._compute_metrics(None, dict(DONE), {})
    assert sorted(path.name for path in (tmp_path / "samples" / "train").iterdir()) == ["step_5"]
    assert (tmp_path / "samples" / "val" / "step_3").exists()


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
    stopped._save({"reward/mean": 0.5})
    assert read_manifest(tmp_path / "checkpoints" / "global_step_6").extra["line"]["reward/mean"] == 0.5

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


def test_the_best_checkpoint_by_validation_stays_beside_the_last_ones(monkeypatch, tmp_path):
    """Step 3 scores highest and makes more errors than the start did."""
    made = trainer(f"tts.output_dir={tmp_path}", "trainer.max_actor_ckpt_to_keep=1")
    made.run_dir, made.scorer = RunDir(tmp_path), ScorerInfo()
    made.agent_loop_manager = SimpleNamespace(rewards=SimpleNamespace(state=dict))
    made.probe_watch = ProbeWatch()

    def save(self):
        actor = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}" / "actor"
        actor.mkdir(parents=True)
        (actor / "model_world_size_1_rank_0.pt").write_bytes(b"shard")

    monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", save)
    made.run_dir.append_metrics(0, {"val-mean/score": 0.05, "val-mean/cer": 0.2})
    for step, score, cer in ((1, 0.1, 0.2), (2, 0.4, 0.1), (3, 0.9, 0.3), (4, 0.3, 0.1), (5, 0.2, 0.1)):
        made.global_steps = step
        made._save({})
        validation = {"val-mean/score": score, "val-mean/cer": cer}
        made.run_dir.append_metrics(step, validation)
    assert sorted(path.name for path in made.run_dir.checkpoints.glob("global_step_*")) == [
        "global_step_2",
        "global_step_5",
    ]


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before_whole(monkeypatch, tmp_path):
    made = trainer(f"tts.output_dir={tmp_path}")
    made.run_dir, made.scorer = RunDir(tmp_path), ScorerInfo()
    made.agent_loop_manager = SimpleNamespace(rewards=SimpleNamespace(state=dict))
    made.probe_watch = ProbeWatch()

    def save(self):
        directory = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        (directory / "actor").mkdir(parents=True)
        (directory / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b"shard")
        if self.global_steps == 2:
            (directory / "data.pt").symlink_to("/dev/full")
        torch.save({"rows": 8}, directory / "data.pt")  # of the data loader, in the trainer's own process

    monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", save)
    made.global_steps = 1
    made._save({})
    made.global_steps = 2
    with pytest.raises(
        RunStopped, match=r"cannot write .*checkpoints: torch says .*; free space on its disk and resume"
    ):
        made._save({})
    verify(tmp_path / "checkpoints" / "global_step_1")
    assert not (tmp_path / "checkpoints" / "global_step_2").exists()
    assert made._saved_step == 1


def test_a_validation_is_shown_and_logs_what_the_scorer_took_and_what_the_probes_say(monkeypatch, tmp_path):
    made = trainer(f"tts.output_dir={tmp_path}")
    made.run_dir, made._in_step = RunDir(tmp_path), True
    made.probe_watch, made.logger = ProbeWatch(), SimpleNamespace(logger={})
    monkeypatch.setattr(PPOTrainerSync, "_validate", lambda self: {})
    rollout = SimpleNamespace(stop_reason="eos", codes_FQ=[0, 0, 0])

    def validated(total: float, probe: float) -> dict:
        notes = {"scorer_latency_s": 0.5, "scorer_retries": 1, "scorer_waiting_s": 0.0}
        rows = [SimpleNamespace(id=f"row-{index}", data_source="test", text="Hello.") for index in range(8)]
        samples = [
            SimpleNamespace(row=row, score=Score(total, {"probe/dnsmos": probe}, notes), rollout=rollout, clip=None)
            for row in rows
        ]
        made.replay_buffer = SimpleNamespace(take_validated=lambda: samples)
        return made._validate()

    metrics = validated(0.5, 3.0)
    assert metrics["val-scorer/latency_p95_s"] == 0.5
    means = {name: value for name, value in metrics.items() if name.startswith("val-mean/")}
    assert means == {"val-mean/score": 0.5, "val-mean/eos": 1.0, "val-mean/probe/dnsmos": 3.0}
    assert metrics["val-scorer/retries"] == 8
    assert metrics["val-probe/dnsmos/mean"] == 3.0
    assert made.said[0].kind == "result"
    assert made.said[0].text.startswith("validation at step 6")
    assert validated(0.6, 2.0)["val-probe/dnsmos/alarm"] == 1.0
    alarm = made.said[-1]
    assert alarm.text.startswith("ALARM at step 6: the validation score rose by 0.1 and probe/dnsmos fell by 1")
    assert alarm.kind == "warning"


# ------------------------------------------------------------------ a resume at a step that was killed before its end


@pytest.mark.parametrize(
    ("test_freq", "line", "validates"),
    [
        (3, {}, True),  # it was to be validated, and was not
        (3, {"val-core/test/reward/mean@1": 0.5}, False),
        (4, {}, False),
    ],
)
def test_a_resumed_step_is_validated_if_its_attempt_did_not_live_to_do_so(
    monkeypatch, tmp_path, test_freq, line, validates
):
    made = trainer(f"trainer.test_freq={test_freq}", "trainer.val_before_train=true")
    made.total_training_steps = 9
    made.run_dir, made.replay_buffer, made.attempt = RunDir(tmp_path), SimpleNamespace(), Attempt(0, 6, None, ())
    made.run_dir.append_metrics(6, line)
    monkeypatch.setattr(PPOTrainerSync, "fit", lambda self, manager: None)
    made.fit(SimpleNamespace())
    assert made.config.trainer.val_before_train == validates


def test_where_no_step_is_left_the_validation_is_made_up_for_and_nothing_is_trained(monkeypatch, tmp_path):
    """verl's own loop, of which no part is left out but the validation and the trackers."""
    made = trainer("trainer.test_freq=3", "trainer.logger=[]", "trainer.total_training_steps=6")
    made.run_dir, made.replay_buffer, made.attempt = (
        RunDir(tmp_path),
        SimpleNamespace(take_validated=lambda: []),
        Attempt(1, 6, None, (), restored=True),
    )
    made.run_dir.append_metrics(6, {"reward/mean": 0.5})
    made.probe_watch, made._dump_futures = ProbeWatch(), []
    made._dump_executor = SimpleNamespace(shutdown=lambda wait: None)
    made.steps_per_epoch, made.trainer_mode = 3, "sync"
    logged: list[tuple[int, dict]] = []
    monkeypatch.setattr(
        "verl.trainer.ppo.v1.trainer_base.Tracking",
        lambda **_: SimpleNamespace(logger={}, log=lambda data, step: logged.append((step, data))),
    )
    monkeypatch.setattr(PPOTrainerSync, "_validate", lambda self: {"val-core/test/reward/mean@1": 0.75})
    monkeypatch.setattr(OmniTrainer, "_show", lambda self, samples, seconds: None)
    cut_off = tmp_path / "samples" / "val" / "step_6"
    cut_off.mkdir(parents=True)
    monkeypatch.setattr(PPOTrainerSync, "step", lambda self, *_: pytest.fail("a step was begun"))
    made.fit(SimpleNamespace())
    (line,) = read_jsonl(made.run_dir.metrics)
    assert (line["step"], line["reward/mean"], line["val-core/test/reward/mean@1"]) == (6, 0.5, 0.75)
    assert not made.run_dir.owes_validation(6, 3, 6)
    assert not cut_off.exists(), "clips that belong to no numbers"
    seen = [(step, name) for step, data in logged for name in data if name.endswith(("reward/mean", "mean@1"))]
    assert seen == [(6, "val-core/test/reward/mean@1"), (6, "reward/mean")], "each once"


@pytest.mark.parametrize(
    ("rows", "epochs", "steps", "last"), [(8, 2, 9, 4), (8, 2, 3, 3), (9, 2, 9, 4), (8, 2, None, 4)]
)
def test_the_last_step_is_that_of_the_last_epoch_where_it_comes_first(monkeypatch, rows, epochs, steps, last):
    """verl's loop ends there, too, but saves and validates only what it holds to be the last step."""

    def init(self):
        self.steps_per_epoch = rows // self.config.data.train_batch_size
        wanted = self.config.trainer.total_training_steps
        self.total_training_steps = (
            self.steps_per_epoch * self.config.trainer.total_epochs if wanted is None else wanted
        )

    monkeypatch.setattr(PPOTrainerSync, "_init_dataloader", init)
    made = trainer(
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"trainer.total_epochs={epochs}",
        f"trainer.total_training_steps={'null' if steps is None else steps}",
    )
    made._init_dataloader()
    assert made.total_training_steps == last
