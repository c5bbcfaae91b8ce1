"""What config.json of a model directory says, read without transformers."""

import json
from pathlib import Path
from typing import Any

from verl_tts.config.tts import MODELS
from verl_tts.errors import CheckpointError
from verl_tts.files import read_json_object

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
CONFIG = "config.json"
CODEC_DIR = "speech_tokenizer"
TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"))  # either is one, with tokenizer_config.json
HEADER_BYTES = 8  # of a safetensors file: the length of its header, little endian
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def read_model_type(path: str | None) -> str | None:
    """``model_type`` of the model directory; None where there is no config.json to read, which
    ``read_model_config`` reports."""
    config_file = Path(path or "") / CONFIG
    return read_json_object(config_file).get("model_type") if config_file.is_file() else None


def read_policy_config(path: str) -> dict[str, Any]:
    """config.json of a policy that we have, whatever else is beside it. Raises ``CheckpointError``."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"the model {path} is not a directory; it has to be a local checkpoint")
    if not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory / CONFIG} is missing; the directory is not a checkpoint")
    config = read_json_object(directory / CONFIG)
    model_type, known = config.get("model_type"), MODELS[1:]
    if model_type not in known:
        raise CheckpointError(f"{path} holds a model of type {model_type}; the policies here are {', '.join(known)}")
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
    codec = directory / CODEC_DIR
    if not (codec / CONFIG).is_file():
        raise CheckpointError(
            f"{path} has no codec: {CODEC_DIR}/config.json is missing, and codes could not be decoded"
        )
    for file in (*weight_files(weights[0]), *sorted(codec.glob("*.safetensors"))):
        read_header(file)
    return config


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


def speaker_size(model_config: dict[str, Any]) -> int:
    """Length of a speaker embedding: it stands in the talker's prompt as one position of its hidden size."""
    return int(model_config["talker_config"]["hidden_size"])


def language_tags(model_config: dict[str, Any]) -> list[str]:
    """The languages that the model has a token for, in lower case; a prompt may do without one (Auto)."""
    return [tag.lower() for tag in model_config["talker_config"].get("codec_language_id") or {}]
