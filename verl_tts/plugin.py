"""Everything that we hang into verl, Transformers and Ray, in one list, and the proof that it hangs there.

``actor_rollout_ref.model.external_lib=verl_tts.plugin`` makes verl import this module wherever a model
configuration is built: in the trainer and in the actor workers, and our rollout server does the same. The driver,
the transfer queue and the balancer stay light.
"""

import importlib
import os
import sys
from collections.abc import Callable

from verl_tts.errors import RegistrationError

ROLLOUT_NAME = "vllm_omni"


def register() -> None:
    """Registers all of it. Safe to call again."""
    for part in (_models, _rollout, _engine):
        part()


def _models() -> None:
    """Transformers' Auto classes know the policies' configurations."""
    from verl_tts.models.base import POLICIES, get_policy

    for name in POLICIES:
        get_policy(name).register()


def _rollout() -> None:
    """verl knows the rollout engine: the replica by its loader, the sender of weights by its name."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def load_replica() -> type:
        from verl_tts.rollout.replica import OmniReplica

        return OmniReplica

    _ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "verl_tts.rollout.replica.WeightSender"
    RolloutReplicaRegistry.register(ROLLOUT_NAME, load_replica)


def _engine() -> None:
    """verl knows the actor engine. Only actor workers have its base class loaded, and only they need it."""
    if "verl.workers.engine_workers" in sys.modules:
        importlib.import_module("verl_tts.engine.actor")


def check_registered(*, engine: bool = False) -> None:
    """Raises ``RegistrationError`` with the cause where a part of ours is missing in this process.

    verl hides an entry point that fails to load, and vLLM-Omni does so too. ``engine`` is asked for in actor
    workers.
    """
    _check("the verl platform", _check_platform)
    _check("a policy", _check_models)
    _check("the rollout engine", _check_rollout)
    if engine:
        _check("the actor engine", _check_engine)


def _check(what: str, proof: Callable[[], str | None]) -> None:
    try:
        missing = proof()
    except Exception as error:
        raise RegistrationError(f"{what} could not be registered: {type(error).__name__}: {error}") from error
    if missing:
        raise RegistrationError(f"{what} is not registered: {missing}")


def _check_platform() -> str | None:
    from verl.plugin.platform import get_platform

    asked = os.environ.get("VERL_PLATFORM", "")
    importlib.import_module("verl_tts.platforms.verl_cpu")  # shows what a hidden entry point failed with
    importlib.import_module("verl_tts.platforms.vllm_omni_cpu")
    if asked == "cpu" and get_platform().device_name != "cpu":
        return (
            f"VERL_PLATFORM=cpu, but verl runs on {get_platform().device_name}; reinstall verl_tts (its entry points)"
        )
    return None


def _check_models() -> str | None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from verl_tts.config.model_dir import MODEL_TYPES

    unknown = [model_type for model_type in MODEL_TYPES.values() if model_type not in CONFIG_MAPPING]
    return f"Transformers does not know {', '.join(unknown)}" if unknown else None


def _check_rollout() -> str | None:
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    get_rollout_class(ROLLOUT_NAME, "async")
    RolloutReplicaRegistry.get(ROLLOUT_NAME)
    return None


def _check_engine() -> str | None:
    from verl.workers.engine.base import EngineRegistry

    from verl_tts.models.base import POLICIES

    for name in POLICIES:
        EngineRegistry.get_engine_cls(name, "fsdp2")
    return None


register()
