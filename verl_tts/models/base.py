"""What a policy brings along, and the list of policies.

An adapter is one file, ``verl_tts/models/<name>.py``, that ends in ``ADAPTER = PolicyAdapter(...)``. ``get_policy``
imports it, with its torch and its model code, when it is asked for and not before. The rollout engine's side of the
same policy is ``verl_tts/rollout/<name>.py``; what follows from its config.json alone is ``<name>_facts.py``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from verl_tts.config.model_dir import MODEL_TYPES
from verl_tts.errors import ConfigError

# name of a policy -> the module of its adapter
POLICIES = {name: f"verl_tts.models.{name}" for name in MODEL_TYPES}


@dataclass(frozen=True)
class PolicyAdapter:
    """A codec language model as the actor engine and the export see it.

    ``policy`` is the ``torch.nn.Module`` that is trained. Its ``from_pretrained(path, dtype=...)`` loads what
    training needs and nothing else; its ``forward`` replays sampled codes and returns a tuple of logits.
    """

    model_type: str
    """What config.json of a checkpoint says."""
    sample_rate_hz: int
    samples_per_frame: int
    policy: Any
    register: Callable[[], None]
    """Makes Transformers' Auto classes know the model. Idempotent."""
    replay_inputs: Callable[[Any, Callable[[str], list[Any]], str], dict[str, Any]]
    """(config, rows, prompt layout) -> ``forward``'s arguments; ``rows(name)`` are the samples' tensors of a column."""
    score: Callable[[Any, Any, Callable[[str], list[Any]], Any], dict[str, Any]]
    """(config, ``forward``'s output, rows, ``Scoring``) -> one value for each response token of all samples, by name:
    ``engine.sampling.score``'s, over what the rollout engine can sample."""
    is_trainable: Callable[[str, str], bool]
    """(parameter name, "full" | "backbone" | "lora") -> does the optimizer get it."""
    lora_targets: Callable[[str | Sequence[str]], str]
    """The published ``target_modules`` -> a regular expression that hits the policy alone."""
    lora_prefix: str
    """The stack whose layers LoRA adapts; an adapter that was made of this stack alone has names below it."""


def get_policy(name: str) -> PolicyAdapter:
    """The adapter of a policy. Raises ``ConfigError`` for one that nobody wrote."""
    if name not in POLICIES:
        raise ConfigError(f"Unknown model type {name!r}: there are adapters for {', '.join(sorted(POLICIES))}")
    return import_module(POLICIES[name]).ADAPTER


def is_trained(patterns: Mapping[str, re.Pattern[str]], name: str, mode: str) -> bool:
    """Whether a parameter's name matches what a policy trains in this mode. Raises ``ConfigError`` for another mode."""
    if mode not in patterns:
        raise ConfigError(f"Unknown trainable mode {mode!r}: choose one of {', '.join(patterns)}")
    return patterns[mode].fullmatch(name) is not None


# ---------------------------------------------------------------------------------------------------- LoRA

# The linear modules of a Qwen3 layer and what they are part of.
LORA_PARENTS = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}


def lora_leaves(target_modules: str | Sequence[str]) -> str:
    """The end of a regular expression that hits these modules of a layer.

    ``target_modules`` is "all-linear" or leaf names such as ["q_proj", "v_proj"], as published. Raises
    ``ConfigError`` for a name that a layer lacks.
    """
    names = [*LORA_PARENTS] if target_modules == "all-linear" else target_modules
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise ConfigError(f"target_modules {target_modules!r}: write all-linear or a list of {', '.join(LORA_PARENTS)}")
    for name in names:
        if name not in LORA_PARENTS:
            raise ConfigError(f"Unknown LoRA target {name!r}: choose from {', '.join(LORA_PARENTS)}")
    return "|".join(rf"{LORA_PARENTS[name]}\.{name}" for name in names)
