"""Each shim in ``verl_tts/compat`` is needed: the fault that it is there for is still there.

A test that fails here is good news: upstream has changed, and the file that the test names can go, or shrink.
(``qwen_tts_transformers5`` has a file of tests of its own.)
"""

import inspect
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

TORCH_PROGRAM = """
import json, os, tempfile
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from verl_tts.compat import fsdp2_unpinned_offload, torch_cpu_device_module, torch_gloo_twice

found = {"there already": [name for name in torch_cpu_device_module.NAMES if hasattr(torch.cpu, name)]}

def outcome(call):
    try:
        return call() or "works"
    except (ValueError, RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"

def group(backend):
    folder = tempfile.mkdtemp()
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    dist.destroy_process_group()

def offload():
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), offload_policy=CPUOffloadPolicy(pin_memory=True))
    with torch.no_grad():
        model(torch.zeros(2, 4))

found["group"] = outcome(lambda: group("cpu:gloo,cpu:gloo"))
torch_gloo_twice.apply()
found["group, with the shim"] = outcome(lambda: group("cpu:gloo,cpu:gloo"))
found["group, named once"] = outcome(lambda: group("gloo"))
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
found["offload"] = outcome(offload)
fsdp2_unpinned_offload.apply()
found["offload, with the shim"] = outcome(offload)
torch_cpu_device_module.apply()
found["missing, with the shim"] = [name for name in torch_cpu_device_module.NAMES if not hasattr(torch.cpu, name)]
kept = torch.cpu.synchronize
torch_cpu_device_module.apply()
found["what torch has is kept"] = torch.cpu.synchronize is kept
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What torch does on a machine without a GPU, before and after the shims, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TORCH_PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rsplit("FOUND", 1)[1])


# ------------------------------------------------------------------------------------------------ torch and verl


def test_torch_cpu_device_module__torch_still_lacks_every_name_that_is_added(found):
    assert found["there already"] == [], "torch has these now: take them out of NAMES"
    assert found["missing, with the shim"] == []
    assert found["what torch has is kept"]


def test_torch_cpu_device_module__verl_still_calls_them():
    import verl.utils.checkpoint.checkpoint_manager as checkpoints
    import verl.workers.engine_workers as workers
    from verl.utils import memory_utils

    sources = "".join(inspect.getsource(module) for module in (checkpoints, workers, memory_utils))
    for name in ("max_memory_allocated", "max_memory_reserved", "get_rng_state", "set_rng_state", "empty_cache"):
        assert f".{name}(" in sources, name


def test_torch_gloo_twice__torch_refuses_a_device_that_is_named_twice(found):
    assert found["group"].startswith(("ValueError", "AssertionError", "RuntimeError")), found["group"]
    assert found["group, with the shim"] == "works"
    assert found["group, named once"] == "works"


def test_torch_gloo_twice__verl_names_it_twice():
    from verl.utils import distributed

    for function in (distributed.initialize_global_process_group, distributed.initialize_global_process_group_ray):
        assert 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"' in inspect.getsource(function)


def test_fsdp2_unpinned_offload__pinning_fails_without_a_driver(found):
    assert found["offload"] != "works"
    assert found["offload, with the shim"] == "works"


def test_fsdp2_unpinned_offload__verl_pins_whatever_the_platform():
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    assert "CPUOffloadPolicy(pin_memory=True)" in inspect.getsource(FSDPEngine._build_fsdp_module)


# ------------------------------------------------------------------------------------------------ vLLM


def packed_layer(monkeypatch: pytest.MonkeyPatch, onednn: bool) -> torch.nn.Module:
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    from verl_tts.compat import vllm_cpu_live_weights

    monkeypatch.setattr(ops, "_supports_onednn", ops._supports_onednn)
    if not onednn:
        vllm_cpu_live_weights.apply()
    layer = torch.nn.Linear(32, 64, bias=False)
    layer.weight.requires_grad_(False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)  # as vLLM calls it for linear layers
    return layer


def test_vllm_cpu_live_weights__packing_drops_the_weight_of_a_layer(monkeypatch):
    assert packed_layer(monkeypatch, onednn=True).weight.numel() == 0, "a sync would write into nothing"


def test_vllm_cpu_live_weights__without_packing_the_layer_computes_with_its_live_weight(monkeypatch):
    layer, x = packed_layer(monkeypatch, onednn=False), torch.rand(3, 32)
    with torch.no_grad():
        layer.weight.copy_(torch.rand_like(layer.weight))
        torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), x @ layer.weight.T)


# ------------------------------------------------------------------------------------------------ vLLM-Omni


def stage(stage_id: int) -> SimpleNamespace:
    metadata = SimpleNamespace(stage_id=stage_id, stage_type="llm", runtime_cfg={"devices": "0"})
    return SimpleNamespace(metadata=metadata, replica_id=0, launch_mode="local")


def test_vllm_omni_parallel_stages__stages_of_one_device_wait_for_each_other():
    from vllm_omni.engine.stage_runtime import StageRuntime

    runtime = object.__new__(StageRuntime)
    first, second = (StageRuntime._replica_init_group_key(runtime, stage(i)) for i in (0, 1))
    assert first == second
    source = inspect.getsource(StageRuntime._initialize_local_llm_replica)
    assert "acquire_device_locks(" in source, "the lock on the whole host"
    assert "with self._replica_launch_lock:" in source, "held until a stage is ready"
    assert "self._replica_launch_lock = threading.Lock()" in inspect.getsource(StageRuntime.__init__)


def test_vllm_omni_parallel_stages__with_the_shim_they_do_not(monkeypatch):
    from vllm_omni.engine import stage_runtime

    from verl_tts.compat import vllm_omni_parallel_stages

    runtime_class = stage_runtime.StageRuntime
    for owner, name in (
        (stage_runtime, "acquire_device_locks"),
        (runtime_class, "_replica_init_group_key"),
        (runtime_class, "initialize"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    monkeypatch.setattr(runtime_class, "initialize", lambda self: "initialized")
    vllm_omni_parallel_stages.apply()
    once = runtime_class.initialize
    vllm_omni_parallel_stages.apply()
    assert runtime_class.initialize is once, "applied once"
    runtime = object.__new__(runtime_class)
    assert runtime._replica_init_group_key(stage(0)) != runtime._replica_init_group_key(stage(1))
    assert stage_runtime.acquire_device_locks(0, {}, 10) == []
    assert runtime.initialize() == "initialized"
    with runtime._replica_launch_lock, runtime._replica_launch_lock:
        pass  # nothing is waited for


# ------------------------------------------------------------------------------------------------ beside compat/


def test_the_talker__vllm_omni_still_writes_bf16_for_embeddings_whatever_the_dtype():
    """``Talker`` sets the engine's own."""
    from vllm_omni.model_executor.models.qwen3_tts import prompt_embeds_builder, qwen3_tts_talker

    for module in (prompt_embeds_builder, qwen3_tts_talker):
        assert "self._embedding_dtype = torch.bfloat16" in inspect.getsource(module)


