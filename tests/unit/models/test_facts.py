"""What a config.json that people edit may hold: sizes, or something that is answered in one line."""

from copy import deepcopy
from typing import Any

import pytest

from verl_tts.config.plan_shown import published_sizes
from verl_tts.errors import CheckpointError
from verl_tts.models.facts import facts_of, get_facts, sizes_of

MODEL_TYPES = {"qwen3_tts": "talker_config", "moss_tts_delay": "language_config"}


@pytest.fixture(params=MODEL_TYPES)
def described(request) -> tuple[dict[str, Any], str]:
    """A published config.json, and where its language model is."""
    return deepcopy(next(iter(published_sizes(request.param).values()))), MODEL_TYPES[request.param]


@pytest.mark.parametrize("value", [None, 0, -1, "x", 1.5, [], {}, 10**12])
def test_a_number_of_layers_that_is_none_is_one_line(described, value):
    config, part = described
    config[part]["num_hidden_layers"] = value
    with pytest.raises(CheckpointError, match=r"^config\.json of type .*(layers|kind)") as refused:
        facts_of(config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["hidden_size", "head_dim", "vocab_size", "num_attention_heads"])
@pytest.mark.parametrize("value", [None, 0, -1, "x", 1.5, []])
def test_a_size_that_is_none_is_one_line(described, name, value):
    config, part = described
    config[part][name] = value
    with pytest.raises(CheckpointError, match=r"^config\.json of type .*(kind|has to be|have to be)"):
        facts_of(config)


@pytest.mark.parametrize("value", [None, 0, "x", []])
def test_a_part_that_is_no_object_is_one_line(described, value):
    config, part = described
    config[part] = value
    with pytest.raises(CheckpointError, match="has a value of another kind"):
        facts_of(config)


@pytest.mark.parametrize("value", [None, 3, "x", [1]])
def test_a_codec_whose_parts_are_no_objects_is_one_line(value):
    config = {"encoder_kwargs": value, "decoder_kwargs": value, "quantizer_kwargs": value}
    with pytest.raises(CheckpointError, match=r"the codec's config\.json has a value of another kind"):
        sizes_of(get_facts("moss").codec_shapes, config, "the codec's config.json")
