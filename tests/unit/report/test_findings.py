"""What a report says, as numbers, on histories small enough to reckon by hand."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tts.errors import ConfigError
from verl_tts.report import findings
from verl_tts.report.best import best_step, constraints_of, parse_constraints, validation_means
from verl_tts.report.findings import thinned
from verl_tts.report.history import Clip, History, error_rate_part


def clip(step: int, row: str, score: float | None, sample: int = 0, stop: str = "eos", **parts: float) -> Clip:
    values = {"eos": float(stop == "eos"), **parts} | ({} if score is None else {"score": score})
    return Clip("val", step, row, sample, "text", stop, 10, None, None, None, values)


def history(*clips: Clip, checkpoints: tuple[int, ...] = ()) -> History:
    val: dict[int, list[Clip]] = {}
    for one in clips:
        val.setdefault(one.step, []).append(one)
    lines = [{"step": step} | validation_means((one.row_id, one.values) for one in val[step]) for step in sorted(val)]
    return History(Path("/run"), lines, dict(sorted(val.items())), {}, {}, list(checkpoints))


def validation(step: int, score: float, cer: float, rows: int = 4) -> list[Clip]:
    return [clip(step, f"row-{i}", score + i / 100, cer=cer) for i in range(rows)]


# ------------------------------------------------------------------ curves


def test_a_prompt_that_was_sampled_more_often_does_not_count_more() -> None:
    run = history(clip(0, "a", 0.0), clip(0, "b", 1.0), clip(0, "b", 1.0, 1), clip(0, "b", 1.0, 2))
    (score, eos) = findings.part_curves(run)
    assert (score.name, score.first.mean) == ("score", 0.5)
    assert (eos.name, eos.first.mean, eos.is_share) == ("eos", 1.0, True)


def test_a_change_is_over_the_prompts_that_both_have() -> None:
    run = history(*(clip(0, row, 0.2) for row in "abc"), *(clip(5, row, 0.6) for row in "bcd"))
    score = findings.part_curves(run)[0]
    assert score.first.change is None
    assert score.last.change is not None
    assert score.last.change.mean == pytest.approx(0.4)


def test_with_one_prompt_in_common_there_is_no_interval() -> None:
    run = history(clip(0, "a", 0.2), clip(5, "a", 0.6), clip(5, "b", 0.6))
    assert findings.part_curves(run)[0].last.change is None


@given(st.lists(st.integers(), unique=True), st.integers(2, 50))
def test_what_is_thinned_keeps_first_last_and_order(steps: list[int], limit: int) -> None:
    kept = thinned(sorted(steps), limit)
    assert len(kept) == min(limit, len(steps))
    assert kept == sorted(set(kept))
    if steps:
        assert (kept[0], kept[-1]) == (min(steps), max(steps))


def test_more_values_mean_fewer_draws_within_limits() -> None:
    small = history(*validation(0, 0.1, 0.1))
    large = history(*(one for step in range(60) for one in validation(step, 0.1, 0.1, rows=2000)))
    assert findings.draws_for(small) == findings.MOST_DRAWS
    assert findings.FEWEST_DRAWS <= findings.draws_for(large) < findings.MOST_DRAWS
    assert len(findings.interval_steps(large)) < 60


# ------------------------------------------------------------------ clips


def test_improved_and_harmed_are_by_the_change_of_a_prompt() -> None:
    run = history(
        *(clip(0, row, 0.5) for row in "abcd"),
        *(clip(9, row, s) for row, s in zip("abcd", (0.9, 0.6, 0.5, 0.1))),  # noqa: B905
    )
    found = findings.featured(run)
    assert found is not None
    assert [pair.after.row_id for pair in found.improved] == ["a", "b"]
    assert [pair.after.row_id for pair in found.harmed] == ["d"]
    assert [one.row_id for one in found.best] == ["a", "b", "c", "d"]
    assert found.worst == [], "whoever is among the best is not shown again"


def test_the_grid_is_spread_over_steps_and_prompts() -> None:
    found = findings.grid(history(*(clip(step, f"{row:02d}", 0.5) for step in range(30) for row in range(20))))
    assert found is not None
    assert (found.steps[0], found.steps[-1], len(found.steps)) == (0, 29, findings.GRID_STEPS)
    assert [min(found.clips), max(found.clips), len(found.clips)] == ["00", "19", findings.GRID_PROMPTS]
    assert (found.rows_in_all, found.steps_in_all) == (20, 30)


# ------------------------------------------------------------------ the checkpoint to keep


RISING = (validation(0, 0.1, 0.30), validation(10, 0.3, 0.25), validation(20, 0.5, 0.29), validation(30, 0.7, 0.40))


def kept(constraint: str, *checkpoints: int) -> findings.Keep:
    run = history(*(one for step in RISING for one in step), checkpoints=checkpoints)
    found = findings.keep(run, parse_constraints(constraint))
    assert found is not None
    return found


def test_the_best_score_whose_error_rate_has_not_risen_is_kept() -> None:
    found = kept("cer<=first", 10, 20, 30)
    assert found.step == 20
    assert "Step 30 scores higher, but it breaks cer ≤ first." in found.reason
    assert found.change is not None
    assert found.change.mean == pytest.approx(0.4)


def test_without_a_constraint_the_best_score_is_kept() -> None:
    assert kept("none", 10, 20, 30).step == 30


def test_only_what_is_there_can_be_kept_and_what_is_gone_is_named() -> None:
    found = kept("cer<=first", 10)
    assert found.step == 10
    assert "Step 30 scores higher" in found.reason


@pytest.mark.parametrize(
    ("constraint", "checkpoints", "reason"),
    [
        ("cer<=0.1", (10, 20, 30), "No later validation meets cer ≤ 0.1."),
        ("cer<=first", (30,), "No validated step with cer ≤ first has a whole checkpoint in this directory."),
    ],
)
def test_where_nothing_meets_the_constraint_nothing_is_kept(constraint, checkpoints, reason) -> None:
    found = kept(constraint, *checkpoints)
    assert (found.step, found.reason) == (None, reason)


def test_a_policy_that_got_worse_is_not_kept() -> None:
    run = history(*validation(0, 0.5, 0.3), *validation(10, 0.4, 0.2), checkpoints=(10,))
    found = findings.keep(run, ())
    assert found is not None
    assert found.step is None
    assert "keep the model that the run began with" in found.reason


def test_a_gain_within_chance_says_so() -> None:
    scores = {"a": (0.1, 0.9), "b": (0.9, 0.2), "c": (0.5, 0.6)}
    run = history(
        *(clip(s, row, pair[i]) for row, pair in scores.items() for i, s in enumerate((0, 5))), checkpoints=(5,)
    )
    found = findings.keep(run, ())
    assert found is not None
    assert found.step == 5
    assert "within chance" in found.reason


def test_a_part_that_no_validation_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="validations have no part mos; they have score, eos, cer"):
        kept("mos>=3", 10)


@given(
    st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.3]), st.sampled_from([0.1, 0.2, 0.3])), min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
    st.sampled_from([["cer"], ["cer", "wer"], ["wer"], []]),
)
def test_the_report_names_the_step_that_the_run_keeps(measured, saved, names) -> None:
    run = history(
        *(one for step, (score, cer) in enumerate(measured) for one in validation(step, score, cer)),
        checkpoints=tuple(saved),
    )
    found = findings.keep(run, constraints_of(names, ["score", "eos", "cer"]))
    assert found is not None
    assert found.step == best_step(run.metrics, names, saved)


def test_the_choice_is_by_all_clips_of_a_validation_and_not_by_those_that_were_kept() -> None:
    run = history(*(one for step in RISING for one in step), checkpoints=(10, 20, 30))
    run.val.clear()
    found = findings.keep(run, parse_constraints("cer<=first"))
    assert found is not None
    assert (found.step, found.change) == (20, None)


def test_a_part_that_only_sounds_like_an_error_rate_is_none() -> None:
    assert error_rate_part(["score", "cer_capped", "clip/seconds", "answer"]) is None
