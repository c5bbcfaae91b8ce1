"""Do the engine and the actor hold the same policy? A metric every step, and an end beyond a limit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_tts.config.tts import GatesConfig
from verl_tts.errors import GateError
from verl_tts.gates import LogprobGate, require_finite

WIDE = GatesConfig(logprob_max_abs=100.0, logprob_mean_abs=100.0, outside_support_share=1.0)
NAN, INF = math.nan, math.inf


def check(engine: list[float], actor: list[float], limits: GatesConfig = WIDE) -> dict[str, float]:
    return LogprobGate(limits).check(torch.tensor(engine), torch.tensor(actor), step=12)


def test_the_same_log_probs_pass_with_a_gap_of_zero():
    metrics = check([-1.0, -7.5, -3.0], [-1.0, -7.5, -3.0], GatesConfig())
    assert metrics["gate/logprob_max_abs"] == metrics["gate/logprob_mean_abs"] == metrics["gate/outside_support"] == 0
    assert metrics["gate/logprob_correlation"] == pytest.approx(1.0)


def test_the_gap_is_measured_over_all_tokens_in_nats():
    metrics = check([-1.0, -2.0, -3.0, -4.0], [-1.5, -2.0, -3.0, -3.9])
    assert metrics["gate/logprob_max_abs"] == pytest.approx(0.5)
    assert metrics["gate/logprob_mean_abs"] == pytest.approx(0.15)


@given(st.lists(st.tuples(*[st.floats(-20, 0)] * 2), min_size=1, max_size=20))
def test_the_mean_gap_is_never_above_the_largest_and_neither_is_negative(pairs):
    metrics = check([engine for engine, _ in pairs], [actor for _, actor in pairs])
    assert 0 <= metrics["gate/logprob_mean_abs"] <= metrics["gate/logprob_max_abs"] + 1e-12
    assert -1.001 <= metrics.get("gate/logprob_correlation", 0.0) <= 1.001


@pytest.mark.parametrize(
    ("engine", "actor", "limits", "message"),
    [
        ([-1.0, -2.0], [-1.0, -2.3], GatesConfig(), r"gate/logprob_max_abs is 0\.3, the limit is 0\.25 \(tts\.gates"),
        ([-1.0] * 4, [-1.1] * 4, GatesConfig(), r"gate/logprob_mean_abs is 0\.1, the limit is 0\.02"),
        ([-1.0] * 9, [-1.0] * 8 + [-INF], GatesConfig(), r"gate/outside_support is 0\.111, the limit is 0\.01"),
    ],
)
def test_beyond_a_limit_the_run_stops_with_value_limit_and_setting(engine, actor, limits, message):
    with pytest.raises(GateError, match=r"step 12: " + message):
        check(engine, actor, limits)


def test_a_limit_itself_is_allowed():
    limits = GatesConfig(logprob_max_abs=0.5, logprob_mean_abs=0.25, outside_support_share=0.5)
    metrics = check([-1.0, -1.0, -1.0, -1.0], [-1.5, -1.0, -INF, -INF], limits)
    assert metrics["gate/outside_support"] == 0.5
    assert metrics["gate/logprob_max_abs"] == 0.5
    assert metrics["gate/logprob_mean_abs"] == 0.25, "over the tokens inside"


def test_tokens_that_are_all_outside_are_counted_and_not_divided_by_zero():
    metrics = check([-1.0, -2.0], [-INF, -INF])
    assert (metrics["gate/logprob_max_abs"], metrics["gate/outside_support"]) == (0.0, 1.0)


@pytest.mark.parametrize(("engine", "actor"), [([NAN], [-1.0]), ([-1.0], [NAN]), ([-INF], [-1.0]), ([-1.0], [INF])])
def test_a_log_prob_that_is_not_finite_stops_the_run(engine, actor):
    """Only the actor's may be -inf, where its own truncation leaves a token out."""
    with pytest.raises(GateError, match="step 12: a log-prob is not finite; nothing was updated"):
        check([-1.0, *engine], [-1.0, *actor])


def test_one_token_or_equal_log_probs_have_no_correlation():
    assert "gate/logprob_correlation" not in check([-1.0], [-1.0])
    assert "gate/logprob_correlation" not in check([-1.0, -1.0], [-1.0, -2.0])


def test_half_precision_is_compared_in_double():
    engine = torch.tensor([-7.6171875, -7.625], dtype=torch.bfloat16)
    metrics = LogprobGate(WIDE).check(engine, engine.float() + 1e-4, step=1)
    assert metrics["gate/logprob_mean_abs"] == pytest.approx(1e-4, rel=0.01)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_value_that_is_not_finite_is_named_with_its_step(value):
    require_finite("an advantage", torch.tensor([0.0, -1.0]), 3)
    require_finite("an advantage", torch.tensor([]), 3)
    with pytest.raises(GateError, match="step 3: an advantage is not finite"):
        require_finite("an advantage", torch.tensor([0.0, value]), 3)
