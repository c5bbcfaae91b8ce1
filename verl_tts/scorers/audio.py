"""Audio as models want it. Legend: ``S`` audio sample."""

from dataclasses import dataclass, field

import numpy as np
import soxr

from verl_tts.types import Waveform

SILENCE_RMS = 1e-4  # -80 dBFS. Recognisers make sentences up for silence, so they are not asked below this.


@dataclass(frozen=True)
class SharedWaveform(Waveform):
    """A waveform that is resampled once per rate, for the scorers that look at the same clip."""

    _at_rate: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def at(self, rate_hz: int) -> np.ndarray:
        """``samples_S`` at ``rate_hz``, float32; nobody writes into it."""
        if rate_hz not in self._at_rate:
            self._at_rate[rate_hz] = _resample(self, rate_hz)
            self._at_rate[rate_hz].flags.writeable = False
        return self._at_rate[rate_hz]


def resampled(waveform: Waveform, rate_hz: int) -> np.ndarray:
    """``samples_S`` at ``rate_hz``, float32; nothing is left of a clip that is shorter than one sample there."""
    return waveform.at(rate_hz) if isinstance(waveform, SharedWaveform) else _resample(waveform, rate_hz)


def _resample(waveform: Waveform, rate_hz: int) -> np.ndarray:
    if waveform.sample_rate_hz == rate_hz:
        return waveform.samples_S.astype(np.float32, copy=False).view()
    return soxr.resample(waveform.samples_S, waveform.sample_rate_hz, rate_hz).astype(np.float32, copy=False)


def rms(samples_S: np.ndarray) -> float:
    """Root mean square about the mean, full scale = 1."""
    return float(samples_S.std(dtype=np.float64))


def is_silent(samples_S: np.ndarray) -> bool:
    return len(samples_S) == 0 or rms(samples_S) < SILENCE_RMS


def windows(samples_S: np.ndarray, rate_hz: int, longest_s: float, search_s: float = 5.0) -> list[np.ndarray]:
    """``samples_S`` in pieces of at most ``longest_s``, each cut at the quietest 20 ms of its last ``search_s``."""
    longest, frame = round(longest_s * rate_hz), round(0.02 * rate_hz)
    first = longest - round(search_s * rate_hz) // frame * frame
    pieces = []
    while len(samples_S) > longest:
        energy = np.square(samples_S[first:longest].reshape(-1, frame), dtype=np.float64).sum(axis=1)
        cut = first + int(energy.argmin()) * frame + frame // 2
        pieces.append(samples_S[:cut])
        samples_S = samples_S[cut:]
    return [*pieces, samples_S]
