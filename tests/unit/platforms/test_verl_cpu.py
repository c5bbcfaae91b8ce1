"""The CPU as a verl platform, in processes of their own: verl settles on one when it is imported."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json, sys
import torch
import torch.distributed as dist
before = {"cpu": set(vars(torch.cpu)), "group": dist.init_process_group}

import verl
from verl.plugin.platform import get_platform
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils.device import get_device_id, get_device_name, get_nccl_backend, get_torch_device, get_resource_name

found = {
    "names": PlatformRegistry.registered_names(),
    "added": sorted(set(vars(torch.cpu)) - before["cpu"]),
    "same group": dist.init_process_group is before["group"],
    "heavy": sorted({"vllm", "vllm_omni", "qwen_tts", "verl_tts.plugin", "verl_tts.engine.actor"} & set(sys.modules)),
}
if get_platform().device_name == "cpu":
    device, memory = get_torch_device(), torch.cpu.mem_get_info()
    found |= {
        "platform": type(get_platform()).__name__,
        "device": get_device_name(),
        "backend": get_nccl_backend(),
        "resource": get_resource_name(),
        "as an index": f"{get_device_name()}:{get_device_id()}",
        "as a device": str(torch.zeros(1).to(get_device_id()).device),
        "same module": device is torch.cpu,
        "memory": [device.memory_allocated(), device.max_memory_allocated(), *memory],
        "rng": bool(torch.equal(device.get_rng_state(), torch.get_rng_state())),
    }
    get_platform().manual_seed(3)
    first = torch.rand(2)
    state = device.get_rng_state()
    second = torch.rand(2)
    device.set_rng_state(state)
    found["rng restored"] = bool(torch.equal(torch.rand(2), second))
    get_platform().manual_seed_all(3)
    found["seeded"] = bool(torch.equal(torch.rand(2), first))
    with get_platform().nvtx_range("a"):
        pass
    for call in ("synchronize", "empty_cache", "profiler_start", "profiler_stop", "cudart"):
        assert getattr(get_platform(), call)() is None, call
    from verl_tts.platforms import verl_cpu
    twice = dist.init_process_group
    verl_cpu._register()
    found["applied twice"] = dist.init_process_group is not twice
    from verl.utils.distributed import initialize_global_process_group_ray
    initialize_global_process_group_ray()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    found["group"] = [dist.get_backend(), tensor.tolist()]
print("FOUND", json.dumps(found))
"""


def run(tmp_path, **environment: str) -> dict[str, Any]:
    unset = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    group = {"DIST_INIT_METHOD": f"file://{tmp_path}/store", "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=unset | group | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rsplit("FOUND", 1)[1])


@pytest.fixture(scope="module")
def cpu(tmp_path_factory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("group"), VERL_PLATFORM="cpu")


def test_it_does_nothing_unless_it_is_asked_for(tmp_path):
    found = run(tmp_path)
    assert "cpu" not in found["names"]
    assert found["added"] == []
    assert found["same group"]


def test_verl_takes_it_when_asked_and_imports_nothing_heavy_with_it(cpu):
    assert (cpu["platform"], cpu["device"]) == ("CpuPlatform", "cpu")
    assert cpu["heavy"] == []


def test_the_device_is_a_name_where_tensors_go_and_an_index_where_verl_formats_one(cpu):
    assert cpu["as a device"] == "cpu"
    assert cpu["as an index"] == "cpu:0"


def test_ray_hands_out_the_resource_that_verl_counts(cpu):
    assert cpu["resource"] == "GPU"
    assert cpu["backend"] == "gloo"


def test_torch_cpu_stays_the_module_that_it_was_and_has_what_verl_asks_for(cpu):
    assert cpu["same module"]
    allocated, peak, available, total = cpu["memory"]
    assert 0 < allocated <= total
    assert allocated <= 2 * peak
    assert 0 < available <= total
    assert cpu["rng"]
    assert cpu["rng restored"]
    assert cpu["seeded"]


def test_verls_process_group_starts_and_reduces(cpu):
    backend, tensor = cpu["group"]
    assert "gloo" in backend
    assert tensor == [1.0, 1.0]
    assert not cpu["applied twice"]
