"""A run that was killed and resumed ends where an unbroken one does, bit for bit."""

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from .runs import Inputs, Run, explain, scorer, start

pytestmark = pytest.mark.loop


def test_a_killed_run_leaves_its_last_checkpoint_whole_and_no_process(killed: Run) -> None:
    assert killed.returncode < 0
    assert killed.checkpoint(2).exists()
    assert killed.leftovers == []


def test_resuming_goes_on_after_the_last_whole_checkpoint(resumed: Run) -> None:
    assert resumed.returncode == 0, explain(resumed)
    assert "ready: training from step 3 to 4" in resumed.lines
    assert {step: line["attempt"] for step, line in resumed.metrics.items()} == {1: 0, 2: 0, 3: 1, 4: 1}


def test_a_step_that_was_saved_and_had_no_line_gets_it_from_its_checkpoint(
    unbroken: Run, killed: Run, resumed: Run
) -> None:
    """``killed`` and ``resumed`` share a directory, so what was there before is in the note."""
    assert "restored the line of step 2 from its checkpoint" in resumed.lines
    ours, theirs = resumed.metrics[2], unbroken.metrics[2]
    for name in ("reward/mean", "actor/kl_loss", "actor/grad_norm", "rollout/frames/mean", "gate/reference_mean_abs"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-6), name


def test_at_an_epochs_edge_the_steps_that_are_left_are_trained(resumed: Run) -> None:
    epochs = {step: line["training/epoch"] for step, line in resumed.metrics.items()}
    assert epochs == {1: 0, 2: 0, 3: 1, 4: 1}


def test_gpu_hours_go_on_counting(resumed: Run) -> None:
    hours = [resumed.metrics[step]["speed/gpu_hours"] for step in (1, 2, 3, 4)]
    assert hours == sorted(hours)
    assert hours[2] > hours[1]


def test_tensorboard_shows_every_step_once(resumed: Run) -> None:
    """Step 2 was killed before it was logged."""
    events = EventAccumulator(str(resumed.directory / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3, 4]


def test_the_same_codes_are_sampled_and_scored_as_without_the_break(unbroken: Run, resumed: Run) -> None:
    compared = ("id", "sample", "seed", "frames", "score", "stop_reason")
    for step in (3, 4):
        ours = [{name: line[name] for name in compared} for line in resumed.samples(step)]
        theirs = [{name: line[name] for name in compared} for line in unbroken.samples(step)]
        assert ours == theirs
        for line in resumed.samples(step):
            if line["path"]:
                same = (resumed.directory / line["path"]).read_bytes()
                assert same == (unbroken.directory / line["path"]).read_bytes(), line["id"]


def test_parameters_end_bit_identical(unbroken: Run, resumed: Run) -> None:
    ours, theirs = resumed.tensors(4), unbroken.tensors(4)
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name].full_tensor(), theirs[name].full_tensor())]
    assert different == []


def test_optimizer_state_ends_bit_identical(unbroken: Run, resumed: Run) -> None:
    ours, theirs = resumed.tensors(4, "optim")["state"], unbroken.tensors(4, "optim")["state"]
    assert ours.keys() == theirs.keys()
    for key, state in ours.items():
        for name, value in state.items():
            other = theirs[key][name]
            if hasattr(value, "full_tensor"):
                value, other = value.full_tensor(), other.full_tensor()
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), (key, name)


def test_another_scorer_stops_a_resume_before_anything_is_started(inputs: Inputs, resumed: Run) -> None:
    with scorer("constant") as server:
        refused = start(resumed.directory, inputs, scorer_url=server.url, steps=6)
    assert refused.returncode == 2, explain(refused)
    assert refused.lines[-1].startswith("verl_tts: ")
    assert "tts.reward.allow_other_scorer=true" in refused.lines[-1]
    assert not any(line.startswith("ready") for line in refused.lines)
