"""A tiny-random MOSS-VoiceGenerator checkpoint with its codec: real topology and rules, tiny widths, 10 MB.

What tiny.py says of its bytes holds here too. The model's directory is complete: the codec, which is published by
itself, lies in it as ``codec/``.

The values are chosen so that the policy behaves: it begins a clip at once, most clips end by themselves before 40
frames, an answer ends after its clip, and random codes decode to an audible waveform.
"""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from verl_tts.checkpoints.tiny import (
    Shape,
    Shapes,
    decoder_shapes,
    match,
    under,
    uniform,
    weight_and_bias,
    write_json,
    write_qwen2_tokenizer,
    write_weights,
)
from verl_tts.files import check_is_new, staged


def build_tiny_moss(out: Path) -> None:
    """Writes the checkpoint to the directory ``out``, which appears whole or not at all.

    Raises ``ConfigError`` when ``out`` exists already.
    """
    check_is_new(out)
    with staged(out) as model:
        write_qwen2_tokenizer(model, TEXT_IDS, {})
        write_json(model / "config.json", MODEL_CONFIG)
        write_json(model / "generation_config.json", GENERATION_CONFIG)
        write_weights(model / "model.safetensors", model_shapes(MODEL_CONFIG), model_tensor)
        codec = model / "codec"
        codec.mkdir()
        write_json(codec / "config.json", CODEC_CONFIG)
        write_weights(codec / "model.safetensors", codec_shapes(CODEC_CONFIG), codec_tensor)


# -------------------------------------------------------------------------------------------------- configs

CODEBOOKS = 16
CODES = 1024  # written into vLLM-Omni's stage for the codec: 1024 is its pad code
HIDDEN = 64
TEXT_SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_user_slot|>",
    "<|audio_assistant_gen_slot|>",
    "<|audio_assistant_delay_slot|>",
)
TEXT_IDS = {token: 320 + i for i, token in enumerate(TEXT_SPECIALS)}
TEXT_VOCAB = 384

LANGUAGE_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "float32",
    "head_dim": 32,  # the smallest that vLLM's CPU attention takes
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": TEXT_VOCAB,
}

MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["MossTTSDelayModel"],
    "audio_assistant_delay_slot_token_id": TEXT_IDS["<|audio_assistant_delay_slot|>"],
    "audio_assistant_gen_slot_token_id": TEXT_IDS["<|audio_assistant_gen_slot|>"],
    "audio_end_token_id": TEXT_IDS["<|audio_end|>"],
    "audio_pad_code": CODES,
    "audio_start_token_id": TEXT_IDS["<|audio_start|>"],
    "audio_user_slot_token_id": TEXT_IDS["<|audio_user_slot|>"],
    "audio_vocab_size": CODES,
    "dtype": "float32",
    "im_end_token_id": TEXT_IDS["<|im_end|>"],
    "im_start_token_id": TEXT_IDS["<|im_start|>"],
    "language_config": LANGUAGE_CONFIG,
    "model_type": "moss_tts_delay",
    "n_vq": CODEBOOKS,
    "pad_token_id": TEXT_IDS["<|endoftext|>"],
    "sampling_rate": 24000,
    "tie_word_embeddings": False,
}

GENERATION_CONFIG: dict[str, Any] = {"eos_token_id": TEXT_IDS["<|im_end|>"], "pad_token_id": TEXT_IDS["<|endoftext|>"]}


def patches(size: int) -> dict[str, Any]:
    return {"module_type": "PatchedPretransform", "patch_size": size}


def transformer(inputs: int, outputs: int) -> dict[str, Any]:
    return {
        "causal": True,
        "conv_layout": True,
        "d_model": 32,
        "dim_feedforward": 64,
        "gating": "none",
        "input_dimension": inputs,
        "layer_scale": 0.01,
        "max_period": 10000,
        "module_type": "Transformer",
        "norm": "layer_norm",
        "num_heads": 2,
        "num_layers": 1,
        "output_dimension": outputs,
        "positional_embedding": "rope",
    }


