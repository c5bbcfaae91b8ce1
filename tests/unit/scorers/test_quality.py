"""DNSMOS with its real weights, which its package ships."""

import math
from dataclasses import replace

import numpy as np
import pytest

from verl_tts.errors import ConfigError
from verl_tts.scorers.quality import QualityScorer
from verl_tts.types import Waveform


@pytest.fixture(scope="module")
def scorer() -> QualityScorer:
    return QualityScorer()


def with_samples(clip, samples_S):
    return replace(clip, waveform=Waveform(samples_S.astype(np.float32), clip.waveform.sample_rate_hz))


def test_speech_scores_above_noisy_speech_above_noise(scorer, spoken):
    clean_S = spoken.waveform.samples_S
    noise_S = np.random.default_rng(0).normal(0, 0.1, len(clean_S))
    clips = [with_samples(spoken, samples) for samples in (clean_S, clean_S + noise_S / 4, noise_S)]
    clean, noisy, noise = (answer["score"] for answer in scorer.score_batch(clips))
    assert clean > noisy + 0.05 > noise + 0.05


def test_the_score_is_the_overall_opinion_as_a_share_of_its_scale(scorer, spoken):
    (answer,) = scorer.score_batch([spoken])
    assert set(answer) == {"score", *scorer.part_names}
    assert answer["score"] == pytest.approx((answer["ovrl"] - 1) / 4)
    (other,) = QualityScorer(measure="p808").score_batch([spoken])
    assert other["score"] == pytest.approx((answer["p808"] - 1) / 4)


def test_a_batch_is_scored_as_its_clips_are(scorer, spoken):
    half = with_samples(spoken, spoken.waveform.samples_S[:20_000])
    together = scorer.score_batch([half, spoken])
    assert together == [scorer.score_batch([clip])[0] for clip in (half, spoken)]


@pytest.mark.parametrize("samples_S", [np.zeros(1), np.zeros(20_000), np.full(400, 7.0), np.ones(1)])
def test_any_clip_gets_a_score_in_the_range(scorer, spoken, samples_S):
    (answer,) = scorer.score_batch([with_samples(spoken, samples_S)])
    assert 0 <= answer["score"] <= 1
    assert all(math.isfinite(value) for value in answer.values())


def test_the_measure_is_checked_and_part_of_the_fingerprint(scorer):
    assert QualityScorer(measure="sig").fingerprint() != scorer.fingerprint()
    with pytest.raises(ConfigError, match="ovrl, sig, bak, p808"):
        QualityScorer(measure="mos")
