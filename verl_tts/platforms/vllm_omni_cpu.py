"""The CPU as a vLLM-Omni platform: entry point ``vllm_omni.platform_plugins``.

vLLM has a CPU platform and vLLM-Omni has workers for GPUs; this joins the two by inheritance alone. It is
active where vLLM itself is a CPU build and nowhere else.
"""

from typing import Any


def platform_class() -> str | None:
    """What vLLM-Omni calls to ask whether this platform is the current one."""
    from vllm.platforms import current_platform

    return f"{__name__}.CpuOmniPlatform" if current_platform.is_cpu() else None


def __getattr__(name: str) -> Any:
    # The class is made when it is asked for: vLLM-Omni imports this module on GPU machines too.
    if name == "CpuOmniPlatform":
        globals()[name] = _make_platform()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _make_platform() -> type:
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

    class CpuOmniPlatform(OmniPlatform, CpuPlatform):
        _omni_enum = OmniPlatformEnum.OOT

        @classmethod
        def get_omni_ar_worker_cls(cls) -> str:
            return "verl_tts.platforms.vllm_omni_cpu_worker.CpuARWorker"

        @classmethod
        def get_omni_generation_worker_cls(cls) -> str:
            return "verl_tts.platforms.vllm_omni_cpu_worker.CpuGenerationWorker"

        @classmethod
        def get_default_stage_config_path(cls) -> str:
            return "vllm_omni/model_executor/stage_configs"

        @classmethod
        def get_diffusion_attn_backend_cls(cls, selected_backend: str | None, head_size: int) -> str:
            from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum

            return DiffusionAttentionBackendEnum.TORCH_SDPA.get_path()

        @classmethod
        def supports_torch_inductor(cls) -> bool:
            return False  # else the code predictor captures CUDA graphs

        @classmethod
        def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
            return torch.device("cpu")

        @classmethod
        def get_device_count(cls) -> int:
            from vllm.utils.cpu_resource_utils import get_visible_memory_node

            return max(1, len(get_visible_memory_node()))

        @classmethod
        def get_device_version(cls) -> str | None:
            return None

        @classmethod
        def synchronize(cls) -> None:
            return None

        @classmethod
        def get_free_memory(cls, device: torch.device | None = None) -> int:
            return cls.mem_get_info()[0]

        @classmethod
        def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
            return cls.mem_get_info()

    CpuOmniPlatform.__module__ = __name__
    CpuOmniPlatform.__qualname__ = "CpuOmniPlatform"
    return CpuOmniPlatform
