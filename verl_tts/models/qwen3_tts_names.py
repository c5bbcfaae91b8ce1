"""Names of Qwen3-TTS's parameters: which are trained, which are in memory while it trains. Without torch."""

import re
from collections.abc import Sequence

from verl_tts.errors import ConfigError

TRAINABLE = {
    "full": re.compile(r"talker\.(model|codec_head)\..*"),
    "backbone": re.compile(r"talker\.(model\.(layers|norm)|codec_head)\..*"),
    "lora": re.compile(r".*\.lora_[AB]\..*"),
}
LORA_PARENTS = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
# What only generates, and is dropped when a policy is loaded to be trained.
GENERATION_ONLY = re.compile(
    r"speaker_encoder\..*|talker\.code_predictor\.(model\.(layers|norm)\.|lm_head\.|small_to_mtp_projection\.).*"
)


def is_trainable(name: str, mode: str) -> bool:
    """Whether a parameter of ``Qwen3TTSPolicy`` is trained in mode "full", "backbone" or "lora".

    "backbone" leaves the two big embeddings frozen. Raises ``ConfigError`` for another mode.
    """
    if mode not in TRAINABLE:
        raise ConfigError(f"Unknown trainable mode {mode!r}: choose one of {', '.join(TRAINABLE)}")
    return TRAINABLE[mode].fullmatch(name) is not None


def lora_targets(target_modules: str | Sequence[str]) -> str:
    """A regular expression for PEFT that hits the talker's layers and never the frozen code predictor.

    ``target_modules`` is "all-linear" or leaf names such as ["q_proj", "v_proj"], as published: the code
    predictor has modules of the same names. Raises ``ConfigError`` for a name that the talker's layers lack.
    """
    names = [*LORA_PARENTS] if target_modules == "all-linear" else target_modules
    if isinstance(names, str) or not names:
        raise ConfigError(f"target_modules {target_modules!r}: write all-linear or a list of {', '.join(LORA_PARENTS)}")
    for name in names:
        if name not in LORA_PARENTS:
            raise ConfigError(f"Unknown LoRA target {name!r}: choose from {', '.join(LORA_PARENTS)}")
    leaves = "|".join(rf"{LORA_PARENTS[name]}\.{name}" for name in names)
    return rf"talker\.model\.layers\.\d+\.({leaves})"
