"""Resampling and cutting."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from verl_tts.scorers import audio
from verl_tts.scorers.audio import SharedWaveform, is_silent, resampled, windows
from verl_tts.types import Waveform

RATE_HZ = 1_000


def sound(samples: int) -> np.ndarray:
    return np.random.default_rng(samples).normal(0, 0.1, samples).astype(np.float32)


@given(st.integers(0, 20_000))
def test_windows_are_the_clip_and_none_is_too_long(samples):
    samples_S = sound(samples)
    pieces = windows(samples_S, RATE_HZ, longest_s=3.0, search_s=1.0)
    assert np.array_equal(np.concatenate(pieces), samples_S)
    assert all(len(piece) <= 3_000 for piece in pieces)
    assert all(len(piece) >= 2_000 for piece in pieces[:-1])


def test_a_window_ends_where_it_is_quiet():
    samples_S = sound(4_000)
    samples_S[2_500:2_600] = 0
    first, second = windows(samples_S, RATE_HZ, longest_s=3.0, search_s=1.0)
    assert 2_500 <= len(first) <= 2_600
    assert len(first) + len(second) == 4_000


def test_a_shared_waveform_is_resampled_once_per_rate(monkeypatch):
    waveform = SharedWaveform(sound(2_400), 24_000)
    plain = Waveform(waveform.samples_S, 24_000)
    once = resampled(waveform, 16_000)
    assert np.array_equal(once, resampled(plain, 16_000))
    monkeypatch.setattr(audio, "soxr", None)
    assert resampled(waveform, 16_000) is once


def test_nobody_writes_into_what_is_shared():
    samples_S = sound(2_400)
    shared = resampled(SharedWaveform(samples_S, 24_000), 24_000)
    with pytest.raises(ValueError, match="read-only"):
        shared[0] = 1
    samples_S[0] = 1  # the caller's own stays the caller's


@pytest.mark.parametrize(("samples_S", "silent"), [([], True), ([0.0] * 9, True), ([0.5] * 9, True), ([0, 0.1], False)])
def test_silence_is_what_does_not_move(samples_S, silent):
    assert is_silent(np.array(samples_S, np.float32)) is silent
