"""What a policy brings along, and the list of policies.

An adapter is one file, ``verl_tts/models/<model_type>.py``, that ends in ``ADAPTER = PolicyAdapter(...)``.
``get_policy`` imports it, with its torch and its model code, when it is asked for and not before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from verl_tts.errors import ConfigError

# model_type of config.json -> the module of its adapter
POLICIES = {"qwen3_tts": "verl_tts.models.qwen3_tts"}


@dataclass(frozen=True)
class PolicyAdapter:
    """A codec language model as the actor engine, the rollout and the export see it.

    ``policy`` is the ``torch.nn.Module`` that is trained. Its ``from_pretrained(path, dtype=...)`` loads what
    training needs and nothing else; its ``forward`` replays sampled codes and returns ``(logits_NV,)``, one row
    for each sampled token, over the ids in ``support(config)``.
    """

    model_type: str
    num_codebooks: int
    sample_rate_hz: int
    samples_per_frame: int
    policy: Any
    register: Callable[[], None]
    """Makes Transformers' Auto classes know the model. Idempotent."""
    support: Callable[[Any], Any]
    """config -> LongTensor (V,): the ids that the rollout engine can sample, ascending."""
    support_index: Callable[[Any], Any]
    """config -> LongTensor (vocabulary,): the place of an id in ``support(config)``, -1 outside."""
    is_trainable: Callable[[str, str], bool]
    """(parameter name, "full" | "backbone" | "lora") -> does the optimizer get it."""
    lora_targets: Callable[[str | Sequence[str]], str]
    """The published ``target_modules`` -> a regular expression that hits the policy alone."""


def get_policy(model_type: str) -> PolicyAdapter:
    """The adapter of a ``model_type``. Raises ``ConfigError`` for one that nobody wrote."""
    if model_type not in POLICIES:
        raise ConfigError(f"Unknown model type {model_type!r}: there are adapters for {', '.join(sorted(POLICIES))}")
    return import_module(POLICIES[model_type]).ADAPTER
