"""How codes are drawn, and what a request keeps: with the talker's own functions, without an engine."""

import pytest
import torch
from scipy import stats

from verl_tts.checkpoints.tiny_moss import MODEL_CONFIG
from verl_tts.engine.sampling import truncate
from verl_tts.models.moss_prompt import Cursor, TokenIds
from verl_tts.rollout.moss_talker import Answer, Talker, draw_codes

IDS = TokenIds.of(MODEL_CONFIG)
DRAWS = 20_000
Q, V, H = IDS.codebooks, IDS.codes, 8
FEW = 256  # codes of the distribution that is drawn 20,000 times: sorting 1024 of them takes a minute


@pytest.mark.parametrize("settings", [(1.5, 50, 0.6), (0.7, 25, 0.95), (1.0, -1, 1.0)])
def test_codes_are_distributed_as_they_say(settings):
    """Chi-square over 20,000 draws of one state in each codebook; a false alarm once in 10,000 runs of this test."""
    temperature, top_k, top_p = settings
    logits_QV = 2 * torch.randn(Q, FEW, generator=torch.Generator().manual_seed(1))
    expected_QV = truncate(logits_QV / temperature, top_k, top_p).softmax(-1).double()
    uniform_BQ = torch.rand(DRAWS, Q, generator=torch.Generator().manual_seed(2))
    pieces = [
        draw_codes(logits_QV.expand(len(part), Q, FEW), part, settings, reports_processed=False)
        for part in uniform_BQ.split(1000)
    ]
    codes_BQ = torch.cat([codes for codes, _ in pieces])
    logprobs_BQ = torch.cat([logprobs for _, logprobs in pieces])
    for book in range(Q):
        counts = torch.bincount(codes_BQ[:, book], minlength=FEW)
        assert (counts[expected_QV[book] == 0] == 0).all(), "nothing outside top-k and top-p"
        assert len(counts[expected_QV[book] > 0]) >= 2
        likely = expected_QV[book] * DRAWS >= 5
        found = [*counts[likely].tolist(), int(counts[~likely].sum())]
        wanted = [*(expected_QV[book][likely] * DRAWS).tolist(), float(expected_QV[book][~likely].sum()) * DRAWS]
        kept = [place for place, value in enumerate(wanted) if value > 0]
        wanted_sum = sum(wanted)
        test = stats.chisquare([found[i] for i in kept], [wanted[i] * DRAWS / wanted_sum for i in kept])
        assert test.pvalue > 1e-4 / Q, f"codebook {book}"
    raw = logits_QV.log_softmax(-1)[torch.arange(Q), codes_BQ]
    assert torch.equal(logprobs_BQ, raw), "before temperature and truncation"


def test_processed_log_probs_are_those_after_temperature_and_truncation():
    logits = torch.randn(3, Q, V, generator=torch.Generator().manual_seed(1))
    codes, logprobs = draw_codes(logits, torch.rand(3, Q), (0.8, 20, 0.9), reports_processed=True)
    expected = truncate(logits / 0.8, 20, 0.9).log_softmax(-1).gather(-1, codes[..., None])[..., 0]
    assert torch.equal(logprobs, expected)
    assert bool(logprobs.isfinite().all())


def test_temperature_zero_takes_the_most_probable_code():
    logits = torch.randn(3, Q, V)
    codes, _ = draw_codes(logits, torch.rand(3, Q), (0.0, -1, 1.0), reports_processed=False)
    assert torch.equal(codes, logits.argmax(-1))


# -------------------------------------------------------------------------------------------------- requests