# 240 x 2 x 2 x 2 = 1920 samples a frame.
CODEC_CONFIG: dict[str, Any] = {
    "architectures": ["MossAudioTokenizerModel"],
    "causal_transformer_context_duration": 10.0,
    "code_dim": 32,
    "decoder_kwargs": [
        transformer(32, 32),
        patches(2),
        transformer(16, 32),
        patches(2),
        transformer(16, 32),
        patches(2),
        transformer(16, 240),
        patches(240),
    ],
    "downsample_rate": 1920,
    "dtype": "float32",
    "encoder_kwargs": [
        patches(240),
        transformer(240, 16),
        patches(2),
        transformer(32, 16),
        patches(2),
        transformer(32, 16),
        patches(2),
        transformer(32, 32),
    ],
    "model_type": "moss-audio-tokenizer",
    "number_channels": 1,
    "quantizer_kwargs": {
        "codebook_dim": 8,
        "codebook_size": CODES,
        "input_dim": 32,
        "num_quantizers": CODEBOOKS,
        "output_dim": 32,
        "quantizer_type": "rlfq",
        "rvq_dim": 16,
    },
    "quantizer_type": "rlfq",
    "sampling_rate": 24000,
}


# --------------------------------------------------------------------------------------------------- shapes


def model_shapes(config: Mapping[str, Any]) -> Shapes:
    """Name and shape of every tensor of ``model.safetensors``."""
    language, codes = config["language_config"], config["audio_vocab_size"] + 1
    hidden = language["hidden_size"]
    yield "language_model.embed_tokens.weight", (language["vocab_size"], hidden)
    yield from under("language_model", decoder_shapes(language, qk_norm=True))
    yield "lm_heads.0.weight", (language["vocab_size"], hidden)
    for book in range(config["n_vq"]):
        yield f"emb_ext.{book}.weight", (codes, hidden)
        yield f"lm_heads.{book + 1}.weight", (codes, hidden)


def codec_shapes(config: Mapping[str, Any]) -> Shapes:
    """Name and shape of every tensor of ``codec/model.safetensors``."""
    for part in ("encoder", "decoder"):
        for place, module in enumerate(config[f"{part}_kwargs"]):
            if module["module_type"] == "Transformer":
                yield from under(f"{part}.{place}", projected_transformer_shapes(module))
    quantizer = config["quantizer_kwargs"]
    inner, code = quantizer["rvq_dim"], quantizer["codebook_dim"]
    yield from normed_convolution("quantizer.input_proj", inner, quantizer["input_dim"])
    yield from normed_convolution("quantizer.output_proj", quantizer["output_dim"], inner)
    for book in range(quantizer["num_quantizers"]):
        name = f"quantizer.quantizers.{book}"
        yield from normed_convolution(f"{name}.in_proj", code, inner)
        yield from normed_convolution(f"{name}.out_proj", inner, code)
        yield f"{name}.codebook.weight", (quantizer["codebook_size"], code)


def projected_transformer_shapes(config: Mapping[str, Any]) -> Shapes:
    width, inner = config["d_model"], config["dim_feedforward"]
    yield "input_proj.weight", (width, config["input_dimension"])
    yield "output_proj.weight", (config["output_dimension"], width)
    for i in range(config["num_layers"]):
        layer = f"transformer.layers.{i}"
        yield f"{layer}.self_attn.in_projs.0.weight", (3 * width, width)
        yield f"{layer}.self_attn.out_projs.0.weight", (width, width)
        yield from weight_and_bias(f"{layer}.norm1", width)
        yield from weight_and_bias(f"{layer}.norm2", width)
        yield f"{layer}.linear1.weight", (inner, width)
        yield f"{layer}.linear2.weight", (width, inner)
        yield f"{layer}.layer_scale_1.scale", (width,)
        yield f"{layer}.layer_scale_2.scale", (width,)


