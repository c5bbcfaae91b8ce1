"""One unbroken run in FP32: what it leaves, and that both sides hold one policy."""

import json
from ipaddress import ip_address

import pytest
import soundfile
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from verl_tts.checkpoints.manifest import verify
from verl_tts.config.compose import compose
from verl_tts.config.model_dir import read_model_config
from verl_tts.config.plan import Machine, Plan
from verl_tts.gates import GATES

from .runs import FP32_LIMIT, Inputs, Run, explain

pytestmark = pytest.mark.loop


def test_the_run_ends_with_zero(unbroken: Run) -> None:
    assert unbroken.returncode == 0, explain(unbroken)


def test_engine_and_actor_agree_on_every_log_prob_before_and_after_updates(unbroken: Run) -> None:
    """At temperature 0.9, top_k 50 and top_p 0.95, over the engine's support."""
    gaps = {step: line["gate/logprob_max_abs"] for step, line in unbroken.metrics.items() if step > 0}
    assert sorted(gaps) == [1, 2, 3, 4]
    assert max(gaps.values()) < FP32_LIMIT, gaps


def test_updates_move_the_policy_away_from_the_reference(unbroken: Run) -> None:
    kl = [unbroken.metrics[step]["actor/kl_loss"] for step in (1, 2, 3, 4)]
    assert kl[0] == 0
    assert kl[3] > 1e-4, kl


def test_frozen_tensors_keep_every_bit_and_policy_tensors_change(unbroken: Run, inputs: Inputs) -> None:
    base, trained = load_file(inputs.model / "model.safetensors"), unbroken.tensors(4)
    policy = ("talker.model.", "talker.codec_head.")
    changed = {name for name, tensor in trained.items() if not torch.equal(tensor.full_tensor(), base[name])}
    assert changed, "nothing was trained"
    assert all(name.startswith(policy) for name in changed), sorted(changed)
    layers = {name for name in trained if ".layers." in name}
    assert layers <= changed, sorted(layers - changed)


def test_every_row_is_real_and_every_group_whole(unbroken: Run) -> None:
    for step in (1, 2, 3, 4):
        assert unbroken.metrics[step]["rollout/rows_real"] == 16
        assert unbroken.metrics[step]["rollout/groups_dropped"] == 0


def test_each_sample_can_be_heard_and_has_its_line(unbroken: Run) -> None:
    samples = unbroken.samples(3)
    assert len(samples) == 16
    for line in samples:
        if line["frames"] == 0:
            assert line["path"] is None
            continue
        clip, rate_hz = soundfile.read(unbroken.directory / line["path"])
        assert rate_hz == 24000
        assert len(clip) == 1920 * line["frames"]


def test_siblings_differ_and_the_same_prompt_is_validated_with_the_same_noise(unbroken: Run) -> None:
    group = [line for line in unbroken.samples(1) if line["id"] == unbroken.samples(1)[0]["id"]]
    assert len({line["seed"] for line in group}) == 4
    before, after = unbroken.samples(0, "val"), unbroken.samples(4, "val")
    assert [line["seed"] for line in before] == [line["seed"] for line in after]


