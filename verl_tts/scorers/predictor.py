"""An opinion, predicted: a linear head on a frozen speech encoder, such as UTMOS, AnimeScore or a likability model.

    score   (value - low) / (high - low), cut to [0, 1]
    value   what the model says, on its own scale

``model`` is a directory with ``config.json`` and ``model.safetensors``, or ``model.pt`` that ``torch.load`` reads
with ``weights_only=True``. The configuration:

    format          "verl_tts_predictor", version 1
    encoder_class   Wav2Vec2Model, HubertModel or WavLMModel
    encoder         that class's own config.json
    pooling         over frames: "mean", or "mean_std", which gives the head twice the width
    normalise       true: the samples get mean 0 and variance 1, as the encoder's feature extractor may ask for
    scale, offset   value = offset + scale * head(pooled)
    low, high       the scale of the value, for example 1 and 5

Weights are named ``encoder.*`` as in Transformers, ``head.weight`` (1, H) or (1, 2H), and ``head.bias`` (1).
The licence is that of the weights. Clips go through the encoder one at a time, whole, at 16 kHz, in float32: these
encoders normalise over time, so that padding would change a score.

Legend: ``S`` audio sample, ``T`` frame, ``H`` hidden.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version as package_version
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from verl_tts.errors import ConfigError
from verl_tts.rewards.protocol import excerpt
from verl_tts.scorers.audio import resampled
from verl_tts.scorers.base import Clip, fingerprint_of, sha256_of_files
from verl_tts.scorers.pretrained import LOAD_ERRORS, torch_device
from verl_tts.types import Scalar, Waveform

RATE_HZ = 16_000
FORMAT, FORMAT_VERSION = "verl_tts_predictor", 1
ENCODERS = ("Wav2Vec2Model", "HubertModel", "WavLMModel")
POOLINGS = {"mean": 1, "mean_std": 2}  # times the hidden size


@dataclass(frozen=True)
class PredictorConfig:
    """``config.json``, checked; ValueError names the key."""

    format: str
    version: int
    encoder_class: str
    encoder: Mapping[str, Any] = field(repr=False)
    pooling: str
    normalise: bool
    scale: float
    offset: float
    low: float
    high: float

    def __post_init__(self) -> None:
        choices = {
            "format": (FORMAT,),
            "version": (FORMAT_VERSION,),
            "encoder_class": ENCODERS,
            "pooling": (*POOLINGS,),
        }
        for key, known in choices.items():
            if getattr(self, key) not in known:
                raise ValueError(f"{key}={getattr(self, key)!r}; there are: {', '.join(map(str, known))}")
        if not isinstance(self.encoder, Mapping) or not isinstance(self.normalise, bool):
            raise ValueError("encoder must be an object, normalise true or false")
        for key in ("scale", "offset", "low", "high"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
                raise ValueError(f"{key}={value!r} must be a finite number")
        if not self.low < self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}")


class Predictor(nn.Module):
    """Samples of one clip to one number."""

    def __init__(self, config: PredictorConfig) -> None:
        super().__init__()
        encoder_class = getattr(transformers, config.encoder_class)
        encoder_config = encoder_class.config_class(**config.encoder)
        self.encoder = encoder_class(encoder_config)
        self.head = nn.Linear(encoder_config.hidden_size * POOLINGS[config.pooling], 1)
        self._config = config
        self.shortest = 1  # samples that make one frame
        for kernel, stride in reversed(list(zip(encoder_config.conv_kernel, encoder_config.conv_stride, strict=True))):
            self.shortest = (self.shortest - 1) * stride + kernel

    def forward(self, samples_S: torch.Tensor) -> torch.Tensor:
        if self._config.normalise:
            samples_S = (samples_S - samples_S.mean()) / torch.sqrt(samples_S.var(correction=0) + 1e-7)
        hidden_TH = self.encoder(samples_S[None]).last_hidden_state[0]
        pooled = [hidden_TH.mean(dim=0)]
        if self._config.pooling == "mean_std":
            pooled.append(hidden_TH.std(dim=0, correction=0))
        return self._config.offset + self._config.scale * self.head(torch.cat(pooled))[0]


class PredictorScorer:
    name = "predictor"
    version = "1"
    revision = None
    score_range = (0.0, 1.0)
    part_names = ("value",)

    def __init__(self, *, model: str, device: str = "auto") -> None:
        folder = Path(model)
        self._config = _read_config(folder / "config.json")
        self._device = torch_device(self.name, device)
        self._predictor = _load(folder, self._config).to(self._device).eval()
        self.model = model
        self.details = {
            "value_range": [self._config.low, self._config.high],
            "transformers": package_version("transformers"),
            "model_files": sha256_of_files(folder),
        }

    def fingerprint(self) -> str:
        return fingerprint_of(name=self.name, version=self.version, **self.details)

    def check(self, clip: Clip) -> None:
        """Any clip will do."""

    def score_batch(self, clips: Sequence[Clip]) -> list[dict[str, Scalar]]:
        return [self._score(clip.waveform) for clip in clips]

    def _score(self, waveform: Waveform) -> dict[str, Scalar]:
        value = self._predict(resampled(waveform, RATE_HZ))
        share = (value - self._config.low) / (self._config.high - self._config.low)
        return {"score": min(1.0, max(0.0, share)), "value": value}

    @torch.inference_mode()
    def _predict(self, samples_S: np.ndarray) -> float:
        padded_S = np.pad(samples_S, (0, max(0, self._predictor.shortest - len(samples_S))))
        return float(self._predictor(torch.tensor(padded_S, device=self._device)))


def _read_config(path: Path) -> PredictorConfig:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {key.name for key in fields(PredictorConfig)}
        if not isinstance(content, dict) or set(content) != known:
            raise ValueError(f"an object with exactly these keys is expected: {', '.join(sorted(known))}")
        return PredictorConfig(**content)
    except (OSError, ValueError) as error:
        raise ConfigError(f"predictor: {path}: {excerpt(error)}") from error


def _load(folder: Path, config: PredictorConfig) -> Predictor:
    weights = next((path for name in ("model.safetensors", "model.pt") if (path := folder / name).is_file()), None)
    if weights is None:
        raise ConfigError(f"predictor: {folder} has neither model.safetensors nor model.pt")
    try:
        predictor = Predictor(config)
        if weights.suffix == ".safetensors":
            predictor.load_state_dict(load_file(weights))
        else:
            predictor.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    except LOAD_ERRORS as error:
        raise ConfigError(f"predictor: {weights} does not fit config.json: {excerpt(error)}") from error
    return predictor
