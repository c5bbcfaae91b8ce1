"""Recordings that a speaker embedding is made of. Shapes: ``S`` audio sample, ``C`` channel."""

from pathlib import Path

import numpy as np
import soundfile

from verl_tts.errors import DataError
from verl_tts.types import Waveform

MIN_RATE_HZ = 16_000  # below, nothing is left of the band above 8 kHz and little of it above 4 kHz
MIN_SECONDS = 1.0
MIN_RMS = 1e-4  # about the mean, full scale = 1: -80 dBFS


def read_reference(path: Path) -> Waveform:
    """A recording, its channels averaged.

    Raises ``DataError``: no such file, no audio, too short, too low a rate, silence, a NaN.
    """
    try:
        samples_SC, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        if not path.exists():  # libsndfile calls it a "System error"
            raise DataError(f"the recording {path} does not exist") from error
        raise DataError(f"{path} cannot be read as audio: {error.error_string}") from error
    reference = Waveform(samples_SC.mean(axis=1), rate_hz)
    if rate_hz < MIN_RATE_HZ:
        raise DataError(f"{path} has a rate of {rate_hz} Hz; a reference needs {MIN_RATE_HZ} Hz or more")
    if reference.seconds < MIN_SECONDS:
        raise DataError(f"{path} lasts {reference.seconds:.2f} s; a reference needs {MIN_SECONDS} s or more")
    if not np.isfinite(reference.samples_S).all():
        raise DataError(f"{path} has samples that are not finite")
    rms = float(reference.samples_S.std(dtype=np.float64))
    if rms < MIN_RMS:
        raise DataError(f"{path} is silent: its RMS is {rms:.1g} of full scale, a reference needs {MIN_RMS:g} or more")
    return reference
