"""Values counted where they are: in a file of weights, and in what a forward pass keeps for its backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open


def numel(file: Path) -> int:
    with safe_open(file, framework="pt") as tensors:
        return sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


@contextmanager
def kept_by_autograd(policy: torch.nn.Module) -> Iterator[dict[int, tuple[int, torch.Tensor]]]:
    """Address -> (bytes, tensor) of every storage that is kept inside the block, the policy's parameters left out."""
    kept: dict[int, tuple[int, torch.Tensor]] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
