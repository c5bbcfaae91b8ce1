"""A tiny-random CLAP as Transformers has it: what it finds alike means nothing, and is the same each time."""

from pathlib import Path

import torch
from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, ClapProcessor, RobertaTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode


def write_tiny_clap(folder: Path, *, fusion: bool) -> Path:
    """Random weights, and a byte for a token."""
    letters = sorted(bytes_to_unicode().values())
    vocab = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *letters, "<mask>"])}
    text = {"vocab_size": len(vocab), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"intermediate_size": 16, "max_position_embeddings": 66, "projection_dim": 16}
    audio = {"patch_embeds_hidden_size": 8, "depths": [1, 1], "num_attention_heads": [2, 2], "num_hidden_layers": 2}
    audio |= {"hidden_size": 16, "projection_dim": 16, "enable_fusion": fusion, "fusion_type": "aff_2d"}
    audio |= {"fusion_num_hidden_layers": 1, "aff_block_r": 2, "enable_patch_fusion": fusion}
    torch.manual_seed(0)
    ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=16)).save_pretrained(folder)
    extractor = ClapFeatureExtractor(truncation="fusion" if fusion else "rand_trunc")
    tokenizer = RobertaTokenizer(vocab=vocab, merges=[], model_max_length=64)
    ClapProcessor(extractor, tokenizer).save_pretrained(folder)
    return folder
