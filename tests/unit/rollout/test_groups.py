"""From groups to the rows that the actor trains on.

Shapes: ``T`` sampled token, ``F`` codec frame, ``Q`` codebook.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_tts.errors import GateError, RolloutError
from verl_tts.rewards.manager import RewardManager
from verl_tts.rollout.agent_loop import Group
from verl_tts.rollout.groups import GroupRule, describe, to_fields, to_tags

FAILURE = RolloutError("sample row-1#0: the talker returned nothing")


def groups_of(make, failed: str) -> list[Group]:
    """ "..x." has a failed third group."""
    return [make.group(index, failure=FAILURE if mark == "x" else None) for index, mark in enumerate(failed)]


def ids(groups) -> list[int]:
    return [group.row.index for group in groups]


# ------------------------------------------------------------------------------------------------ whole groups


@pytest.mark.parametrize("on_failure", ["stop", "drop"])
def test_a_step_without_failures_is_trained_on_as_it_is(make, on_failure):
    groups = groups_of(make, "....")
    assert GroupRule(on_failure, 1.0, lambda: 4).apply(groups) == groups


def test_stop_ends_the_run_and_names_prompt_cause_and_remedy(make):
    with pytest.raises(
        RolloutError, match=r"1 of 4 groups .* row-2: .*returned nothing; tts.failed_group=drop"
    ) as info:
        GroupRule("stop", 0.5, lambda: 1).apply(groups_of(make, "..x."))
    assert info.value.__cause__ is FAILURE


@pytest.mark.parametrize(
    ("failed", "divisor", "left"),
    [
        ("x...", 1, [1, 2, 3]),
        ("..x.", 1, [0, 1, 3]),
        ("x...", 2, [1, 2]),  # a third group has no partner: it goes, whole
        ("....x...", 4, [0, 1, 2, 3]),
        ("x.x.", 2, [1, 3]),
        ("x..x", 1, [1, 2]),
    ],
)
def test_drop_leaves_whole_groups_in_order_as_many_as_divide(make, failed, divisor, left):
    kept = GroupRule("drop", 0.5, lambda: divisor).apply(groups_of(make, failed))
    assert ids(kept) == left
    assert all(len(group.samples) == 2 for group in kept)


@pytest.mark.parametrize(
    ("failed", "divisor", "min_groups"),
    [("xxx.", 1, 0.5), ("x...", 4, 0.5), ("xx..", 1, 0.75), ("xxxx", 1, 0.0), ("x", 1, 0.0), (".x", 2, 0.0)],
)
def test_too_few_groups_stop_the_run(make, failed, divisor, min_groups):
    with pytest.raises(GateError, match=r"are left .* tts.min_groups=.*the first failure: sample row-1#0"):
        GroupRule("drop", min_groups, lambda: divisor).apply(groups_of(make, failed))


def test_the_share_of_groups_is_not_lost_to_rounding(make):
    """0.55 * 100 is 55.00000000000001."""
    assert len(GroupRule("drop", 0.55, lambda: 1).apply(groups_of(make, "." * 55 + "x" * 45))) == 55


@given(st.text(".x", min_size=1, max_size=12), st.integers(1, 4), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_what_is_left_is_whole_divides_and_is_enough(make, failed, divisor, min_groups):
    groups = groups_of(make, failed)
    try:
        kept = GroupRule("drop", min_groups, lambda: divisor).apply(groups)
    except GateError:
        whole = failed.count(".")
        assert whole - whole % divisor < max(1, min_groups * len(failed))
        return
    assert all(group.failure is None and len(group.samples) == 2 for group in kept)
    assert ids(kept) == sorted(ids(kept))
    if "x" in failed:
        assert len(kept) % divisor == 0
        assert len(kept) >= max(1, min_groups * len(failed))


# ------------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize("frames", [0, 1, 5])
def test_a_row_has_one_entry_for_each_sampled_token(make, frames):
    """T = F + 1: the last token has no residual codes."""
    sample = make.sample(frames=frames, total=0.25, language_id=2050)
    fields = to_fields(sample, "uid-1")
    tokens, prompt = frames + 1, 4
    for name in ("responses", "response_mask", "loss_mask", "rollout_log_probs", "rm_scores", "tts_codes"):
        assert len(fields[name]) == tokens, name
    assert fields["tts_codes"].shape == (tokens, 16)
    assert torch.equal(fields["tts_codes"][:, 0], fields["responses"]), "codebook 0 is what was sampled"
    assert torch.equal(fields["tts_codes"][:-1], torch.from_numpy(sample.rollout.codes_FQ))
    assert fields["tts_codes"][-1, 1:].abs().sum() == 0
    assert fields["response_mask"].tolist() == fields["loss_mask"].tolist() == [1] * tokens
    assert fields["rm_scores"].tolist() == [0.0] * frames + [0.25], "the reward stands on the last token"
    assert torch.equal(fields["input_ids"], torch.cat([fields["prompts"], fields["responses"]]))
    assert fields["position_ids"].tolist() == list(range(prompt + tokens))
    assert fields["prompts"].tolist() == [1, 2, 3, 4]
    assert torch.equal(fields["rollout_log_probs"], torch.from_numpy(sample.rollout.logprobs_T))
    assert fields["tts_language"].tolist() == [2050]
    assert fields["tts_speaker"].tolist() == [0.5] * 8
    assert fields["uid"] == "uid-1"
    assert "waveform" not in fields, "waveforms never enter the transfer queue"
    assert to_tags(sample, 7) == {
        "status": "success",
        "prompt_len": prompt,
        "response_len": tokens,
        "seq_len": prompt + tokens,
        "global_steps": 7,
        "min_global_steps": 6,
        "max_global_steps": 6,
    }


def test_columns_have_the_types_that_the_actor_computes_with(make):
    fields = to_fields(make.sample(), "u")
    integers = ("prompts", "responses", "response_mask", "input_ids", "position_ids", "tts_codes", "tts_language")
    assert {fields[name].dtype for name in integers} == {torch.int64}
    assert {fields[name].dtype for name in ("rollout_log_probs", "rm_scores", "tts_speaker")} == {torch.float32}


def test_a_language_that_the_model_chooses_is_minus_one(make):
    assert to_fields(make.sample(language_id=None), "u")["tts_language"].tolist() == [-1]


def test_parts_that_were_not_measured_do_not_enter_verls_average(make):
    fields = to_fields(make.sample(parts={"cer": math.nan, "guard/silence": 1.0}), "u")
    assert fields["extra_fields"] == {"reward_extra_info": {"guard/silence": 1.0}}


def test_rows_of_a_step_become_one_batch(make):
    """Uneven lengths and an immediate EOS in one write, as the buffer makes it."""
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    rows = [to_fields(make.sample(frames=frames), "u") for frames in (0, 3, 1)]
    batch = list_of_dict_to_tensordict(rows)
    assert [len(codes_TQ) for codes_TQ in batch["tts_codes"].unbind()] == [1, 4, 2]


# ------------------------------------------------------------------------------------------------ metrics


def test_a_step_is_described_by_what_is_trained_on(make):
    submitted = [make.group(0, (0.0, 1.0)), make.group(1, (0.5, 0.5)), make.group(2, failure=FAILURE)]
    metrics = describe(submitted, submitted[:2])
    assert metrics["rollout/rows_real"] == 4
    assert metrics["rollout/groups_dropped"] == 1
    assert metrics["rollout/frames/mean"] == 2.5
    assert metrics["rollout/frames/max"] == 3
    assert metrics["rollout/eos_rate"] == 1.0
    assert metrics["rollout/audio_s"] == pytest.approx(10 * 0.08)
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/std"] == pytest.approx(np.std([0.0, 1.0, 0.5, 0.5]))
    assert metrics["reward/flat_group_rate"] == 0.5, "siblings that score alike teach nothing"


def test_parts_are_averaged_over_the_clips_in_which_they_were_measured(make):
    samples = [make.sample(parts={"cer": part}) for part in (0.2, math.nan, 0.4)]
    groups = [Group(make.row(), samples)]
    metrics = describe(groups, groups)
    assert metrics["reward/parts/cer"] == pytest.approx(0.3)


def test_a_group_of_one_is_not_called_flat(make):
    groups = [make.group(0, (0.5,))]
    assert "reward/flat_group_rate" not in describe(groups, groups)


# ------------------------------------------------------------------------------------------------ the buffer


class Queue:
    """In place of the transfer queue."""

    def __init__(self, announced: dict | None = None) -> None:
        self.announced = announced or {}
        self.written: list[dict] = []
        self.cleared: list[str] = []

    def kv_list(self, partition_id):
        return {partition_id: self.announced}

    def kv_clear(self, keys, partition_id):
        self.cleared += keys

    def kv_batch_put(self, keys, partition_id, fields, tags):
        self.written.append({"keys": keys, "partition": partition_id, "fields": fields, "tags": tags})
        return keys


@pytest.fixture
def buffer(monkeypatch):
    from verl_tts.rollout import groups as module

    def make_buffer(groups: list[Group], queue: Queue, on_failure: str = "drop") -> module.GroupBuffer:
        monkeypatch.setattr(module, "tq", queue)
        made = module.GroupBuffer(GroupRule(on_failure, 0.5, lambda: 1))
        rewards = RewardManager.from_config({}, {"path": "pkg://verl_tts.rewards.functions", "name": "duration"})
        made.agent_loop = SimpleNamespace(collect=lambda split: groups, rewards=rewards)
        return made

    return make_buffer


def test_a_batch_enters_the_queue_in_one_write_ordered_by_prompt_and_sample(make, buffer):
    queue = Queue({"announced": {"is_prompt": True}, "row": {"is_prompt": False}})
    batch, metrics = buffer(groups_of(make, ".x."), queue).sample(7, "train", 3)
    (written,) = queue.written
    assert batch == written["keys"] == ["train-7-0_0_0", "train-7-0_1_0", "train-7-1_0_0", "train-7-1_1_0"]
    assert list(written["fields"]["uid"]) == ["train-7-0"] * 2 + ["train-7-1"] * 2, "siblings share a group"
    assert [tag["response_len"] for tag in written["tags"]] == [3, 4, 3, 4]
    assert written["fields"]["data_source"][0] == "test"
    assert queue.cleared == ["announced"]
    assert (metrics["rollout/rows_real"], metrics["rollout/groups_dropped"]) == (4, 1)


def test_a_validation_with_a_failed_rollout_is_no_validation(make, buffer):
    queue = Queue()
    with pytest.raises(RolloutError, match="validation: the rollout of prompt row-1 failed: sample row-1#0"):
        buffer(groups_of(make, ".x."), queue).sample(7, "val", 3)
    assert queue.written == []


def test_nothing_enters_the_queue_where_the_rule_says_stop(make, buffer):
    queue = Queue()
    with pytest.raises(RolloutError, match="1 of 2 groups"):
        buffer(groups_of(make, "x."), queue, "stop").sample(7, "train", 2)
    assert queue.written == []


def test_clips_that_are_copies_of_a_sibling_are_counted_and_those_of_other_prompts_are_not(make):
    """Two and three frames differ; within a group the same frames give the same samples here."""
    twins = Group(make.row(0), [make.sample(0, frames=frames) for frames in (2, 2, 2, 3)])
    others = Group(make.row(1), [make.sample(1, frames=frames) for frames in (2, 3, 4, 5)])
    assert describe([twins, others], [twins, others])["rollout/identical_rate"] == 2 / 8


def test_the_share_of_prompts_that_are_left_and_the_pace_of_speech_are_metrics(make):
    groups = groups_of(make, "x...")
    metrics = describe(groups, groups[1:])
    assert metrics["rollout/real_share"] == 0.75
    assert metrics["rollout/frames_per_char"] == pytest.approx((2 + 3) / 2 / len("Hello."))
    assert metrics["rollout/tokens"] == 3 * (3 + 4)
