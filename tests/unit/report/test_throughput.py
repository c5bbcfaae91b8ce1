"""How fast a step was, in the units that its user thinks in."""

import pytest

from verl_tts.report.throughput import throughput

STEP = {
    "timing_s/step": 9.0,
    "timing_s/testing": 1.0,
    "timing_s/gen": 6.0,
    "timing_s/update_actor": 2.0,
    "rollout/rows_real": 32,
    "rollout/audio_s": 120.0,
    "rollout/tokens": 1500,
}


def test_a_step_is_counted_with_its_validation():
    found = throughput(STEP, devices=4, gpu_hours_before=1.0)
    assert found["speed/steps_per_hour"] == 360
    assert found["speed/samples_per_s"] == 3.2
    assert found["speed/audio_s_per_s"] == 12
    assert found["speed/actor_tokens_per_s"] == 750
    assert found["speed/gpu_hours"] == pytest.approx(1.0 + 4 * 10 / 3600)


def test_the_shares_of_the_phases_sum_to_one():
    found = throughput(STEP, devices=1, gpu_hours_before=0.0)
    shares = {name: share for name, share in found.items() if name.startswith("share/")}
    assert shares == pytest.approx(
        {"share/rollout": 0.6, "share/update": 0.2, "share/validation": 0.1, "share/other": 0.1}
    )


def test_a_step_without_an_update_has_no_token_speed():
    step = {name: value for name, value in STEP.items() if name != "timing_s/update_actor"}
    assert "speed/actor_tokens_per_s" not in throughput(step, devices=1, gpu_hours_before=0.0)
