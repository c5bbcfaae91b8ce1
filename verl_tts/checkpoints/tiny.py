"""A tiny-random Qwen3-TTS-12Hz "Base" checkpoint: real topology and ids, tiny widths, 18 MB, no download.

The bytes are a function of this file alone. A weight depends on its own name and shape, never on the
order in which somebody constructs modules; shapes are written out from the config rather than taken from
a model class; the tokenizer has no trained merges. So the files are the same on every machine and under
every version of torch, Transformers and qwen-tts, and a test pins their SHA-256.

The values are chosen so that the policy behaves: hidden states differ between texts and speakers, most
utterances end by themselves before 48 frames, and random codes decode to an audible, unclipped waveform.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from verl_tts.files import check_is_new, staged

Shape = tuple[int, ...]
Shapes = Iterator[tuple[str, Shape]]


def build_tiny_qwen3_tts(out: Path) -> None:
    """Writes the checkpoint to the directory ``out``, which appears whole or not at all.

    Raises ``ConfigError`` when ``out`` exists already.
    """
    check_is_new(out)
    with staged(out) as model:
        write_tokenizer(model)
        write_json(model / "config.json", MODEL_CONFIG)
        write_json(model / "generation_config.json", GENERATION_CONFIG)
        write_weights(model / "model.safetensors", model_shapes(MODEL_CONFIG))
        codec = model / "speech_tokenizer"
        codec.mkdir()
        write_json(codec / "config.json", CODEC_CONFIG)
        write_json(codec / "preprocessor_config.json", CODEC_PREPROCESSOR_CONFIG)
        write_weights(codec / "model.safetensors", codec_shapes(CODEC_CONFIG))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------- text tokenizer

# vLLM ends a request when it samples the text tokenizer's EOS id, and the talker samples codec ids: text
# specials that lie inside the talker's vocabulary would end utterances at random. So they begin behind it.
TALKER_VOCAB = 3072
TEXT_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
TEXT_IDS = {token: TALKER_VOCAB + i for i, token in enumerate(TEXT_SPECIALS)}
TEXT_VOCAB = 3136  # specials included, rounded up to a multiple of 64


def bytes_to_unicode() -> list[str]:
    """The character that byte-level BPE writes for each byte: printable bytes stand for themselves."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def write_tokenizer(model: Path) -> None:
    """The tokenizer, and what Qwen3-TTS's processor wants beside it."""
    write_qwen2_tokenizer(model, TEXT_IDS, {"processor_class": "Qwen3TTSProcessor"})
    write_json(
        model / "preprocessor_config.json",
        {
            "padding_side": "left",
            "padding_value": 0.0,
            "processor_class": "Qwen3TTSProcessor",
            "return_attention_mask": True,
        },
    )


def write_qwen2_tokenizer(model: Path, specials: Mapping[str, int], more: Mapping[str, Any]) -> None:
    """A byte-level Qwen2 tokenizer whose only merges spell ``assistant``; unused pieces reach up to the specials.

    qwen-tts cuts the chat template by position: ``<|im_start|>assistant\\n`` has to be 3 tokens and
    ``<|im_end|>\\n<|im_start|>assistant\\n`` 5. Every other text, in any script, is one token a byte.
    """
    word = "assistant"
    merges = [f"{word[:i]} {word[i]}" for i in range(1, len(word))]
    pieces = [*bytes_to_unicode(), *(merge.replace(" ", "") for merge in merges)]
    pieces += [f"<unused{i}>" for i in range(len(pieces), min(specials.values()))]
    write_json(model / "vocab.json", {piece: i for i, piece in enumerate(pieces)})
    (model / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    write_json(
        model / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "added_tokens_decoder": {str(i): {"content": token, **special} for token, i in specials.items()},
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "errors": "replace",
            "model_max_length": 4096,
            "pad_token": "<|endoftext|>",
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
            **more,
        },
    )


# -------------------------------------------------------------------------------------------------- configs

