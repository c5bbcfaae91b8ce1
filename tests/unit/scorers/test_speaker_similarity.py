"""Speaker similarity: Resemblyzer with its real weights, ECAPA-TDNN of full size with random ones."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from verl_tts.errors import ConfigError
from verl_tts.rewards.protocol import BadRequestError, Clip
from verl_tts.scorers.speaker_similarity import SpeakerSimilarityScorer
from verl_tts.types import Waveform


@pytest.fixture(scope="module")
def folder(tmp_path_factory, spoken) -> Path:
    """References: the first half of the spoken clip, the same voice an octave up, silence; and a secret outside."""
    outside = tmp_path_factory.mktemp("outside")
    references = outside / "references"
    (references / "voices").mkdir(parents=True)
    samples_S, rate_hz = spoken.waveform.samples_S, spoken.waveform.sample_rate_hz
    soundfile.write(references / "anna.wav", samples_S[: len(samples_S) // 2], rate_hz)
    soundfile.write(references / "voices/child.flac", np.stack([samples_S, samples_S], axis=1), 2 * rate_hz)
    soundfile.write(references / "nobody.wav", np.zeros(rate_hz), rate_hz)
    soundfile.write(outside / "secret.wav", samples_S, rate_hz)
    (references / "link.wav").symlink_to(outside / "secret.wav")
    return references


@pytest.fixture(scope="module")
def scorer(folder) -> SpeakerSimilarityScorer:
    return SpeakerSimilarityScorer(references=str(folder), device="cpu")


def asked(clip: Clip, **metadata) -> Clip:
    return replace(clip, metadata=metadata)


def silent(clip: Clip) -> Clip:
    return replace(clip, waveform=Waveform(np.zeros(24_000, np.float32), 24_000))


def test_the_same_voice_is_more_alike_than_another(scorer, spoken):
    clips = [asked(spoken, speaker="anna"), asked(spoken, ref_audio="voices/child.flac")]
    own, other = (answer["score"] for answer in scorer.score_batch(clips))
    assert own > 0.85
    assert own > other + 0.1


def test_a_clip_without_a_voice_is_like_nobody(scorer, spoken):
    (answer,) = scorer.score_batch([asked(silent(spoken), speaker="anna")])
    assert answer == {"score": 0.0}


def test_a_batch_is_scored_as_its_clips_are_and_again_the_same(scorer, spoken):
    clips = [
        asked(spoken, speaker="anna"),
        asked(silent(spoken), speaker="anna"),
        asked(spoken, speaker="voices/child"),
    ]
    together = scorer.score_batch(clips)
    assert together == [scorer.score_batch([clip])[0] for clip in reversed(clips)][::-1]


def test_the_reference_by_path_counts_before_the_speaker(scorer, spoken, folder):
    both = asked(spoken, speaker="anna", ref_audio="voices/child.flac")
    absolute = asked(spoken, ref_audio=str(folder / "voices/child.flac"))
    one, other, alone = scorer.score_batch([both, absolute, asked(spoken, speaker="voices/child")])
    assert one == other == alone


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "metadata: ref_audio or speaker"),
        ({"speaker": 7}, "metadata: ref_audio or speaker"),
        ({"speaker": ""}, "metadata: ref_audio or speaker"),
        ({"ref_audio": "a\0b"}, "metadata: ref_audio or speaker"),
        ({"speaker": "berta"}, "metadata.speaker: there is no reference 'berta'"),
        ({"ref_audio": "anna"}, "metadata.ref_audio: there is no reference 'anna'"),
        ({"ref_audio": "."}, "metadata.ref_audio: there is no reference"),
        ({"ref_audio": "../secret.wav"}, "metadata.ref_audio: '../secret.wav' is not below the references"),
        ({"speaker": "../secret"}, "metadata.speaker: '../secret' is not below the references"),
        ({"speaker": "voices/../../secret"}, "is not below the references"),
        ({"ref_audio": "/etc/passwd"}, "is not below the references"),
        ({"ref_audio": "link.wav"}, "is not below the references"),
        ({"ref_audio": "x" * 5000}, "metadata.ref_audio: there is no reference"),
    ],
)
def test_only_a_file_below_the_folder_is_a_reference(scorer, spoken, metadata, message):
    with pytest.raises(BadRequestError) as refused:
        scorer.check(asked(spoken, **metadata))
    assert message in str(refused.value)


def test_a_reference_without_a_voice_is_an_error_and_no_score(scorer, spoken):
    with pytest.raises(RuntimeError, match=r"no voice .* nobody\.wav"):
        scorer.score_batch([asked(spoken, speaker="nobody")])


def test_another_reference_is_another_fingerprint(scorer, folder, tmp_path):
    assert SpeakerSimilarityScorer(references=str(folder), device="cpu").fingerprint() == scorer.fingerprint()
    assert SpeakerSimilarityScorer(references=str(tmp_path), device="cpu").fingerprint() != scorer.fingerprint()


# --- ECAPA-TDNN ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ecapa(folder, tmp_path_factory) -> dict:
    here = Path(__file__).parent
    places = [folder, here / "data/open_the_window.flac", tmp_path_factory.mktemp("ecapa")]
    command = [sys.executable, "-m", "tests.unit.scorers.ecapa_answers", *places]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=here.parents[2]).stdout)


def test_ecapa_says_the_same_of_a_clip_in_any_batch(ecapa):
    assert ecapa["together"] == ecapa["alone"]
    scores = [answer["score"] for answer in ecapa["together"]]
    assert all(-1 <= score <= 1 for score in scores)
    assert len(set(scores)) == len(scores)


def test_a_clip_is_wholly_like_itself_to_ecapa_and_silence_is_like_nobody(ecapa):
    *_, itself, silence = ecapa["together"]
    assert itself["score"] == pytest.approx(1, abs=1e-3)
    assert silence == {"score": -1.0}


@pytest.mark.parametrize("content", ["empty", "text", "program"])
def test_a_checkpoint_that_is_none_is_refused_and_not_run(ecapa, content):
    assert "is no ECAPA-TDNN" in ecapa["refused"][content]


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"references": "/no/such/folder"}, "references='/no/such/folder' is no directory"),
        ({"backend": "wavlm"}, "resemblyzer, ecapa"),
        ({"model": "/models/ecapa"}, "model='/models/ecapa' is for backend=ecapa"),
        ({"backend": "ecapa"}, "model=None has no embedding_model.ckpt"),
        ({"backend": "ecapa", "model": "/"}, "model='/' has no embedding_model.ckpt"),
        ({"device": "tpu"}, "unknown device"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        SpeakerSimilarityScorer(**{"references": str(folder), **options})
