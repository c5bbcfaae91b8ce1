"""A recording as the codes that a policy is given of it, by the codec's own encoder, on the CPU, each file once.

    file -> first seconds -> mono -> 24 kHz -> -20 dBFS, by 3 dB at most -> encoder -> codes (F, Q)

Shapes: ``S`` audio sample, ``F`` codec frame, ``Q`` codebook.
"""

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np

from verl_tts.data.voices import reference_file
from verl_tts.errors import CheckpointError, DataError
from verl_tts.models.moss_prompt import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

LOUDNESS_DBFS = -20.0
MAX_GAIN_DB = 3.0


class References:
    """The references of a run, by their path below ``folder``. The encoder is loaded when the first is asked for."""

    def __init__(self, codec: Path, folder: Path, *, codebooks: int, max_seconds: float) -> None:
        self.codec, self.folder, self.codebooks, self.max_seconds = codec, folder, codebooks, max_seconds
        self._encoder: Any = None
        self._encoding = threading.Lock()
        self._known: dict[str, np.ndarray] = {}

    def frames(self, name: str) -> int:
        """Frames of a reference, at most one more than it has. Raises ``DataError``."""
        import soundfile

        file = reference_file(self.folder, name)
        try:
            info = soundfile.info(file)
        except (OSError, RuntimeError) as error:
            if not file.exists():  # libsndfile calls it a "System error"
                raise DataError(f"the reference {file} does not exist") from error
            raise DataError(f"the reference {file} cannot be read: {error}") from error
        if info.frames == 0:
            raise DataError(f"the reference {self.folder / name} is empty")
        return math.ceil(min(info.duration, self.max_seconds) * SAMPLE_RATE_HZ / SAMPLES_PER_FRAME)

    def codes(self, name: str) -> np.ndarray:
        """(F, Q) int64. Raises ``DataError`` for the recording, ``CheckpointError`` for the codec."""
        with self._encoding:
            if name not in self._known:
                self._known[name] = self._encode(self._read(name), name)
            return self._known[name]

    def _read(self, name: str) -> np.ndarray:
        import soundfile
        import torch
        import torchaudio

        self.frames(name)
        with soundfile.SoundFile(self.folder / name) as file:
            rate = file.samplerate
            samples_SN = file.read(int(self.max_seconds * rate), dtype="float32", always_2d=True)
        if not np.isfinite(samples_SN).all():
            raise DataError(f"the reference {self.folder / name} has samples that are not finite")
        samples_S = torch.from_numpy(samples_SN.mean(axis=1))
        samples_S = torchaudio.functional.resample(samples_S, rate, SAMPLE_RATE_HZ).numpy()
        level_dbfs = 10 * math.log10(float(np.mean(samples_S.astype(np.float64) ** 2)) + 1e-12)
        gain_db = min(max(LOUDNESS_DBFS - level_dbfs, -MAX_GAIN_DB), MAX_GAIN_DB)
        return samples_S * np.float32(10 ** (gain_db / 20))

    def _encode(self, samples_S: np.ndarray, name: str) -> np.ndarray:
        import torch

        if self._encoder is None:
            self._encoder = load_codec(self.codec)
        with torch.inference_mode():
            found = self._encoder.batch_encode([torch.from_numpy(samples_S)], num_quantizers=self.codebooks)
        codes_FQ = found.audio_codes[:, 0, : int(found.audio_codes_lengths[0])].T.numpy().astype(np.int64)
        if len(codes_FQ) == 0:
            raise DataError(
                f"the reference {self.folder / name} is shorter than one frame of {SAMPLES_PER_FRAME} samples"
            )
        return np.ascontiguousarray(codes_FQ)


def load_codec(directory: Path) -> Any:
    """MOSS's audio tokenizer, of the class that vLLM-Omni decodes with. Raises ``CheckpointError``."""
    from vllm_omni.model_executor.models.moss_tts.audio_tokenizer_v2 import MossAudioTokenizerModel

    model, about = MossAudioTokenizerModel.from_pretrained(str(directory), output_loading_info=True)
    if wrong := sorted([*about["missing_keys"], *about["unexpected_keys"]]):
        raise CheckpointError(
            f"{directory} is no codec that can be read here: {len(wrong)} names, {wrong[0]} among them"
        )
    return model.eval()
