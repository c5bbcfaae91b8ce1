"""The best step is the highest score among those that got nothing worse that must not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tts.errors import ConfigError
from verl_tts.report.best import (
    Constraint,
    best_step,
    constraints_of,
    parse_constraints,
    validation_means,
    validations,
)


def line(step: int, score: float | None = None, **parts: float) -> dict:
    values = {} if score is None else {"score": score, **parts}
    return {"step": step, "reward/mean": 9.0} | {f"val-mean/{name}": value for name, value in values.items()}


ALL = range(1, 100)  # what was saved: every step but the start


# ------------------------------------------------------------------ what a validation measured


def test_a_prompt_that_was_sampled_more_often_does_not_count_more():
    clips = [("a", {"score": 0.0}), ("b", {"score": 1.0}), ("b", {"score": 1.0}), ("b", {"score": 1.0, "cer": 0.3})]
    assert validation_means(clips) == {"val-mean/score": 0.5, "val-mean/cer": 0.3}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1)), min_size=1))
def test_a_mean_is_that_of_the_prompts_means(clips):
    (mean,) = validation_means((row, {"score": value}) for row, value in clips).values()
    of_rows = [[value for row, value in clips if row == name] for name in sorted({row for row, _ in clips})]
    assert mean == pytest.approx(sum(sum(values) / len(values) for values in of_rows) / len(of_rows))


def test_lines_without_a_score_or_with_what_is_no_number_are_no_validations():
    lines = [line(4, 0.5, cer=0.1), line(2), {"step": 1, "val-mean/score": None, "val-mean/cer": 0.2}, line(3, 0.25)]
    assert validations(lines) == {3: {"score": 0.25}, 4: {"score": 0.5, "cer": 0.1}}


# ------------------------------------------------------------------ what it has to meet


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["score", "eos", "cer", "cer_capped"], ("cer \u2264 first",)),
        (["score", "eos", "whisper.CER", "parakeet.wer"], ("whisper.CER \u2264 first", "parakeet.wer \u2264 first")),
        (["score", "eos", "seconds"], ("eos \u2265 first",)),
        (["score"], ()),
    ],
)
def test_error_rates_must_not_rise_or_else_eos_not_get_rarer(names, expected):
    assert tuple(map(str, constraints_of(["cer", "wer"], names))) == expected


def test_with_no_name_there_is_no_constraint():
    assert constraints_of([], ["score", "eos", "cer"]) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cer<=first", (Constraint("cer", "<=", None),)),
        (" eos >= 0.9 ", (Constraint("eos", ">=", 0.9),)),
        ("none", ()),
    ],
)
def test_a_constraint_is_a_part_a_sign_and_a_limit(text, expected):
    assert parse_constraints(text) == expected


@pytest.mark.parametrize("text", ["cer", "cer<=", "<=1", "cer=1", "cer<=first and eos>=1", "cer<=first,eos>=1", ""])
def test_what_is_no_constraint_is_refused(text):
    with pytest.raises(ConfigError, match="has to be PART<=LIMIT"):
        parse_constraints(text)


# ------------------------------------------------------------------ the choice


def test_the_highest_score_wins_and_of_equals_the_earliest():
    assert best_step([line(0, 0.1), line(10, 0.5), line(15), line(20, 0.5), line(30, 0.3)], [], ALL) == 10


def test_a_step_whose_error_rate_is_above_the_first_one_does_not_count():
    lines = [line(0, 0.1, cer=0.2), line(10, 0.4, cer=0.2), line(20, 0.9, cer=0.21)]
    assert best_step(lines, ["cer"], ALL) == 10
    assert best_step(lines, [], ALL) == 20


def test_of_several_error_rates_none_may_rise():
    lines = [line(0, 0.1, cer=0.2, wer=0.4), line(10, 0.4, cer=0.1, wer=0.4), line(20, 0.9, cer=0.1, wer=0.5)]
    assert best_step(lines, ["cer", "wer"], ALL) == 10


def test_a_scorer_that_gets_another_name_is_measured_from_its_first_validation():
    before = [line(0, 0.1, **{"whisper.cer": 0.2}), line(10, 0.4, **{"whisper.cer": 0.1})]
    after = [line(20, 0.5, **{"asr.cer": 0.3}), line(30, 0.6, **{"asr.cer": 0.3}), line(40, 0.7, **{"asr.cer": 0.4})]
    assert best_step(before + after[:1], ["cer"], [10, 40]) == 10, "what is protected stays so"
    assert best_step(before + after, ["cer"], ALL) == 30


def test_a_first_validation_without_the_part_does_not_rule_out_all_others_and_never_counts_itself():
    lines = [line(0, 0.9), line(10, 0.4, cer=0.2), line(20, 0.5, cer=0.1), line(30, 0.95), line(40, 0.8, cer=0.3)]
    assert best_step([line(0, 0.1), *lines[1:]], ["cer"], ALL) == 20


def test_where_no_error_rate_is_measured_clips_must_not_be_cut_off_more_often():
    lines = [line(0, 0.1, eos=0.9), line(10, 0.4, eos=0.95), line(20, 0.9, eos=0.8)]
    assert best_step(lines, ["cer"], ALL) == 10


def test_where_no_later_step_is_better_the_run_has_nothing_better_than_its_start():
    assert best_step([line(0, 0.1, cer=0.2), line(10, 0.4, cer=0.3)], ["cer"], ALL) is None
    assert best_step([line(0, 0.5), line(10, 0.5), line(20, 0.4)], [], ALL) is None


def test_a_first_validation_that_was_saved_can_be_the_best():
    assert best_step([line(10, 0.5), line(20, 0.4)], [], ALL) == 10
    assert best_step([line(10, 0.5)], [], ALL) == 10


def test_only_steps_that_are_there_are_looked_at_and_measured_from_the_first_validation():
    lines = [line(0, 0.1, cer=0.2), line(10, 0.4, cer=0.1), line(20, 0.3, cer=0.15), line(30, 0.9, cer=0.3)]
    assert best_step(lines, ["cer"], [20, 30]) == 20
    assert best_step(lines, ["cer"], [30]) is None


def test_without_a_validation_there_is_no_best():
    assert best_step([line(1), line(2)], [], ALL) is None
    assert best_step([], [], ALL) is None
