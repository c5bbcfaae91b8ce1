"""verl asks for the process group ``cpu:gloo,cpu:gloo`` when the device is the CPU.

verl 0.9.1 builds ``f"cpu:gloo,{device}:{backend}"`` (utils/distributed.py); torch 2.11 refuses a device that is
named twice. The doubled part is dropped; every other string passes as it is. Needed until verl builds the
string from distinct devices.
"""

import functools
from typing import Any


def apply() -> None:
    import torch.distributed as dist

    original = dist.init_process_group
    if getattr(original, "_verl_tts", False):
        return

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(backend, str):
            backend = ",".join(dict.fromkeys(backend.split(",")))
        return original(backend, *args, **kwargs)

    init_process_group._verl_tts = True  # type: ignore[attr-defined]
    dist.init_process_group = init_process_group
