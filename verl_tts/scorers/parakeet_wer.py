"""``parakeet_wer``: how well Parakeet understands the clip, in words; answers as in ``error_rate.py``. English.

Parakeet TDT by NVIDIA (CC-BY-4.0) over NeMo (Apache-2.0). ``model`` is the path of a ``.nemo`` file. NeMo pins versions
that the trainer cannot use: it and this server live in an environment of their own, and nothing takes their place
where they are missing. Greedy decoding, one clip at a time, whole: 0.6 B with full attention reads up to 24 minutes.

Not run with real weights or with NeMo by the authors of this file. Legend: ``S`` audio sample.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version as package_version
from pathlib import Path

import numpy as np
import torch

from verl_tts.errors import ConfigError
from verl_tts.files import sha256_of
from verl_tts.scorers.error_rate import ErrorRateScorer
from verl_tts.scorers.pretrained import torch_device


class Parakeet:
    rate_hz = 16_000

    def __init__(self, file: Path, device: torch.device) -> None:
        try:
            from nemo.collections.asr.models import ASRModel
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"parakeet_wer: {error.name} is not installed; make an environment of its own with "
                "nemo_toolkit[asr] in it (docs/scorers.md)"
            ) from error
        self._model = ASRModel.restore_from(str(file), map_location=device).eval()
        self.identity: Mapping[str, object] = {
            "backend": "nemo",
            "backend_version": package_version("nemo_toolkit"),
            "decoding": "the model's own, greedy",
            "model_files": {file.name: sha256_of(file)},
        }

    def transcribe(self, clips_S: Sequence[np.ndarray]) -> list[str]:
        return [self._model.transcribe([samples_S], batch_size=1, verbose=False)[0].text for samples_S in clips_S]


class ParakeetWERScorer(ErrorRateScorer):
    name = "parakeet_wer"
    revision = None

    def __init__(self, *, model: str, device: str = "auto", normaliser: str = "nfc_punct") -> None:
        if not Path(model).is_file():
            raise ConfigError(f"parakeet_wer: model={model!r} is no file; give the path of a .nemo file")
        self.model = model
        super().__init__(Parakeet(Path(model), torch_device(self.name, device)), normaliser)
