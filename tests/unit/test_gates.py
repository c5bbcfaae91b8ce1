"""Checks during the run: what each compares, when it warns, and when it ends the run."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_tts.config.compose import compose, tts_config
from verl_tts.config.tts import GatesConfig, Levels
from verl_tts.errors import ConfigError, GateError
from verl_tts.gates import (
    BEHIND,
    CLOCK,
    GATES,
    OF_SYNCED,
    GateWatch,
    compare_logprobs,
    compare_with_reference,
    require_finite,
)

NAN, INF = math.nan, math.inf
HEALTHY = {
    "gate/logprob_max_abs": 0.02,
    "gate/logprob_mean_abs": 0.004,
    "gate/logprob_correlation": 0.999,
    "gate/outside_support": 0.0,
    "gate/nearer_reference": 0.2,
    "gate/weights_unchanged": 0.0,
    "gate/first_ratio": 0.01,
    "rollout/identical_rate": 0.0,
    "rollout/eos_rate": 0.95,
    "rollout/real_share": 1.0,
    "rollout/frames_per_char": 1.2,
    "reward/flat_group_rate": 0.1,
    "gate/kl": 0.01,
}
BROKEN = {
    "logprob_max_abs": 0.3,
    "logprob_mean_abs": 0.1,
    "logprob_correlation": 0.5,
    "outside_support": 0.2,
    "nearer_reference": 50.0,
    "weights_unchanged": 1.0,
    "identical_clips": 0.9,
    "flat_groups": 1.0,
    "eos_rate": 0.0,
    "length_drift": 9.0,
    "kl": 8.0,
    "first_ratio": 2.0,
    "real_rows": 0.5,
}
METRIC = {gate.name: gate.metric for gate in GATES}


def judge(watch: GateWatch, step: int = 12, **changed: Any) -> tuple[Any, dict[str, Any]]:
    metrics = HEALTHY | {METRIC[name]: value for name, value in changed.items()}
    if "length_drift" in changed:
        watch.frames_per_char = HEALTHY["rollout/frames_per_char"] / changed["length_drift"]
    return watch.judge(step, metrics), metrics


# ------------------------------------------------------------------ levels


def test_every_gate_is_a_setting_and_every_setting_a_gate():
    levels = {field.name for field in fields(GatesConfig) if field.name != "steps_in_a_row"}
    assert {gate.name for gate in GATES} == levels == BROKEN.keys()


def test_a_healthy_step_says_nothing():
    verdict, metrics = judge(GateWatch(GatesConfig()))
    assert (verdict.warnings, verdict.stop) == ((), None)
    assert (metrics["gate/warned"], metrics["gate/in_a_row"], metrics["gate/length_drift"]) == (0, 0, 1.0)


@pytest.mark.parametrize("name", BROKEN)
def test_beyond_its_stop_level_a_gate_warns_with_its_key_and_stops_after_some_steps_in_a_row(name):
    watch = GateWatch(GatesConfig(steps_in_a_row=3))
    first, metrics = judge(watch, 12, **{name: BROKEN[name]})
    assert first.stop is None
    (warning,) = first.warnings
    assert warning.startswith(f"step 12: {METRIC[name]} is ")
    assert f"(tts.gates.{name}.stop)" in warning
    assert warning.endswith("for 1 of 3 steps")
    assert (metrics["gate/warned"], metrics["gate/in_a_row"]) == (1, 1)
    judge(watch, 13, **{name: BROKEN[name]})
    third, _ = judge(watch, 14, **{name: BROKEN[name]})
    assert third.stop is not None
    assert f"(tts.gates.{name}.stop)" in third.stop
    assert third.stop.endswith("for 3 step(s) in a row")


def test_a_healthy_step_between_begins_the_count_anew():
    watch = GateWatch(GatesConfig(steps_in_a_row=2))
    for step, kl in enumerate((9.0, 0.0, 9.0, 0.0, 9.0)):
        assert judge(watch, step, kl=kl)[0].stop is None
    assert judge(watch, 6, kl=9.0)[0].stop is not None


@pytest.mark.parametrize("name", sorted(OF_SYNCED))
def test_an_engine_that_is_behind_on_purpose_is_judged_after_its_syncs_alone(name):
    """The steps between two syncs neither count nor begin the count anew."""
    watch = GateWatch(GatesConfig(steps_in_a_row=2))
    verdicts = []
    for step, behind in enumerate((0, 1, 2, 3, 4, 5, 0)):
        metrics = HEALTHY | {METRIC[name]: BROKEN[name], BEHIND: behind}
        verdicts.append(watch.judge(step, metrics))
    assert [bool(verdict.warnings) for verdict in verdicts] == [True, *[False] * 6]
    assert verdicts[-1].stop is not None
    assert all(verdict.stop is None for verdict in verdicts[:-1])


def test_between_its_levels_a_gate_warns_when_it_gets_there_and_not_every_step():
    watch = GateWatch(GatesConfig())
    said = [judge(watch, step, eos_rate=rate)[0].warnings for step, rate in enumerate((0.7, 0.6, 0.9, 0.7))]
    assert [len(warnings) for warnings in said] == [1, 0, 0, 1]
    assert said[0][0] == (
        "step 0: rollout/eos_rate is 0.7, below 0.8 (tts.gates.eos_rate.warn): clips are cut off by "
        "data.max_response_length"
    )


def test_a_level_itself_is_allowed_and_null_is_never():
    watch = GateWatch(GatesConfig(steps_in_a_row=1, kl=Levels(0.5, 0.5), eos_rate=Levels(0.5, 0.5)))
    assert judge(watch, kl=0.5, eos_rate=0.5)[0].warnings == ()
    never = GateWatch(GatesConfig(steps_in_a_row=1, kl=Levels(None, None)))
    verdict, _ = judge(never, kl=1e9)
    assert (verdict.warnings, verdict.stop) == ((), None)


def test_a_value_that_is_not_a_number_is_beyond_every_level():
    assert judge(GateWatch(GatesConfig(steps_in_a_row=1)), kl=NAN)[0].stop is not None


def test_a_step_without_a_metric_is_not_judged_by_its_gate():
    """Without a reference there is no KL, and a step between two syncs sends no weights."""
    verdict = GateWatch(GatesConfig(steps_in_a_row=1)).judge(1, {})
    assert (verdict.warnings, verdict.stop) == ((), None)


@pytest.mark.parametrize("now", [2.4, 0.6])
def test_length_is_measured_from_the_first_step_in_both_directions(now):
    watch = GateWatch(GatesConfig())
    assert watch.judge(1, dict(HEALTHY)).warnings == ()
    metrics = HEALTHY | {"rollout/frames_per_char": now}
    (warning,) = watch.judge(2, metrics).warnings
    assert metrics["gate/length_drift"] == pytest.approx(2.0)
    assert "tts.gates.length_drift.warn" in warning


@pytest.mark.parametrize(
    "grows", [{"rollout/frames_per_char": 1.6}, {"rollout/frames_per_char": 0.6}, {"gate/kl": 4.0}]
)
def test_by_default_a_policy_that_collapses_in_its_first_steps_does_not_get_beyond_the_tenth(grows):
    """Speech that gets longer or shorter, or leaves the reference, by the same factor with each step."""
    watch, (name, factor) = GateWatch(GatesConfig()), *grows.items()
    verdicts = [watch.judge(step, HEALTHY | {name: HEALTHY[name] * factor**step}) for step in range(1, 11)]
    stopped = [step for step, verdict in enumerate(verdicts, start=1) if verdict.stop]
    assert stopped
    assert stopped[0] <= 10
    warned = [step for step, verdict in enumerate(verdicts, start=1) if verdict.warnings]
    assert warned[0] <= 4, "and says so before"


# ------------------------------------------------------------------ a resume


def lines_of(*kls: float) -> list[dict[str, Any]]:
    """As a run leaves them in metrics.jsonl: speech gets longer with each step."""
    steps = enumerate(kls, start=1)
    return [{"step": step} | HEALTHY | {"gate/kl": kl, "rollout/frames_per_char": 1.0 + step} for step, kl in steps]


@pytest.mark.parametrize("resumed_at", range(7))
def test_a_resumed_watch_judges_as_one_that_has_seen_every_step(resumed_at):
    lines = lines_of(0.7, 9.0, 9.0, 0.1, 0.7, 9.0, 9.0, 9.0)
    unbroken, resumed = (GateWatch(GatesConfig(steps_in_a_row=3)) for _ in range(2))
    resumed.recall(lines[:resumed_at])
    theirs = [unbroken.judge(line["step"], dict(line)) for line in lines]
    ours = [resumed.judge(line["step"], dict(line)) for line in lines[resumed_at:]]
    assert ours == theirs[resumed_at:]
    assert [verdict.stop is not None for verdict in theirs] == [False] * 7 + [True]


def test_a_value_that_the_file_could_not_say_counts_after_a_resume_too():
    """JSON has no NaN: the line has null, and the name below non_finite."""
    watch = GateWatch(GatesConfig(steps_in_a_row=2))
    watch.recall([{"step": 1, "gate/kl": None, "non_finite": ["gate/kl"]}])
    assert judge(watch, 2, kl=9.0)[0].stop is not None


@pytest.mark.parametrize("value", ["9.0", None, [9.0], 10**400])
@pytest.mark.parametrize("name", ["gate/kl", "rollout/frames_per_char"])
def test_a_line_that_was_edited_is_recalled_as_far_as_it_has_numbers(name, value):
    watch = GateWatch(GatesConfig(steps_in_a_row=2))
    watch.recall([{"step": 1, "gate/kl": 9.0} | {name: value}])
    assert (judge(watch, 2, kl=9.0)[0].stop is not None) == (name != "gate/kl")


def test_the_level_that_a_resume_has_loosened_is_the_one_that_counts():
    before = lines_of(9.0, 9.0)
    watch = GateWatch(GatesConfig(steps_in_a_row=3, kl=Levels(None, 10.0)))
    watch.recall(before)
    assert judge(watch, 3, kl=11.0)[0].stop is None


# ------------------------------------------------------------------ settings


def test_the_table_in_the_docs_is_the_table_of_the_code():
    page = (Path(__file__).parents[2] / "docs" / "gates.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    limits = GatesConfig()
    for (name, metric, _, warn, stop, _), gate in zip(rows, GATES, strict=True):
        levels = getattr(limits, gate.name)
        side = "above" if gate.healthy == "below" else "below"
        assert (name, metric) == (f"`{gate.name}`", f"`{gate.metric}`")
        assert (warn, stop) == (f"{side} {levels.warn:g}", f"{side} {levels.stop:g}")


def test_a_gates_one_number_is_its_stop_level_and_null_is_never():
    gates = tts_config(compose(["tts.platform=cpu", "tts.gates.kl=2", "tts.gates.eos_rate.stop=null"])).gates
    assert gates.kl == Levels(0.5, 2.0)
    assert gates.eos_rate == Levels(0.8, None)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tts.gates.kl=-1", r"tts\.gates\.kl\.stop=-1.0 has to be a number from 0 on, or null"),
        ("tts.gates.kl.warn=much", r"tts\.gates\.kl\.warn=much is of the wrong type"),
        ("tts.gates.steps_in_a_row=0", r"tts\.gates\.steps_in_a_row=0 has to be 1 or more"),
        ("tts.gates.eos=1", r"there is no setting tts\.gates\.eos; the nearest are tts\.gates\.eos_rate"),
    ],
)
def test_a_level_that_cannot_be_is_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        compose(["tts.platform=cpu", override])


# ------------------------------------------------------------------ log-probs


def compare(engine: list[float], actor: list[float]) -> dict[str, float]:
    return compare_logprobs(torch.tensor(engine), torch.tensor(actor), step=12)


def test_the_same_log_probs_have_a_gap_of_zero():
    metrics = compare([-1.0, -7.5, -3.0], [-1.0, -7.5, -3.0])
    assert metrics["gate/logprob_max_abs"] == metrics["gate/logprob_mean_abs"] == metrics["gate/outside_support"] == 0
    assert metrics["gate/logprob_correlation"] == pytest.approx(1.0)


def test_the_gap_is_measured_over_all_tokens_in_nats():
    metrics = compare([-1.0, -2.0, -3.0, -4.0], [-1.5, -2.0, -3.0, -3.9])
    assert metrics["gate/logprob_max_abs"] == pytest.approx(0.5)
    assert metrics["gate/logprob_mean_abs"] == pytest.approx(0.15)


@given(st.lists(st.tuples(*[st.floats(-20, 0)] * 2), min_size=1, max_size=20))
def test_the_mean_gap_is_never_above_the_largest_and_neither_is_negative(pairs):
    metrics = compare([engine for engine, _ in pairs], [actor for _, actor in pairs])
    assert 0 <= metrics["gate/logprob_mean_abs"] <= metrics["gate/logprob_max_abs"] + 1e-12
    assert -1.001 <= metrics.get("gate/logprob_correlation", 0.0) <= 1.001


def test_tokens_outside_the_actors_support_are_counted_and_left_out_of_the_gap():
    metrics = compare([-1.0, -1.0, -1.0, -1.0], [-1.5, -1.0, -INF, -INF])
    assert metrics["gate/outside_support"] == 0.5
    assert metrics["gate/logprob_max_abs"] == 0.5
    assert metrics["gate/logprob_mean_abs"] == 0.25


def test_tokens_that_are_all_outside_are_counted_and_not_divided_by_zero():
    metrics = compare([-1.0, -2.0], [-INF, -INF])
    assert (metrics["gate/logprob_max_abs"], metrics["gate/outside_support"]) == (0.0, 1.0)


@pytest.mark.parametrize(("engine", "actor"), [([NAN], [-1.0]), ([-1.0], [NAN]), ([-INF], [-1.0]), ([-1.0], [INF])])
def test_a_log_prob_that_is_not_finite_stops_the_run(engine, actor):
    """Only the actor's may be -inf, where its own truncation leaves a token out."""
    with pytest.raises(GateError, match="step 12: a log-prob of the engine or the actor is not finite; nothing was"):
        compare([-1.0, *engine], [-1.0, *actor])


