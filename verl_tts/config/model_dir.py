"""What config.json of a model directory says, read without transformers."""

import json
from pathlib import Path
from typing import Any

from verl_tts.config.tts import MODELS
from verl_tts.errors import CheckpointError

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
CODEC_DIR = "speech_tokenizer"


def read_model_type(path: str | None) -> str | None:
    """``model_type`` of the model directory; None where there is no config.json to read, which
    ``read_model_config`` reports."""
    config_file = Path(path or "") / "config.json"
    return _load(config_file).get("model_type") if config_file.is_file() else None


def read_model_config(path: str) -> dict[str, Any]:
    """config.json of a complete model directory of a policy that we have.

    Raises ``CheckpointError``: a missing directory or file, a broken config.json, another model.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"the model {path} is not a directory; it has to be a local checkpoint")
    config = _load(directory / "config.json")
    model_type, known = config.get("model_type"), MODELS[1:]
    if model_type not in known:
        raise CheckpointError(f"{path} holds a model of type {model_type}; the policies here are {', '.join(known)}")
    if not any((directory / name).is_file() for name in WEIGHTS):
        raise CheckpointError(f"{path} has no weights: neither {' nor '.join(WEIGHTS)} is there")
    if not (directory / CODEC_DIR / "config.json").is_file():
        raise CheckpointError(
            f"{path} has no codec: {CODEC_DIR}/config.json is missing, and codes could not be decoded"
        )
    return config


def speaker_size(model_config: dict[str, Any]) -> int:
    """Length of a speaker embedding: it stands in the talker's prompt as one position of its hidden size."""
    return int(model_config["talker_config"]["hidden_size"])


def language_tags(model_config: dict[str, Any]) -> list[str]:
    """The languages that the model has a token for, in lower case; a prompt may do without one (Auto)."""
    return [tag.lower() for tag in model_config["talker_config"].get("codec_language_id") or {}]


def _load(config_file: Path) -> dict[str, Any]:
    if not config_file.is_file():
        raise CheckpointError(f"{config_file} is missing; the directory is not a checkpoint")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{config_file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{config_file} is not a JSON object")
    return config
