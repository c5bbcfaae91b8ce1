"""Audio as recognisers want it. Legend: ``S`` audio sample."""

import numpy as np
import soxr

from verl_tts.types import Waveform


def resampled(waveform: Waveform, rate_hz: int) -> np.ndarray:
    """``samples_S`` at ``rate_hz``, float32."""
    if waveform.sample_rate_hz == rate_hz:
        return waveform.samples_S.astype(np.float32, copy=False)
    return soxr.resample(waveform.samples_S, waveform.sample_rate_hz, rate_hz).astype(np.float32, copy=False)


def rms(samples_S: np.ndarray) -> float:
    """Root mean square about the mean, full scale = 1."""
    return float(samples_S.std(dtype=np.float64))
