"""The published form: what a request may say, and what is said to one that may not."""

import contextlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tts.errors import ConfigError, DataError, UserError
from verl_tts.serving.generate_form import PUBLISHED, parse, read_audio_data, read_tags


@pytest.fixture
def references(tmp_path):
    (tmp_path / "voices/anna").mkdir(parents=True)
    (tmp_path / "voices/anna/1.wav").touch()
    (tmp_path / "secret.wav").touch()
    (tmp_path / "voices/link.wav").symlink_to(tmp_path / "secret.wav")
    (tmp_path / "voices/inside.wav").symlink_to(tmp_path / "voices/anna/1.wav")
    (tmp_path / "voices/circle.wav").symlink_to(tmp_path / "voices/circle.wav")
    os.mkfifo(tmp_path / "voices/pipe.wav")
    return tmp_path / "voices"


# ------------------------------------------------------------------ what is understood


def test_a_request_without_settings_is_sampled_as_published():
    request = parse({"text": "Good morning."}, None)
    sampling = request.sampling
    published = (1.0, 0.8, 50, 1.1, 4096)
    assert tuple(PUBLISHED.values()) == published
    assert (
        sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty, sampling.max_frames
    ) == published  # fmt: skip
    assert (request.seed, request.speech.instruction, request.speech.ref_audio) == (None, None, None)


def test_what_a_request_says_wins_and_the_engines_room_is_the_limit(references):
    body = {
        "text": "${instruction:Speak softly.}Good morning.",
        "audio_data": "anna/1.wav",
        "sampling_params": {"temperature": 0, "top_k": -1, "max_new_tokens": 10**12, "seed": 7},
        "stream": False,
    }
    request = parse(body, references, max_frames=100)
    assert (request.speech.text, request.speech.instruction) == ("Good morning.", "Speak softly.")
    assert request.speech.ref_audio == references / "anna/1.wav"
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.max_frames) == (0, -1, 100)
    assert request.seed == 7


@pytest.mark.parametrize(
    ("text", "tags", "spoken"),
    [
        ("Hello.", {}, "Hello."),
        ("${instruction:Softly.}Hello.", {"instruction": "Softly."}, "Hello."),
        ("${token:100}${instruction:Softly.}Hello.", {"token": "100", "instruction": "Softly."}, "Hello."),
        ("${instruction:A}${token:100}Hello.", {"instruction": "A"}, "${token:100}Hello."),
        ("Hello. ${instruction:Softly.}", {}, "Hello. ${instruction:Softly.}"),
        ("${instruction:}Hello.", {"instruction": ""}, "Hello."),
        ("${instruction:Softly", {}, "${instruction:Softly"),
        ("${other:1}Hello.", {}, "${other:1}Hello."),
    ],
)
def test_tags_count_at_the_beginning_and_in_their_order_alone(text, tags, spoken):
    assert read_tags(text) == (tags, spoken)


@given(st.text(alphabet="${}:instructiontoken ab", max_size=60))
def test_tags_and_text_are_the_whole_request(text):
    tags, spoken = read_tags(text)
    assert text == "".join(f"${{{name}:{value}}}" for name, value in tags.items()) + spoken


# ------------------------------------------------------------------ the folder of references


def test_a_recording_is_found_by_its_path_below_the_folder_and_by_its_whole_path(references):
    inside = (references / "anna/1.wav").resolve()
    for value in ("anna/1.wav", ["anna/1.wav"], str(inside), "./anna/../anna/1.wav", "inside.wav"):
        assert read_audio_data(value, references) == inside


@pytest.mark.parametrize(
    "value",
    [
        "../secret.wav", "anna/../../secret.wav", "/etc/passwd", "link.wav", "circle.wav", "pipe.wav", "anna", ".",
        "gone.wav", "a\0b", "x" * 5000, "~/secret.wav", "..\\secret.wav",
    ],
)  # fmt: skip
def test_nothing_else_is_and_the_answer_says_nothing_about_what_is_there(references, value):
    with pytest.raises(DataError) as refused:
        read_audio_data(value, references)
    assert str(refused.value).startswith('"audio_data": there is no recording')
    assert str(references) not in str(refused.value)
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize("value", ["http://127.0.0.1/x.wav", "HTTPS://x/y.wav", "data:audio/wav;base64,AAAA"])
def test_an_address_or_the_audio_itself_is_refused_as_such(references, value):
    with pytest.raises(DataError, match='"audio_data": no address is fetched and a request brings no audio; name the'):
        read_audio_data(value, references)


