"""``torch.cpu`` lacks what verl calls on every ``torch.<device>``.

verl 0.9.1 asks the device module for memory figures, caches and random state (workers/engine_workers.py,
utils/memory_utils.py, utils/checkpoint/checkpoint_manager.py). torch 2.11's ``torch.cpu`` has none of them,
and verl compares the module with ``torch.cpu`` by identity, so it cannot be wrapped. Only missing names are
added. Needed until verl guards these calls or ``torch.cpu`` has them.
"""

from typing import Any

NAMES = (
    "memory_allocated",
    "memory_reserved",
    "max_memory_allocated",
    "max_memory_reserved",
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "mem_get_info",
    "get_rng_state",
    "set_rng_state",
    "get_device_name",
)


def _resident_bytes(*_: Any, **__: Any) -> int:
    import psutil

    return psutil.Process().memory_info().rss


def _peak_bytes(*_: Any, **__: Any) -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _mem_get_info(*_: Any, **__: Any) -> tuple[int, int]:
    import psutil

    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _nothing(*_: Any, **__: Any) -> None:
    return None


def apply() -> None:
    import torch

    implementations = {
        "memory_allocated": _resident_bytes,
        "memory_reserved": _resident_bytes,
        "max_memory_allocated": _peak_bytes,
        "max_memory_reserved": _peak_bytes,
        "mem_get_info": _mem_get_info,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "get_device_name": lambda *_, **__: "CPU",
    }
    for name in NAMES:
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, implementations.get(name, _nothing))
