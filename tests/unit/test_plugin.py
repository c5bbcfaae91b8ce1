"""What hangs in verl and Transformers after registration, and what does not before.

In a process of its own: verl settles on a platform when it is imported, and registries are global.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import importlib, json, os, pkgutil, sys
os.environ["VERL_PLATFORM"] = "cpu"

import torch, verl, verl_tts
import torch.distributed.fsdp
import verl.workers.engine_workers  # as in an actor worker
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from verl.workers.engine.base import EngineRegistry
from verl.workers.rollout import base as rollout
from verl.workers.rollout.replica import RolloutReplicaRegistry

found = {}

def outside():
    "What importing verl_tts might change, as a text."
    import verl.plugin.platform, verl.utils.fsdp_utils, verl.workers.engine.fsdp.transformer_impl
    modules = [torch.cpu, torch.distributed, torch.distributed.fsdp, verl, verl.plugin.platform,
               verl.utils.fsdp_utils, verl.workers.engine.fsdp.transformer_impl, rollout]
    state = {module.__name__: {name: id(value) for name, value in vars(module).items() if callable(value)}
             for module in modules}
    classes = [torch.distributed.fsdp.CPUOffloadPolicy, verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead]
    state |= {cls.__name__: {name: id(value) for name, value in vars(cls).items()} for cls in classes}
    return state | {"registries": dict(enumerate(registries())), "environment": dict(os.environ)}

def changes(before, after):
    "Names that are new are lazily imported ones of upstream, unless they are a registry's or a variable's."
    named = [(place, name) for place, names in before.items() for name in names
             if names[name] != after[place].get(name)]
    return named + [("environment", name) for name in after["environment"].keys() - before["environment"].keys()]

def registries():
    return [sorted(map(str, rollout._ROLLOUT_REGISTRY.items())), sorted(RolloutReplicaRegistry._registry),
            str(EngineRegistry._engines), "qwen3_tts" in CONFIG_MAPPING]

def cause(call, **kwargs):
    from verl_tts.errors import RegistrationError
    try:
        call(**kwargs)
    except RegistrationError as error:
        return str(error)
    return None

# Those that are there to change something: one that verl imports, what it imports in turn, the trainer, what vLLM loads
# into the talker's process, and what a server loads, which imports vLLM-Omni's.
registering = ("verl_tts.plugin", "verl_tts.engine.actor", "verl_tts.models.qwen3_tts", "verl_tts.trainer",
               "verl_tts.rollout.worker_extension", "verl_tts.rollout.qwen3_tts_talker", "verl_tts.rollout.moss_talker",
               "verl_tts.serving.openai_form",
               "verl_tts.platforms.vllm_omni_cpu_worker",
               "verl_tts.commands.__main__")
before = outside()
names = [module.name for module in pkgutil.walk_packages(verl_tts.__path__, "verl_tts.")]
for name in names:
    if name not in registering:
        importlib.import_module(name)
found["imported"] = len(names) - len(registering)
found["changed by importing"] = changes(before, outside())

from verl_tts import plugin
once = registries()
plugin.register()
found["registered"] = once
found["changed by registering again"] = once != registries()
found["all is well"] = cause(plugin.check_registered, engine=True)

def with_broken(module):
    "A module of ours that cannot be imported."
    kept = sys.modules.pop(module, None)
    sys.modules[module] = None
    try:
        return cause(plugin.check_registered, engine=True)
    finally:
        sys.modules[module] = kept

found["broken"] = {name: with_broken(f"verl_tts.{name}")
                   for name in ("platforms.verl_cpu", "platforms.vllm_omni_cpu", "rollout.replica")}

entry = rollout._ROLLOUT_REGISTRY.pop((plugin.ROLLOUT_NAME, "async"))
found["no sender"] = cause(plugin.check_registered)
rollout._ROLLOUT_REGISTRY[(plugin.ROLLOUT_NAME, "async")] = entry
engines = EngineRegistry._engines.pop("qwen3_tts")
found["no engine"] = cause(plugin.check_registered, engine=True)
found["no engine, not asked for"] = cause(plugin.check_registered)
EngineRegistry._engines["qwen3_tts"] = engines
config = CONFIG_MAPPING._extra_content.pop("qwen3_tts")
found["no model"] = cause(plugin.check_registered)
CONFIG_MAPPING._extra_content["qwen3_tts"] = config
platform = verl.plugin.platform.get_platform()
type(platform).device_name = "cuda"
found["other platform"] = cause(plugin.check_registered)
type(platform).device_name = "cpu"
found["all is well again"] = cause(plugin.check_registered, engine=True)
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.rsplit("FOUND", 1)[1])


def test_importing_verl_tts_changes_nothing_outside_it(found):
    assert found["imported"] > 40, "every module but those that are there to register"
    assert found["changed by importing"] == []


def test_registration_hangs_all_parts_into_verl_and_transformers(found):
    senders, replicas, engines, is_model_known = found["registered"]
    assert "(('vllm_omni', 'async'), 'verl_tts.rollout.replica.WeightSender')" in senders
    assert "vllm_omni" in replicas
    assert "verl_tts.engine.actor.PolicyEngine" in engines
    assert is_model_known
    assert found["all is well"] is None


def test_registering_again_changes_nothing(found):
    assert not found["changed by registering again"]


@pytest.mark.parametrize(
    ("module", "part"),
    [
        ("platforms.verl_cpu", "the verl platform"),
        ("platforms.vllm_omni_cpu", "the verl platform"),
        ("rollout.replica", "the rollout engine"),
    ],
)
def test_a_module_of_ours_that_cannot_be_imported_is_named_with_the_cause(found, module, part):
    """verl and vLLM-Omni would hide it."""
    assert found["broken"][module].startswith(f"{part} could not be registered: ")
    assert f"verl_tts.{module}" in found["broken"][module]
    assert "\n" not in found["broken"][module]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("no sender", "the rollout engine could not be registered: AssertionError: Rollout vllm_omni with mode async"),
        ("no engine", "the actor engine could not be registered"),
        ("no model", "a policy is not registered: Transformers does not know qwen3_tts"),
        ("other platform", "the verl platform is not registered: VERL_PLATFORM=cpu, but verl runs on cuda; reinstall"),
    ],
)
def test_a_part_that_is_missing_is_named(found, missing, message):
    assert found[missing].startswith(message)


def test_the_engine_is_asked_for_in_actor_workers_alone(found):
    assert found["no engine, not asked for"] is None
    assert found["all is well again"] is None
