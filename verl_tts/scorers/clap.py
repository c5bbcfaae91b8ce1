"""Fit of the sound to a text: the cosine of CLAP's embeddings of both, in [-1, 1].

The text is ``metadata.emotion`` put into ``template``, or ``text``, the same for every clip: the published quality
term of LAION's MOSS run compares with ``QUALITY_TEXT``.

A ``ClapModel`` of Transformers (Apache-2.0) by path or repository, for example laion/larger_clap_music_and_speech
(Apache-2.0). Audio beyond what the model takes, 10 s, is cut where it is quiet; the embedding of the clip is the mean
over its windows, weighted by their lengths. Upstream takes a random window instead: nothing here is random.

Voice-OpenCLAP, the emotion term of that run, is not read: nothing that could be found says what its files are. LAION's
voiceclap-small brings its own code along, which is never run here, and voiceclap-large is a model of
sentence-transformers; each can be a server of its own behind the protocol (docs/scorers.md).

Legend: ``S`` audio sample, ``W`` window, ``H`` embedding.
"""

from collections.abc import Sequence
from importlib.metadata import version as package_version
from pathlib import Path

import numpy as np
import torch
from transformers import ClapModel, ClapProcessor

from verl_tts.errors import ConfigError
from verl_tts.rewards.protocol import excerpt
from verl_tts.scorers.audio import resampled, windows
from verl_tts.scorers.base import BadRequestError, Clip, fingerprint_of, sha256_of_files
from verl_tts.scorers.pretrained import LOAD_ERRORS, load_whole, model_folder, torch_device
from verl_tts.types import Scalar, Waveform

MODEL_REMEDY = "give a directory or repository of Transformers' ClapModel"
QUALITY_TEXT = "High Quality Recording, fluid pleasant performance"
FIELD = "{emotion}"


class ClapScorer:
    name = "clap"
    version = "1"
    score_range = (-1.0, 1.0)
    part_names = ()

    def __init__(
        self,
        *,
        model: str,
        revision: str | None = None,
        device: str = "auto",
        allow_download: bool = False,
        text: str | None = None,
        template: str = FIELD,
    ) -> None:
        if text is not None and not text.strip():
            raise ConfigError("clap: text is empty; leave it out to compare with metadata.emotion")
        if FIELD not in template:
            raise ConfigError(f"clap: template={template!r} has no {FIELD}; for the same text for every clip set text")
        if Path(model).is_file():
            raise ConfigError(
                f"clap: model={model} is a file: {MODEL_REMEDY}; OpenCLAP's and laion_clap's own .pt files are not read"
            )
        folder = model_folder(self.name, model, revision, allow_download)
        self._device = torch_device(self.name, device)
        self._clap = load_whole(self.name, ClapModel, folder, torch.float32)
        try:
            self._processor = ClapProcessor.from_pretrained(folder, local_files_only=True)
        except LOAD_ERRORS as error:
            raise ConfigError(f"clap: {folder} does not load as ClapProcessor: {excerpt(error)}") from error
        self._clap.to(self._device).eval()
        self._rate_hz: int = self._processor.feature_extractor.sampling_rate
        self._window_s: float = self._processor.feature_extractor.max_length_s
        self._text = text
        self._template = template
        self.model = model
        self.revision = revision
        self.details = {
            "text": text or template,
            "transformers": package_version("transformers"),
            "model_files": sha256_of_files(folder),
        }

    def fingerprint(self) -> str:
        return fingerprint_of(name=self.name, version=self.version, **self.details)

    def check(self, clip: Clip) -> None:
        self._text_of(clip)

    def score_batch(self, clips: Sequence[Clip]) -> list[dict[str, Scalar]]:
        return [{"score": self._fit(clip)} for clip in clips]

    def _text_of(self, clip: Clip) -> str:
        if self._text is not None:
            return self._text
        emotion = clip.metadata.get("emotion")
        if not isinstance(emotion, str) or not emotion.strip():
            raise BadRequestError("metadata.emotion", f"a text is expected, not {excerpt(repr(emotion))}")
        return self._template.replace(FIELD, emotion)

    @torch.inference_mode()
    def _fit(self, clip: Clip) -> float:
        cosine = self._embed_audio(clip.waveform) @ self._embed_text(self._text_of(clip))
        return max(-1.0, min(1.0, float(cosine)))

    def _embed_audio(self, waveform: Waveform) -> torch.Tensor:
        samples_S = resampled(waveform, self._rate_hz)
        if len(samples_S) == 0:
            samples_S = np.zeros(1, np.float32)
        pieces = windows(samples_S, self._rate_hz, self._window_s)
        inputs = self._processor.feature_extractor(pieces, sampling_rate=self._rate_hz, return_tensors="pt")
        embeddings_WH = self._clap.get_audio_features(
            inputs.input_features.to(self._device),
            is_longer=torch.zeros(len(pieces), 1, dtype=torch.bool),  # no window is; the extractor draws lots here
        ).pooler_output
        lengths_W = torch.tensor([len(piece) for piece in pieces], dtype=torch.float32, device=self._device)
        return _unit(lengths_W @ _unit(embeddings_WH))

    def _embed_text(self, text: str) -> torch.Tensor:
        tokens = self._processor.tokenizer(text, truncation=True, return_tensors="pt").to(self._device)
        return _unit(self._clap.get_text_features(**tokens).pooler_output[0])


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vectors, dim=-1)
