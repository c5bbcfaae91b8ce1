"""The CPU as a vLLM-Omni platform: found where vLLM is a CPU build, by inheritance alone."""

from types import SimpleNamespace

import pytest
import torch

from verl_tts.platforms import vllm_omni_cpu


def test_it_is_the_current_platform_of_a_cpu_build():
    """By its entry point: nothing here has named it."""
    from vllm_omni.platforms import current_omni_platform

    assert type(current_omni_platform).__name__ == "CpuOmniPlatform"
    assert vllm_omni_cpu.platform_class() == "verl_tts.platforms.vllm_omni_cpu.CpuOmniPlatform"


def test_it_steps_aside_where_vllm_is_built_for_a_gpu(monkeypatch):
    import vllm.platforms

    monkeypatch.setattr(vllm.platforms, "_current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert vllm_omni_cpu.platform_class() is None


def test_the_class_is_made_once_and_pickles_by_its_name():
    platform = vllm_omni_cpu.CpuOmniPlatform
    assert platform is vllm_omni_cpu.CpuOmniPlatform
    assert (platform.__module__, platform.__qualname__) == (vllm_omni_cpu.__name__, "CpuOmniPlatform")
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = vllm_omni_cpu.Other


def test_memory_and_devices_are_the_machines():
    platform = vllm_omni_cpu.CpuOmniPlatform
    assert platform.get_torch_device(0) == torch.device("cpu")
    assert platform.get_device_count() >= 1
    free, total = platform.get_device_memory()
    assert 0 < free <= total
    assert 0 < platform.get_free_memory() <= total
    assert not platform.supports_torch_inductor(), "the code predictor would capture CUDA graphs"


def test_stage_workers_run_vllm_omnis_code_over_vllms_cpu_worker():
    """Method resolution does the work: an override of vLLM's CPU classes comes after all of vLLM-Omni's."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
    from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
    from vllm_omni.worker.mixins import OmniWorkerMixin

    platform = vllm_omni_cpu.CpuOmniPlatform
    ar = resolve_obj_by_qualname(platform.get_omni_ar_worker_cls())
    generation = resolve_obj_by_qualname(platform.get_omni_generation_worker_cls())

    from verl_tts.platforms import vllm_omni_cpu_worker as worker

    assert (ar, generation) == (worker.CpuARWorker, worker.CpuGenerationWorker)
    for cls in (ar, generation):
        assert cls.__mro__.index(OmniWorkerMixin) < cls.__mro__.index(worker.CPUWorker)
    pairs = ((worker.CpuARModelRunner, GPUARModelRunner), (worker.CpuGenerationModelRunner, GPUGenerationModelRunner))
    for runner, omni in pairs:
        order = [runner.__mro__.index(cls) for cls in (omni, CPUModelRunner, GPUModelRunner)]
        assert order == sorted(order)


@pytest.mark.parametrize("task", [{"task_id": "t-1"}, SimpleNamespace(task_id="t-1")])
def test_sleep_and_wake_are_answered_though_there_is_nothing_to_free(task):
    from verl_tts.platforms.vllm_omni_cpu_worker import CpuARWorker

    worker = object.__new__(CpuARWorker)
    worker.rank, worker.vllm_config = 0, SimpleNamespace(model_config=SimpleNamespace(stage_id=1))
    for handle in (worker.handle_sleep_task, worker.handle_wake_task):
        answer = handle(task)
        assert (answer.task_id, answer.status, answer.rank, answer.stage_id) == ("t-1", "SUCCESS", 0, 1)
