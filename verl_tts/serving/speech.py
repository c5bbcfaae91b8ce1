"""A text to be spoken, outside a run: what a model is given for it, how it is sampled, and the engine that speaks.

The prompt, the sampler and the engine are those of a rollout (``rollout/``), without Ray and without a trainer.

Shapes: ``S`` audio sample, ``H`` hidden size of the talker.
"""

import asyncio
import importlib
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from verl_tts.checkpoints.manifest import MANIFEST
from verl_tts.config.compose import compose, worker_environment
from verl_tts.config.model_dir import codec_dir, read_model_config, speaker_size
from verl_tts.config.validate import COLDEST, MAX_FRAMES
from verl_tts.data.emotions import instruction
from verl_tts.data.schema import is_speakable
from verl_tts.data.speaker import read_speaker
from verl_tts.errors import CheckpointError, ConfigError, DataError, RunStopped, TTSError
from verl_tts.launch import WORKER_ENVIRONMENT
from verl_tts.models import qwen3_tts_prompt as prompts
from verl_tts.models.plain_text import encoder
from verl_tts.report.console import Say, output_to
from verl_tts.rollout.alone import as_done, engine, spec_alone
from verl_tts.rollout.spec import RolloutSpec
from verl_tts.types import CodecRollout, Conditioning, Given, PromptRow, Waveform

MAX_TOP_K = 1 << 16  # beyond any codebook
MAX_SEED = 2**48 - 1  # as those that a run derives
VOICES_KEPT = 256
AT_ONCE = 8  # texts in the engine; the others wait outside it


@dataclass(frozen=True)
class Speech:
    """One text and how it is to be said. ``ref_audio`` is the recording whose voice it gets."""

    text: str
    ref_audio: Path | None = None
    emotion: str | None = None
    instruction: str | None = None
    language: str | None = None

    def __post_init__(self) -> None:
        for name in ("text", "ref_audio", "instruction", "language"):
            if not _is_unicode(str(getattr(self, name) or "")):
                raise DataError(f"the {name} is no Unicode: it holds half of a surrogate pair")
        if not is_speakable(self.text):
            raise DataError(f"the text {self.text[:40]!r} has no letter or digit to be spoken")
        if self.emotion is not None and self.instruction is not None:
            raise ConfigError("an emotion and an instruction: an emotion stands for an instruction, give one of them")

    @property
    def spoken_as(self) -> str | None:
        """The instruction, an emotion's too. Raises ``DataError`` for an unknown emotion."""
        return self.instruction if self.emotion is None else instruction(self.emotion)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class Sampling:
    """How codes are drawn. The defaults are those of training: the whole distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    max_frames: int = 360

    def __post_init__(self) -> None:
        if self.temperature != 0 and not COLDEST <= self.temperature <= 10:
            raise ConfigError(
                f"temperature={self.temperature} has to be between {COLDEST} and 10, or 0 for the likeliest code"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} has to be above 0 and at most 1")
        if self.top_k != -1 and not 1 <= self.top_k <= MAX_TOP_K:
            raise ConfigError(f"top_k={self.top_k} has to be between 1 and {MAX_TOP_K}, or -1 for all codes")
        if not 0.1 <= self.repetition_penalty <= 10:
            raise ConfigError(f"repetition_penalty={self.repetition_penalty} has to be between 0.1 and 10")
        if not 1 <= self.max_frames <= MAX_FRAMES:
            raise ConfigError(f"max_frames={self.max_frames} has to be between 1 and {MAX_FRAMES}")


def check_seed(seed: int) -> int:
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"seed={seed} has to be between 0 and {MAX_SEED}")
    return seed


# ------------------------------------------------------------------------------------------------- the policy


class Qwen3TTS:
    """What a Qwen3-TTS Base model is given: a text and a voice. It takes no instruction."""

    def __init__(self, model: Path, config: Mapping[str, Any], voice: Path | None, language: str, tts: Any) -> None:
        """``voice`` is a recording, or a speaker embedding (.json), of texts that bring none."""
        self._model, self._config, self._voice, self._language = model, config, voice, language
        self._ids, self._encode = prompts.TokenIds.of(config), encoder(_tokenizer(model))
        self._embed = lru_cache(VOICES_KEPT)(self._embed_file)

    def __call__(self, speech: Speech) -> Conditioning:
        if speech.spoken_as is not None:
            raise ConfigError(f"{self._model} is a Qwen3-TTS Base model, which takes no instruction and no emotion")
        voice = speech.ref_audio or self._voice
        if voice is None:
            raise ConfigError(
                f"{self._model} speaks with the voice of a recording; name one (--ref-audio, or in a request)"
            )
        language = speech.language or self._language
        return Conditioning(
            text_ids=prompts.text_ids_of(self._ids, self._encode, speech.text),
            speaker_H=self._embed(voice, voice.stat().st_mtime_ns if voice.exists() else 0),
            language=language,
            language_id=prompts.language_id(self._config, language),
        )

    def _embed_file(self, voice: Path, changed_ns: int) -> np.ndarray:
        """``changed_ns`` is there for the cache: a file that is replaced is another voice."""
        if voice.suffix == ".json":
            return read_speaker(voice, speaker_size(dict(self._config)))
        from verl_tts.data.reference import read_reference

        reference = read_reference(voice)
        from verl_tts.models.qwen3_tts_speaker import embed_speaker

        return embed_speaker(self._model, reference)


class Moss:
    """What MOSS is given: a text, and an instruction and the voice of a recording where there are any."""

    def __init__(self, model: Path, config: Mapping[str, Any], voice: Path | None, language: str, tts: Any) -> None:
        from verl_tts.rollout.moss import Conditioner
        from verl_tts.rollout.reference import References

        codec = codec_dir(str(model), dict(config), tts.codec_path)
        references = References(codec, Path("/"), codebooks=config["n_vq"], max_seconds=tts.reference_seconds)
        self._condition = Conditioner(
            config, _tokenizer(model), references, language=language, reference_format=tts.reference_format
        )
        self._voice = voice

    def __call__(self, speech: Speech) -> Given:
        voice = speech.ref_audio or self._voice
        extra = {"instruction": speech.spoken_as, "ref_audio": None if voice is None else str(voice.absolute())}
        extra = {name: value for name, value in extra.items() if value is not None}
        return self._condition(
            PromptRow("speech", speech.text, "speech", 0, "speech", speech.text, speech.language, extra=extra)
        )


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns of every policy that is not its own
    return AutoTokenizer.from_pretrained(model, trust_remote_code=False)


POLICIES: Mapping[str, Callable[..., Callable[[Speech], Given]]] = {"qwen3_tts": Qwen3TTS, "moss": Moss}


# ------------------------------------------------------------------------------------------------- the engine


@dataclass(frozen=True)
class Speaker:
    """A model that can speak: what turns a text into a prompt, and how its engine is started."""

    conditions: Callable[[Speech], Given]
    spec: RolloutSpec
    environment: Mapping[str, str]  # of the engine's processes

    def prompt(self, speech: Speech) -> Given:
        """Raises ``DataError`` for a text that is too long, else what ``conditions`` raises."""
        given = self.conditions(speech)
        if (length := len(given.text_ids)) > self.spec.max_prompt_tokens:
            raise DataError(
                f"the text {speech.text[:40]!r}... has {length} tokens, the limit is {self.spec.max_prompt_tokens}; "
                "cut it into sentences"
            )
        return given


def open_model(
    model: Path,
    *,
    voice: Path | None = None,
    language: str = "Auto",
    max_frames: int = Sampling.max_frames,
    overrides: Sequence[str] = (),
) -> Speaker:
    """Reads a model directory. ``overrides`` are those of a run, of which only the engine's count.

    Raises ``CheckpointError`` or ``ConfigError``; nothing is started.
    """
    if (model / MANIFEST).is_file():
        raise CheckpointError(
            f"{model} is a training checkpoint; make a model of it first: verl-tts export {model} OUT"
        )
    config = read_model_config(str(model))
    composed = compose([f"actor_rollout_ref.model.path={_quoted(str(model))}", *overrides])
    composed.data.max_response_length = max_frames
    spec = spec_alone(composed)
    adapter = importlib.import_module(f"verl_tts.rollout.{spec.model}")
    adapter.check_model(config)
    environment = WORKER_ENVIRONMENT | worker_environment(composed)
    return Speaker(POLICIES[spec.model](model, config, voice, language, composed.tts), spec, environment)


def _quoted(text: str) -> str:
    """A value that Hydra's grammar reads as this very text."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


