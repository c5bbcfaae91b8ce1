"""Likeness of the voice to a reference: the cosine of two speaker embeddings. Legend: ``S`` sample, ``H`` embedding.

    resemblyzer   range [0, 1]; Resemblyzer by Resemble AI (Apache-2.0), weights in its package
    ecapa         range [-1, 1]; ECAPA-TDNN in SpeechBrain (Apache-2.0), weights by path:
                  a directory with ``embedding_model.ckpt``, as speechbrain/spkrec-ecapa-voxceleb has it (Apache-2.0)

``metadata.ref_audio`` is the path of the reference, ``metadata.speaker`` its name without the ending, both below
``references``; the first counts if there are both. A clip without a voice in it is like nobody: the range's low end.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Protocol

import numpy as np
import soundfile
import torch

from verl_tts.errors import ConfigError
from verl_tts.rewards.protocol import excerpt
from verl_tts.scorers.audio import is_silent, resampled
from verl_tts.scorers.base import BadRequestError, Clip, fingerprint_of, sha256_of_files
from verl_tts.scorers.pretrained import LOAD_ERRORS, torch_device
from verl_tts.types import Scalar, Waveform

RATE_HZ = 16_000
SUFFIXES: Sequence[str] = (".wav", ".flac", ".ogg", ".mp3")
AS_IT_IS: Sequence[str] = ("",)
EMBEDDINGS_KEPT = 4096  # of references; a group of samples shares its own


class SpeakerEncoder(Protocol):
    score_range: tuple[float, float]
    identity: Mapping[str, object]

    def embed(self, samples_S: np.ndarray) -> np.ndarray | None:
        """The voice as a vector of length 1, of samples at 16 kHz that are not silent; None if there is no voice."""


class SpeakerSimilarityScorer:
    name = "speaker_similarity"
    version = "1"
    revision = None
    part_names = ()

    def __init__(
        self, *, references: str, backend: str = "resemblyzer", model: str | None = None, device: str = "auto"
    ) -> None:
        self._folder = Path(references).resolve()
        if not self._folder.is_dir():
            raise ConfigError(
                f"speaker_similarity: references={references!r} is no directory; give the one they are in"
            )
        self._encoder = _build_encoder(backend, model, torch_device(self.name, device))
        self.model = model or backend
        self.score_range = self._encoder.score_range
        self.details = {
            "backend": backend,
            **self._encoder.identity,
            "references": fingerprint_of(files=sha256_of_files(self._folder)),
        }
        self._embed_reference = functools.lru_cache(EMBEDDINGS_KEPT)(self._embed_file)

    def fingerprint(self) -> str:
        return fingerprint_of(name=self.name, version=self.version, **self.details)

    def check(self, clip: Clip) -> None:
        self._reference_of(clip)

    def score_batch(self, clips: Sequence[Clip]) -> list[dict[str, Scalar]]:
        return [{"score": self._similarity(clip)} for clip in clips]

    def _similarity(self, clip: Clip) -> float:
        path = self._reference_of(clip)
        reference_H = self._embed_reference(path, path.stat().st_mtime_ns)
        voice_H = self._embed(clip.waveform)
        low, high = self.score_range
        return low if voice_H is None else float(np.clip(voice_H @ reference_H, low, high))

    def _embed(self, waveform: Waveform) -> np.ndarray | None:
        samples_S = resampled(waveform, RATE_HZ)
        return None if is_silent(samples_S) else self._encoder.embed(samples_S)

    def _embed_file(self, path: Path, changed_ns: int) -> np.ndarray:
        """``changed_ns`` is there for the cache: a file that is replaced is another reference."""
        samples_CS, sample_rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
        voice_H = self._embed(Waveform(samples_CS.mean(axis=1), sample_rate_hz))
        if voice_H is None:
            raise RuntimeError(f"no voice was found in the reference {path.relative_to(self._folder)}")
        return voice_H

    def _reference_of(self, clip: Clip) -> Path:
        """An existing file below the folder; BadRequestError for any other wish."""
        if clip.metadata.get("ref_audio") is not None:
            field, suffixes = "ref_audio", AS_IT_IS
        else:
            field, suffixes = "speaker", SUFFIXES
        wish = clip.metadata.get(field)
        if not isinstance(wish, str) or not wish or "\0" in wish:
            raise BadRequestError("metadata", f"ref_audio or speaker must name a reference, not {excerpt(repr(wish))}")
        for suffix in suffixes:
            path = Path(os.path.realpath(self._folder / f"{wish}{suffix}"))
            if not path.is_relative_to(self._folder):
                raise BadRequestError(f"metadata.{field}", f"{excerpt(repr(wish))} is not below the references")
            if os.path.isfile(path):  # unlike Path.is_file, False for a name that is too long
                return path
        raise BadRequestError(f"metadata.{field}", f"there is no reference {excerpt(repr(wish))}")


def _build_encoder(backend: str, model: str | None, device: torch.device) -> SpeakerEncoder:
    if backend == "resemblyzer":
        if model is not None:
            raise ConfigError(f"speaker_similarity: model={model!r} is for backend=ecapa; Resemblyzer has its own")
        return Resemblyzer(device)
    if backend == "ecapa":
        return Ecapa(model, device)
    raise ConfigError(f"speaker_similarity: unknown backend {backend!r}; there are: resemblyzer, ecapa")


class Resemblyzer:
    """Three LSTM layers over 1.6 s windows; trims long silences, evens the level out."""

    score_range = (0.0, 1.0)

    def __init__(self, device: torch.device) -> None:
        try:
            import resemblyzer
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"speaker_similarity: {error.name} is not installed; pip install webrtcvad-wheels, then "
                "pip install --no-deps resemblyzer==0.1.4, or use backend=ecapa"
            ) from error
        self._prepare = resemblyzer.preprocess_wav
        self._encoder = resemblyzer.VoiceEncoder(device, verbose=False)
        self.identity: Mapping[str, object] = {"backend_version": package_version("resemblyzer")}

    def embed(self, samples_S: np.ndarray) -> np.ndarray | None:
        voiced_S = self._prepare(samples_S)
        return self._encoder.embed_utterance(voiced_S) if len(voiced_S) else None


class Ecapa:
    """The architecture that the VoxCeleb weights have; the rest of SpeechBrain's recipe is not read or run."""

    score_range = (-1.0, 1.0)
    MEL_BANDS = 80
    CHANNELS = (1024, 1024, 1024, 1024, 3072)
    EMBEDDING_SIZE = 192

    def __init__(self, model: str | None, device: torch.device) -> None:
        weights = Path(model or "") / "embedding_model.ckpt"
        if model is None or not weights.is_file():
            raise ConfigError(
                f"speaker_similarity: model={model!r} has no embedding_model.ckpt; backend=ecapa needs the directory "
                "of a SpeechBrain ECAPA-TDNN"
            )
        try:
            from speechbrain.lobes.features import Fbank
            from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"speaker_similarity: backend=ecapa needs {error.name}, which is not installed; pip install speechbrain"
            ) from error
        self._device = device
        self._features = Fbank(n_mels=self.MEL_BANDS).to(device)
        self._network = ECAPA_TDNN(self.MEL_BANDS, lin_neurons=self.EMBEDDING_SIZE, channels=list(self.CHANNELS))
        try:
            self._network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        except LOAD_ERRORS as error:
            raise ConfigError(
                f"speaker_similarity: {weights} is no ECAPA-TDNN of VoxCeleb: {excerpt(error)}"
            ) from error
        self._network.to(device).eval()
        self.identity: Mapping[str, object] = {
            "backend_version": package_version("speechbrain"),
            "model_files": sha256_of_files(weights.parent),
        }

    @torch.inference_mode()
    def embed(self, samples_S: np.ndarray) -> np.ndarray:
        features = self._features(torch.tensor(samples_S, device=self._device)[None])
        voice_H = self._network(features - features.mean(dim=1, keepdim=True))[0, 0]
        return (voice_H / voice_H.norm()).cpu().numpy()
