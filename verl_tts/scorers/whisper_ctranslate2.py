"""Whisper run by faster-whisper over CTranslate2 (both MIT). Legend: ``S`` audio sample.

Greedy, no fall-back temperatures, no text carried from one 30 s window to the next, so that equal clips get
equal transcripts; audio of any length is read to its end.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version as package_version
from pathlib import Path

import ctranslate2
import numpy as np
from faster_whisper import WhisperModel

from verl_tts.errors import ConfigError
from verl_tts.rewards.protocol import excerpt
from verl_tts.scorers.base import sha256_of_files
from verl_tts.scorers.pretrained import DTYPES, split_device

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


class CTranslate2Whisper:
    rate_hz = 16_000

    def __init__(self, scorer: str, folder: Path, device: str, dtype: str, language: str) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"{scorer}: unknown dtype {dtype!r}; there are: {', '.join(DTYPES)}")
        kind, index = split_device(scorer, device)
        if kind == "auto":
            kind = "cuda" if ctranslate2.get_cuda_device_count() else "cpu"
        compute_type = {"cpu": "float32", "cuda": "float16"}[kind] if dtype == "auto" else dtype
        try:
            self._whisper = WhisperModel(str(folder), device=kind, device_index=index, compute_type=compute_type)
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigError(f"{scorer}: {folder} does not load on {device} as {dtype}: {excerpt(error)}") from error
        known = self._whisper.supported_languages
        if language not in known:
            choice = "English only; give --model a multilingual one" if known == ["en"] else ", ".join(known)
            raise ConfigError(f"{scorer}: {folder} does not know the language {language!r}; it knows: {choice}")
        self._language = language
        self.identity: Mapping[str, object] = {
            "backend": "faster-whisper",
            "backend_version": package_version("faster-whisper"),
            "dtype": self._whisper.model.compute_type,
            "language": language,
            "decoding": _DECODING,
            "model_files": sha256_of_files(folder),
        }

    def transcribe(self, clips_S: Sequence[np.ndarray]) -> list[str]:
        return [self._transcribe(samples_S) for samples_S in clips_S]

    def _transcribe(self, samples_S: np.ndarray) -> str:
        segments, _ = self._whisper.transcribe(samples_S, language=self._language, **_DECODING)
        return "".join(segment.text for segment in segments).strip()
