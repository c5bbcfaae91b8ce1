"""What config.json of a model directory says, read without transformers."""

import json
from pathlib import Path
from typing import Any

from verl_tts.errors import CheckpointError

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# name of a policy -> model_type of config.json, and where the codec is below the model's directory
MODEL_TYPES = {"qwen3_tts": "qwen3_tts", "moss": "moss_tts_delay"}
CODEC_DIRS = {"qwen3_tts": "speech_tokenizer", "moss": "codec"}
CODEC_ELSEWHERE = ("moss",)  # published without it


def read_model_type(path: str | None) -> str | None:
    """The policy of the model directory, or the ``model_type`` that we have none for; None where there is no
    config.json to read, which ``read_model_config`` reports."""
    config_file = Path(path or "") / "config.json"
    if not config_file.is_file():
        return None
    config = _load(config_file)
    return policy_of(config) or config.get("model_type")


def policy_of(config: dict[str, Any]) -> str | None:
    """Which policy a config.json is of; None: of none that we have."""
    return next((name for name, model_type in MODEL_TYPES.items() if model_type == config.get("model_type")), None)


def read_model_config(path: str) -> dict[str, Any]:
    """config.json of a complete model directory of a policy that we have.

    Raises ``CheckpointError``: a missing directory or file, a broken config.json, another model.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"the model {path} is not a directory; it has to be a local checkpoint")
    config = _load(directory / "config.json")
    if policy_of(config) is None:
        known = ", ".join(MODEL_TYPES.values())
        raise CheckpointError(f"{path} holds a model of type {config.get('model_type')}; the policies here are {known}")
    if not any((directory / name).is_file() for name in WEIGHTS):
        raise CheckpointError(f"{path} has no weights: neither {' nor '.join(WEIGHTS)} is there")
    if policy_of(config) not in CODEC_ELSEWHERE:
        codec_dir(path, config)
    return config


def codec_dir(path: str, config: dict[str, Any], codec_path: str | None = None) -> Path:
    """The directory of the codec, whose config.json is there; ``codec_path`` is ``tts.codec_path``.

    Raises ``CheckpointError``.
    """
    name = CODEC_DIRS[policy_of(config) or ""]
    directory = Path(codec_path) if codec_path else Path(path) / name
    if not (directory / "config.json").is_file():
        named = f"{codec_path} (tts.codec_path)" if codec_path else path
        missing = "config.json" if codec_path else f"{name}/config.json"
        raise CheckpointError(f"{named} has no codec: {missing} is missing, and codes could not be decoded")
    return directory


def speaker_size(model_config: dict[str, Any]) -> int:
    """Length of a speaker embedding: it stands in the talker's prompt as one position of its hidden size."""
    return int(model_config["talker_config"]["hidden_size"])


def language_tags(model_config: dict[str, Any]) -> list[str]:
    """The languages that the model has a token for, in lower case; a prompt may do without one (Auto)."""
    return [tag.lower() for tag in model_config.get("talker_config", {}).get("codec_language_id") or {}]


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
