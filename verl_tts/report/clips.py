"""Kept clips inside a page: small, playable everywhere, and never more of them than a mail takes.

MP3 is what every browser plays, phones' too; of the formats that libsndfile writes it is a third of FLAC. A rate that
MP3 does not have keeps its FLAC. Nothing of the file's name, date or tags gets into the page.

Shapes: ``S`` audio sample.
"""

import base64
import io
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soundfile

MP3_RATES_HZ = frozenset({8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000})
WAVE_BARS = 56
MEDIUM = 0.5  # of LAME's scale of variable bit rates, 0 the finest


@dataclass(frozen=True)
class Sound:
    """``data_uri`` for ``<audio src>``; ``wave`` is the SVG path of its outline in a box of WAVE_BARS x 20."""

    data_uri: str
    seconds: float
    wave: str


def encode(file: Path, *, fineness: float = MEDIUM) -> Sound | None:
    """None where the file is not there or is not audio: it was deleted, or a crash has torn it."""
    try:
        samples_S, rate = soundfile.read(file, dtype="float32", always_2d=False)
    except (OSError, soundfile.LibsndfileError):
        return None
    if samples_S.ndim != 1 or len(samples_S) == 0:
        return None
    buffer = io.BytesIO()
    if rate in MP3_RATES_HZ:
        soundfile.write(buffer, samples_S, rate, format="MP3", compression_level=fineness, bitrate_mode="VARIABLE")
        kind = "audio/mpeg"
    else:
        soundfile.write(buffer, samples_S, rate, format="FLAC", subtype="PCM_16")
        kind = "audio/flac"
    data = base64.b64encode(buffer.getvalue()).decode()
    return Sound(f"data:{kind};base64,{data}", len(samples_S) / rate, outline(samples_S))


def outline(samples_S: np.ndarray) -> str:
    """The loudest sample of each of WAVE_BARS stretches, mirrored, relative to the clip's loudest."""
    stretches = np.array_split(np.abs(samples_S), min(WAVE_BARS, len(samples_S)))
    peaks = np.array([stretch.max() for stretch in stretches])
    heights = 9.0 * peaks / max(float(peaks.max()), 1e-3)
    width = WAVE_BARS / len(peaks)
    return "".join(
        f"M{(i + 0.5) * width:.4g} {10 - height:.2g}v{max(2 * height, 0.6):.2g}" for i, height in enumerate(heights)
    )


@dataclass
class Shelf:
    """The clips of one page. They are asked for in the order of their importance, until ``limit_bytes`` are used."""

    limit_bytes: int
    sounds: dict[str, Sound] = field(default_factory=dict)  # id in the page -> sound
    used_bytes: int = 0
    left_out: int = 0
    missing: int = 0
    _ids: dict[Path, str | None] = field(default_factory=dict)

    def put(self, file: Path | None) -> str | None:
        """The clip's id in the page; None where it has no audio, its file is gone, or the page is full."""
        if file is None:
            return None
        if file not in self._ids:
            self._ids[file] = self._add(file)
        return self._ids[file]

    def _add(self, file: Path) -> str | None:
        if not file.is_file():
            self.missing += 1
            return None
        if self.used_bytes >= self.limit_bytes:
            self.left_out += 1
            return None
        sound = encode(file)
        if sound is None:
            self.missing += 1
            return None
        if self.used_bytes + len(sound.data_uri) > self.limit_bytes:
            self.left_out += 1
            return None
        self.used_bytes += len(sound.data_uri)
        name = f"c{len(self.sounds)}"
        self.sounds[name] = sound
        return name
