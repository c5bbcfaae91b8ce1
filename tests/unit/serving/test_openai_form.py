"""vLLM-Omni's OpenAI-style form: its request, our prompt.

tests/loop/test_serving.py and tests/recipes/test_moss.py have real engines.
"""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest
from vllm_omni.entrypoints.openai.tts_adapters import TTS_ADAPTER_REGISTRY, resolve_adapter

from verl_tts.checkpoints.tiny_moss import build_tiny_moss
from verl_tts.rollout import moss, qwen3_tts
from verl_tts.serving import openai_form
from verl_tts.serving.generate_form import parse
from verl_tts.serving.openai_form import SpeechForm
from verl_tts.serving.server import GenerateForm
from verl_tts.serving.speech import open_model

REFERENCE = Path(__file__).parents[1] / "scorers/data/open_the_window.flac"


@pytest.fixture(scope="module")
def voices(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("voices")
    (folder / "an na").mkdir()
    (folder / "an na/1.flac").write_bytes(REFERENCE.read_bytes())
    soundfile.write(folder / "nan.wav", np.full(48_000, np.nan, np.float32), 24_000, subtype="FLOAT")
    return folder


@pytest.fixture(scope="module")
def form(tmp_path_factory, voices) -> GenerateForm:
    model = tmp_path_factory.mktemp("moss") / "model"
    build_tiny_moss(model)
    return GenerateForm(open_model(model, max_frames=64), voices, moss)


@pytest.fixture(scope="module")
def qwen_form(tiny_checkpoint, voices) -> GenerateForm:
    return GenerateForm(open_model(tiny_checkpoint, max_frames=64), voices, qwen3_tts)


def registered(form: GenerateForm, name: str, monkeypatch) -> SpeechForm:
    monkeypatch.setitem(TTS_ADAPTER_REGISTRY, name, TTS_ADAPTER_REGISTRY[name])
    openai_form.register(form)
    found = resolve_adapter(name)
    assert found is SpeechForm, (
        "vLLM-Omni's own reads recordings unchecked, and that of MOSS runs the checkpoint's code"
    )
    return found(SimpleNamespace())


@pytest.fixture
def adapter(form, monkeypatch) -> SpeechForm:
    return registered(form, "moss_tts", monkeypatch)


@pytest.fixture
def qwen(qwen_form, monkeypatch) -> SpeechForm:
    return registered(qwen_form, "qwen3_tts", monkeypatch)


def request(**fields: Any) -> OpenAICreateSpeechRequest:
    return OpenAICreateSpeechRequest(**{"input": "Good morning.", **fields})


def built(adapter: SpeechForm, asked: OpenAICreateSpeechRequest) -> tuple[dict[str, Any], list[Any]]:
    stages: list[Any] = ["the talker's by default", "the codec's"]
    return asyncio.run(adapter.build(asked, stages, False)).prompt, stages


def test_both_forms_ask_the_engine_the_same(adapter, form, voices):
    asked = request(
        instructions="Softly.", ref_audio=f"file://{voices}/an%20na/1.flac", seed=7, extra_params={"top_k": 9}
    )
    assert adapter.validate(asked) is None
    prompt, stages = built(adapter, asked)
    body = {"text": "${instruction:Softly.}Good morning.", "audio_data": "an na/1.flac"}
    same = parse(body | {"sampling_params": {"seed": 7, "top_k": 9}}, voices, 64)
    expected, expected_stages, _ = form.ask(same, form.speaker.prompt(same.speech))
    assert prompt["prompt_token_ids"] == expected["prompt_token_ids"]
    for name, value in expected["additional_information"].items():
        assert np.array_equal(prompt["additional_information"][name], value), name
    assert (prompt["additional_information"]["prompt_codes"] != 1024).any(), "the recording is in it"
    assert [str(stage) for stage in stages] == [str(stage) for stage in expected_stages]
    assert asked.seed is None, "or the server would put it over the streams that were made of it"


def test_both_forms_ask_the_engine_of_qwen3_tts_the_same(qwen, qwen_form, voices):
    asked = request(
        ref_audio=f"file://{voices}/an%20na/1.flac",
        task_type="Base",
        x_vector_only_mode=True,
        seed=7,
        max_new_tokens=10**12,
        extra_params={"repetition_penalty": 1.2},
    )
    assert qwen.validate(asked) is None
    prompt, stages = built(qwen, asked)
    body = {"text": "Good morning.", "audio_data": "an na/1.flac"}
    same = parse(body | {"sampling_params": {"seed": 7, "repetition_penalty": 1.2}}, voices, 64)
    expected, expected_stages, _ = qwen_form.ask(same, qwen_form.speaker.prompt(same.speech))
    assert prompt == expected
    assert [str(stage) for stage in stages] == [str(stage) for stage in expected_stages]
    left = (asked.seed, asked.max_new_tokens, asked.extra_params)
    assert left == (None, None, None), "or the server would put them over what was made of them"


@pytest.mark.parametrize("policy", ["adapter", "qwen"])
def test_a_recording_of_what_is_no_number_is_the_clients_fault(policy, request):
    asked = OpenAICreateSpeechRequest(input="Good morning.", ref_audio="nan.wav")
    with pytest.raises(ValueError, match=r"nan\.wav has samples that are not finite"):
        built(request.getfixturevalue(policy), asked)


def test_a_voice_is_a_recording_too_and_what_is_not_said_is_as_published(adapter, voices):
    named, by_path = (built(adapter, request(**{field: "an na/1.flac"})) for field in ("voice", "ref_audio"))
    assert named[0]["prompt_token_ids"] == by_path[0]["prompt_token_ids"]
    temperature, top_k, top_p = named[0]["additional_information"]["audio_sampling"]
    assert (temperature, top_k, top_p) == (1.0, 50, 0.8)
    assert named[1][0].max_tokens == 64, "the engine has room for no more"
    assert named[1][0].seed != by_path[1][0].seed, "without a seed each request has another"
    assert built(adapter, request(max_new_tokens=20))[1][0].max_tokens == 20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": "..."}, "has no letter or digit to be spoken"),
        ({"stream": True}, "stream: an answer is one file"),
        ({"task_type": "Base"}, "task_type has no meaning for moss here"),
        ({"ambient_sound": "rain"}, "ambient_sound has no meaning for moss here"),
        ({"ref_audio": "a.wav", "voice": "b.wav"}, "ref_audio and voice both name a recording"),
        ({"voice": "alloy"}, "\"voice\": there is no recording 'alloy' below the folder of references"),
        ({"ref_audio": "file:///etc/passwd"}, "\"ref_audio\": there is no recording '/etc/passwd' below"),
        ({"ref_audio": "http://127.0.0.1:9/x.wav"}, '"ref_audio": no address is fetched and a request brings no audio'),
        ({"ref_audio": "data:audio/wav;base64,UklGRg=="}, '"ref_audio": no address is fetched and a request brings'),
        ({"seed": 2**60}, "has to be between 0 and"),
        ({"extra_params": {"temperature": 99}}, "temperature=99 has to be between 0.01 and 10"),
        ({"extra_params": {"speed": 2}}, "unknown key 'speed' of sampling_params"),
        ({"ref_audio": "file://[/an%20na/1.flac"}, "is no file:// address"),
        ({"ref_audio": "file://elsewhere/an%20na/1.flac"}, "names a host"),
        ({"language": "\ud800"}, "the language is no Unicode"),
    ],
)
def test_a_request_that_is_wrong_is_one_line(adapter, fields, message):
    found = adapter.validate(request(**fields))
    assert message in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task_type": "CustomVoice"}, "task_type has no meaning for qwen3_tts here"),
        ({"task_type": "Base", "ref_text": "Hi."}, "ref_text has no meaning for qwen3_tts here"),
        ({"x_vector_only_mode": False}, "x_vector_only_mode has no meaning for qwen3_tts here"),
        ({"speaker_embedding": [0.0] * 64}, "speaker_embedding has no meaning"),
        ({"ref_audio": "data:audio/wav;base64,UklGRg=="}, "a request brings no audio"),
        ({"extra_params": {"temperature": 1e-39}}, "temperature=1e-39 has to be between 0.01 and 10, or 0"),
    ],
)
def test_what_qwen3_tts_does_not_do_here_is_one_line(qwen, fields, message):
    assert message in qwen.validate(request(**fields))


def test_a_prompt_that_is_too_long_is_the_clients_fault(adapter):
    with pytest.raises(ValueError, match="cut it into sentences"):
        built(adapter, request(input="word " * 2000))
