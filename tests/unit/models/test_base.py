"""The registry of policies."""

import pytest

from verl_tts.errors import ConfigError
from verl_tts.models.base import POLICIES, get_policy


@pytest.mark.parametrize("model_type", POLICIES)
def test_adapter_answers_to_the_model_type_it_is_listed_under(model_type: str) -> None:
    assert get_policy(model_type).model_type == model_type


def test_unknown_model_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'qwen3tts'.*qwen3_tts"):
        get_policy("qwen3tts")
