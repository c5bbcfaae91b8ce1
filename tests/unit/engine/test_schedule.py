import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl.utils.config import omega_conf_to_dataclass

from verl_tts.config.compose import compose
from verl_tts.engine.schedule import PolicyOptimizerConfig, linear_schedule, linear_share

OPTIM = "actor_rollout_ref.actor.optim"


@given(st.integers(0, 50), st.integers(1, 200), st.floats(0, 1), st.integers(0, 400))
def test_the_share_rises_over_the_warm_up_and_falls_to_the_floor_and_no_further(warmup, steps, floor, step):
    total = warmup + steps
    share = linear_share(step, warmup, total, floor)
    assert 0 <= share <= 1
    if step >= warmup:
        assert share >= floor - 1e-12
        assert linear_share(step + 1, warmup, total, floor) <= share + 1e-12
    if step >= total:
        assert share == pytest.approx(floor)


def test_a_run_of_ten_steps_ends_at_its_minimum():
    config = compose([f"{OPTIM}.lr_scheduler_type=linear", f"{OPTIM}.min_lr_ratio=0.2", f"{OPTIM}.lr_warmup_steps=0"])
    optim = omega_conf_to_dataclass(config.actor_rollout_ref.actor.optim)
    assert isinstance(optim, PolicyOptimizerConfig)
    optim.total_training_steps = 10
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = linear_schedule(optimizer, optim), []
    for _ in range(11):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([1.0 - 0.08 * step for step in range(11)])


def test_verls_own_schedules_are_still_checked_by_verl():
    with pytest.raises(AssertionError):
        PolicyOptimizerConfig(lr=1.0, lr_scheduler_type="step")
    assert PolicyOptimizerConfig(lr=1.0, lr_scheduler_type="cosine").lr_scheduler_type == "cosine"
