"""Bad audio strikes a guard; what cannot be audio is an error. Legend: ``S`` audio sample, ``F`` codec frame."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays

from verl_tts.config.reward import GuardConfig
from verl_tts.errors import ConfigError, RolloutError
from verl_tts.rewards.guards import check_guards, check_transcript, letters_in, longest_run, measure, repeated_share
from verl_tts.types import CodecRollout, Waveform

NO_FRAMES = {"codes_FQ": np.zeros((0, 16), np.int64), "tokens_T": np.zeros(1, np.int64)}


TEXT = "Good morning."


def check(waveform: Waveform, rollout: CodecRollout | None, text: str = TEXT, **settings):
    return check_guards(GuardConfig(**settings), waveform, rollout, text, "a")


def struck(waveform: Waveform, rollout: CodecRollout | None, text: str = TEXT, **settings) -> set[str]:
    return {verdict.name for verdict in check(waveform, rollout, text, **settings)[1] if verdict.struck}


def noise(seconds: float, rms: float, offset: float = 0.0) -> Waveform:
    samples_S = np.random.default_rng(0).normal(offset, rms, round(seconds * 24_000))
    return Waveform(samples_S.astype(np.float32), 24_000)


def test_ordinary_speech_strikes_no_guard(speech, rollout):
    assert struck(speech, rollout) == set()


def test_an_immediate_eos_is_a_violation_and_no_error(rollout):
    _, verdicts = check(Waveform(np.zeros(0, np.float32), 24_000), replace(rollout, **NO_FRAMES))
    first = next(verdict for verdict in verdicts if verdict.is_violation)
    assert first.name == "no_audio"
    assert first.reason == "0 samples"


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
    (verdict,) = [v for v in check(speech, cut, penalise_truncation=penalised)[1] if v.struck]
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
        check(Waveform(samples_S, 24_000), rollout)


@pytest.mark.parametrize(
    "setting",
    [
        {"min_rms": -1},
        {"min_seconds": float("nan")},
        {"penalise_truncation": "no"},
        {"penalise_empty_transcript": 1},
        {"enforce": None},
        {"max_silence_share": 1.5},
        {"max_clipping_share": -0.1},
        {"max_repeated_share": "half"},
        {"max_trailing_silence_s": -1},
        {"max_code_run": 2.5},
        {"min_seconds_per_letter": True},
        {"max_seconds_per_letter": float("inf")},
    ],
    ids=str,
)
def test_an_impossible_limit_is_refused_by_name(setting):
    (name,) = setting
    with pytest.raises(ConfigError, match=f"guards.{name}"):
        GuardConfig(**setting)


def test_a_rate_band_without_room_is_refused():
    with pytest.raises(ConfigError, match=r"min_seconds_per_letter=0\.3 must be below"):
        GuardConfig(min_seconds_per_letter=0.3, max_seconds_per_letter=0.3)


# --- what is measured ------------------------------------------------------------------------------------------------

RATE_HZ = 24_000


def clip(*pieces: np.ndarray) -> Waveform:
    return Waveform(np.concatenate(pieces).astype(np.float32), RATE_HZ)


def sound(seconds: float, rms: float = 0.1) -> np.ndarray:
    return np.random.default_rng(1).normal(0, rms, round(seconds * RATE_HZ))


def still(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE_HZ))


def codes(*codes_F: int) -> CodecRollout:
    codes_FQ = np.array(codes_F, np.int64)[:, None].repeat(16, axis=1)
    return CodecRollout(np.append(codes_FQ[:, 0], 2150), codes_FQ, np.zeros(len(codes_F) + 1, np.float32), "eos", 0)


def test_silence_is_told_from_speech_by_the_loudest_window(rollout):
    quiet_end = measure(clip(sound(1.0), sound(1.0, rms=5e-4)), rollout, TEXT)
    assert quiet_end["clip/silence_share"] == pytest.approx(0.5)
    assert quiet_end["clip/trailing_silence_s"] == pytest.approx(1.0)
    soft_speech = measure(clip(sound(2.0, rms=5e-4)), rollout, TEXT)
    assert soft_speech["clip/silence_share"] == 0.0
    assert soft_speech["clip/trailing_silence_s"] == 0.0


def test_a_pause_inside_is_silence_and_no_trailing_silence(rollout):
    measured = measure(clip(sound(1.0), still(0.5), sound(0.5)), rollout, TEXT)
    assert measured["clip/silence_share"] == pytest.approx(0.25)
    assert measured["clip/trailing_silence_s"] == 0.0


@pytest.mark.parametrize(
    ("waveform", "limit", "name"),
    [
        (clip(sound(1.0), still(9.0)), {"max_silence_share": 0.8}, "mostly_silent"),
        (clip(sound(2.0), still(3.0)), {"max_trailing_silence_s": 2.0}, "trailing_silence"),
        (clip(np.sign(sound(1.0))), {"max_clipping_share": 0.05}, "clipping"),
        (clip(sound(0.2)), {"min_seconds_per_letter": 0.02}, "too_fast"),
        (clip(sound(9.0)), {"max_seconds_per_letter": 0.3}, "too_slow"),
    ],
)
def test_each_limit_strikes_where_it_is_on_and_is_silent_where_it_is_off(waveform, limit, name, rollout):
    assert struck(waveform, rollout, **limit) == {name}
    assert struck(waveform, rollout) == set()
    assert struck(clip(sound(1.0)), rollout, **limit) == set()


@pytest.mark.parametrize(
    ("codes_F", "run", "share"),
    [
        ([], 0, 0.0),
        ([5], 1, 0.0),
        ([5, 5, 5, 6], 3, 0.0),
        ([1, 2, 3, 4, 5, 6, 7, 8], 1, 0.0),
        ([1, 2, 3, 4, 1, 2, 3, 4], 1, 1 / 5),
        ([7] * 10, 10, 6 / 7),
    ],
)
def test_repetition_of_codes_is_measured_as_a_run_and_as_a_share(codes_F, run, share):
    assert longest_run(np.array(codes_F)) == run
    assert repeated_share(np.array(codes_F)) == pytest.approx(share)


def test_codes_in_a_loop_strike_their_guards(speech):
    strict = {"max_code_run": 20, "max_repeated_share": 0.5}
    assert struck(speech, codes(*[7] * 30), **strict) == {"code_run", "repeated_codes"}
    assert struck(speech, codes(*[1, 2, 3, 4] * 10), **strict) == {"repeated_codes"}
    assert struck(speech, codes(*range(40)), **strict) == set()


def test_without_a_rollout_its_codes_are_not_judged(speech):
    strict = {"max_code_run": 1, "max_repeated_share": 0.0, "penalise_truncation": True}
    assert struck(speech, None, **strict) == set()
    assert np.isnan(check(speech, None)[0]["clip/code_run"])


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("Good morning.", 11),
        ("  ... !? ", 0),
        ("in 2026", 2 + 4 * 4),
        ("नमस्ते", 6),  # marks count, as they are heard
        ("你好", 6),
        ("안녕", 5),
        ("こんにちは", 10),
    ],
)
def test_letters_are_counted_by_what_they_take_to_say(text, letters):
    assert letters_in(text) == letters


def test_the_band_of_a_speaking_rate_knows_the_script(rollout):
    """Twelve Chinese signs in 3 s are ordinary speech, twelve Latin letters in 8 s are not."""
    band = {"min_seconds_per_letter": 0.02, "max_seconds_per_letter": 0.3}
    assert struck(clip(sound(8.0)), rollout, "你好你好你好你好你好你好", **band) == set()
    assert struck(clip(sound(8.0)), rollout, "good morning a", **band) == {"too_slow"}


@pytest.mark.parametrize(
    ("notes", "heard_nothing"),
    [
        ({"asr_text": ""}, True),
        ({"asr_text": " ... "}, True),
        ({"asr_text": None}, True),
        ({"whisper_cer.asr_text": "hello", "parakeet_wer.asr_text": ""}, True),
        ({"asr_text": "hello"}, False),
        ({"asr_text": "नमस्ते"}, False),
    ],
)
def test_a_transcript_without_a_word_is_a_violation(notes, heard_nothing):
    verdict = check_transcript(GuardConfig(), notes)
    assert verdict is not None
    assert verdict.is_violation == heard_nothing
    assert check_transcript(GuardConfig(penalise_empty_transcript=False), notes) is None


def test_an_answer_without_a_transcript_is_not_judged_by_one():
    assert check_transcript(GuardConfig(), {"text": ""}) is None


STRICT = {
    "penalise_truncation": True,
    "max_silence_share": 0.0,
    "max_trailing_silence_s": 0.0,
    "max_clipping_share": 0.0,
    "min_seconds_per_letter": 1.0,
    "max_seconds_per_letter": 1.1,
    "max_code_run": 1,
    "max_repeated_share": 0.0,
}


def test_guards_that_are_not_enforced_are_logged_and_only_what_cannot_be_sent_is_a_violation(speech, rollout):
    _, verdicts = check(speech, replace(rollout, stop_reason="length"), enforce=False, **STRICT)
    assert len([verdict for verdict in verdicts if verdict.struck]) > 3
    assert not [verdict for verdict in verdicts if verdict.is_violation]
    _, verdicts = check(Waveform(np.zeros(0, np.float32), RATE_HZ), replace(rollout, **NO_FRAMES), enforce=False)
    assert [verdict.name for verdict in verdicts if verdict.is_violation] == ["no_audio"]


@given(
    arrays(np.float32, st.integers(0, 2000), elements=st.floats(-4, 4, width=32)),
    st.sampled_from([8_000, 24_000, 44_100]),
    st.lists(st.integers(0, 3), max_size=30),
    st.text(max_size=20),
)
def test_every_clip_has_the_same_measures_and_each_is_in_its_range(samples_S, rate_hz, codes_F, text):
    measured, verdicts = check(Waveform(samples_S, rate_hz), codes(*codes_F), text, **STRICT)
    assert len(measured) == 8
    assert [verdict.name for verdict in verdicts] == [
        *("no_audio", "silence", "too_short", "truncated", "mostly_silent", "trailing_silence", "clipping"),
        *("too_fast", "too_slow", "code_run", "repeated_codes"),
    ]
    for name in ("silence_share", "clipping_share", "repeated_share"):
        assert 0 <= measured[f"clip/{name}"] <= 1
    assert all(value >= 0 for value in measured.values() if not np.isnan(value))
    assert 0 <= measured["clip/trailing_silence_s"] <= measured["clip/seconds"] + 1e-9