CODEBOOKS = 16
CODES = 2048
CODEC_EOS = 2150
HIDDEN = 64

CODE_PREDICTOR_CONFIG: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 4096,
    "max_window_layers": 2,
    "model_type": "qwen3_tts_talker_code_predictor",
    "num_attention_heads": 2,
    "num_code_groups": CODEBOOKS,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": CODES,
}

TALKER_CONFIG: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0,
    "code_predictor_config": CODE_PREDICTOR_CONFIG,
    "codec_bos_id": 2149,
    "codec_eos_token_id": CODEC_EOS,
    "codec_language_id": {
        "chinese": 2055,
        "english": 2050,
        "french": 2061,
        "german": 2053,
        "italian": 2070,
        "japanese": 2058,
        "korean": 2064,
        "portuguese": 2071,
        "russian": 2069,
        "spanish": 2054,
    },
    "codec_nothink_id": 2155,
    "codec_pad_id": 2148,
    "codec_think_bos_id": 2156,
    "codec_think_eos_id": 2157,
    "codec_think_id": 2154,
    "head_dim": 32,  # the smallest that vLLM's CPU attention takes
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "model_type": "qwen3_tts_talker",
    "num_attention_heads": 2,
    "num_code_groups": CODEBOOKS,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "position_id_per_seconds": 13,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default", "type": "default"},
    "rope_theta": 1000000,
    "sliding_window": None,
    "spk_id": {},
    "spk_is_dialect": {},
    "text_hidden_size": 48,  # differs from hidden_size, so that text_projection cannot be left out unnoticed
    "text_vocab_size": TEXT_VOCAB,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": TALKER_VOCAB,
}

SPEAKER_ENCODER_CONFIG: dict[str, Any] = {
    "enc_attention_channels": 8,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_dim": HIDDEN,
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_res2net_scale": 8,
    "enc_se_channels": 8,
    "mel_dim": 128,
    "sample_rate": 24000,
}

MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3TTSForConditionalGeneration"],
    "assistant_token_id": 263,
    "dtype": "float32",
    "im_end_token_id": TEXT_IDS["<|im_end|>"],
    "im_start_token_id": TEXT_IDS["<|im_start|>"],
    "model_type": "qwen3_tts",
    "speaker_encoder_config": SPEAKER_ENCODER_CONFIG,
    "talker_config": TALKER_CONFIG,
    "tokenizer_type": "qwen3_tts_tokenizer_12hz",
    "tts_bos_token_id": TEXT_IDS["<tts_text_bos>"],
    "tts_eos_token_id": TEXT_IDS["<tts_text_eod>"],
    "tts_model_size": "tiny",
    "tts_model_type": "base",
    "tts_pad_token_id": TEXT_IDS["<tts_pad>"],
}

GENERATION_CONFIG: dict[str, Any] = {
    "do_sample": True,
    "max_new_tokens": 2048,
    "repetition_penalty": 1.05,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_k": 50,
    "subtalker_top_p": 1.0,
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 1.0,
}

CODEC_ENCODER_CONFIG: dict[str, Any] = {
    "_frame_rate": 12.5,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "audio_channels": 1,
    "codebook_dim": 8,
    "codebook_size": CODES,
    "compress": 2,
    "dilation_growth_rate": 2,
    "head_dim": 16,
    "hidden_act": "gelu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "kernel_size": 7,
    "last_kernel_size": 3,
    "layer_scale_initial_scale": 0.01,
    "max_position_embeddings": 8000,
    "norm_eps": 1e-5,
    "normalize": False,
    "num_attention_heads": 2,
    "num_filters": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "num_quantizers": 32,
    "num_residual_layers": 1,
    "num_semantic_quantizers": 1,
    "pad_mode": "constant",
    "residual_kernel_size": 3,
    "rope_theta": 10000.0,
    "sampling_rate": 24000,
    "sliding_window": 250,
    "trim_right_ratio": 1.0,
    "upsample_groups": 32,
    "upsampling_ratios": [8, 6, 5, 4],
    "use_cache": False,
    "use_causal_conv": True,
    "use_conv_shortcut": False,
    "use_streaming": False,
    "vector_quantization_hidden_dimension": 8,
}

