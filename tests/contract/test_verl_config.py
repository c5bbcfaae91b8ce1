"""verl reads the configuration that we compose: its own checks pass, its dataclasses know every key.

In a process of its own, since verl settles on a platform when it is imported.
"""

import os
import subprocess
import sys

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
"""


def test_verl_takes_our_configuration_on_every_platform():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("verl takes it\n"), done.stderr