def normed_convolution(name: str, outputs: int, inputs: int) -> Shapes:
    """A convolution of width 1 under PyTorch's weight norm: lengths, directions and a bias."""
    yield f"{name}.bias", (outputs,)
    yield f"{name}.parametrizations.weight.original0", (outputs, 1, 1)
    yield f"{name}.parametrizations.weight.original1", (outputs, inputs, 1)


# --------------------------------------------------------------------------------------------------- values

# No head has a bias. Three channels are constant instead, by what kind of token stands at a position: text of a
# prompt, a slot of a clip, the end of a clip. Nothing else writes to them, and the text head leans on them.
SAYS_TEXT, SAYS_SLOT, SAYS_END = 0, 1, 2
STEADY = [SAYS_TEXT, SAYS_SLOT, SAYS_END]
STEADY_VALUE = 6.0
SLOTS = ("<|audio_start|>", "<|audio_assistant_gen_slot|>", "<|audio_assistant_delay_slot|>", "<|audio_user_slot|>")
# (row of the text head, channel): how much it leans on it. A frame ends its clip with a few percent probability.
LEANS = {
    ("<|audio_start|>", SAYS_TEXT): 6.0,
    ("<|im_end|>", SAYS_END): 6.0,
    ("<|audio_assistant_gen_slot|>", SAYS_SLOT): 1.27,
}
# The rest of these rows is damped, so that this holds for any prompt.
DAMPED, DAMPING = ("<|audio_assistant_gen_slot|>", "<|audio_assistant_delay_slot|>"), 0.5
WRITES_TO_HIDDEN = ("language_model.layers.*.self_attn.o_proj.weight", "language_model.layers.*.mlp.down_proj.weight")

# As in tiny.py: a constant, a standard deviation, or a gain on 1 / sqrt(fan in).
CONSTANTS = {
    "*.q_norm.weight": 4.0,  # a frame hears its text, not the mean of a prompt that is mostly template
    "*norm.weight": 1.0,
    "*.norm1.weight": 1.0,
    "*.norm2.weight": 1.0,
    "*.bias": 0.0,
    "*.scale": 0.3,
    "*.original0": 1.0,
}
SPREADS = {
    "language_model.embed_tokens.weight": 1.0,
    "emb_ext.*": 0.05,  # 16 of them are summed
    "*.codebook.weight": 0.5,
}
GAINS = {
    "lm_heads.*": 0.8,
    "language_model.layers.*.self_attn.o_proj.weight": 1.5,
    "decoder.6.output_proj.weight": 0.05,  # waveforms of random codes get a standard deviation near 0.1
}


def codec_tensor(name: str, shape: Shape) -> np.ndarray:
    """The float32 value of one parameter: a function of its name and shape."""
    constant = match(name, CONSTANTS)
    if constant is not None:
        return np.full(shape, constant, np.float32)
    spread = match(name, SPREADS)
    return uniform(
        name, shape, (match(name, GAINS) or 1.0) / math.sqrt(math.prod(shape[1:])) if spread is None else spread
    )


def model_tensor(name: str, shape: Shape) -> np.ndarray:
    """As ``codec_tensor``, with the steady channels."""
    values = codec_tensor(name, shape)
    if any(fnmatchcase(name, pattern) for pattern in WRITES_TO_HIDDEN):
        values[STEADY] = 0.0
    if name.startswith(("lm_heads.", "emb_ext.")):
        values[:, STEADY] = 0.0
    if name == "language_model.embed_tokens.weight":
        slots, end = [TEXT_IDS[token] for token in SLOTS], TEXT_IDS["<|audio_end|>"]
        values[:, STEADY] = 0.0
        values[:, SAYS_TEXT] = STEADY_VALUE
        values[[*slots, end], SAYS_TEXT] = 0.0
        values[slots, SAYS_SLOT] = STEADY_VALUE
        values[end, SAYS_END] = STEADY_VALUE
    if name == "lm_heads.0.weight":
        values[[TEXT_IDS[token] for token in DAMPED]] *= np.float32(DAMPING)
        for (token, channel), lean in LEANS.items():
            values[TEXT_IDS[token], channel] = lean
    return values
