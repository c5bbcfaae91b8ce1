"""The duration score: one at the target, lower on both sides, never flat."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from verl_tts.rewards.functions import duration_score
from verl_tts.rewards.protocol import BadRequestError, Clip
from verl_tts.scorers.duration import DurationScorer
from verl_tts.types import Waveform

SECONDS = st.floats(0.01, 100)


def clip(seconds: float, **metadata) -> Clip:
    return Clip(Waveform(np.zeros(round(seconds * 24_000), np.float32), 24_000), "Hi.", metadata)


@given(SECONDS, SECONDS)
def test_the_score_is_in_its_range_and_does_not_care_which_length_is_the_target(seconds, target):
    assert 0 < duration_score(seconds, target) <= 1
    assert duration_score(seconds, target) == duration_score(target, seconds)


@given(SECONDS, st.floats(1.01, 5), st.floats(1.01, 5))
def test_the_closer_of_two_lengths_on_the_same_side_scores_higher(target, factor, further):
    assert duration_score(target * factor, target) > duration_score(target * factor * further, target)
    assert duration_score(target / factor, target) > duration_score(target / factor / further, target)


def test_a_batch_is_scored_as_its_clips_are():
    clips = [clip(0.5, target_seconds=1), clip(1.0, target_seconds=1), clip(4.0, target_seconds=1)]
    scorer = DurationScorer()
    together = scorer.score_batch(clips)
    assert together == [scorer.score_batch([one])[0] for one in clips]
    assert [answer["score"] for answer in together] == [0.5, 1.0, 0.25]


@pytest.mark.parametrize("target", [None, 0, -1, True, "2"])
def test_a_clip_without_a_target_is_refused(target):
    with pytest.raises(BadRequestError, match="target_seconds"):
        DurationScorer().check(clip(1.0, target_seconds=target))
    with pytest.raises(BadRequestError, match="target_seconds"):
        DurationScorer().check(clip(1.0))
