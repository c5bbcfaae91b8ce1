"""The actor alone: FSDP2 on one GPU, BF16 compute over FP32 parameters. Needs no vLLM."""

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("trainable", ["full", "backbone", "lora"])
def test_one_optimizer_step(job, trainable):
    found = job("actor_job.py", trainable)
    assert found["logprob_mean_abs"] < 0.1, "BF16 against the same policy in FP32"
    assert 0 < found["grad_norm"] < float("inf")
    assert found["parameter_dtypes"] == ["torch.float32"]
    assert found["trained_tensors"] > 0
    assert found["frozen_and_changed"] == []
    assert found["trained_and_unchanged"] == []


def test_attention_implementations_agree(job):
    found = job("actor_job.py", "attention")
    assert found["implementations"] == ["sdpa", "eager"]
    assert found["max_abs"] < 1e-3


def test_gradient_checkpointing_changes_memory_and_nothing_else(job, platform):
    found = job("actor_job.py", "checkpointing")
    assert found["with"]["grad_norm"] == pytest.approx(found["without"]["grad_norm"], rel=1e-2)
    if platform == "cuda":  # on a CPU it is the memory of the process
        assert found["with"]["gib"] <= found["without"]["gib"] * 1.02
