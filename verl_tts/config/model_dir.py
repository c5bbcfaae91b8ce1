"""What config.json of a model directory says, read without transformers."""

import json
from pathlib import Path
from typing import Any

from verl_tts.errors import CheckpointError
from verl_tts.files import read_json_object

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
CONFIG = "config.json"
# name of a policy -> model_type of config.json, and where the codec is below the model's directory
MODEL_TYPES = {"qwen3_tts": "qwen3_tts", "moss": "moss_tts_delay"}
CODEC_DIR = "speech_tokenizer"
CODEC_DIRS = {"qwen3_tts": CODEC_DIR, "moss": "codec"}
CODEC_ELSEWHERE = ("moss",)  # published without it
TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"))  # either is one, with tokenizer_config.json
HEADER_BYTES = 8  # of a safetensors file: the length of its header, little endian
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def read_model_type(path: str | None) -> str | None:
    """The policy of the model directory, or the ``model_type`` that we have none for; None where there is no
    config.json to read, which ``read_model_config`` reports."""
    config_file = Path(path or "") / CONFIG
    if not config_file.is_file():
        return None
    config = read_json_object(config_file)
    return policy_of(config) or config.get("model_type")


def policy_of(config: dict[str, Any]) -> str | None:
    """Which policy a config.json is of; None: of none that we have."""
    return next((name for name, model_type in MODEL_TYPES.items() if model_type == config.get("model_type")), None)


def read_policy_config(path: str) -> dict[str, Any]:
    """config.json of a policy that we have, whatever else is beside it. Raises ``CheckpointError``."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"the model {path} is not a directory; it has to be a local checkpoint")
    if not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory / CONFIG} is missing; the directory is not a checkpoint")
    config = read_json_object(directory / CONFIG)
    if policy_of(config) is None:
        known = ", ".join(MODEL_TYPES.values())
        raise CheckpointError(f"{path} holds a model of type {config.get('model_type')}; the policies here are {known}")
    return config


def read_model_config(path: str) -> dict[str, Any]:
    """config.json of a complete model directory of a policy that we have.

    Raises ``CheckpointError``: a missing directory or file, a broken config.json, another model, a safetensors file
    that is cut off. Of the weights only the headers are read.
    """
    config, directory = read_policy_config(path), Path(path)
    weights = [directory / name for name in WEIGHTS if (directory / name).is_file()]
    if not weights:
        raise CheckpointError(f"{path} has no weights: neither {' nor '.join(WEIGHTS)} is there")
    if not any(all((directory / name).is_file() for name in names) for names in TOKENIZERS):
        raise CheckpointError(
            f"{path} has no tokenizer: neither {' nor '.join(map(' with '.join, TOKENIZERS))} is there"
        )
    if policy_of(config) not in CODEC_ELSEWHERE:
        codec_dir(path, config)
    for file in weight_files(weights[0]):
        read_header(file)
    return config


def codec_dir(path: str, config: dict[str, Any], codec_path: str | None = None) -> Path:
    """The directory of the codec, whose files are whole; ``codec_path`` is ``tts.codec_path``.

    Raises ``CheckpointError``.
    """
    name = CODEC_DIRS[policy_of(config) or ""]
    directory = Path(codec_path) if codec_path else Path(path) / name
    if not (directory / CONFIG).is_file():
        named = f"{codec_path} (tts.codec_path)" if codec_path else path
        missing = CONFIG if codec_path else f"{name}/{CONFIG}"
        remedy = "; name its directory with tts.codec_path" if policy_of(config) in CODEC_ELSEWHERE else ""
        raise CheckpointError(f"{named} has no codec: {missing} is missing, and codes could not be decoded{remedy}")
    for file in sorted(directory.glob("*.safetensors")):
        read_header(file)
    return directory


def weight_files(weights: Path) -> list[Path]:
    """The files behind one of ``WEIGHTS``: itself, or those that an index names. Raises ``CheckpointError``."""
    if weights.suffix != ".json":
        return [weights]
    places = read_json_object(weights).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{weights} has no weight_map, which says in which file a tensor is")
    return [weights.parent / str(name) for name in sorted({*places.values()})]


def read_header(file: Path) -> dict[str, Any]:
    """Tensor name -> {"dtype", "shape", "data_offsets"} of a safetensors file as long as its header says.

    Raises ``CheckpointError``: no file, an empty one, half of one, another format.
    """
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(HEADER_BYTES), "little")
        if size < HEADER_BYTES or not 0 < length <= min(MAX_HEADER_BYTES, size - HEADER_BYTES):
            raise CheckpointError(f"{file} has {size} bytes and no whole header; it is cut off or not safetensors")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            expected = HEADER_BYTES + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise CheckpointError(f"{file} is not a safetensors file: its header cannot be read") from error
    if size != expected:
        raise CheckpointError(f"{file} has {size} bytes, its header says {expected}; copy or download it again")
    return header


def takes_speakers(model_config: dict[str, Any]) -> bool:
    """Whether the policy's voice is an embedding; another has it from a recording or from its text."""
    return policy_of(model_config) == "qwen3_tts"


def speaker_size(model_config: dict[str, Any]) -> int:
    """Length of a speaker embedding: it stands in the talker's prompt as one position of its hidden size.

    Raises ``CheckpointError`` for a config.json that does not say it.
    """
    talker = model_config.get("talker_config")
    size = talker.get("hidden_size") if isinstance(talker, dict) else None
    if type(size) is not int or size < 1:
        raise CheckpointError(f"config.json has talker_config.hidden_size={size}; it has to be a number of 1 or more")
    return size


def language_tags(model_config: dict[str, Any]) -> list[str] | None:
    """The languages that the model has a token for, in lower case; a prompt may do without one (Auto). None: a language
    is a word of the prompt, and any will do."""
    if not isinstance(model_config.get("talker_config"), dict):
        return None
    return [tag.lower() for tag in model_config["talker_config"].get("codec_language_id") or {}]
