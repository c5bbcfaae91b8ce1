"""What follows from Qwen3-TTS's config.json: names and sizes of parameters, its codec, its tokenizer. Without torch."""

import re
from collections.abc import Iterator, Sequence

from verl_tts.checkpoints.tiny import codec_shapes, model_shapes
from verl_tts.models.base import is_trained, lora_leaves
from verl_tts.models.facts import Fit, Heads, ModelConfig, PolicyFacts, equal
from verl_tts.models.qwen3_tts_prompt import (
    CLOSING_TOKENS,
    MODEL_TYPE,
    ROLE_TOKENS,
    SAMPLE_RATE_HZ,
    SAMPLES_PER_FRAME,
    assistant_text,
)

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


def heads(config: ModelConfig) -> Heads:
    """The columns of the codec head that the engine can sample: the codes, with EOS in place of 0."""
    talker = config["talker_config"]
    support, hidden = talker["code_predictor_config"]["vocab_size"], talker["hidden_size"]
    return Heads(columns=support, columns_a_clip=0, copied=support * hidden, cast=0, indices=0)


def codec_fits(config: ModelConfig, codec: ModelConfig) -> Iterator[Fit]:
    predictor, decoder = config["talker_config"]["code_predictor_config"], codec.get("decoder_config") or {}
    yield from equal(
        ("codebooks", decoder.get("num_quantizers"), predictor["num_code_groups"]),
        ("codes in a codebook", decoder.get("codebook_size"), predictor["vocab_size"]),
        ("samples a frame", codec.get("decode_upsample_rate"), SAMPLES_PER_FRAME),
        ("Hz", codec.get("output_sample_rate"), SAMPLE_RATE_HZ),
    )


FACTS = PolicyFacts(
    model_type=MODEL_TYPE,
    sample_rate_hz=SAMPLE_RATE_HZ,
    samples_per_frame=SAMPLES_PER_FRAME,
    shapes=model_shapes,
    codec_shapes=codec_shapes,
    codec_gib=0.7,
    codec_fits=codec_fits,
    reads_references=False,
    language_model=lambda config: config["talker_config"],
    generation_only=GENERATION_ONLY,
    is_trainable=is_trainable,
    lora_targets=lora_targets,
    embeddings=re.compile(r"talker\..*embedding(\.\d+)?\.weight"),
    heads=heads,
    overhead=lambda config: 1,  # the last token, which is never decoded
    special_tokens=(
        "im_start_token_id", "im_end_token_id", "tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id"
    ),
    template=(assistant_text(""), ROLE_TOKENS + CLOSING_TOKENS),
)  # fmt: skip
