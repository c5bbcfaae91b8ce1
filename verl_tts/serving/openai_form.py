"""vLLM-Omni's ``POST /v1/audio/speech``, as OpenAI's: what a request's fields are to the policies here.

    {"input": "Good morning.", "instructions": "Speak softly.", "ref_audio": "file:///data/voices/anna/1.wav",
     "seed": 7, "max_new_tokens": 400, "extra_params": {"temperature": 1.0, "top_p": 0.8, "top_k": 50}}

``voice`` may name the recording in place of ``ref_audio``: clients of OpenAI's have to send it. Both are paths below
the folder that the server was started with, or a file:// address of one. Qwen3-TTS speaks with the embedding of the
recording, as its rollouts do: there is no cloning from a transcript (``ref_text``).

vLLM-Omni 0.24's own adapters are not asked. They read recordings without a check, which one of NaNs ends the engine
by, and they make other prompts than a rollout; MOSS's runs the processor that lies in the model's directory, code of
the checkpoint. Adapters are registered by the name of a model; this one takes their place.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest
from vllm_omni.entrypoints.openai.tts_adapters import TTS_ADAPTER_REGISTRY, ARTTSAdapter, PreparedRequest

from verl_tts.errors import DataError, UserError
from verl_tts.serving.generate_form import Request, read_audio_data, read_sampling
from verl_tts.serving.server import GenerateForm
from verl_tts.serving.speech import Speech, one_line

NAMES = {"qwen3_tts": "qwen3_tts", "moss": "moss_tts"}  # vLLM-Omni's, of the stages that a rollout starts
# What other models read of a request, and a recording or an instruction does not say for these.
MEANINGLESS = (
    "task_type",
    "ref_text",
    "ref_audio_2",
    "ambient_sound",
    "duration_seconds",
    "speaker_embedding",
    "x_vector_only_mode",
    "initial_codec_chunk_frames",
    "non_streaming_mode",
    "word_timestamps",
)
# What of it says how a policy speaks anyway.
IMPLIED: Mapping[str, Mapping[str, Any]] = {"qwen3_tts": {"task_type": "Base", "x_vector_only_mode": True}}


def register(form: GenerateForm) -> None:
    """Has this process's server ask the policy as ``form`` does."""
    SpeechForm.form = form
    SpeechForm.name = NAMES[form.speaker.spec.model]
    TTS_ADAPTER_REGISTRY[SpeechForm.name] = SpeechForm


class SpeechForm(ARTTSAdapter):
    form: ClassVar[GenerateForm]

    def validate(self, request: OpenAICreateSpeechRequest) -> str | None:
        try:
            self.parse(request)
        except UserError as error:
            return one_line(error)
        return None

    def parse(self, request: OpenAICreateSpeechRequest) -> Request:
        """Raises ``DataError`` or ``ConfigError``: one line for the client."""
        if request.is_streaming():
            raise DataError("stream: an answer is one file; leave it out")
        policy = self.form.speaker.spec.model
        for field in MEANINGLESS:
            unsaid = OpenAICreateSpeechRequest.model_fields[field].default
            if getattr(request, field) not in (unsaid, IMPLIED.get(policy, {}).get(field, unsaid)):
                raise DataError(f"{field} has no meaning for {policy} here; leave it out")
        if request.ref_audio is not None and request.voice is not None:
            raise DataError("ref_audio and voice both name a recording; give one of them")
        field = "voice" if request.ref_audio is None else "ref_audio"
        recording = read_audio_data(_path(getattr(request, field), field), self.form.references, field)
        given = {"seed": request.seed, "max_new_tokens": request.max_new_tokens}
        settings = (request.extra_params or {}) | {name: value for name, value in given.items() if value is not None}
        sampling, seed = read_sampling(settings, self.form.speaker.spec.max_response_tokens)
        speech = Speech(request.input, recording, instruction=request.instructions, language=request.language)
        return Request(speech, sampling, seed)

    async def build(
        self, request: OpenAICreateSpeechRequest, sampling_params_list: list[Any], has_inline_ref_audio: bool
    ) -> PreparedRequest:
        """``sampling_params_list`` is the request's own: the parameters of both stages are put into it."""
        asked = self.parse(request)
        try:
            given = await asyncio.to_thread(self.form.speaker.prompt, asked.speech)
        except UserError as error:
            raise ValueError(one_line(error)) from error  # which the server answers with 400
        prompt, sampling_params_list[:], _ = self.form.ask(asked, given)
        # They are in there, checked, the seed as a stream for each stage; the server would put them over it.
        request.seed = request.max_new_tokens = request.extra_params = None
        return PreparedRequest(prompt=prompt, model_type=self.name)


def _path(value: Any, field: str) -> Any:
    """``_path("file:///data/a%20b.wav", field) == "/data/a b.wav"``; what is no such address stays as it is.

    Raises ``DataError`` for an address that is broken, or of another machine.
    """
    if not isinstance(value, str) or not value.startswith("file:"):
        return value
    try:
        address = urlsplit(value)
    except ValueError as error:
        raise DataError(f'"{field}": {value[:80]!r} is no file:// address') from error
    if address.netloc not in ("", "localhost"):
        raise DataError(f'"{field}": {value[:80]!r} names a host; a recording is a file of this server')
    return unquote(address.path)
