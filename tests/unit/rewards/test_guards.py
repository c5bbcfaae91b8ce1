"""Bad audio strikes a guard; what cannot be audio is an error."""

from dataclasses import replace

import numpy as np
import pytest

from verl_tts.config.reward import GuardConfig
from verl_tts.errors import ConfigError, RolloutError
from verl_tts.rewards.guards import check_guards
from verl_tts.types import CodecRollout, Waveform

NO_FRAMES = {"codes_FQ": np.zeros((0, 16), np.int64), "tokens_T": np.zeros(1, np.int64)}


def struck(waveform: Waveform, rollout: CodecRollout, **settings) -> set[str]:
    return {v.name for v in check_guards(GuardConfig(**settings), waveform, rollout, "a") if v.struck}


def noise(seconds: float, rms: float, offset: float = 0.0) -> Waveform:
    samples_S = np.random.default_rng(0).normal(offset, rms, round(seconds * 24_000))
    return Waveform(samples_S.astype(np.float32), 24_000)


def test_ordinary_speech_strikes_no_guard(speech, rollout):
    assert struck(speech, rollout) == set()


def test_an_immediate_eos_is_a_violation_and_no_error(rollout):
    verdicts = check_guards(
        GuardConfig(), Waveform(np.zeros(0, np.float32), 24_000), replace(rollout, **NO_FRAMES), "a"
    )
    first = next(verdict for verdict in verdicts if verdict.is_violation)
    assert first.name == "no_audio"
    assert first.reason == "0 frames, 0 samples"


@pytest.mark.parametrize(
    ("waveform", "expected"),
    [
        (noise(1.0, 0.0), {"silence"}),
        (noise(1.0, 5e-5), {"silence"}),
        (noise(1.0, 2e-4), set()),
        (noise(1.0, 5e-5, offset=0.5), {"silence"}),  # an offset cannot be heard
        (noise(0.08, 0.1), {"too_short"}),
        (noise(0.16, 0.1), set()),
        (noise(0.04, 0.0), {"silence", "too_short"}),
    ],
)
def test_silent_and_short_clips_are_told_from_speech(waveform, expected, rollout):
    assert struck(waveform, rollout) == expected


def test_the_limits_are_settings(rollout):
    assert struck(noise(1.0, 0.01), rollout, min_rms=0.02, min_seconds=1.5) == {"silence", "too_short"}
    assert struck(noise(0.01, 1e-6), rollout, min_rms=0, min_seconds=0) == set()


@pytest.mark.parametrize("penalised", [False, True])
def test_a_clip_that_never_stopped_is_flagged_and_penalised_only_by_setting(speech, rollout, penalised):
    cut = replace(rollout, stop_reason="length")
    (verdict,) = [v for v in check_guards(GuardConfig(penalise_truncation=penalised), speech, cut, "a") if v.struck]
    assert verdict.name == "truncated"
    assert verdict.is_violation == penalised


@pytest.mark.parametrize(
    "samples_S",
    [
        np.array([0.1, np.nan], np.float32),
        np.array([0.1, np.inf], np.float32),
        np.zeros((2, 100), np.float32),
        np.zeros(100, np.int16),
    ],
    ids=["NaN", "infinite", "two channels", "integers"],
)
def test_what_cannot_be_audio_is_an_error_that_names_the_sample(samples_S, rollout):
    with pytest.raises(RolloutError, match="sample 'a'"):
        check_guards(GuardConfig(), Waveform(samples_S, 24_000), rollout, "a")


@pytest.mark.parametrize("setting", [{"min_rms": -1}, {"min_seconds": float("nan")}, {"penalise_truncation": "no"}])
def test_an_impossible_limit_is_refused_by_name(setting):
    (name,) = setting
    with pytest.raises(ConfigError, match=f"guards.{name}"):
        GuardConfig(**setting)
