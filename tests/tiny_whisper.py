"""A tiny-random multilingual Whisper as Transformers has it: it says nonsense, and says it the same way each time."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

LANGUAGES = ("en", "hi")


def write_tiny_whisper(folder: Path, *, languages: Sequence[str] = LANGUAGES) -> Path:
    """Random weights, a byte for a token, and Whisper's own order of special tokens."""
    letters = sorted(bytes_to_unicode().values())
    special = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{name}|>" for name in languages)]
    special += ["<|translate|>", "<|transcribe|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    ids = {token: i for i, token in enumerate([*letters, *special])}
    tokenizer = WhisperTokenizer(vocab={letter: ids[letter] for letter in letters} | {special[0]: ids[special[0]]})
    tokenizer.add_special_tokens({"extra_special_tokens": special[1:]})
    assert [tokenizer.convert_tokens_to_ids(token) for token in special] == [ids[token] for token in special]

    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1) | dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads"), 2
    )
    config = WhisperConfig(
        vocab_size=len(ids),
        d_model=16,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_target_positions=48,
        decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
        init_std=1.0,
        **sizes,
    )
    torch.manual_seed(0)
    whisper = WhisperForConditionalGeneration(config)
    prompt = {"is_multilingual": False}
    if languages:
        prompt = {
            "is_multilingual": True,
            "lang_to_id": {f"<|{name}|>": ids[f"<|{name}|>"] for name in languages},
            "task_to_id": {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
        }
    whisper.generation_config = GenerationConfig(
        decoder_start_token_id=ids["<|startoftranscript|>"],
        eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
        no_timestamps_token_id=ids["<|notimestamps|>"],
        max_length=24,
        **prompt,
    )
    whisper.save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    return folder
