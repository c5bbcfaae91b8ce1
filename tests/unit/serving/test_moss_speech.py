"""MOSS in vLLM-Omni's OpenAI-style form: its request, our prompt; tests/recipes/test_moss.py has a real engine."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest
from vllm_omni.entrypoints.openai.tts_adapters import TTS_ADAPTER_REGISTRY, resolve_adapter

from verl_tts.checkpoints.tiny_moss import build_tiny_moss
from verl_tts.rollout import moss
from verl_tts.serving import moss_speech
from verl_tts.serving.generate_form import parse
from verl_tts.serving.moss_speech import MossSpeech
from verl_tts.serving.server import GenerateForm
from verl_tts.serving.speech import open_model

REFERENCE = Path(__file__).parents[1] / "scorers/data/open_the_window.flac"


@pytest.fixture(scope="module")
def voices(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("voices")
    (folder / "an na").mkdir()
    (folder / "an na/1.flac").write_bytes(REFERENCE.read_bytes())
    return folder


@pytest.fixture(scope="module")
def form(tmp_path_factory, voices) -> GenerateForm:
    model = tmp_path_factory.mktemp("moss") / "model"
    build_tiny_moss(model)
    return GenerateForm(open_model(model, max_frames=64), voices, moss)


@pytest.fixture
def adapter(form, monkeypatch) -> MossSpeech:
    monkeypatch.setitem(TTS_ADAPTER_REGISTRY, "moss_tts", TTS_ADAPTER_REGISTRY["moss_tts"])
    moss_speech.register(form)
    found = resolve_adapter("moss_tts")
    assert found is MossSpeech, "vLLM-Omni's own would run the checkpoint's code"
    return found(SimpleNamespace())


def request(**fields: Any) -> OpenAICreateSpeechRequest:
    return OpenAICreateSpeechRequest(**{"input": "Good morning.", **fields})


def built(adapter: MossSpeech, asked: OpenAICreateSpeechRequest) -> tuple[dict[str, Any], list[Any]]:
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
        ({"task_type": "Base"}, "task_type has no meaning for MOSS"),
        ({"ambient_sound": "rain"}, "ambient_sound has no meaning for MOSS"),
        ({"ref_audio": "a.wav", "voice": "b.wav"}, "ref_audio and voice both name a recording"),
        ({"voice": "alloy"}, "\"voice\": there is no recording 'alloy' below the folder of references"),
        ({"ref_audio": "file:///etc/passwd"}, "\"ref_audio\": there is no recording '/etc/passwd' below"),
        ({"ref_audio": "http://127.0.0.1:9/x.wav"}, "there is no recording"),
        ({"seed": 2**60}, "has to be between 0 and"),
        ({"extra_params": {"temperature": 99}}, "temperature=99 has to be between 0"),
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


def test_a_prompt_that_is_too_long_is_the_clients_fault(adapter):
    with pytest.raises(ValueError, match="cut it into sentences"):
        built(adapter, request(input="word " * 2000))
