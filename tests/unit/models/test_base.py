"""The registry of policies."""

import pytest

from verl_tts.config.model_dir import MODEL_TYPES
from verl_tts.errors import ConfigError
from verl_tts.models.base import POLICIES, get_policy


@pytest.mark.parametrize("name", POLICIES)
def test_adapter_is_of_the_model_type_that_its_policy_stands_for(name: str) -> None:
    assert get_policy(name).model_type == MODEL_TYPES[name]


def test_unknown_model_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'qwen3tts'.*qwen3_tts"):
        get_policy("qwen3tts")