def test_metrics_have_one_line_a_step_in_order(unbroken: Run) -> None:
    lines = [json.loads(line) for line in (unbroken.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(line["attempt"] == 0 for line in lines)
    assert "val-core/quickstart/reward/mean@1" in lines[0]
    assert "val-core/quickstart/reward/mean@1" in lines[4]


def test_checkpoints_are_sealed_and_name_the_scorer(unbroken: Run) -> None:
    for step in (2, 4):
        assert verify(unbroken.checkpoint(step)).scorer_fingerprint


def test_what_the_guards_measured_and_how_the_scorer_served_are_in_every_line(unbroken: Run) -> None:
    for step in (1, 2, 3, 4):
        line = unbroken.metrics[step]
        assert line["reward/scorer/requests"] <= 16
        assert line["reward/scorer/latency_p50_s"] <= line["reward/scorer/latency_p95_s"]
        assert isinstance(line["reward/scorer/slowest_id"], str)
        assert line["reward/parts/clip/seconds"] > 0
        assert 0 <= line["reward/violation_rate"] < 1
    assert unbroken.metrics[4]["val-scorer/requests"] > 0
    assert verify(unbroken.checkpoint(4)).reward_statistics["composition"] == {"steps": 4, "components": {}}


def test_the_terminal_shows_one_line_a_step_and_the_rest_is_in_the_log(unbroken: Run) -> None:
    steps = [line for line in unbroken.lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/4", "2/4", "3/4", "4/4"]
    assert len([line for line in unbroken.lines if not line.startswith("still in")]) < 30, unbroken.lines
    assert "RolloutServer" in unbroken.log


def test_no_process_no_shared_memory_and_no_temporary_file_outlives_the_run(unbroken: Run) -> None:
    assert unbroken.leftovers == []
    assert unbroken.shared_memory == []
    assert unbroken.temporary == []


def test_the_plan_knew_the_size_of_a_checkpoint(unbroken: Run, inputs: Inputs) -> None:
    config = compose(["tts.platform=cpu", f"actor_rollout_ref.model.path={inputs.model}"])
    plan = Plan(config, Machine(1), read_model_config(str(inputs.model)), None, None)
    written = sum(file.stat().st_size for file in unbroken.checkpoint(4).rglob("*") if file.is_file())
    assert plan.checkpoint <= written < 1.1 * plan.checkpoint, (plan.checkpoint, written)


def test_what_unpickles_listens_to_this_machine_alone(unbroken: Run) -> None:
    """At all addresses is torch's TCPStore alone: one in the first actor worker, one in each stage of the engine."""
    assert any("gcs_server" in title for _, title in unbroken.listening)
    elsewhere = [title for address, title in unbroken.listening if not is_loopback(address)]
    assert all("WorkerDict" in title or "StageEngineCore" in title for title in elsewhere), elsewhere
    assert len(elsewhere) == len(set(elsewhere)) <= 3, "more than one of a process"


def is_loopback(address: str) -> bool:
    found = ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def test_every_gate_has_its_metric_in_every_line(unbroken: Run) -> None:
    """But for that of the weights in the first step, whose learning rate nobody has told."""
    for step in (1, 2, 3, 4):
        missing = {gate.metric for gate in GATES} - unbroken.metrics[step].keys()
        assert missing == ({"gate/weights_unchanged"} if step == 1 else set())


def test_the_first_ratio_of_each_update_is_1_and_each_changes_the_engines_weights(unbroken: Run) -> None:
    for step in (1, 2, 3, 4):
        assert unbroken.metrics[step]["gate/first_ratio"] < 1e-3
        assert unbroken.metrics[step]["sync/changed"] == 1
        assert unbroken.metrics[step]["sync/tensors"] > 20


def test_gates_cost_little_and_the_phases_account_for_the_step(unbroken: Run) -> None:
    for step in (1, 2, 3, 4):
        line = unbroken.metrics[step]
        assert 0 < line["timing_s/gate"] < 0.1 * line["timing_s/step"]
        assert sum(share for name, share in line.items() if name.startswith("share/")) == pytest.approx(1)
        assert line["share/other"] < 0.2
        assert line["speed/audio_s_per_s"] > 0
    assert unbroken.metrics[4]["speed/gpu_hours"] > unbroken.metrics[1]["speed/gpu_hours"]


def test_a_validation_is_a_table_with_the_files_of_the_best_and_the_worst_clip(unbroken: Run) -> None:
    first = next(index for index, line in enumerate(unbroken.lines) if line.startswith("validation at step 4"))
    table = unbroken.lines[first : first + 4]
    assert table[0].split()[4:] == ["clips", "score", "eos", "frames", "kl", "clips/s"]
    best = table[2].split()
    assert (unbroken.directory / best[-1]).exists()
    assert float(best[1]) == pytest.approx(max(line["score"] for line in unbroken.samples(4, "val")), abs=1e-3)


def test_tensorboard_has_every_step_and_the_clips_of_the_validations(unbroken: Run) -> None:
    events = EventAccumulator(str(unbroken.directory / "tensorboard"), size_guidance={"audio": 0}).Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3, 4]
    heard = events.Audio(events.Tags()["audio"][0])
    assert heard[-1].step == 4
    assert heard[-1].sample_rate == 24000
