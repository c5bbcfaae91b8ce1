"""The tiny checkpoint: the same bytes everywhere, loadable by qwen-tts, and a policy that behaves."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from verl_tts.checkpoints import tiny
from verl_tts.checkpoints.tiny import CODEC_CONFIG, MODEL_CONFIG, build_tiny_qwen3_tts, codec_shapes, model_shapes
from verl_tts.compat import qwen_tts_transformers5
from verl_tts.errors import RunStopped, UserError
from verl_tts.models.qwen3_tts import Qwen3TTSPolicy
from verl_tts.models.qwen3_tts_prompt import assistant_text

SHA256 = {
    "config.json": "f7707a5ea9f7eb0724e7d20f75fe88788369bc9bfdbb8a300b2a944045d1b866",
    "generation_config.json": "0c4cd243f679b953f775055d8681e87776b4fb7e28c4b127f9ac62543bbba52f",
    "merges.txt": "adcafd1d01934f0f2471216e81a2868974510ed2a855c51dd8cd81bdc1daa2a4",
    "model.safetensors": "a87927b7b46478ddff319bec94447595099a610465004dbe3abbde7ac2356a11",
    "preprocessor_config.json": "ad630ebde37d50e67efb7c35b3b3762896fc512ad8ed2669f0a59565603decfd",
    "speech_tokenizer/config.json": "035193cfe91c8f2957c8bbecd27cf7f4d9b69931d9684c9419c17a93e2bf5a79",
    "speech_tokenizer/model.safetensors": "1238af238606d986e4753baf3828edbf08db419e50fd6e64b0ddea23d2b2b19d",
    "speech_tokenizer/preprocessor_config.json": "fcb3805e597e786d4067706e602f6688524640f8d3396790e2e09b5942fcbdfb",
    "tokenizer_config.json": "c8581f40fe91806d049869e948803ae5bfca7c296b0100833a71dc3e001c06e7",
    "vocab.json": "f6d7e0318e1570437627b8e57febddade8e1066f87fab5ee3d084375ed0d2df0",
}


# --------------------------------------------------------------------------------------------------------- bytes


def test_every_file_has_its_pinned_bytes(tiny_checkpoint: Path) -> None:
    files = [path for path in tiny_checkpoint.rglob("*") if path.is_file()]
    assert {str(path.relative_to(tiny_checkpoint)): digest(path) for path in files} == SHA256


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_checkpoint_is_small(tiny_checkpoint: Path) -> None:
    assert sum(path.stat().st_size for path in tiny_checkpoint.rglob("*")) < 25e6


def test_uniform_values_have_the_asked_for_spread_and_depend_on_name_and_shape() -> None:
    values = tiny.uniform("a", (400, 50), 0.5)
    assert values.dtype == np.float32
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 0.5) < 0.01
    assert abs(values).max() <= 0.5 * np.sqrt(3)
    assert not np.array_equal(values, tiny.uniform("b", (400, 50), 0.5))
    assert not np.array_equal(values.ravel(), tiny.uniform("a", (50, 400), 0.5).ravel())


def test_existing_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists already"):
        build_tiny_qwen3_tts(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_breaks_off_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(tiny, "write_weights", full_disk)
    with pytest.raises(RunStopped, match=r"cannot write .*tiny: No space"):
        build_tiny_qwen3_tts(tmp_path / "deep" / "tiny")
    assert list((tmp_path / "deep").iterdir()) == []


# ------------------------------------------------------------------------------------------------ what reads them


@pytest.mark.parametrize("part", ["model", "codec"])
def test_shapes_are_those_of_qwen_tts_own_modules(tiny_checkpoint: Path, part: str) -> None:
    qwen_tts_transformers5.apply()
    from qwen_tts.core import Qwen3TTSTokenizerV2Config, Qwen3TTSTokenizerV2Model
    from qwen_tts.core.models import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration

    with torch.device("meta"):
        if part == "model":
            ours = dict(model_shapes(MODEL_CONFIG))
            module = Qwen3TTSForConditionalGeneration(Qwen3TTSConfig.from_pretrained(tiny_checkpoint))
        else:
            ours = dict(codec_shapes(CODEC_CONFIG))
            config = Qwen3TTSTokenizerV2Config.from_pretrained(tiny_checkpoint / "speech_tokenizer")
            module = Qwen3TTSTokenizerV2Model(config)
    assert ours == {name: tuple(value.shape) for name, value in module.state_dict().items()}


@pytest.mark.parametrize("text", ["Hello there", "नमस्ते दुनिया", "assistant, 你好"])
def test_chat_template_is_cut_into_three_and_five_tokens(tiny_checkpoint: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    ids = tokenizer(assistant_text(text))["input_ids"]
    assert tokenizer.decode(ids[:3]) == "<|im_start|>assistant\n"
    assert tokenizer.decode(ids[3:-5]) == text
    assert tokenizer.decode(ids[-5:]) == "<|im_end|>\n<|im_start|>assistant\n"


def test_no_text_special_is_a_codec_id(tiny_checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    specials = tokenizer.convert_tokens_to_ids(list(tiny.TEXT_SPECIALS))
    assert specials == [3072, 3073, 3074, 3075, 3076, 3077]
    assert tokenizer.eos_token_id == MODEL_CONFIG["im_end_token_id"] == 3074
    assert MODEL_CONFIG["assistant_token_id"] == tokenizer.convert_tokens_to_ids("assistant")


# --------------------------------------------------------------------------------------------- how it behaves


@pytest.fixture(scope="module")
def qwen_tts_model(tiny_checkpoint: Path) -> Any:
    qwen_tts_transformers5.apply()
    from qwen_tts import Qwen3TTSModel

    return Qwen3TTSModel.from_pretrained(str(tiny_checkpoint), dtype=torch.float32)


def test_random_codes_decode_to_an_audible_unclipped_waveform(qwen_tts_model: Any) -> None:
    codes = torch.randint(0, 2048, (8, 40, 16), generator=torch.Generator().manual_seed(0))
    waveforms, sample_rate_hz = qwen_tts_model.model.speech_tokenizer.decode({"audio_codes": list(codes)})
    samples_BS = np.stack(waveforms)
    assert sample_rate_hz == 24000
    assert samples_BS.shape == (8, 40 * 1920)
    assert 0.05 < samples_BS.std() < 0.2
    assert abs(samples_BS).max() < 0.99


def test_a_waveform_encodes_to_sixteen_codes_a_frame(qwen_tts_model: Any) -> None:
    samples_S = 0.3 * np.sin(np.arange(2 * 24000) / 20).astype(np.float32)
    codes = qwen_tts_model.model.speech_tokenizer.encode(samples_S, sr=24000).audio_codes[0]
    assert codes.shape == (25, 16)
    assert len(codes.unique()) > 50


def test_speaker_embedding_has_the_width_of_the_talker(qwen_tts_model: Any) -> None:
    samples_S = 0.3 * np.sin(np.arange(24000) / 20).astype(np.float32)
    assert qwen_tts_model.model.extract_speaker_embedding(audio=samples_S, sr=24000).shape == (64,)


def test_qwen_tts_clones_a_voice_with_it(qwen_tts_model: Any) -> None:
    torch.manual_seed(0)
    reference = (0.3 * np.sin(np.arange(24000) / 20).astype(np.float32), 24000)
    waveforms, sample_rate_hz = qwen_tts_model.generate_voice_clone(
        text="नमस्ते", language="English", ref_audio=reference, x_vector_only_mode=True, max_new_tokens=8
    )
    assert sample_rate_hz == 24000
    assert len(waveforms[0]) % 1920 == 0
    assert len(waveforms[0]) > 0


@pytest.mark.parametrize("layout", ["non_streaming", "streaming"])
def test_most_utterances_end_by_themselves_before_48_frames(tiny_checkpoint: Path, layout: str) -> None:
    ended_B = probability_of_ending(tiny_checkpoint, layout, frames=48)
    assert 0.70 <= ended_B.mean() <= 0.95
    assert ended_B.min() > 0.5  # none of them drones on for ever


@torch.no_grad()
def probability_of_ending(checkpoint: Path, layout: str, frames: int) -> torch.Tensor:
    """For each of 16 prompts, the probability of an EOS among the first tokens, along frames sampled without one.

    Codebook 0 is sampled from the policy at temperature 1; residual codes are drawn evenly, which is what the
    tiny code predictor comes to.
    """
    policy = Qwen3TTSPolicy.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    generator = torch.Generator().manual_seed(0)
    texts = ["Hi.", "नमस्ते, आप कैसे हैं?", "A sentence of some length, please.", "One, two, three."] * 4
    codes = [torch.empty(0, 16, dtype=torch.long) for _ in texts]
    speakers = [torch.randn(64, generator=generator) for _ in texts]
    going_on_B = torch.ones(len(texts))
    for frame in range(frames):
        (logits_NV,) = policy(
            text_ids=[torch.tensor(tokenizer(assistant_text(text))["input_ids"]) for text in texts],
            codes=codes,
            speakers=speakers,
            language_ids=[None, 2050, 2055, None] * 4,
            layout=layout,
        )
        probabilities_BV = logits_NV.view(len(texts), frame + 1, -1)[:, -1].softmax(-1)
        going_on_B *= 1 - probabilities_BV[:, -1]  # EOS is the last of the support
        code0 = 1 + torch.multinomial(probabilities_BV[:, :-1], 1, generator=generator)
        residual = torch.randint(0, 2048, (len(texts), 15), generator=generator)
        codes = [
            torch.cat([before, new[None]]) for before, new in zip(codes, torch.cat([code0, residual], 1), strict=True)
        ]
    return 1 - going_on_B