def test_one_token_or_equal_log_probs_have_no_correlation():
    assert "gate/logprob_correlation" not in compare([-1.0], [-1.0])
    assert "gate/logprob_correlation" not in compare([-1.0, -1.0], [-1.0, -2.0])


def test_half_precision_is_compared_in_double():
    engine = torch.tensor([-7.6171875, -7.625], dtype=torch.bfloat16)
    metrics = compare_logprobs(engine, engine.float() + 1e-4, step=1)
    assert metrics["gate/logprob_mean_abs"] == pytest.approx(1e-4, rel=0.01)


def nearer(engine: list[float], actor: list[float], reference: list[float]) -> float:
    gap = compare(engine, actor)["gate/logprob_mean_abs"]
    return compare_with_reference(torch.tensor(engine), torch.tensor(reference), gap)["gate/nearer_reference"]


def test_an_engine_that_kept_the_old_weights_is_nearer_to_the_reference():
    """The fault that a gap to the actor alone is too weak for: the policy has moved by 0.01, the limit is 0.02."""
    held, moved = [-2.0, -3.0, -4.0], [-2.01, -2.99, -4.01]
    stop = GatesConfig().nearer_reference.stop
    assert nearer(held, actor=moved, reference=held) > stop
    assert nearer(moved, actor=moved, reference=held) < 0.01
    assert nearer(held, actor=held, reference=held) == 0.0, "before the policy has moved"