class Backbone(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(IDS.text_vocab, H)


@pytest.fixture(scope="module")
def talker():
    """The class without vLLM's layers: hidden states are the embeddings summed so far."""
    torch.manual_seed(0)
    made = Talker.__new__(Talker)
    torch.nn.Module.__init__(made)
    made.ids, made.reports_processed, made._cursors = IDS, False, []
    made.model = Backbone()
    made.audio_embeddings = torch.nn.ModuleList(torch.nn.Embedding(V + 1, H) for _ in range(Q))
    made.audio_heads = torch.nn.ModuleList(torch.nn.Linear(H, V + 1, bias=False) for _ in range(Q))
    made.text_lm_head = torch.nn.Linear(H, IDS.text_vocab, bias=False)
    made.logits_processor = lambda head, hidden: head(hidden)
    made.rebuild_caches()
    return made.requires_grad_(False)


PROMPT = [IDS.im_start, 5, 6, 7, IDS.im_end]


def info(seed: int = 3, settings=(1.0, -1, 1.0)) -> dict:
    return {
        "prompt_codes": torch.full((len(PROMPT), Q), IDS.pad_code),
        "audio_sampling": list(settings),
        "audio_seed": [seed],
        "_omni_prompt_len": len(PROMPT),
    }


class Request:
    """One request as the runner drives it; the "hidden state" of a position is the sum of its inputs so far."""

    def __init__(self, talker: Talker, **settings) -> None:
        self.talker, self.info = talker, info(**settings)
        self.tokens, self.rows, self.logprobs = [*PROMPT], [], []

    def span(self, first: int, end: int) -> bool:
        """Feeds the positions [first, end); True if a position was drawn."""
        self.info["_omni_num_computed_tokens"] = first
        _, embeds, update = self.talker.preprocess(torch.tensor(self.tokens[first:end]), None, **self.info)
        self.info |= update
        if first == 0:
            self.hidden = torch.zeros(H)
        self.hidden = self.hidden + embeds.sum(0)
        output = self.talker.make_omni_output(
            self.hidden[None], model_intermediate_buffer=[self.info], request_token_spans=[(0, 1)]
        )
        codes = output.multimodal_outputs["codes"]
        self.rows += codes["audio"][0].tolist()
        self.logprobs += codes["logprobs"][0].tolist()
        self.logits = self.talker.compute_logits(output)[0]
        return len(codes["audio"][0]) == 1


ANSWER = [IDS.audio_start, *[IDS.gen_slot] * 4, IDS.delay_slot, *[IDS.delay_slot] * 15, IDS.audio_end, IDS.im_end]


def whole(talker, **settings) -> Request:
    request = Request(talker, **settings)
    for token in ANSWER:
        assert request.span(0 if len(request.tokens) == len(PROMPT) else len(request.tokens) - 1, len(request.tokens))
        assert bool(request.logits[token].isfinite()), "the token may be sampled here"
        request.tokens.append(token)
    return request


def test_an_answer_has_a_row_for_each_token_and_five_whole_frames(talker):
    request = whole(talker)
    rows = torch.tensor(request.rows)
    assert rows.shape == (len(ANSWER), Q)
    assert ((rows != IDS.pad_code).sum(0) == 5).all()
    assert [next(i for i, row in enumerate(request.rows) if row[q] != IDS.pad_code) for q in range(Q)] == [
        *range(1, Q + 1)
    ]
    assert ((torch.tensor(request.logprobs) == 0) == (rows == IDS.pad_code)).all()


def test_the_text_is_free_only_where_the_loop_lets_it_be(talker):
    request = Request(talker)
    request.span(0, len(PROMPT))
    banned = [IDS.text_pad, IDS.gen_slot, IDS.delay_slot, IDS.audio_end, IDS.im_end]
    assert set(torch.isneginf(request.logits).nonzero().flatten().tolist()) == set(banned)
    request = whole(talker)
    assert request.logits.isfinite().sum() == IDS.text_vocab - 4, "at the end, im_end too"
    request = Request(talker)
    for token in ANSWER[:8]:
        request.span(0 if len(request.tokens) == len(PROMPT) else len(request.tokens) - 1, len(request.tokens))
        request.tokens.append(token)
    assert request.logits.isfinite().nonzero().flatten().tolist() == [IDS.delay_slot], "the rest of them is forced"


def test_the_whole_text_head_is_asked_only_where_the_text_is_free(talker, monkeypatch):
    """In the published vocabulary it is a gigabyte in float32, and most positions are inside a clip."""
    cursors = []
    for fed in (0, 3, 8, len(ANSWER)):  # free before the clip, inside it, forced, free behind it
        cursors.append(Cursor())
        for token in ANSWER[:fed]:
            cursors[-1].advance(token, IDS)
    hidden = torch.randn(6, H, generator=torch.Generator().manual_seed(1))
    head, asked = talker.text_lm_head, []
    monkeypatch.setattr(talker, "logits_processor", lambda head, rows: [asked.append(rows), head(rows)][1])
    talker._cursors = [cursors[1], None, *cursors[2:], cursors[0]]
    logits = talker.compute_logits(hidden)
    assert torch.equal(torch.cat(asked).sort(0).values, hidden[[1, 3, 4, 5]].sort(0).values)
    expected = head(hidden)
    allowed = torch.ones_like(expected, dtype=torch.bool)
    allowed[0] = allowed[2] = False
    allowed[0, [IDS.gen_slot, IDS.delay_slot]] = True
    allowed[2, IDS.delay_slot] = True
    for row in (3, 4):
        allowed[row, talker._cursors[row].banned(IDS)] = False
    assert torch.equal(logits.isfinite(), allowed)
    assert logits[2].log_softmax(-1)[IDS.delay_slot] == 0
    chosen = allowed.clone()
    chosen[2] = False
    torch.testing.assert_close(logits[chosen], expected[chosen])


def test_a_seed_repeats_and_another_differs(talker):
    first, same, other = whole(talker), whole(talker), whole(talker, seed=4)
    assert first.rows == same.rows
    assert first.rows != other.rows
    assert whole(talker, settings=(0.0, -1, 1.0)).rows == whole(talker, seed=4, settings=(0.0, -1, 1.0)).rows


def test_a_prompt_in_chunks_and_a_preempted_request_sample_the_same(talker):
    straight = whole(talker)
    request = Request(talker)
    assert not request.span(0, 2), "a part of the prompt draws nothing"
    assert request.span(2, len(PROMPT))
    for place, token in enumerate(ANSWER):
        request.tokens.append(token)
        if place == len(ANSWER) - 1:
            break
        if place == 9:  # preempted: all is fed once more, in two chunks
            assert not request.span(0, 8)
            assert request.span(8, len(request.tokens))
        else:
            assert request.span(len(request.tokens) - 1, len(request.tokens))
    assert torch.tensor(request.logprobs).allclose(torch.tensor(straight.logprobs), atol=1e-4)
    assert request.rows == straight.rows


def test_prompt_codes_that_are_not_one_row_a_token_are_an_error(talker):
    request = Request(talker)
    request.info["prompt_codes"] = request.info["prompt_codes"][:-1]
    with pytest.raises(ValueError, match="4 rows of prompt codes for 5 prompt tokens"):
        request.span(0, len(PROMPT))


def test_requests_of_one_step_do_not_touch_each_other(talker):
    hidden = torch.randn(3, H, generator=torch.Generator().manual_seed(1))

    def answers():
        made = []
        for seed, settings in ((1, (1.0, -1, 1.0)), (2, (0.7, 20, 0.9)), (3, (1.0, -1, 1.0))):
            answer = Answer(torch.zeros(4, Q, dtype=torch.long), settings, torch.Generator().manual_seed(seed))
            for token in ANSWER[:9]:
                answer.cursor.advance(token, IDS)
            made.append(answer)
        return made

    together, _ = talker.draw(answers(), hidden)
    for place, answer in enumerate(answers()):
        alone, _ = talker.draw([answer], hidden[place : place + 1])
        assert torch.equal(alone[0], together[place])


def test_the_weights_have_their_published_names(talker):
    named = {
        name: None
        for name in talker.hf_to_vllm_mapper.apply_list(
            [
                "language_model.layers.0.mlp.up_proj.weight",
                "emb_ext.10.weight",
                "lm_heads.0.weight",
                "lm_heads.16.weight",
            ]
        )
    }
    assert [*named] == [
        "model.layers.0.mlp.up_proj.weight", "audio_embeddings.10.weight", "text_lm_head.weight",
        "audio_heads.15.weight",
    ]  # fmt: skip


def test_a_step_without_requests_has_no_output(talker):
    assert talker.make_omni_output(torch.zeros(2, H), model_intermediate_buffer=[]).multimodal_outputs == {}
