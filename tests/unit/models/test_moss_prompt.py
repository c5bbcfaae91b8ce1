"""The delay pattern and the prompts: what holds for every number of codebooks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tts.checkpoints.tiny_moss import MODEL_CONFIG
from verl_tts.errors import ConfigError, DataError
from verl_tts.models.moss_prompt import (
    Cursor,
    Text,
    TokenIds,
    build_prompt,
    delay,
    frames_of,
    frames_of_codes,
    plan,
    undelay,
)

IDS = TokenIds.of(MODEL_CONFIG)
BOOKS = [1, 2, 3, 8, 16, 32]
books = st.sampled_from(BOOKS)


def ids_of(codebooks: int) -> TokenIds:
    return replace(IDS, codebooks=codebooks)


def codes(frames: int, codebooks: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, IDS.codes, (frames, codebooks))


def answer(ids: TokenIds, frames: list[int], seed: int, tail: list[int]) -> tuple[list[int], np.ndarray]:
    """Clips of so many frames, drawn by the cursor; ``tail`` is what comes after the last."""
    cursor, tokens, rows, random = Cursor(), [], [], np.random.default_rng(seed)
    wanted = [token for count in frames for token in [ids.audio_start, *[ids.gen_slot] * (count - 1), ids.delay_slot]]
    wanted += tail
    while wanted or cursor.forced(ids) is not None:
        forced = cursor.forced(ids)
        token = wanted.pop(0) if forced is None else forced
        row = np.full(ids.codebooks, ids.pad_code)
        for book in cursor.active(ids):
            row[book] = random.integers(0, ids.codes)
        tokens.append(token)
        rows.append(row)
        cursor.advance(token, ids)
    return tokens, np.stack(rows)


@given(books, st.integers(0, 40), st.integers(0, 99))
def test_delay_and_its_inverse(codebooks, frames, seed):
    codes_FQ = codes(frames, codebooks, seed)
    rows_RQ = delay(codes_FQ, IDS.pad_code)
    assert len(rows_RQ) == (frames + codebooks - 1 if frames else 0)
    assert (rows_RQ != IDS.pad_code).sum() == codes_FQ.size
    if frames:
        assert np.array_equal(undelay(rows_RQ), codes_FQ)


@given(books, st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(0, 99))
def test_an_answer_of_whole_clips_has_all_of_their_frames(codebooks, frames, seed):
    ids = ids_of(codebooks)
    tokens, grid_TQ = answer(ids, frames, seed, [ids.im_end])
    assert len(tokens) == sum(count + codebooks + 1 for count in frames) + 1, "start, frames and delay, end; im_end"
    codes_FQ = frames_of(ids, tokens, grid_TQ)
    assert codes_FQ.shape == (sum(frames), codebooks)
    assert ((codes_FQ >= 0) & (codes_FQ < ids.codes)).all()
    active_TQ = plan(ids, tokens).active_TQ
    assert (active_TQ.sum(axis=0) == sum(frames)).all(), "each codebook has a code for each frame"
    assert np.array_equal(active_TQ, grid_TQ != ids.pad_code)
    for book in range(1, codebooks):
        assert np.array_equal(active_TQ[1:, book], active_TQ[:-1, book - 1]), "a codebook is one position behind"


@given(books, st.integers(1, 12), st.integers(0, 60), st.integers(0, 99))
def test_an_answer_that_was_cut_keeps_the_frames_that_are_whole(codebooks, frames, cut, seed):
    ids = ids_of(codebooks)
    tokens, grid_TQ = answer(ids, [frames], seed, [ids.im_end])
    whole_FQ, kept = frames_of(ids, tokens, grid_TQ), min(cut, len(tokens))
    cut_FQ = frames_of(ids, tokens[:kept], grid_TQ[:kept])
    assert len(cut_FQ) == min(frames, max(0, kept - codebooks))
    assert np.array_equal(cut_FQ, whole_FQ[: len(cut_FQ)])


@given(books, st.lists(st.integers(1, 6), min_size=1, max_size=2), st.integers(0, 99))
def test_what_was_sampled_follows_from_the_text(codebooks, frames, seed):
    ids = ids_of(codebooks)
    tokens, _ = answer(ids, frames, seed, [ids.im_end])
    planned = plan(ids, tokens)
    forced = planned.kind_T == Text.FORCED
    assert forced.sum() == len(frames) * codebooks, "the first delay token is sampled; the others and the end are not"
    nothing_T = ~planned.sampled_TC.any(axis=1)
    assert [tokens[place] for place in np.flatnonzero(nothing_T)] == [ids.audio_end] * len(frames)


@pytest.mark.parametrize("codebooks", BOOKS)
def test_a_token_that_may_not_stand_somewhere_is_refused(codebooks):
    ids = ids_of(codebooks)
    tokens, _ = answer(ids, [3], 0, [ids.im_end])
    for place, wrong in (
        (0, ids.gen_slot),
        (0, ids.im_end),
        (1, 5),
        (4, ids.gen_slot),
        (len(tokens) - 1, ids.audio_end),
    ):
        with pytest.raises(DataError, match=rf"text token {wrong} cannot stand at position {place}"):
            plan(ids, [*tokens[:place], wrong])


def test_codes_that_do_not_fit_their_text_are_refused():
    tokens, grid_TQ = answer(IDS, [3], 0, [IDS.im_end])
    for place, code in (((0, 0), 5), ((1, 0), IDS.pad_code), ((1, 0), -1), ((3, 9), 7)):
        wrong_TQ = grid_TQ.copy()
        wrong_TQ[place] = code
        with pytest.raises(DataError, match=rf"position {place[0]}, codebook {place[1]} has the code {code}"):
            frames_of(IDS, tokens, wrong_TQ)
    with pytest.raises(DataError, match="shape"):
        frames_of(IDS, tokens, grid_TQ[:-1])
    assert frames_of_codes(grid_TQ[:0], IDS.pad_code).shape == (0, 16)


# ---------------------------------------------------------------------------------------------------- prompts


def encode(text: str) -> list[int]:
    """One token a character."""
    return [ord(character) % 256 for character in text]


def spoken(prompt) -> str:
    marks = {IDS.im_start: "<|im_start|>", IDS.im_end: "<|im_end|>", IDS.audio_start: "<A>", IDS.audio_end: "</A>"}
    slots = {IDS.gen_slot: "g", IDS.delay_slot: "d", IDS.user_slot: "u"}
    return "".join((marks | slots).get(token) or chr(token) for token in prompt.text_P)


def test_a_request_without_a_reference_is_one_turn_of_named_fields():
    prompt = build_prompt(IDS, encode, "Hi.", instruction="Softly.")
    assert spoken(prompt) == (
        "<|im_start|>user\n<user_inst>\n- Reference(s):\nNone\n- Instruction:\nSoftly.\n- Tokens:\nNone\n- Quality:\n"
        "None\n- Sound Event:\nNone\n- Ambient Sound:\nNone\n- Language:\nNone\n- Text:\nHi.\n</user_inst><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (prompt.codes_PQ == IDS.pad_code).all(), "the pad code is embedded at every position of text"
    assert prompt.codes_PQ.shape == (len(prompt.text_P), 16)


def test_a_reference_in_the_request_stands_in_its_field():
    prompt = build_prompt(IDS, encode, "Hi.", reference_FQ=codes(3, 16, 0), reference_format="single_turn")
    assert f"- Reference(s):\n[S1]:\n<A>{'u' * 18}</A>\n- Instruction:\nNone" in spoken(prompt)
    assert spoken(prompt).count("<|im_start|>") == 2


def test_a_reference_in_context_is_an_answer_to_an_empty_request():
    prompt = build_prompt(IDS, encode, "Hi.", instruction="Softly.", reference_FQ=codes(3, 16, 0))
    empty, target = (
        spoken(build_prompt(IDS, encode, text, instruction=instruction)).removesuffix("<|im_start|>assistant\n")
        for text, instruction in (("None", None), ("Hi.", "Softly."))
    )
    clip = f"<|im_start|>assistant\n<A>{'g' * 3}{'d' * 15}</A><|im_end|>\n"
    assert spoken(prompt) == f"{empty}{clip}{target}<|im_start|>assistant\n"


@given(st.sampled_from(["in_context", "single_turn"]), books, st.integers(1, 9), st.integers(0, 99))
def test_a_reference_is_delayed_between_its_marks(reference_format, codebooks, frames, seed):
    ids, codes_FQ = ids_of(codebooks), codes(frames, codebooks, seed)
    prompt = build_prompt(ids, encode, "Hi.", reference_FQ=codes_FQ, reference_format=reference_format)
    start, end = prompt.text_P.index(ids.audio_start), prompt.text_P.index(ids.audio_end)
    assert np.array_equal(prompt.codes_PQ[start + 1 : end], delay(codes_FQ, ids.pad_code))
    assert (np.delete(prompt.codes_PQ, np.arange(start + 1, end), axis=0) == ids.pad_code).all()


def test_an_unknown_format_or_a_reference_of_another_shape_is_refused():
    with pytest.raises(ConfigError, match="Unknown reference format 'sideways'"):
        build_prompt(IDS, encode, "Hi.", reference_FQ=codes(3, 16, 0), reference_format="sideways")
    for shape in ((0, 16), (3, 8)):
        with pytest.raises(DataError, match="a reference clip has codes of shape"):
            build_prompt(IDS, encode, "Hi.", reference_FQ=codes(*shape, 0))
