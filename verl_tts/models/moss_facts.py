"""What follows from MOSS's config.json: names and sizes of parameters, its codec, its tokenizer. Without torch."""

import re
from collections.abc import Iterator, Sequence

from verl_tts.checkpoints.tiny_moss import codec_shapes, model_shapes
from verl_tts.models.base import is_trained, lora_leaves
from verl_tts.models.facts import NEVER, Fit, Heads, ModelConfig, PolicyFacts, equal
from verl_tts.models.moss_prompt import MODEL_TYPE, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

FREE_POSITIONS = 2
"""Of an answer with one clip, where any token of the text's vocabulary may stand: its begin, and the end."""

TRAINABLE = {
    "full": re.compile(r"(language_model|emb_ext|lm_heads)\..*"),
    "backbone": re.compile(r"(language_model\.(layers|norm)|lm_heads)\..*"),
    "lora": re.compile(r".*\.lora_[AB]\..*"),
}


def is_trainable(name: str, mode: str) -> bool:
    """Whether a parameter of ``MossPolicy`` is trained in mode "full", "backbone" or "lora".

    "backbone" leaves all embeddings frozen. Raises ``ConfigError`` for another mode.
    """
    return is_trained(TRAINABLE, name, mode)


def lora_targets(target_modules: str | Sequence[str]) -> str:
    """A regular expression for PEFT that hits the linear layers of ``language_model`` alone. Raises ``ConfigError``."""
    return rf"language_model\.layers\.\d+\.({lora_leaves(target_modules)})"


def heads(config: ModelConfig) -> Heads:
    """A code of each codebook at every position; the whole text at the free ones, whose head is the largest."""
    language, books, codes = config["language_config"], config["n_vq"], config["audio_vocab_size"]
    hidden, text = language["hidden_size"], language["vocab_size"]
    return Heads(
        columns=books * codes,
        columns_a_clip=FREE_POSITIONS * text,
        copied=books * codes * hidden,
        cast=text * hidden,
        indices=1 + books,
    )


def codec_fits(config: ModelConfig, codec: ModelConfig) -> Iterator[Fit]:
    """A codec with more codebooks decodes with the first of them."""
    quantizer, books = codec.get("quantizer_kwargs") or {}, config["n_vq"]
    found = quantizer.get("num_quantizers")
    yield Fit("codebooks", found, books, found is not None and found >= books)
    yield from equal(
        ("codes in a codebook", quantizer.get("codebook_size"), config["audio_vocab_size"]),
        ("samples a frame", codec.get("downsample_rate"), SAMPLES_PER_FRAME),
        ("Hz", codec.get("sampling_rate", codec.get("sample_rate")), SAMPLE_RATE_HZ),
    )


FACTS = PolicyFacts(
    model_type=MODEL_TYPE,
    sample_rate_hz=SAMPLE_RATE_HZ,
    samples_per_frame=SAMPLES_PER_FRAME,
    shapes=model_shapes,
    codec_shapes=codec_shapes,
    codec_gib=6.0,  # 1.6 B parameters, by its model card
    codec_fits=codec_fits,
    reads_references=True,
    language_model=lambda config: config["language_config"],
    generation_only=NEVER,
    is_trainable=is_trainable,
    lora_targets=lora_targets,
    embeddings=re.compile(r"(language_model\.embed_tokens|emb_ext\.\d+)\.weight"),
    heads=heads,
    overhead=lambda config: config["n_vq"] + 2,  # begin, delay and end: see moss_prompt
    special_tokens=(
        "pad_token_id", "im_start_token_id", "im_end_token_id", "audio_start_token_id", "audio_end_token_id",
        "audio_user_slot_token_id", "audio_assistant_gen_slot_token_id", "audio_assistant_delay_slot_token_id",
    ),
    template=("<|im_start|><|im_end|>", 2),  # what stands between is cut by no number
)  # fmt: skip
