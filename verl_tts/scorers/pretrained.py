"""Where a model's files are, and on which device and in which precision PyTorch runs it."""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from verl_tts.errors import ConfigError
from verl_tts.rewards.protocol import excerpt

# What a model directory needs; repositories hold the same weights in other formats and precisions, too.
_MODEL_FILES = ["*.json", "*.txt", "*.model", "model.bin", "model*.safetensors", "pytorch_model*.bin"]
_IGNORED_FILES = ["*.fp32*", "*.fp16*"]

# What reading a directory raises that does not hold the model it should.
LOAD_ERRORS = (
    OSError,
    TypeError,
    ValueError,
    RuntimeError,
    EOFError,
    SafetensorError,
    StrictDataclassError,
    pickle.UnpicklingError,
)

DTYPES = ("auto", "float32", "float16", "bfloat16")


def model_folder(scorer: str, model: str, revision: str | None, allow_download: bool) -> Path:
    """The directory of a model that is named by path or by repository; local files only without leave to download."""
    if Path(model).is_dir():
        return Path(model)
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            local_files_only=not allow_download,
            allow_patterns=_MODEL_FILES,
            ignore_patterns=_IGNORED_FILES,
        )
    except (OSError, ValueError) as error:
        raise no_model(scorer, model, allow_download, error) from error
    return Path(folder)


def no_model(scorer: str, model: str, allow_download: bool, error: Exception) -> ConfigError:
    remedy = "check the name" if allow_download else "give a directory, or add --allow-download"
    return ConfigError(f"{scorer}: no model {model!r} on this machine; {remedy} ({excerpt(error)})")


def load_whole(scorer: str, model_class: Any, folder: Path, dtype: torch.dtype) -> Any:
    """A model of Transformers with every weight out of the files of ``folder``; ConfigError where one is not there.

    Transformers draws what it does not find from a random generator, and so it does for the weights of another model.
    """
    expected = model_class.config_class.model_type
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        if found != expected:
            raise ConfigError(
                f"{scorer}: {folder} does not load as {model_class.__name__}: config.json says model_type={found!r}, "
                f"not {expected!r}; code that a checkpoint brings along is never run"
            )
        model, info = model_class.from_pretrained(folder, dtype=dtype, local_files_only=True, output_loading_info=True)
    except (*LOAD_ERRORS, AttributeError) as error:
        raise ConfigError(f"{scorer}: {folder} does not load as {model_class.__name__}: {excerpt(error)}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ConfigError(
            f"{scorer}: {folder} lacks {len(missing)} weights of {model_class.__name__}, {missing[0]} first"
        )
    return model


def split_device(scorer: str, device: str) -> tuple[str, int]:
    """("auto", 0), ("cpu", 0) or ("cuda", N)."""
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or not (index.isdecimal() or not index):
        raise ConfigError(f"{scorer}: unknown device {device!r}; there are: auto, cpu, cuda, cuda:N")
    return kind, int(index or 0)


def torch_device(scorer: str, device: str) -> torch.device:
    kind, index = split_device(scorer, device)
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise ConfigError(f"{scorer}: device={device}, but PyTorch sees {torch.cuda.device_count()} GPUs here")
    return torch.device("cuda", index) if kind == "cuda" else torch.device("cpu")


def torch_dtype(scorer: str, dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is float16 on a GPU and float32 on a CPU."""
    if dtype not in DTYPES:
        raise ConfigError(f"{scorer}: unknown dtype {dtype!r}; there are: {', '.join(DTYPES)}")
    if dtype == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    return getattr(torch, dtype)
