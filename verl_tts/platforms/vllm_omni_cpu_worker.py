"""vLLM-Omni's stage workers on vLLM's CPU worker.

Method resolution does the work: CpuARModelRunner -> vLLM-Omni's AR runner -> vLLM's CPU runner -> vLLM's GPU
runner, so every ``super()`` of vLLM-Omni lands on the CPU override where there is one.
"""

from typing import Any

import torch

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  (first: it loads vLLM's CPU shared memory)
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin

from verl_tts.compat import vllm_cpu_live_weights


class _CpuRunner:
    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        # vLLM-Omni makes some buffers anew after vLLM had aliased each buffer's device side to its host side.
        self._postprocess_tensors()  # type: ignore[attr-defined]

    def _init_talker_mtp(self) -> None:
        # No CUDA graphs are captured here, and vLLM-Omni compares with the largest captured size.
        if self.compilation_config.max_cudagraph_capture_size is None:  # type: ignore[attr-defined]
            self.compilation_config.max_cudagraph_capture_size = 0  # type: ignore[attr-defined]
        super()._init_talker_mtp()  # type: ignore[misc]


class CpuARModelRunner(_CpuRunner, GPUARModelRunner, CPUModelRunner):
    pass


class CpuGenerationModelRunner(_CpuRunner, GPUGenerationModelRunner, CPUModelRunner):
    pass


class _CpuStageWorker(OmniWorkerMixin):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vllm_cpu_live_weights.apply()
        super().__init__(*args, **kwargs)

    def handle_sleep_task(self, task: Any) -> Any:
        return self._acknowledge(task, "sleep")

    def handle_wake_task(self, task: Any) -> Any:
        return self._acknowledge(task, "wake")

    def _acknowledge(self, task: Any, what: str) -> Any:
        """The control plane waits for an answer; on a CPU there is no memory to give back."""
        from vllm_omni.diffusion.data import OmniACK

        return OmniACK(
            task_id=task["task_id"] if isinstance(task, dict) else task.task_id,
            status="SUCCESS",
            rank=self.rank,
            stage_id=getattr(self.vllm_config.model_config, "stage_id", 0),
            metadata={"source": f"cpu {what}: nothing to free"},
        )


class CpuARWorker(_CpuStageWorker, CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        self.model_runner = CpuARModelRunner(self.vllm_config, torch.device("cpu"))


class CpuGenerationWorker(_CpuStageWorker, CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        self.model_runner = CpuGenerationModelRunner(self.vllm_config, torch.device("cpu"))
