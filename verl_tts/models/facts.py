"""What follows from a policy's config.json alone, and is declared once a policy, without torch.

``verl_tts/models/<name>_facts.py`` ends in ``FACTS = PolicyFacts(...)``. The plan of a run and the doctor read it; the
adapter of the same policy (base.py) takes its weight names from there.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from math import prod
from typing import Any, NamedTuple

from verl_tts.config.model_dir import MODEL_TYPES, policy_of
from verl_tts.errors import CheckpointError

ModelConfig = Mapping[str, Any]
Shapes = Callable[[ModelConfig], Iterator[tuple[str, tuple[int, ...]]]]
MOST_TENSORS = 20_000  # far above any policy or codec
NEVER = re.compile(r"(?!)")
"""Matches no name."""


@dataclass(frozen=True)
class Heads:
    """What a replay computes beside the decoder layers, in numbers of values."""

    columns: int
    """Logits of every answered position, in FP32 like all that follows."""
    columns_a_clip: int
    """Logits of the few positions of a clip that have more than that."""
    copied: int
    """Of head weights: gathered and copied whatever they are kept in."""
    cast: int
    """Of head weights: copied where the policy computes in less than FP32."""
    indices: int
    """Embedding tables that a position is looked up in by an index of its own."""


class Fit(NamedTuple):
    """One number that codec and policy have to agree on."""

    name: str
    found: Any
    wanted: Any
    fits: bool


def equal(*numbers: tuple[str, Any, Any]) -> Iterator[Fit]:
    """Of numbers that fit if they are the same: (name, found, wanted) of each."""
    for name, found, wanted in numbers:
        yield Fit(name, found, wanted, found == wanted)


@dataclass(frozen=True)
class PolicyFacts:
    model_type: str
    """What config.json of a checkpoint says."""
    sample_rate_hz: int
    samples_per_frame: int
    shapes: Shapes
    """Name and shape of every tensor of model.safetensors."""
    codec_shapes: Shapes
    """The same of the codec, from its own config.json."""
    codec_gib: float
    """Weights of the published codec in FP32, where its config.json is not there to count them."""
    codec_fits: Callable[[ModelConfig, ModelConfig], Iterator[Fit]]
    """(config.json, that of the codec) -> what has to be equal for the one to decode the other."""
    reads_references: bool
    """Whether recordings are part of a prompt: the codec encodes them on the CPU."""
    language_model: Callable[[ModelConfig], ModelConfig]
    """The sizes of the Qwen3 that is trained, under Qwen3's names."""
    generation_only: re.Pattern[str]
    """Parameters that are not in memory while it trains."""
    is_trainable: Callable[[str, str], bool]
    """(parameter name, "full" | "backbone" | "lora") -> does the optimizer get it."""
    lora_targets: Callable[[str | Sequence[str]], str]
    """The published ``target_modules`` -> a regular expression that hits the policy alone."""
    embeddings: re.Pattern[str]
    """Weights of the ``nn.Embedding``s."""
    heads: Callable[[ModelConfig], Heads]
    overhead: Callable[[ModelConfig], int]
    """Positions of an answer that ends by itself beyond its frames."""
    special_tokens: Sequence[str]
    """Keys of config.json that name a token of the text tokenizer."""
    template: tuple[str, int]
    """What stands around the text of a prompt, and the tokens that it has to be."""


def get_facts(name: str) -> PolicyFacts:
    """Of a policy that there is."""
    return import_module(f"verl_tts.models.{name}_facts").FACTS


def facts_of(model_config: ModelConfig) -> PolicyFacts:
    """Raises ``CheckpointError`` for a config.json of no policy that we have, or one that lacks what it has to say."""
    name, model_type = policy_of(dict(model_config)), model_config.get("model_type")
    if name is None:
        known = ", ".join(MODEL_TYPES.values())
        raise CheckpointError(f"there is no policy for a model of type {model_type}; the policies here are {known}")
    facts = get_facts(name)
    what = f"config.json of type {model_type}"
    sizes_of(facts.shapes, model_config, what)
    with _read(what):
        facts.heads(model_config)
        if facts.language_model(model_config)["num_hidden_layers"] < 1:
            raise CheckpointError(f"{what} describes no layers; its num_hidden_layers has to be 1 or more")
    return facts


def sizes_of(shapes: Shapes, config: ModelConfig, what: str) -> dict[str, int]:
    """Name -> number of values of every tensor that a config.json describes.

    Raises ``CheckpointError`` for one that lacks a value, or has one that is no size; ``what`` names it in a line.
    """
    with _read(what):
        found = dict(islice(shapes(config), MOST_TENSORS + 1))
        if len(found) > MOST_TENSORS:
            raise CheckpointError(f"{what} describes more than {MOST_TENSORS} tensors; a number of layers is wrong")
        for name, shape in found.items():
            if any(type(size) is not int or size < 1 for size in shape):
                raise CheckpointError(f"{what} makes {name} of shape {shape!r:.80}; its sizes have to be 1 or more")
        return {name: prod(shape) for name, shape in found.items()}


@contextmanager
def _read(what: str) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"{what} has no {error.args[0]}, which it has to have") from error
    except (TypeError, ValueError, IndexError, ZeroDivisionError, AttributeError) as error:
        raise CheckpointError(f"{what} has a value of another kind than it has to have: {error}") from error
