"""Quality as DNSMOS P.835 and P.808 predict it, from 1 (bad) to 5 (excellent). Legend: ``S`` audio sample.

    score              (measure - 1) / 4, cut to [0, 1]; ``measure`` is ovrl unless set otherwise
    ovrl, sig, bak     P.835: overall, speech, background
    p808               P.808: overall

DNSMOS by Microsoft (MIT), weights and code in the PyPI package ``speechmos`` (MIT), run by ONNX Runtime (MIT) on a CPU.
It was trained on noise suppressors, at 16 kHz: it hears noise and distortion, not whether the words are right.
It listens to 9 s at a time and repeats a shorter clip. Silence is not the worst it knows; that is the guards' work.
"""

from collections.abc import Sequence
from importlib.metadata import version as package_version
from importlib.resources import files

import numpy as np
from speechmos.dnsmos import DNSMOS

from verl_tts.errors import ConfigError
from verl_tts.scorers.audio import resampled
from verl_tts.scorers.base import Clip, fingerprint_of
from verl_tts.types import Scalar, Waveform

RATE_HZ = 16_000
MEASURES = ("ovrl", "sig", "bak", "p808")
LOWEST, HIGHEST = 1.0, 5.0  # of a mean opinion score


class QualityScorer:
    name = "quality"
    version = "1"
    model = "dnsmos"
    revision = None
    score_range = (0.0, 1.0)
    part_names = MEASURES

    def __init__(self, *, measure: str = "ovrl") -> None:
        if measure not in MEASURES:
            raise ConfigError(f"quality: unknown measure {measure!r}; there are: {', '.join(MEASURES)}")
        self._measure = measure
        weights = files("speechmos") / "dnsmos_models"
        self._dnsmos = DNSMOS(str(weights / "sig_bak_ovr.onnx"), str(weights / "model_v8.onnx"))
        self.details = {
            "measure": measure,
            "speechmos": package_version("speechmos"),
            "librosa": package_version("librosa"),  # makes the spectrogram of P.808
        }

    def fingerprint(self) -> str:
        return fingerprint_of(name=self.name, version=self.version, **self.details)

    def check(self, clip: Clip) -> None:
        """Any clip will do."""

    def score_batch(self, clips: Sequence[Clip]) -> list[dict[str, Scalar]]:
        return [self._score(clip.waveform) for clip in clips]

    def _score(self, waveform: Waveform) -> dict[str, Scalar]:
        samples_S = np.clip(resampled(waveform, RATE_HZ), -1.0, 1.0)  # as a loudspeaker would
        if len(samples_S) == 0:
            samples_S = np.zeros(1, np.float32)
        opinion = self._dnsmos(samples_S, RATE_HZ, False)
        measures = {measure: float(opinion[f"{measure}_mos"]) for measure in MEASURES}
        share = (measures[self._measure] - LOWEST) / (HIGHEST - LOWEST)
        return {"score": min(1.0, max(0.0, share)), **measures}
