"""verl reads our configuration (its own checks pass, its dataclasses know every key) and our prompt files.

In a process of its own, since verl settles on a platform when it is imported.
"""

import os
import subprocess
import sys

import pytest

from verl_tts.data.quickstart import write_quickstart

PROGRAM = """
import os, sys
from dataclasses import fields
from verl_tts.config.compose import compose, worker_environment

os.environ.update(worker_environment(compose(["tts.platform=cpu"])))

from hydra.utils import get_class
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

for platform in ("cpu", "cuda"):
    config = compose([f"tts.platform={platform}"])
    assert need_reference_policy(config) and not need_critic(config)
    validate_config(config, use_reference_policy=True, use_critic=False)
    roles = config.actor_rollout_ref
    rollout = omega_conf_to_dataclass(roles.rollout)
    assert rollout.agent.agent_loop_manager_class == "verl_tts.rollout.agent_loop.AgentLoopManager"
    actor = omega_conf_to_dataclass(roles.actor)
    assert actor.engine.strategy == "fsdp2" and actor.engine.mixed_precision["param_dtype"] == "bf16"
    # The reference's node and the model's are completed by a worker; here it is enough that no key is unknown.
    for node in (roles.actor.fsdp_config, roles.ref.fsdp_config, roles.model):
        unknown = set(node) - {field.name for field in fields(get_class(node._target_))}
        assert not unknown, (platform, unknown)
print("verl takes it")

from transformers import AutoTokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl_tts.data.prompts import read_prompts
from verl_tts.data.schema import row_from_verl

model, file = sys.argv[1:]
dataset = RLHFDataset(file, AutoTokenizer.from_pretrained(model), config.data)
batch = collate_fn([dataset[index] for index in range(len(dataset))])
rows = [row_from_verl({name: column[index] for name, column in batch.items()}) for index in range(len(dataset))]
assert rows == read_prompts(file), rows[0]
print("verl hands over our rows")
"""


@pytest.fixture(scope="module")
def output(tiny_checkpoint, tmp_path_factory):
    data = tmp_path_factory.mktemp("data")
    write_quickstart(data, tiny_checkpoint)
    command = [sys.executable, "-c", PROGRAM, str(tiny_checkpoint), f"{data}/val.parquet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": f"{data}/cache"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


def test_verl_takes_our_configuration_on_every_platform(output):
    assert "verl takes it\n" in output, output


def test_verl_hands_every_row_of_a_prompt_file_to_the_agent_loop_unchanged(output):
    assert "verl hands over our rows\n" in output, output
