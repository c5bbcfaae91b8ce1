"""Several scorers in one server: raw values side by side, the first one's score, audio resampled once."""

import httpx
import numpy as np
import pytest

from verl_tts.errors import ConfigError
from verl_tts.rewards.protocol import BadRequestError, Clip, encode_request
from verl_tts.scorers import audio, build_scorers
from verl_tts.scorers.audio import resampled
from verl_tts.scorers.constant import ConstantScorer
from verl_tts.scorers.duration import DurationScorer
from verl_tts.scorers.several import SeveralScorers


def entry(scorer: str, **options) -> dict:
    return {"scorer": scorer, "options": options}


def test_the_score_is_the_first_ones_and_every_value_has_its_scorers_name(serving, noise):
    clip = Clip(noise, "Hi.", {"id": "en-1", "target_seconds": 0.2})
    scorers = build_scorers([entry("duration"), {**entry("constant", value=2), "name": "flat"}])
    with serving(scorers) as origin:
        info = httpx.get(f"{origin}/info").json()
        answer = httpx.post(f"{origin}/score", content=encode_request(clip)).json()
    assert answer == {
        "id": "en-1",
        "num_samples": 2_400,
        "score": 0.5,
        "duration.score": 0.5,
        "duration.seconds": 0.1,
        "duration.target_seconds": 0.2,
        "flat.score": 2.0,
    }
    assert info["name"] == "duration+flat"
    assert info["score_range"] == [0.0, 1.0]
    assert set(info["part_names"]) == set(answer) - {"id", "num_samples", "score"}
    assert list(info["scorers"]) == ["duration", "flat"]
    assert info["scorers"]["flat"]["fingerprint"] == ConstantScorer(value=2).fingerprint()


def test_one_fingerprint_covers_all_of_them_their_names_and_their_order():
    def fingerprint(**scorers):
        return SeveralScorers(scorers).fingerprint()

    one, two = ConstantScorer(value=1), ConstantScorer(value=2)
    assert fingerprint(a=one, b=two) == fingerprint(a=one, b=ConstantScorer(value=2))
    different = [fingerprint(a=one, b=two), fingerprint(b=two, a=one), fingerprint(a=one, c=two), fingerprint(a=one)]
    assert len({*different, fingerprint(a=two, b=one), one.fingerprint()}) == 6


def test_a_clip_is_resampled_once_per_rate_and_not_once_per_scorer(monkeypatch, scripted, spoken):
    resamplings = []
    original = audio.soxr.resample
    monkeypatch.setattr(audio.soxr, "resample", lambda *args: resamplings.append(args[2]) or original(*args))
    shown = []

    def at(*rates_hz):
        return scripted(lambda clip: shown.append([resampled(clip.waveform, rate) for rate in rates_hz]) or 0.5)

    SeveralScorers({"a": at(16_000), "b": at(16_000, 48_000), "c": at(48_000)}).score_batch([spoken])
    assert sorted(resamplings) == [16_000, 48_000]
    assert shown[0][0] is shown[1][0]
    assert np.array_equal(shown[0][0], resampled(spoken.waveform, 16_000))


def test_a_clip_that_one_of_them_refuses_is_refused(spoken):
    with pytest.raises(BadRequestError, match="target_seconds"):
        SeveralScorers({"flat": ConstantScorer(), "duration": DurationScorer()}).check(spoken)


def test_a_clip_that_one_of_them_fails_on_is_an_error(scripted, spoken):
    def fail(clip):
        raise RuntimeError("no weights")

    with pytest.raises(RuntimeError, match="no weights"):
        SeveralScorers({"flat": ConstantScorer(), "other": scripted(fail)}).score_batch([spoken])


def test_a_batch_is_scored_as_its_clips_are(scripted, spoken, noise):
    scorers = SeveralScorers({"flat": ConstantScorer(), "seconds": scripted(lambda clip: clip.waveform.seconds)})
    clips = [spoken, Clip(noise, "Hi.", {})]
    assert scorers.score_batch(clips) == [scorers.score_batch([clip])[0] for clip in clips]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry("constant"), entry("constant")], "'constant' comes 2 times; give each a name of its own"),
        ([{**entry("constant"), "name": "a.b"}], "name='a.b' must be letters, digits and underscores"),
        ([entry("constant"), entry("loudness")], "unknown scorer 'loudness'"),
    ],
)
def test_names_that_would_be_mixed_up_are_refused(entries, message):
    with pytest.raises(ConfigError, match=message):
        build_scorers(entries)