CODEC_DECODER_CONFIG: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "codebook_dim": 16,
    "codebook_size": CODES,
    "decoder_dim": 32,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "latent_dim": 32,
    "layer_scale_initial_scale": 0.01,
    "max_position_embeddings": 8000,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_quantizers": CODEBOOKS,
    "num_semantic_quantizers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "semantic_codebook_size": 4096,
    "sliding_window": 72,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
    "vector_quantization_hidden_dimension": 16,
}

CODEC_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3TTSTokenizerV2Model"],
    "decode_upsample_rate": 1920,
    "decoder_config": CODEC_DECODER_CONFIG,
    "dtype": "float32",
    "encode_downsample_rate": 1920,
    "encoder_config": CODEC_ENCODER_CONFIG,
    "encoder_valid_num_quantizers": CODEBOOKS,
    "input_sample_rate": 24000,
    "model_type": "qwen3_tts_tokenizer_12hz",
    "output_sample_rate": 24000,
}

CODEC_PREPROCESSOR_CONFIG: dict[str, Any] = {
    "chunk_length_s": None,
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "overlap": None,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": 24000,
}


# --------------------------------------------------------------------------------------------------- shapes


def under(prefix: str, shapes: Shapes) -> Shapes:
    return ((f"{prefix}.{name}", shape) for name, shape in shapes)


def weight_and_bias(name: str, *weight: int, bias: int | None = None) -> Shapes:
    yield f"{name}.weight", weight
    yield f"{name}.bias", (weight[0] if bias is None else bias,)


def model_shapes(config: Mapping[str, Any]) -> Shapes:
    """Name and shape of every tensor of ``model.safetensors``."""
    talker = config["talker_config"]
    predictor = talker["code_predictor_config"]
    hidden, text_hidden = talker["hidden_size"], talker["text_hidden_size"]
    yield from under("talker.model", decoder_shapes(talker, qk_norm=True))
    yield "talker.model.codec_embedding.weight", (talker["vocab_size"], hidden)
    yield "talker.model.text_embedding.weight", (talker["text_vocab_size"], text_hidden)
    yield from weight_and_bias("talker.text_projection.linear_fc1", text_hidden, text_hidden)
    yield from weight_and_bias("talker.text_projection.linear_fc2", hidden, text_hidden)
    yield "talker.codec_head.weight", (talker["vocab_size"], hidden)
    yield from under("talker.code_predictor.model", decoder_shapes(predictor, qk_norm=True))
    for book in range(predictor["num_code_groups"] - 1):
        yield f"talker.code_predictor.model.codec_embedding.{book}.weight", (predictor["vocab_size"], hidden)
        yield f"talker.code_predictor.lm_head.{book}.weight", (predictor["vocab_size"], predictor["hidden_size"])
    if predictor["hidden_size"] != hidden:
        yield from weight_and_bias("talker.code_predictor.small_to_mtp_projection", predictor["hidden_size"], hidden)
    yield from under("speaker_encoder", speaker_encoder_shapes(config["speaker_encoder_config"]))


