"""What is at each position of a prompt. No torch here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tts.checkpoints.tiny import MODEL_CONFIG
from verl_tts.errors import ConfigError, DataError
from verl_tts.models.qwen3_tts_prompt import (
    NO_CODEC,
    SPEAKER,
    TokenIds,
    assistant_text,
    build_prompt,
    language_id,
    prompt_length,
)

IDS = TokenIds.of(MODEL_CONFIG)
ROLE, CLOSING = [3073, 263, 10], [3074, 10, 3073, 263, 10]
PAD, BOS, EOS = IDS.tts_pad, IDS.tts_bos, IDS.tts_eos

texts = st.lists(st.integers(0, 255), min_size=1, max_size=40)
languages = st.sampled_from([None, *IDS.languages.values()])
layouts = st.sampled_from(["non_streaming", "streaming"])


def test_non_streaming_prompt_with_auto_language_is_laid_out_as_documented() -> None:
    prompt = build_prompt(IDS, "non_streaming", [*ROLE, 72, 105, *CLOSING], None)
    assert list(zip(prompt.text_P, prompt.codec_P, strict=True)) == [
        (3073, NO_CODEC),
        (263, NO_CODEC),
        (10, NO_CODEC),
        (PAD, 2155),
        (PAD, 2156),
        (PAD, 2157),
        (PAD, SPEAKER),
        (BOS, 2148),
        (72, 2148),
        (105, 2148),
        (EOS, 2148),
        (PAD, 2149),
    ]
    assert prompt.text_of_frames(2) == [PAD, PAD]


def test_streaming_prompt_with_a_language_is_laid_out_as_documented() -> None:
    prompt = build_prompt(IDS, "streaming", [*ROLE, 72, 105, *CLOSING], language_id(MODEL_CONFIG, "English"))
    assert list(zip(prompt.text_P, prompt.codec_P, strict=True)) == [
        (3073, NO_CODEC),
        (263, NO_CODEC),
        (10, NO_CODEC),
        (PAD, 2154),
        (PAD, 2156),
        (PAD, 2050),
        (PAD, 2157),
        (PAD, SPEAKER),
        (BOS, 2148),
        (72, 2149),
    ]
    assert prompt.text_of_frames(4) == [105, EOS, PAD, PAD]


@given(words=texts, language=languages)
def test_prompt_length_counts_words_tags_and_template(words: list[int], language: int | None) -> None:
    text_ids = [*ROLE, *words, *CLOSING]
    tag = 0 if language is None else 1
    assert prompt_length(MODEL_CONFIG, "non_streaming", text_ids, language) == len(words) + 10 + tag
    assert prompt_length(MODEL_CONFIG, "streaming", text_ids, language) == 9 + tag


@given(words=texts, language=languages, layout=layouts, frames=st.integers(0, 60))
def test_every_word_is_told_once_and_in_order(words: list[int], language: int | None, layout: str, frames: int) -> None:
    prompt = build_prompt(IDS, layout, [*ROLE, *words, *CLOSING], language)
    frames_text = prompt.text_of_frames(frames)
    told = [text for text in [*prompt.text_P[3:], *frames_text] if text < 256]
    assert len(frames_text) == frames
    assert told == words[: len(told)]
    assert len(told) == len(words) or (layout == "streaming" and len(told) == 1 + frames)
    assert prompt.codec_P.count(SPEAKER) == 1
    assert prompt.codec_P.index(2149) == len(prompt) - 1


def test_text_without_a_token_of_its_own_is_refused() -> None:
    with pytest.raises(DataError, match="8 token ids"):
        build_prompt(IDS, "streaming", [*ROLE, *CLOSING], None)


def test_unknown_layout_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"'stream'.*non_streaming, streaming"):
        build_prompt(IDS, "stream", [*ROLE, 72, *CLOSING], None)


@pytest.mark.parametrize(("name", "expected"), [("Auto", None), ("auto", None), ("English", 2050), ("hindi", "error")])
def test_language_names_in_any_case(name: str, expected: int | str | None) -> None:
    if expected == "error":
        with pytest.raises(ConfigError, match=r"'hindi'.*Auto, chinese, english"):
            language_id(MODEL_CONFIG, name)
    else:
        assert language_id(MODEL_CONFIG, name) == expected


def test_support_is_what_the_engine_can_sample() -> None:
    assert IDS.support == [*range(1, 2048), 2150]


def test_ids_are_read_from_config_json(tiny_checkpoint: Path) -> None:
    assert TokenIds.of(json.loads((tiny_checkpoint / "config.json").read_text())) == IDS


def test_template_is_qwen_tts_own() -> None:
    assert assistant_text("Hi") == "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_prompt_and_registry_import_no_torch() -> None:
    code = (
        "import sys, verl_tts.models.base, verl_tts.models.qwen3_tts_prompt;"
        "sys.exit(bool({'torch', 'transformers', 'qwen_tts'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