def test_the_talker__vllm_omni_still_computes_all_rows_of_the_code_predictor_at_each_step():
    """``CodePredictor`` computes one."""
    from vllm_omni.model_executor.models.common.qwen3_code_predictor import CodePredictorWrapper

    source = inspect.getsource(CodePredictorWrapper.forward)
    assert "model_fwd(proj_buf[:padded_bsz, :seq_len, :], pos_ids)" in source
    assert source.count("self._multinomial(probs, generator, generators)") == 2, "draws in one more place"


def test_the_talker__vllm_omni_still_looks_for_its_name():
    """So ``Talker`` is registered under it."""
    from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner

    from verl_tts.rollout.qwen3_tts_talker import ARCHITECTURE

    assert f'"{ARCHITECTURE}"' in inspect.getsource(inspect.getmodule(GPUARModelRunner))


def test_the_cpu_worker__vllm_omni_still_compares_with_a_capture_size_that_a_cpu_does_not_have():
    """``_CpuRunner._init_talker_mtp`` gives it one."""
    from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner

    owner = next(cls for cls in GPUARModelRunner.__mro__ if "_init_talker_mtp" in vars(cls))
    assert "max_cudagraph_capture_size" in inspect.getsource(owner._init_talker_mtp)


def test_the_topology__a_clip_that_does_not_fit_the_budget_is_still_scheduled_in_part():
    """``topology`` gives code2wav room for all its clips at their longest: a part would be decoded again, whole."""
    from vllm_omni.core.sched.omni_generation_scheduler import OmniGenerationScheduler

    source = inspect.getsource(OmniGenerationScheduler.schedule)
    waiting = source[source.index("self.waiting.peek_request()") :]
    assert "num_new_tokens = min(required_tokens, token_budget)" in waiting


def test_the_engine__verl_still_steps_over_a_gradient_that_is_not_finite():
    """``PolicyEngine.optimizer_step`` ends the run there."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    source = inspect.getsource(FSDPEngine.optimizer_step)
    assert "if not torch.isfinite(grad_norm):" in source
    assert "self.optimizer.zero_grad()" in source


def test_the_engine__verl_still_draws_lora_from_an_unseeded_generator():
    """``PolicyEngine._build_lora_module`` seeds it."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    assert "manual_seed" not in inspect.getsource(FSDPEngine._build_lora_module)


def test_the_groups__verl_still_fills_a_batch_with_synthetic_rows(monkeypatch):
    """``GroupRule`` leaves it none to fill, and the trainer asserts that none was added."""
    from verl.trainer.ppo import padding_utils

    row = {"prompts": torch.arange(3), "responses": torch.arange(2), "response_mask": torch.ones(2), "uid": "a"}
    row |= {"position_ids": torch.arange(5), "tts_codes": torch.ones(2, 16), "input_ids": torch.arange(5)}
    written: list[Any] = []
    queue = SimpleNamespace(kv_batch_get=lambda **_: [row], kv_batch_put=lambda **kwargs: written.append(kwargs))
    monkeypatch.setattr(padding_utils, "tq", queue)
    batch = padding_utils.KVBatchMeta(partition_id="train", keys=["a", "b", "c"], tags=[{"seq_len": 5}] * 3)
    assert padding_utils.upsample_batch_to_divisible_size(batch, 3, 7) is batch
    filled = padding_utils.upsample_batch_to_divisible_size(batch, 2, 7)
    assert len(filled.keys) == 4
    assert filled.tags[3]["is_padding"]
    fields = written[0]["fields"]
    assert len(fields["responses"][0]) == 1
    assert len(fields["tts_codes"][0]) == 2, "with the codes of another row"
