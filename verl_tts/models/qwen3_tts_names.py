"""Names of Qwen3-TTS's parameters: which are trained, which are in memory while it trains. Without torch."""

import re
from collections.abc import Sequence

from verl_tts.models.base import is_trained, lora_leaves

TRAINABLE = {
    "full": re.compile(r"talker\.(model|codec_head)\..*"),
    "backbone": re.compile(r"talker\.(model\.(layers|norm)|codec_head)\..*"),
    "lora": re.compile(r".*\.lora_[AB]\..*"),
}
# What only generates, and is dropped when a policy is loaded to be trained.
GENERATION_ONLY = re.compile(
    r"speaker_encoder\..*|talker\.code_predictor\.(model\.(layers|norm)\.|lm_head\.|small_to_mtp_projection\.).*"
)


def is_trainable(name: str, mode: str) -> bool:
    """Whether a parameter of ``Qwen3TTSPolicy`` is trained in mode "full", "backbone" or "lora".

    "backbone" leaves the two big embeddings frozen. Raises ``ConfigError`` for another mode.
    """
    return is_trained(TRAINABLE, name, mode)


def lora_targets(target_modules: str | Sequence[str]) -> str:
    """A regular expression for PEFT that hits the talker's layers and never the frozen code predictor.

    ``target_modules`` is "all-linear" or leaf names such as ["q_proj", "v_proj"], as published: the code
    predictor has modules of the same names. Raises ``ConfigError`` for a name that the talker's layers lack.
    """
    return rf"talker\.model\.layers\.\d+\.({lora_leaves(target_modules)})"
