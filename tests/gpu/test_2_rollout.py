"""vLLM-Omni beside the actor on one GPU: the parts of a step, one after the other."""

import pytest

pytestmark = pytest.mark.gpu_engine


def test_one_clip(job):
    found = job("rollout_job.py", "clip")
    assert found["logprobs_finite"]
    assert found["samples_per_frame"] in (found["expected_samples_per_frame"], 0)
    assert (found["peak_amplitude"] > 0) == (found["frames"] > 0)


def test_engine_and_actor_agree_in_bf16(job):
    found = job("rollout_job.py", "agreement")
    assert found["mean_abs"] < 0.02
    assert found["max_abs"] < 0.25


def test_sleep_gives_memory_back_and_changes_nothing(job, platform):
    found = job("rollout_job.py", "sleep")
    assert found["clips_with_other_codes"] == found["clips_with_other_samples"] == 0
    if platform == "cuda":
        assert found["given_back_gib"] > found["kv_cache_gib"], "the cache, and weights besides"


def test_weights_arrive_and_are_the_ones_that_sample(job):
    found = job("rollout_job.py", "sync")
    assert found["sent"] == found["arrived"] > 0
    assert found["same_digest"]
    assert found["to_new_weights"]["mean_abs"] < 0.02
    assert found["to_old_weights"]["mean_abs"] > 3 * found["to_new_weights"]["mean_abs"]
