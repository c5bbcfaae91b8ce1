"""vLLM-Omni starts the stages of one device one after the other.

vllm-omni 0.24 groups stages by device, takes a lock file per device on the whole host, and holds a launch lock
until a stage is ready (engine/stage_runtime.py). That protects the measuring of free device memory. Where each
stage has its KV cache given in bytes nothing is measured, and start-up is all Python imports: on the CPU, two
stages side by side are up in 10 s instead of 18 s, and two runs on one host do not wait for each other. Needed
until vLLM-Omni offers the choice.
"""

import contextlib
from typing import Any


def apply() -> None:
    from vllm_omni.engine import stage_runtime

    def no_locks(*_: Any, **__: Any) -> list[int]:
        return []

    def group_key(self: Any, replica: Any) -> str:
        return f"stage:{replica.metadata.stage_id}:{replica.replica_id}"

    owner: Any = next(
        cls for cls in vars(stage_runtime).values() if isinstance(cls, type) and "_replica_init_group_key" in vars(cls)
    )
    if getattr(owner._replica_init_group_key, "_verl_tts", False):
        return
    group_key._verl_tts = True  # type: ignore[attr-defined]
    initialize = owner.initialize

    def initialize_side_by_side(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._replica_launch_lock = contextlib.nullcontext()
        return initialize(self, *args, **kwargs)

    stage_runtime.acquire_device_locks = no_locks
    owner._replica_init_group_key = group_key
    owner.initialize = initialize_side_by_side