def decoder_shapes(config: Mapping[str, Any], qk_norm: bool, layer_scale: bool = False) -> Shapes:
    """Layers and final norm of a Qwen-style decoder with gated MLPs."""
    hidden, head, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}"
        yield f"{layer}.self_attn.q_proj.weight", (query, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (key, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (key, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, query)
        if qk_norm:
            yield f"{layer}.self_attn.q_norm.weight", (head,)
            yield f"{layer}.self_attn.k_norm.weight", (head,)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        if layer_scale:
            yield f"{layer}.self_attn_layer_scale.scale", (hidden,)
            yield f"{layer}.mlp_layer_scale.scale", (hidden,)
    yield "norm.weight", (hidden,)


def speaker_encoder_shapes(config: Mapping[str, Any]) -> Shapes:
    """An ECAPA-TDNN."""
    channels, kernels = config["enc_channels"], config["enc_kernel_sizes"]
    squeezed, attended, scale = config["enc_se_channels"], config["enc_attention_channels"], config["enc_res2net_scale"]
    yield from weight_and_bias("blocks.0.conv", channels[0], config["mel_dim"], kernels[0])
    for i in range(1, len(channels) - 1):
        block, width = f"blocks.{i}", channels[i]
        yield from weight_and_bias(f"{block}.tdnn1.conv", width, channels[i - 1], 1)
        for branch in range(scale - 1):
            yield from weight_and_bias(
                f"{block}.res2net_block.blocks.{branch}.conv", width // scale, width // scale, kernels[i]
            )
        yield from weight_and_bias(f"{block}.tdnn2.conv", width, width, 1)
        yield from weight_and_bias(f"{block}.se_block.conv1", squeezed, width, 1)
        yield from weight_and_bias(f"{block}.se_block.conv2", width, squeezed, 1)
    pooled = channels[-1]
    yield from weight_and_bias("mfa.conv", pooled, sum(channels[1:-1]), kernels[-1])
    yield from weight_and_bias("asp.tdnn.conv", attended, 3 * pooled, 1)
    yield from weight_and_bias("asp.conv", pooled, attended, 1)
    yield from weight_and_bias("fc", config["enc_dim"], 2 * pooled, 1)


def codec_shapes(config: Mapping[str, Any]) -> Shapes:
    """Name and shape of every tensor of ``speech_tokenizer/model.safetensors``."""
    yield from under("encoder", codec_encoder_shapes(config["encoder_config"]))
    yield from under("decoder", codec_decoder_shapes(config["decoder_config"]))


def codec_encoder_shapes(config: Mapping[str, Any]) -> Shapes:
    """The encoder half of Mimi: strided convolutions, a transformer, one more stride, residual quantizers."""
    width, kernel, hidden = config["num_filters"], config["residual_kernel_size"], config["hidden_size"]
    yield from weight_and_bias("encoder.layers.0.conv", width, config["audio_channels"], config["kernel_size"])
    layer = 1  # layers without parameters (the ELUs) are counted too
    for ratio in reversed(config["upsampling_ratios"]):
        narrow = width // config["compress"]
        yield from weight_and_bias(f"encoder.layers.{layer}.block.1.conv", narrow, width, kernel)
        yield from weight_and_bias(f"encoder.layers.{layer}.block.3.conv", width, narrow, 1)
        yield from weight_and_bias(f"encoder.layers.{layer + 2}.conv", 2 * width, width, 2 * ratio)
        width, layer = 2 * width, layer + 3
    yield from weight_and_bias(f"encoder.layers.{layer + 1}.conv", hidden, width, config["last_kernel_size"])

    query, key = (config[heads] * config["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    for i in range(config["num_hidden_layers"]):
        name = f"encoder_transformer.layers.{i}"
        yield f"{name}.self_attn.q_proj.weight", (query, hidden)
        yield f"{name}.self_attn.k_proj.weight", (key, hidden)
        yield f"{name}.self_attn.v_proj.weight", (key, hidden)
        yield f"{name}.self_attn.o_proj.weight", (hidden, query)
        yield f"{name}.mlp.fc1.weight", (config["intermediate_size"], hidden)
        yield f"{name}.mlp.fc2.weight", (hidden, config["intermediate_size"])
        yield from weight_and_bias(f"{name}.input_layernorm", hidden)
        yield from weight_and_bias(f"{name}.post_attention_layernorm", hidden)
        yield f"{name}.self_attn_layer_scale.scale", (hidden,)
        yield f"{name}.mlp_layer_scale.scale", (hidden,)

    yield "downsample.conv.weight", (hidden, hidden, 4)  # 25 Hz to 12.5 Hz
    semantic = config["num_semantic_quantizers"]
    inner = config["vector_quantization_hidden_dimension"]
    for part, books in (("semantic", semantic), ("acoustic", config["num_quantizers"] - semantic)):
        name = f"quantizer.{part}_residual_vector_quantizer"
        for i in range(books):
            codebook = f"{name}.layers.{i}.codebook"
            yield f"{codebook}.initialized", (1,)
            yield f"{codebook}.cluster_usage", (config["codebook_size"],)
            yield f"{codebook}.embed_sum", (config["codebook_size"], config["codebook_dim"])
        yield f"{name}.input_proj.weight", (inner, hidden, 1)
        yield f"{name}.output_proj.weight", (hidden, inner, 1)


def codec_decoder_shapes(config: Mapping[str, Any]) -> Shapes:
    """Residual quantizers, a transformer, two ConvNeXt upsamplings and the 8 x 5 x 4 x 3 waveform decoder."""
    hidden, latent, books = config["hidden_size"], config["latent_dim"], config["num_quantizers"]
    outer, inner = config["codebook_dim"], config["codebook_dim"] // 2
    yield from under("pre_transformer", decoder_shapes(config, qk_norm=False, layer_scale=True))
    yield from weight_and_bias("pre_transformer.input_proj", hidden, latent)
    yield from weight_and_bias("pre_transformer.output_proj", latent, hidden)
    for part, layers in (("rvq_first", 1), ("rvq_rest", books - 1)):
        yield f"quantizer.{part}.input_proj.weight", (inner, outer, 1)
        yield f"quantizer.{part}.output_proj.weight", (outer, inner, 1)
        for i in range(layers):
            yield f"quantizer.{part}.vq.layers.{i}._codebook.cluster_usage", (config["codebook_size"],)
            yield f"quantizer.{part}.vq.layers.{i}._codebook.embedding_sum", (config["codebook_size"], inner)
    yield from weight_and_bias("pre_conv.conv", latent, outer, 3)
    for i, ratio in enumerate(config["upsampling_ratios"]):
        yield from weight_and_bias(f"upsample.{i}.0.conv", latent, latent, ratio)
        yield f"upsample.{i}.1.gamma", (latent,)
        yield from weight_and_bias(f"upsample.{i}.1.dwconv.conv", latent, 1, 7)
        yield from weight_and_bias(f"upsample.{i}.1.norm", latent)
        yield from weight_and_bias(f"upsample.{i}.1.pwconv1", 4 * latent, latent)
        yield from weight_and_bias(f"upsample.{i}.1.pwconv2", latent, 4 * latent)

    width = config["decoder_dim"]
    yield from weight_and_bias("decoder.0.conv", width, latent, 7)
    for i, rate in enumerate(config["upsample_rates"], start=1):
        block = f"decoder.{i}.block"
        yield from snake(f"{block}.0", width)
        yield from weight_and_bias(f"{block}.1.conv", width, width // 2, 2 * rate, bias=width // 2)  # transposed
        width //= 2
        for unit in (2, 3, 4):
            yield from snake(f"{block}.{unit}.act1", width)
            yield from weight_and_bias(f"{block}.{unit}.conv1.conv", width, width, 7)
            yield from snake(f"{block}.{unit}.act2", width)
            yield from weight_and_bias(f"{block}.{unit}.conv2.conv", width, width, 1)
    last = len(config["upsample_rates"]) + 1
    yield from snake(f"decoder.{last}", width)
    yield from weight_and_bias(f"decoder.{last + 1}.conv", 1, width, 7)


def snake(name: str, width: int) -> Shapes:
    yield f"{name}.alpha", (width,)
    yield f"{name}.beta", (width,)


# --------------------------------------------------------------------------------------------------- values

# The codec head has no bias. One channel of the codebook-0 embeddings is constant instead, nothing else writes
# to it, and the EOS row of the head leans on it: every frame ends the utterance with a few percent probability.
# The rest of that row is damped, so that this holds for either prompt layout.
STEADY_CHANNEL = 0
STEADY_VALUE = 3.0
EOS_ON_STEADY_CHANNEL = 5.3
EOS_DAMPING = 0.5
WRITES_TO_HIDDEN = (
    "talker.model.layers.*.self_attn.o_proj.weight",
    "talker.model.layers.*.mlp.down_proj.weight",
    "talker.text_projection.linear_fc2.*",
)

# What a parameter is filled with, by the first pattern that its name matches: a constant, a standard deviation,
# or a gain on 1 / sqrt(fan in), which is also the rule for everything else.
CONSTANTS = {
    "*norm.weight": 1.0,
    "*.cluster_usage": 1.0,
    "*.initialized": 1.0,
    "*_layer_scale.scale": 0.3,
    "*.gamma": 0.3,
}
SPREADS = {
    "*.text_embedding.weight": 0.5,
    "talker.model.codec_embedding.weight": 0.3,
    "talker.code_predictor.model.codec_embedding.*": 0.075,  # 15 of them are summed in a frame
    "*.embed_sum": 0.5,
    "*.embedding_sum": 0.5,
    "*.alpha": 0.1,
    "*.beta": 0.1,
    "*.bias": 0.05,
}
GAINS = {
    "talker.codec_head.weight": 1.2,
    "talker.text_projection.linear_fc1.weight": 2.0,
    "talker.model.layers.*.self_attn.o_proj.weight": 2.5,  # a frame hears text and speaker, not only itself
    "decoder.decoder.6.conv.weight": 0.007,  # waveforms of random codes get a standard deviation near 0.1
}


def match(name: str, rules: Mapping[str, float]) -> float | None:
    return next((value for pattern, value in rules.items() if fnmatchcase(name, pattern)), None)


def write_weights(path: Path, shapes: Shapes, fill: Callable[[str, Shape], np.ndarray] | None = None) -> None:
    """``fill`` gives a tensor its value; without one it is ``tensor``."""
    tensors = {name: (fill or tensor)(name, shape) for name, shape in sorted(shapes)}
    path.write_bytes(save(tensors, metadata={"format": "pt"}))


def tensor(name: str, shape: Shape) -> np.ndarray:
    """The float32 value of one parameter: a function of its name and shape."""
    constant = match(name, CONSTANTS)
    if constant is not None:
        return np.full(shape, constant, np.float32)
    spread = match(name, SPREADS)
    if spread is None:
        spread = (match(name, GAINS) or 1.0) / math.sqrt(math.prod(shape[1:]))
    values = uniform(name, shape, spread)
    if any(fnmatchcase(name, pattern) for pattern in WRITES_TO_HIDDEN):
        values[STEADY_CHANNEL] = 0.0
    if ".codec_embedding." in name:
        values[:, STEADY_CHANNEL] = STEADY_VALUE if name == "talker.model.codec_embedding.weight" else 0.0
    if name == "talker.codec_head.weight":
        values[:, STEADY_CHANNEL] = 0.0
        values[CODEC_EOS] *= np.float32(EOS_DAMPING)
        values[CODEC_EOS, STEADY_CHANNEL] = EOS_ON_STEADY_CHANNEL
    return values


def uniform(name: str, shape: Shape, std: float) -> np.ndarray:
    """Uniform float32 values with mean 0 and standard deviation ``std`` from a stream of the name's own.

    NumPy promises Philox's raw integers for good, and what follows is exact but for one IEEE rounding: the
    numbers are the same on every platform.
    """
    key = int.from_bytes(hashlib.sha256(f"{name}{list(shape)}".encode()).digest()[:16], "little")
    bits = np.random.Philox(key=key).random_raw(math.prod(shape)) >> np.uint64(41)  # 23 bits
    steps = 2 * bits.astype(np.int64) + 1 - 2**23  # odd, between -2^23 and 2^23: exact in float32
    half_width = std * math.sqrt(3)
    return (steps.astype(np.float32) * np.float32(half_width / 2**23)).reshape(shape)