@contextmanager
def engine_log(command: str) -> Iterator[tuple[Say, Path]]:
    """All output goes to a file, which stays if the engine fails; yields a way to speak to the terminal, and it."""
    handle, name = tempfile.mkstemp(prefix=f"verl-tts-{command}-", suffix=".log")
    os.close(handle)
    log, is_kept = Path(name), False
    try:
        with output_to(log) as say:
            try:
                yield say, log
            except RunStopped:
                is_kept = True
                say(f"the log is {log}")
                raise
    finally:
        if not is_kept:
            log.unlink()


Take = tuple[Given, int]  # what is given, and the seed


async def speak(
    speaker: Speaker,
    takes: Sequence[Take],
    sampling: Sampling,
    done: Callable[[int, CodecRollout, Waveform], Awaitable[None]],
) -> None:
    """Starts the engine, speaks every take and ends the engine. ``done`` gets the number of a take as soon as it is.

    Raises ``RunStopped`` for what goes wrong in the engine.
    """
    slots = asyncio.Semaphore(AT_ONCE)
    settings = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}

    async with engine(speaker.spec) as server:

        async def one(number: int, given: Given, seed: int) -> tuple[int, CodecRollout, Waveform]:
            async with slots:
                rollout, waveform = await server.sample(
                    f"take-{number}",
                    prompt_ids=list(given.text_ids),
                    sampling_params=settings,
                    seed=seed,
                    sample_id=f"{number}",
                    **given.request(),
                )
                return number, rollout, waveform

        async for take in as_done(one(number, given, seed) for number, (given, seed) in enumerate(takes)):
            await done(*take)


def one_line(error: TTSError) -> str:
    return " ".join(str(error).split())
