"""The talker that stage 0 loads: float32 where the actor is, and the parent's residual codes in less time.

Shapes: ``B`` request, ``Q`` codebook, ``H`` hidden, ``V`` code.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from vllm_omni.model_executor.models.qwen3_tts.configuration_qwen3_tts import Qwen3TTSTalkerCodePredictorConfig
from vllm_omni.model_executor.models.registry import OmniModelRegistry

from verl_tts.checkpoints.tiny import CODE_PREDICTOR_CONFIG
from verl_tts.rollout import qwen3_tts_talker
from verl_tts.rollout.qwen3_tts_talker import ARCHITECTURE, CodePredictor, Float32Head, Talker, draw, invert, uniform

HIDDEN = 48


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def probabilities(rows: int, codes: int, seed: int = 0) -> torch.Tensor:
    """With zeros in front, between and behind, as top-k leaves them."""
    random = torch.Generator().manual_seed(seed)
    probs_BV = torch.rand(rows, codes, generator=random)
    probs_BV[torch.rand(rows, codes, generator=random) < 0.5] = 0.0
    probs_BV[:, codes // 2] += 0.1
    return probs_BV / probs_BV.sum(-1, keepdim=True)


# ------------------------------------------------------------------------------------------------------ drawing


@given(st.lists(st.integers(0, 2**48 - 1), min_size=1, max_size=8), st.integers(1, 64), st.integers(0, 99))
def test_a_code_of_probability_zero_is_never_drawn(seeds, codes, seed):
    probs_BV = probabilities(len(seeds), codes, seed)
    index_B1 = invert(probs_BV, torch.cat([torch.rand(1, 1, generator=row) for row in generators(*seeds)]))
    assert index_B1.shape == (len(seeds), 1)
    assert bool((probs_BV.gather(-1, index_B1) > 0).all())


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2**-24, 1.0])
def test_neither_end_of_the_unit_interval_leaves_the_support(number):
    probs_BV = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    index = int(invert(probs_BV, torch.full((1, 1), number)))
    assert index == (1 if number < 0.5 else 3)


def test_codes_come_as_often_as_their_probability_says():
    probs_V = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    draws = 20_000
    uniform_B1 = torch.rand(draws, 1, generator=torch.Generator().manual_seed(0))
    drawn_B1 = invert(probs_V.expand(draws, -1).contiguous(), uniform_B1)
    shares_V = torch.bincount(drawn_B1[:, 0], minlength=5) / draws
    torch.testing.assert_close(shares_V, probs_V, atol=0.012, rtol=0)  # more than three standard deviations


def test_a_requests_numbers_do_not_depend_on_what_shares_its_batch():
    """vLLM-Omni hands over the generator of a request alone in its batch in another argument."""
    device = torch.device("cpu")
    together_BQ = uniform(3, 15, None, generators(1, 2, 3), device)
    for row, seed in enumerate((1, 2, 3)):
        assert torch.equal(uniform(1, 15, None, generators(seed), device)[0], together_BQ[row])
        assert torch.equal(uniform(1, 15, generators(seed)[0], None, device)[0], together_BQ[row])
    stream = generators(1)
    assert not torch.equal(uniform(1, 15, None, stream, device), uniform(1, 15, None, stream, device))


@given(
    rows=st.integers(1, 5),
    codes=st.sampled_from([10, 64, 400, 408, 416, 2048]),
    top_k=st.sampled_from([0, 1, 7, 50, 3000]),
    temperature=st.floats(0.1, 2.0),
    seed=st.integers(0, 2**32),
)
def test_the_code_drawn_among_the_best_blocks_is_the_one_drawn_among_all(rows, codes, top_k, temperature, seed):
    random = torch.Generator().manual_seed(seed)
    logits_BV = torch.randn(rows, codes, generator=random, dtype=torch.float64)  # no ties
    uniform_B1 = torch.rand(rows, 1, generator=random, dtype=torch.float64)
    kept_BV = logits_BV.argsort(-1, descending=True).argsort(-1) < (top_k or codes)
    probs_BV = (logits_BV / temperature).masked_fill(~kept_BV, float("-inf")).softmax(-1, dtype=torch.float32)
    assert torch.equal(draw(logits_BV, uniform_B1.float(), temperature, top_k), invert(probs_BV, uniform_B1.float()))


# ----------------------------------------------------------------------------------------------- code predictor


@pytest.fixture(scope="module", params=[32, HIDDEN], ids=["projected", "not projected"])
def predictor(request) -> CodePredictor:
    """One of random weights, large enough that codes depend on what was drawn before them."""
    shape = CODE_PREDICTOR_CONFIG | {"hidden_size": request.param}
    module = CodePredictor(
        vllm_config=SimpleNamespace(model_config=None),
        config=Qwen3TTSTalkerCodePredictorConfig(**shape),
        talker_config=SimpleNamespace(hidden_size=HIDDEN),
    )
    random = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random) * (0.3 if parameter.ndim > 1 else 1.0)
    return module.eval()


def given_frames(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    codes_B1 = torch.randint(0, 2048, (rows, 1), generator=random)
    return codes_B1, *(torch.randn(rows, HIDDEN, generator=random) for _ in range(2))


@settings(deadline=None, max_examples=20)
@given(rows=st.integers(2, 6), seed=st.integers(0, 2**32), top_k=st.sampled_from([0, 5, 50]))
def test_one_new_row_a_step_gives_the_codes_that_all_rows_give(predictor, rows, seed, top_k):
    frames, seeds = given_frames(rows, seed), range(rows)
    parent = super(CodePredictor, predictor).forward
    # float32 sums in another order: a number at the border of two codes may fall to either, once in a great many
    codes_BQ = predictor(*frames, top_k=top_k, generators=generators(*seeds))
    expected_BQ = parent(*frames, top_k=top_k, generators=generators(*seeds))
    assert codes_BQ.shape == (rows, 16)
    assert int((codes_BQ == expected_BQ).all(-1).sum()) >= rows - 1


def test_without_sampling_the_likeliest_codes_come_as_in_the_parent(predictor):
    frames = given_frames(8, 0)
    expected_BQ = super(CodePredictor, predictor).forward(*frames, do_sample=False)
    assert torch.equal(predictor(*frames, do_sample=False), expected_BQ)


def test_a_code_depends_on_every_code_before_it(predictor):
    codes_B1, embeds_BH, hidden_BH = given_frames(1, 0)
    first_BQ = predictor(codes_B1, embeds_BH, hidden_BH, do_sample=False)
    moved_BQ = predictor(codes_B1, embeds_BH + 1, hidden_BH, do_sample=False)
    assert not torch.equal(first_BQ[:, 1:], moved_BQ[:, 1:])


def test_what_the_parent_does_not_implement_is_not_left_out_silently(predictor):
    with pytest.raises(NotImplementedError, match="top_p"):
        predictor(*given_frames(2, 0), top_p=0.9)


def test_captured_device_graphs_are_replayed(predictor, monkeypatch):
    """A stand-in for a graph: it writes what the parent reads, and counts."""
    replays = []

    class Graph:
        def replay(self) -> None:
            replays.append(1)

    hidden = torch.zeros(2, 17, predictor._cp_hidden)
    monkeypatch.setattr(predictor, "_device_graphs", {2: (Graph(), hidden)})
    predictor(*given_frames(2, 0), generators=generators(0, 1))
    assert len(replays) == 15


# -------------------------------------------------------------------------------------------------------- talker


def test_logits_are_float32_and_not_rounded():
    layer, random = nn.Linear(64, 100, bias=False, dtype=torch.bfloat16), torch.Generator().manual_seed(0)
    hidden_BH = torch.randn(5, 64, generator=random).bfloat16()
    logits_BV = Float32Head().apply(layer, hidden_BH)
    assert logits_BV.dtype == torch.float32
    torch.testing.assert_close(logits_BV, hidden_BH.float() @ layer.weight.float().T)


def test_the_last_norm_is_that_of_the_actor_bit_for_bit():
    """Both get bfloat16 and give float32, so that no logit leans on a channel that one of them has rounded."""
    from verl_tts.models import qwen3_tts as actor

    random = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(5, HIDDEN, generator=random).bfloat16() for _ in range(2))
    weight = torch.randn(HIDDEN, generator=random).bfloat16()
    engine_norm, actor_norm = nn.Module(), actor.Qwen3TTSRMSNorm(HIDDEN)
    engine_norm.__class__, actor_norm.__class__ = qwen3_tts_talker.Float32RMSNorm, actor.Float32RMSNorm
    engine_norm.variance_epsilon = actor_norm.variance_epsilon
    engine_norm.weight = actor_norm.weight = nn.Parameter(weight)
    normed, stream = engine_norm(x, residual)
    assert normed.dtype == torch.float32
    assert torch.equal(stream, x + residual)
    assert torch.equal(normed, actor_norm(x + residual))


def talker(dtype: torch.dtype, codes_BQ: torch.Tensor) -> SimpleNamespace:
    """What ``Talker.talker_mtp`` reads of its talker."""
    random = torch.Generator().manual_seed(0)
    return SimpleNamespace(
        code_predictor=lambda *_, **__: codes_BQ,
        _codebook_vocab_size=2048,
        _stacked_codec_embed=torch.randn(15, 2048, HIDDEN, generator=random).to(dtype),
        _embedding_dtype=dtype,
    )


@given(rows=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_the_next_input_row_is_summed_in_float32_and_rounded_once(rows, seed):
    random = torch.Generator().manual_seed(seed)
    codes_BQ = torch.randint(0, 2048, (rows, 16), generator=random)
    holder = talker(torch.bfloat16, codes_BQ)
    embeds_BH, hidden_BH, text_BH = (torch.randn(rows, HIDDEN, generator=random).bfloat16() for _ in range(3))
    row_BH, returned_BQ = Talker.talker_mtp(holder, codes_BQ[:, 0], embeds_BH, hidden_BH, text_BH)
    exact_BH = embeds_BH.double() + text_BH.double()
    for book in range(1, 16):
        exact_BH += holder._stacked_codec_embed[book - 1, codes_BQ[:, book]].double()
    assert torch.equal(returned_BQ, codes_BQ)
    assert row_BH.dtype == torch.bfloat16
    torch.testing.assert_close(row_BH, exact_BH.bfloat16(), rtol=2**-7, atol=1e-5)  # one ulp, where it is in between
    assert (row_BH == exact_BH.bfloat16()).float().mean() > 0.97


def test_a_frame_after_the_end_has_codes_that_can_be_looked_up():
    codes_BQ = torch.full((2, 16), 7)
    codes_BQ[0, 0] = 2150
    zeros = torch.zeros(2, HIDDEN)
    _, returned_BQ = Talker.talker_mtp(talker(torch.float32, codes_BQ), codes_BQ[:, 0], zeros, zeros, zeros)
    assert returned_BQ[0].tolist() == [0] * 16
    assert returned_BQ[1].tolist() == [7] * 16


def test_vllm_omni_loads_this_talker_once_it_is_registered():
    before = OmniModelRegistry.models[ARCHITECTURE]
    try:
        qwen3_tts_talker.register()
        assert OmniModelRegistry.models[ARCHITECTURE].load_model_cls() is Talker
    finally:
        OmniModelRegistry.models[ARCHITECTURE] = before
