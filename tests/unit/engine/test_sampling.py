"""The distribution that the engine draws from, compared with vLLM's own sampler.

Shapes: ``N`` token, ``V`` the support.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from verl_tts.engine.sampling import truncate


def logits_of(seed: int, size: int, spread: float) -> torch.Tensor:
    return torch.randn(4, size, generator=torch.Generator().manual_seed(seed)) * spread


@given(st.integers(0, 999), st.integers(2, 60), st.sampled_from([-1, 1, 2, 7, 50, 60]), st.floats(0.01, 1.0))
def test_what_stays_is_what_vllm_samples_from(seed, size, top_k, top_p):
    logits_NV = logits_of(seed, size, spread=3.0)
    # vLLM turns a top_k that is off, or larger than the vocabulary, into the vocabulary.
    k = torch.full((4,), top_k if 0 < top_k < size else size)
    expected_NV = apply_top_k_top_p_pytorch(logits_NV.clone(), k, torch.full((4,), top_p))
    assert torch.equal(truncate(logits_NV, top_k, top_p), expected_NV)


@given(st.integers(0, 999), st.integers(2, 60), st.integers(-1, 70), st.floats(0.0, 1.0))
def test_the_most_probable_token_always_stays_and_what_stays_is_unchanged(seed, size, top_k, top_p):
    logits_NV = logits_of(seed, size, spread=10.0)
    left_NV = truncate(logits_NV, top_k, top_p)
    stays_NV = ~left_NV.isneginf()
    assert bool(stays_NV.gather(-1, logits_NV.argmax(-1, keepdim=True)).all())
    assert torch.equal(left_NV[stays_NV], logits_NV[stays_NV])
    if top_k > 0:
        assert int(stays_NV.sum(-1).max()) <= max(top_k, 1)


@pytest.mark.parametrize(
    ("top_k", "top_p", "stays"),
    [
        (-1, 1.0, [0, 1, 2, 3, 4]),
        (0, 1.0, [0, 1, 2, 3, 4]),
        (9, 1.0, [0, 1, 2, 3, 4]),
        (2, 1.0, [0, 1]),
        (3, 1.0, [0, 1, 2, 3]),  # a tie at the third: both stay
        (-1, 0.5, [0, 1]),  # 0.4 is not yet half
        (-1, 0.39, [0]),
        (2, 0.5, [0]),  # of the two that top-k leaves, the first has 0.57
    ],
)
def test_top_k_comes_first_then_top_p_of_what_is_left(top_k, top_p, stays):
    logits_NV = torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.1]]).log()
    logits_NV[0, 4] -= 0.2
    left_NV = truncate(logits_NV, top_k, top_p)
    assert torch.nonzero(~left_NV[0].isneginf()).flatten().tolist() == stays


def test_gradients_reach_what_stays_and_nothing_else():
    logits_NV = logits_of(0, 20, spread=2.0).requires_grad_()
    kept_NV = truncate(logits_NV, 5, 0.9)
    (-kept_NV.log_softmax(-1).gather(-1, logits_NV.argmax(-1, keepdim=True))).sum().backward()
    assert logits_NV.grad.isfinite().all()
    assert logits_NV.grad[kept_NV.isneginf()].abs().sum() == 0
    assert logits_NV.grad[~kept_NV.isneginf()].abs().sum() > 0
