"""The tiny MOSS checkpoint: the same bytes everywhere, and loadable by vLLM-Omni's own classes."""

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from verl_tts.checkpoints.tiny_moss import (
    CODEC_CONFIG,
    MODEL_CONFIG,
    TEXT_IDS,
    build_tiny_moss,
    codec_shapes,
    model_shapes,
)
from verl_tts.errors import UserError
from verl_tts.models.moss import MossConfig, MossPolicy

SHA256 = {
    "codec/config.json": "1ccb94ff557e8d36f340820abe8a84de83dfba4636de5aa6ca54cdc2b5e5021e",
    "codec/model.safetensors": "d507f8da2363c80d64b163c2accfbe427b153c649fbedc98276ab6144b280102",
    "config.json": "6110bfd2be1b43400ed13c26739bfe68891444e8926e0e1c7fcf057913e44ecc",
    "generation_config.json": "564328b2ee5a54eb3e2da3dfc5e2951c87a62ca3d6a63824e869d9011e5ade9e",
    "merges.txt": "adcafd1d01934f0f2471216e81a2868974510ed2a855c51dd8cd81bdc1daa2a4",
    "model.safetensors": "11aee8b5b4723b42d6b589a31c4a0d150e71488d7f8b877a33ac37f614ae0552",
    "tokenizer_config.json": "62531e6ef740cb1ae41ef428e29ec679314c163f55c9be419d5ca0bd6fd7b9c7",
    "vocab.json": "97320057fb9b6103c80fef809186f8002fabcb524bb5fc41bc7cb565ce9153db",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("moss") / "model"
    build_tiny_moss(out)
    return out


def test_every_file_has_its_pinned_bytes(checkpoint: Path) -> None:
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    found = {str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert found == SHA256
    assert sum(path.stat().st_size for path in files) < 12e6


def test_an_existing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists already"):
        build_tiny_moss(tmp_path)


def test_shapes_are_those_of_the_policy_and_of_the_codec() -> None:
    from vllm_omni.model_executor.models.moss_tts.audio_tokenizer_v2 import MossAudioTokenizerModel
    from vllm_omni.model_executor.models.moss_tts.configuration_moss_audio_tokenizer_v2 import MossAudioTokenizerConfig

    with torch.device("meta"):
        policy = MossPolicy(MossConfig(**MODEL_CONFIG))
        codec = MossAudioTokenizerModel(MossAudioTokenizerConfig(**CODEC_CONFIG))
    for module, ours in ((policy, model_shapes(MODEL_CONFIG)), (codec, codec_shapes(CODEC_CONFIG))):
        assert dict(ours) == {name: tuple(value.shape) for name, value in module.named_parameters()}


def test_the_specials_are_single_tokens(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer("".join(TEXT_IDS))["input_ids"] == [*TEXT_IDS.values()]
    assert tokenizer.eos_token_id == MODEL_CONFIG["im_end_token_id"]


def test_random_codes_are_audible_and_not_clipped_and_a_recording_has_codes(checkpoint: Path) -> None:
    from verl_tts.rollout.reference import load_codec

    codec, random = load_codec(checkpoint / "codec"), torch.Generator().manual_seed(0)
    codes_QF = torch.randint(0, 1024, (16, 25), generator=random)
    audio = codec.batch_decode(codes_list=[codes_QF], num_quantizers=16).audio
    assert audio.shape == (1, 1, 25 * 1920)
    assert 0.03 < float(audio.std()) < 0.3
    assert float(audio.abs().max()) < 1
    found = codec.batch_encode([0.1 * torch.randn(48_000, generator=random)], num_quantizers=16).audio_codes
    assert found.shape == (16, 1, 25)
    assert len(found.unique()) > 20
