"""Intelligibility: 1 minus the error rate of what a recogniser hears, in [0, 1]. Legend: ``S`` audio sample.

    score                  1 - min(1, error)
    cer, cer_capped        raw, and at most 1; ``wer`` where words are counted
    cer_<normaliser>, ..   the same pair under each of the other normalisers, which takes no second transcript
    nll                    -log p(right text | audio) a token, where the scorer is told to answer it: how sure the
                           recogniser is of the text that should be heard, also where it writes another one
    asr_text               what the recogniser wrote
    normalized_target,     what was compared
    normalized_hypothesis

Error rates by jiwer (Apache-2.0). Nothing heard is an error of 1; silence is not shown to the recogniser.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import jiwer
import numpy as np

from verl_tts.errors import ConfigError
from verl_tts.scorers.audio import is_silent, resampled
from verl_tts.scorers.base import BadRequestError, Clip, fingerprint_of
from verl_tts.scorers.text import NORMALISERS
from verl_tts.types import Scalar

_MEASURES = {"cer": jiwer.cer, "wer": jiwer.wer}


class Recogniser(Protocol):
    """Speech to text, greedily: equal audio, equal text, whatever else is in the list."""

    rate_hz: int
    identity: Mapping[str, object]  # all that changes a transcript: model files, precision, decoding, packages

    def transcribe(self, clips_S: Sequence[np.ndarray]) -> list[str]:
        """One transcript a clip; clips are float32 at ``rate_hz`` and of any length."""


class Likelihood(Protocol):
    """A recogniser that also says how likely a text is."""

    rate_hz: int

    def nll(self, samples_S: np.ndarray, text: str) -> float:
        """Mean negative log-likelihood per token of ``text``, its end included, in nats; at least 0."""

    def check_length(self, text: str) -> None:
        """Raise BadRequestError for a text of more tokens than the recogniser takes."""


class ErrorRateScorer:
    """What the scorers over a recogniser share; ``name`` ends in the measure, ``_cer`` or ``_wer``."""

    name: str
    version = "1"
    model: str | None
    revision: str | None
    score_range = (0.0, 1.0)
    part_names: tuple[str, ...]

    def __init__(self, recogniser: Recogniser, normaliser: str, likelihood: Likelihood | None = None) -> None:
        if normaliser not in NORMALISERS:
            raise ConfigError(f"{self.name}: unknown normaliser {normaliser!r}; there are: {', '.join(NORMALISERS)}")
        self._recogniser = recogniser
        self._normalise = NORMALISERS[normaliser]
        self._others = {name: function for name, function in NORMALISERS.items() if name != normaliser}
        self._measure = self.name.rpartition("_")[2]
        self._likelihood = likelihood
        measures = (self._measure, *(f"{self._measure}_{name}" for name in self._others))
        self.part_names = tuple(part for name in measures for part in (name, f"{name}_capped"))
        if likelihood:
            self.part_names += ("nll",)
        self.details = {"normaliser": normaliser, **recogniser.identity, **({"nll": True} if likelihood else {})}

    def fingerprint(self) -> str:
        return fingerprint_of(name=self.name, version=self.version, **self.details)

    def check(self, clip: Clip) -> None:
        if not all(normalise(clip.prompt) for normalise in (self._normalise, *self._others.values())):
            raise BadRequestError("prompt", f"nothing is left of {clip.prompt!r} after normalisation")
        if self._likelihood is not None:
            self._likelihood.check_length(self._normalise(clip.prompt))

    def score_batch(self, clips: Sequence[Clip]) -> list[dict[str, Scalar]]:
        audio = [resampled(clip.waveform, self._recogniser.rate_hz) for clip in clips]
        heard = iter(self._recogniser.transcribe([samples_S for samples_S in audio if not is_silent(samples_S)]))
        transcripts = ["" if is_silent(samples_S) else next(heard) for samples_S in audio]
        answers = [self._compare(clip.prompt, transcript) for clip, transcript in zip(clips, transcripts, strict=True)]
        if self._likelihood is not None:
            for clip, samples_S, answer in zip(clips, audio, answers, strict=True):
                answer["nll"] = self._likelihood.nll(samples_S, self._normalise(clip.prompt))
        return answers

    def _compare(self, prompt: str, transcript: str) -> dict[str, Scalar]:
        target, hypothesis = self._normalise(prompt), self._normalise(transcript)
        errors = {self._measure: self._error(target, hypothesis)}
        for name, normalise in self._others.items():
            errors[f"{self._measure}_{name}"] = self._error(normalise(prompt), normalise(transcript))
        return {
            "score": 1.0 - min(1.0, errors[self._measure]),
            **errors,
            **{f"{name}_capped": min(1.0, error) for name, error in errors.items()},
            "asr_text": transcript,
            "normalized_target": target,
            "normalized_hypothesis": hypothesis,
        }

    def _error(self, target: str, hypothesis: str) -> float:
        return float(_MEASURES[self._measure](target, hypothesis))
