"""The bytes of the protocol: what is sent arrives, and nothing but a valid answer becomes a score."""

import base64
import math

import hypothesis.strategies as st
import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from verl_tts.errors import DataError, ScorerError
from verl_tts.rewards.protocol import (
    BadRequestError,
    Clip,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    read_answer,
)
from verl_tts.types import Score, Waveform

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = (
    st.none() | st.booleans() | TEXT | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
CLIPS = st.builds(
    Clip,
    st.builds(
        Waveform,
        arrays(np.float32, st.integers(1, 50), elements=FINITE),
        st.integers(1, 192_000),
    ),
    TEXT.filter(str.strip),
    st.dictionaries(TEXT, SCALARS, max_size=4),
)
CLIP = Clip(Waveform(np.array([0.5, -0.25], np.float32), 24_000), "Hi.", {"id": "a"})


def request(**changes) -> bytes:
    """A right request with some fields changed, or removed by ``...``."""
    fields = {**orjson.loads(encode_request(CLIP)), **changes}
    return orjson.dumps({name: value for name, value in fields.items() if value is not ...})


@given(CLIPS)
def test_a_request_arrives_as_it_was_sent(clip):
    arrived = decode_request(encode_request(clip))
    assert arrived.waveform.sample_rate_hz == clip.waveform.sample_rate_hz
    assert arrived.waveform.samples_S.tobytes() == clip.waveform.samples_S.tobytes()
    assert arrived.waveform.samples_S.dtype == np.float32
    assert arrived.prompt == clip.prompt
    assert arrived.metadata == dict(clip.metadata)


@pytest.mark.parametrize(
    "samples_S",
    [np.array([0.5, 9.0, -0.25, 9.0], np.float32)[::2], np.array([0.5, -0.25], ">f4"), np.array([0.5, -0.25])],
    ids=["strided", "big endian", "double precision"],
)
def test_samples_leave_as_contiguous_little_endian_floats(samples_S):
    body = orjson.loads(encode_request(Clip(Waveform(samples_S, 24_000), "Hi.", {})))
    assert base64.b64decode(body["waveform_f32_base64"]) == b"\x00\x00\x00\x3f\x00\x00\x80\xbe"
    assert body["num_samples"] == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, [1], {"a": 1}, np.float32(1), 2**70, "\ud800"], ids=repr)
def test_metadata_that_json_cannot_carry_name_their_row(value):
    with pytest.raises(DataError, match="row 'a'"):
        encode_request(Clip(CLIP.waveform, "Hi.", {"id": "a", "target_seconds": value}))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"\xff", "body"),
        (request(protocol_version="2"), "protocol_version"),
        (request(protocol_version=1), "protocol_version"),
        (request(protocol_version=...), "protocol_version"),
        (request(waveform_f32_base64=...), "waveform_f32_base64"),
        (request(waveform_f32_base64="?"), "waveform_f32_base64"),
        (request(waveform_f32_base64="AAAA"), "waveform_f32_base64"),
        (request(waveform_f32_base64="é"), "waveform_f32_base64"),
        (request(waveform_f32_base64="", num_samples=0), "waveform_f32_base64"),
        (request(waveform_f32_base64=base64.b64encode(np.float32([np.nan, 0])).decode()), "waveform_f32_base64"),
        (request(waveform_f32_base64=base64.b64encode(np.float32([np.inf, 0])).decode()), "waveform_f32_base64"),
        (request(num_samples=3), "num_samples"),
        (request(num_samples=2.0), "num_samples"),
        (request(num_samples="2"), "num_samples"),
        (request(num_samples=...), "num_samples"),
        (request(sample_rate=0), "sample_rate"),
        (request(sample_rate=True), "sample_rate"),
        (request(sample_rate=24e3), "sample_rate"),
        (request(sample_rate=10**18), "sample_rate"),
        (
            request(num_samples=3601, waveform_f32_base64=base64.b64encode(bytes(4 * 3601)).decode(), sample_rate=1),
            "sample_rate",
        ),
        (request(prompt=" \n"), "prompt"),
        (request(prompt=None), "prompt"),
        (request(metadata=None), "metadata"),
        (request(metadata={"words": ["a"]}), "metadata.words"),
    ],
)
def test_a_bad_request_is_named_by_its_field(body, field):
    with pytest.raises(BadRequestError, match=rf"^{field}: "):
        decode_request(body)


@settings(max_examples=300)
@given(st.binary(max_size=60) | JSON.map(orjson.dumps) | st.data())
def test_no_request_breaks_the_server(source):
    if not isinstance(source, bytes):
        whole = request()
        start = source.draw(st.integers(0, len(whole)))
        source = whole[:start] + source.draw(st.binary(max_size=4)) + whole[start + source.draw(st.integers(0, 4)) :]
    try:
        clip = decode_request(source)
    except BadRequestError:
        return
    assert np.isfinite(clip.waveform.samples_S).all()
    assert clip.prompt.strip()


@settings(max_examples=500)
@given(
    st.binary(max_size=40)
    | JSON.map(orjson.dumps)
    | st.dictionaries(st.sampled_from(["score", "error", "id", "num_samples", "cer"]), JSON, max_size=5).map(
        orjson.dumps
    )
)
def test_no_answer_but_a_finite_number_under_score_becomes_a_score(body):
    try:
        score = decode_answer(body, CLIP, (-1e300, 1e300))
    except ScorerError as error:
        refusal = str(error)
    else:
        check_score(score, orjson.loads(body))
        return
    assert "\n" not in refusal
    assert len(refusal) < 500


def check_score(score: Score, answer: dict) -> None:
    assert type(answer["score"]) in (int, float)
    assert score.total == float(answer["score"])
    assert math.isfinite(score.total)
    assert all(math.isfinite(part) for part in score.parts.values())
    assert answer.get("error") is None


def test_a_function_may_not_return_what_json_could_not_carry():
    for total in (10**400, math.nan, math.inf, True, "0.5", None, [0.5], np.float32(0.5)):
        with pytest.raises(ScorerError, match="score"):
            read_answer({"score": total}, CLIP)


@pytest.mark.parametrize("key", ["scorer_latency_s", "scorer_retries", "scorer_waiting_s"])
def test_what_the_client_notes_is_not_the_answers_to_say(key):
    with pytest.raises(ScorerError, match=f"the key '{key}', under which the client notes its own"):
        read_answer({"score": 0.5, key: "soon"}, CLIP)


def test_an_echo_that_agrees_is_accepted():
    body = b'{"score": 1, "id": "a", "num_samples": 2}'
    assert decode_answer(body, CLIP) == Score(1.0)


def test_the_ends_of_the_range_are_inside():
    assert decode_answer(b'{"score": 0}', CLIP, (0.0, 1.0)).total == 0.0
    assert decode_answer(b'{"score": 1}', CLIP, (None, 1.0)).total == 1.0


def test_a_server_cannot_send_a_number_that_json_does_not_have():
    with pytest.raises(ValueError, match="cer"):
        encode_answer({"score": 0.5, "cer": math.nan})
