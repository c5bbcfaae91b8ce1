"""Residual codes drawn for all rows at once: the same distribution, one stream a request.

Shapes: ``B`` row, ``V`` code.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_tts.compat.vllm_omni_row_sampling import draw


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def probabilities(rows: int, codes: int, seed: int = 0) -> torch.Tensor:
    """With zeros in front, between and behind, as top-k leaves them."""
    random = torch.Generator().manual_seed(seed)
    probs_BV = torch.rand(rows, codes, generator=random)
    probs_BV[torch.rand(rows, codes, generator=random) < 0.5] = 0.0
    probs_BV[:, codes // 2] += 0.1
    return probs_BV / probs_BV.sum(-1, keepdim=True)


@given(st.lists(st.integers(0, 2**48 - 1), min_size=1, max_size=8), st.integers(1, 64), st.integers(0, 99))
def test_a_code_of_probability_zero_is_never_drawn(seeds, codes, seed):
    probs_BV = probabilities(len(seeds), codes, seed)
    index_B1 = draw(probs_BV, None, generators(*seeds))
    assert index_B1.shape == (len(seeds), 1)
    assert bool((probs_BV.gather(-1, index_B1) > 0).all())


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-24, 1.0])
def test_neither_end_of_the_unit_interval_leaves_the_support(monkeypatch, uniform):
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.full(size, uniform))
    probs_BV = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    index = int(draw(probs_BV, None, generators(0)))
    assert index == (1 if uniform < 0.5 else 3)


def test_a_requests_codes_do_not_depend_on_what_shares_its_batch():
    probs_BV = probabilities(4, 50)
    together_B1 = draw(probs_BV, None, generators(1, 2, 3, 4))
    for row, seed in enumerate((1, 2, 3, 4)):
        assert draw(probs_BV[row : row + 1], None, generators(seed)).item() == together_B1[row].item()
    moved_B1 = draw(probs_BV.flip(0), None, generators(4, 3, 2, 1))
    assert torch.equal(moved_B1.flip(0), together_B1)


def test_a_request_alone_draws_the_same_as_beside_others():
    """vLLM-Omni hands over its generator in another argument then."""
    probs_BV = probabilities(3, 50)
    together_B1 = draw(probs_BV, None, generators(1, 2, 3))
    for row, seed in enumerate((1, 2, 3)):
        alone_B1 = draw(probs_BV[row : row + 1], torch.Generator().manual_seed(seed), None)
        assert alone_B1.item() == together_B1[row].item()


def test_a_stream_goes_on_from_draw_to_draw():
    probs_BV, streams = torch.full((2, 1000), 1e-3), generators(7, 7)
    first_B1, second_B1 = (draw(probs_BV, None, streams) for _ in range(2))
    assert first_B1[0] == first_B1[1]
    assert not torch.equal(first_B1, second_B1)


def test_codes_come_as_often_as_their_probability_says():
    probs_V = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    draws = 20_000
    (stream,) = generators(0)
    drawn_B1 = draw(probs_V.expand(draws, -1).contiguous(), None, [stream] * draws)
    shares_V = torch.bincount(drawn_B1[:, 0], minlength=5) / draws
    torch.testing.assert_close(shares_V, probs_V, atol=0.012, rtol=0)  # more than three standard deviations
