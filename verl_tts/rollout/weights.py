"""What both ends of a weight sync agree on: names, shapes, and a number that says that tensors are equal."""

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from verl_tts.config.model_dir import read_header

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensors: Mapping[str, torch.Tensor]) -> int:
    """A number in [0, 2**63) over names, dtypes and bits, the same on every device and in every order of names.

    It tells a change, not an attack: per tensor it adds the bits as integers, exact and without a copy.
    """
    total = 0
    for name, tensor in tensors.items():
        bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()])
        total += int(bits.sum(dtype=torch.int64)) * (zlib.crc32(f"{name} {tensor.dtype}".encode()) | 1)
    return total & (2**63 - 1)


def read_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors, from the headers of its safetensors files."""
    headers = map(read_header, sorted(model_dir.glob("*.safetensors")))
    return {name: tuple(entry["shape"]) for header in headers for name, entry in header.items()}