def test_rounding_alone_is_no_nearness():
    assert nearer([-2.0], actor=[-2.0 - 2e-6], reference=[-2.0]) < 0.1


def test_a_token_outside_the_references_support_is_left_out():
    found = compare_with_reference(torch.tensor([-1.0, -1.0]), torch.tensor([-INF, -1.5]), 0.0)
    assert found["gate/reference_mean_abs"] == 0.5
    assert compare_with_reference(torch.tensor([-1.0]), torch.tensor([-INF]), 0.0) == {}


def test_the_distance_to_the_reference_is_the_low_variance_estimate_of_the_kl():
    engine, reference = torch.tensor([-1.0, -2.0, -20.0]), torch.tensor([-1.5, -1.0, -1.0])
    kl = compare_with_reference(engine, reference, 0.0)["gate/kl"]
    assert kl == pytest.approx((math.exp(-0.5) - 0.5 + math.exp(1) - 2 + 10) / 3, rel=1e-6)


# ------------------------------------------------------------------ finite values, and time


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_value_that_is_not_finite_is_named_with_its_step(value):
    require_finite("an advantage", torch.tensor([0.0, -1.0]), 3)
    require_finite("an advantage", torch.tensor([]), 3)
    with pytest.raises(GateError, match="step 3: an advantage is not finite; nothing was updated"):
        require_finite("an advantage", torch.tensor([0.0, value]), 3)


def test_the_clock_sums_what_ran_under_it_and_starts_anew_when_taken():
    CLOCK.take()
    with CLOCK.running():
        sum(range(10_000))
    assert CLOCK.take() > 0
    assert CLOCK.take() == 0