@given(st.text(max_size=50))
def test_no_text_leads_out_of_the_folder(tmp_path_factory, value):
    folder = tmp_path_factory.getbasetemp() / "only"
    folder.mkdir(exist_ok=True)
    with pytest.raises(DataError):
        read_audio_data(value, folder)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "the body has to be a JSON object"),
        ({}, '"text", what is to be spoken, is missing'),
        ({"text": None}, "\"text\" has to be one text, but is 'None'"),
        ({"text": ["a", "b"]}, '"text" has to be one text'),
        ({"text": "..."}, "no letter or digit to be spoken"),
        ({"text": "Hi", "rid": "1"}, "unknown key 'rid'; there are: text, audio_data"),
        ({"text": "Hi", "stream": True}, "an answer is one WAV file"),
        ({"text": "${token:5}Hi"}, "the tag ${token:...} has no meaning"),
        ({"text": "${ambient_sound:rain}Hi"}, "the tag ${ambient_sound:...} has no meaning"),
        ({"text": "Hi", "audio_data": "a.wav"}, "started without --references"),
        ({"text": "Hi", "audio_data": ["a", "b"]}, "the path of one recording"),
        ({"text": "Hi", "audio_data": {"url": "x"}}, "the path of one recording"),
        ({"text": "Hi", "audio_data": ""}, "the path of one recording"),
        ({"text": "Hi", "sampling_params": []}, '"sampling_params" has to be an object'),
        ({"text": "Hi", "sampling_params": {"n": 2}}, "unknown key 'n' of sampling_params; there are: temperature"),
        ({"text": "Hi", "sampling_params": {"top_k": 10**400}}, "sampling_params.top_k is beyond every limit"),
        ({"text": "Hi", "sampling_params": {"temperature": "hot"}}, "temperature='hot' has to be a number"),
        ({"text": "Hi", "sampling_params": {"\ud800": 1}}, "unknown key '\\ud800' of sampling_params"),
        ({"text": "Hi", "sampling_params": {"temperature": "\ud800"}}, "temperature='\\ud800' has to be a number"),
        ({"text": "Hi", "sampling_params": {"temperature": True}}, "temperature=True has to be a number"),
        ({"text": "Hi", "sampling_params": {"temperature": float("nan")}}, "temperature=nan has to be between"),
        ({"text": "Hi", "sampling_params": {"temperature": -1}}, "temperature=-1 has to be between"),
        (
            {"text": "Hi", "sampling_params": {"temperature": 1e-320}},
            "temperature=1e-320 has to be between 0.01 and 10",
        ),
        ({"text": "Hi", "sampling_params": {"top_p": 0}}, "top_p=0 has to be above 0"),
        ({"text": "Hi", "sampling_params": {"top_k": 0}}, "top_k=0 has to be between 1 and 65536, or -1"),
        ({"text": "Hi", "sampling_params": {"top_k": 1.5}}, "top_k=1.5 has to be a whole number"),
        ({"text": "Hi", "sampling_params": {"repetition_penalty": 0}}, "repetition_penalty=0 has to be between 0.1"),
        ({"text": "Hi", "sampling_params": {"top_k": 10**30}}, "has to be between 1 and 65536"),
        ({"text": "Hi \ud800"}, "the text is no Unicode"),
        ({"text": "${instruction:\ud800}Hi"}, "the instruction is no Unicode"),
        ({"text": "Hi", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens=0 has to be 1 or more"),
        ({"text": "Hi", "sampling_params": {"seed": -1}}, "seed=-1 has to be between 0"),
        ({"text": "Hi", "sampling_params": {"seed": None}}, "seed=None has to be a whole number"),
    ],
)
def test_a_wrong_request_is_answered_in_one_line(body, message):
    with pytest.raises((ConfigError, DataError)) as refused:
        parse(body, None)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(refused.value).encode(), "an answer is UTF-8"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["text", "audio_data", "sampling_params", "stream", "x"]), JSON, max_size=5)
    | st.fixed_dictionaries(
        {"text": st.just("Hi"), "sampling_params": st.dictionaries(st.sampled_from([*PUBLISHED]), JSON)}
    )
)
def test_no_request_makes_anything_but_an_answer(body):
    with contextlib.suppress(UserError):
        parse(body, None)
