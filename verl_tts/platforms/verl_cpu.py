"""The CPU as a verl platform: entry point ``verl.plugins``, loaded by ``import verl`` in every process.

It does nothing unless ``VERL_PLATFORM=cpu``. It must stay light: torch and verl's platform base, no more,
because the transfer queue and the balancer load it too.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PLATFORM = "cpu"


def _register() -> None:
    import torch
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry

    from verl_tts.compat import fsdp2_unpinned_offload, torch_cpu_device_module, torch_gloo_twice

    class CpuDevice(str):
        """ "cpu" where verl wants a device, "0" where it formats an index.

        verl uses one value for both: ``x.to(get_device_id())`` and ``f"{get_device_name()}:{get_device_id()}"``.
        """

        def __format__(self, spec: str) -> str:
            return "0"

    @PlatformRegistry.register(platform=PLATFORM)
    class CpuPlatform(PlatformBase):
        device_name = "cpu"
        vendor_name = "cpu"
        device_module = torch.cpu  # verl compares with it by identity

        def is_available(self) -> bool:
            return True

        def current_device(self) -> str:
            return CpuDevice("cpu")

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            pass

        def synchronize(self, device_index: int | None = None) -> None:
            pass

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None:
            pass

        def empty_cache(self) -> None:
            pass

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return (None, None)

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"  # what Ray sets for its "GPU" resource

        @contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def profiler_start(self) -> None:
            pass

        def profiler_stop(self) -> None:
            pass

        def ray_resource_name(self) -> str:
            # Logical GPUs (ray.init(num_gpus=N)): verl counts no other resource, and asks Ray for the
            # accelerator ids of this one, which Ray knows for its built-in accelerators alone.
            return "GPU"

        def ray_noset_envvars(self) -> list[str]:
            return []

        def is_ipc_supported(self) -> bool:
            return False

        def cudart(self) -> Any:
            return None

    torch_cpu_device_module.apply()
    torch_gloo_twice.apply()
    fsdp2_unpinned_offload.apply()


if os.environ.get("VERL_PLATFORM") == PLATFORM:
    _register()
