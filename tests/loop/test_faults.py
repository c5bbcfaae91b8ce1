"""What goes wrong ends the run with its own exit code and one line, within the time limits, and loses nothing."""

import pytest

from verl_tts.checkpoints.manifest import newest_valid, verify

from .runs import BF16_LIMIT, FP32_LIMIT, Run, explain

pytestmark = pytest.mark.loop


def last_line(run: Run) -> str:
    return run.lines[-1]


def test_a_skipped_sync_shows_as_a_gap_a_hundred_times_the_limit(stale: Run) -> None:
    """The negative control of the log-prob gate: step 2 samples with the weights of step 0, each other with its own."""
    gaps = {step: line["gate/logprob_max_abs"] for step, line in stale.metrics.items()}
    assert gaps[1] < FP32_LIMIT
    assert gaps[3] < FP32_LIMIT
    assert gaps[2] > 100 * FP32_LIMIT, gaps


def test_an_engine_that_holds_the_reference_after_an_update_is_seen_to_do_so(stale: Run) -> None:
    """In step 2 the policy has moved and the engine has not: it agrees with the reference to the last digit."""
    nearer = {step: line["gate/nearer_reference"] for step, line in stale.metrics.items()}
    assert nearer[1] < 0.1
    assert nearer[3] < 0.1
    assert nearer[2] > 4, nearer
    assert stale.metrics[2]["gate/reference_mean_abs"] < 1e-5
    assert any("the engine holds the reference and not the actor" in line for line in stale.lines)
    assert [line["sync/changed"] for line in stale.metrics.values()] == [0, 1, 1]
    assert {line["sync/behind"] for line in stale.metrics.values()} == {0}, "the trainer does not know"


def test_a_scorer_that_dies_ends_the_run_with_three_and_names_it(stale: Run) -> None:
    assert stale.returncode == 3, explain(stale)
    assert last_line(stale).startswith("verl_tts: ")
    assert "/score" in last_line(stale)
    assert "Traceback" not in "\n".join(stale.lines)


def test_the_last_checkpoint_survives_a_dead_scorer(stale: Run) -> None:
    assert newest_valid(stale.directory / "checkpoints").path == stale.checkpoint(3)
    assert stale.leftovers == []


def test_a_failed_rollout_drops_its_whole_group_and_nothing_synthetic_is_trained(lora: Run) -> None:
    first, second = lora.metrics[1], lora.metrics[2]
    assert (first["rollout/groups_dropped"], first["rollout/rows_real"]) == (1, 12)
    assert (second["rollout/groups_dropped"], second["rollout/rows_real"]) == (0, 16)


def test_merged_lora_reaches_the_engine_on_two_workers(lora: Run) -> None:
    """Agreement with the actor after an update that moved it away from the reference."""
    assert lora.metrics[2]["gate/logprob_max_abs"] < FP32_LIMIT
    assert lora.metrics[2]["actor/kl_loss"] > 1e-6


def test_a_lora_run_resumes(lora: Run, lora_resumed: Run) -> None:
    first = max(lora.metrics) + 1
    assert lora_resumed.metrics[first]["attempt"] == 1
    assert lora_resumed.metrics[first]["gate/logprob_max_abs"] < FP32_LIMIT


def test_a_killed_stage_ends_the_run_with_three_and_says_so(lora_resumed: Run) -> None:
    assert lora_resumed.returncode == 3, explain(lora_resumed)
    assert "stage of the rollout engine died" in last_line(lora_resumed) or "is gone" in last_line(lora_resumed)
    assert lora_resumed.leftovers == []
    assert newest_valid(lora_resumed.directory / "checkpoints").path is not None


def test_a_receiver_that_raises_ends_the_run_with_three_and_its_own_words(broken_receiver: Run) -> None:
    assert broken_receiver.returncode == 3, explain(broken_receiver)
    assert "weight sync at step 0" in last_line(broken_receiver)
    assert "the receiver fails in a test" in last_line(broken_receiver)


def test_the_environment_reaches_a_cluster_that_was_there_before(terminated: Run) -> None:
    """Its workers were started for another platform; two steps on the CPU prove that ours arrived."""
    assert terminated.metrics[2]["rollout/rows_real"] == 16


def test_log_probs_agree_in_bf16_before_an_update_and_after_one_and_its_sync(terminated: Run) -> None:
    gaps = {step: terminated.metrics[step]["gate/logprob_max_abs"] for step in (1, 2, 3)}
    assert max(gaps.values()) < BF16_LIMIT, gaps


def test_sigterm_lets_the_step_in_hand_end_and_saves_it(terminated: Run) -> None:
    assert terminated.returncode == 143, explain(terminated)
    last = max(terminated.metrics)
    assert list(terminated.metrics) == list(range(1, last + 1))
    assert verify(terminated.checkpoint(last)).extra["line"]["reward/mean"] == terminated.metrics[last]["reward/mean"]
    asked = next(i for i, line in enumerate(terminated.lines) if line.startswith("signal SIGTERM: stopping after this"))
    after = [line for line in terminated.lines[asked:] if line.startswith("step ")]
    assert 1 <= len(after) <= 2, "the step in hand, and at most one that had just ended when the signal was acted upon"
    assert after[-1].startswith(f"step {last}/")
    assert (terminated.leftovers, terminated.shared_memory, terminated.temporary) == ([], [], [])
