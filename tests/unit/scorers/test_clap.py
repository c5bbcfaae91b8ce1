"""CLAP, on the tiny-random checkpoint of tests/tiny_clap.py."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.tiny_clap import write_tiny_clap
from verl_tts.errors import ConfigError
from verl_tts.rewards.protocol import BadRequestError, Clip
from verl_tts.scorers.clap import QUALITY_TEXT, ClapScorer
from verl_tts.types import Waveform


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "fusion"])
def folder(request, tmp_path_factory) -> Path:
    return write_tiny_clap(tmp_path_factory.mktemp("clap"), fusion=request.param)


@pytest.fixture(scope="module")
def scorer(folder) -> ClapScorer:
    return ClapScorer(model=str(folder), device="cpu")


def clips_of(spoken: Clip) -> list[Clip]:
    rng = np.random.default_rng(0)
    long = Waveform(rng.normal(0, 0.1, 25 * 24_000).astype(np.float32), 24_000)
    short = Waveform(rng.normal(0, 0.1, 100).astype(np.float32), 24_000)
    clips = [replace(spoken, metadata={"emotion": emotion}) for emotion in ("joy", "a very bitter disappointment")]
    return [*clips, *(replace(clips[0], waveform=waveform) for waveform in (long, short))]


def test_a_batch_is_scored_as_its_clips_are_and_again_the_same(scorer, spoken):
    clips = clips_of(spoken)
    together = scorer.score_batch(clips)
    assert together == [scorer.score_batch([clip])[0] for clip in reversed(clips)][::-1]
    assert all(-1 <= answer["score"] <= 1 for answer in together)
    assert len({answer["score"] for answer in together}) == len(clips)


def test_what_comes_after_10_s_counts(scorer, spoken):
    first, _, long, _ = clips_of(spoken)
    samples_S = long.waveform.samples_S.copy()
    samples_S[12 * 24_000 :] = 0
    muted = replace(first, waveform=Waveform(samples_S, 24_000))
    assert scorer.score_batch([long]) != scorer.score_batch([muted])


def test_the_text_is_the_emotion_in_its_template_or_always_the_same(folder, spoken):
    joyful = replace(spoken, metadata={"emotion": "joy"})
    templated = ClapScorer(model=str(folder), device="cpu", template="A voice full of {emotion}.")
    fixed = ClapScorer(model=str(folder), device="cpu", text="A voice full of joy.")
    assert templated.score_batch([joyful]) == fixed.score_batch([spoken])
    assert templated.fingerprint() != fixed.fingerprint()
    quality = ClapScorer(model=str(folder), device="cpu", text=QUALITY_TEXT)
    assert quality.score_batch([spoken]) != fixed.score_batch([spoken])
    quality.check(spoken)  # needs no emotion


@pytest.mark.parametrize("emotion", [None, "", " ", 3])
def test_a_clip_without_an_emotion_is_refused(scorer, spoken, emotion):
    with pytest.raises(BadRequestError, match=r"metadata\.emotion: a text is expected"):
        scorer.check(replace(spoken, metadata={"emotion": emotion}))


def test_a_text_longer_than_the_model_takes_is_cut(scorer, spoken):
    (answer,) = scorer.score_batch([replace(spoken, metadata={"emotion": "joy " * 100})])
    assert -1 <= answer["score"] <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": " "}, "text is empty"),
        ({"template": "joy"}, "has no {emotion}"),
        ({"model": "no-such-owner/clap"}, "--allow-download"),
        ({"device": "tpu"}, "unknown device"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        ClapScorer(**{"model": str(folder), **options})


def test_a_directory_that_holds_no_clap_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not load as ClapModel"):
        ClapScorer(model=str(tmp_path))


def changed(folder: Path, out: Path, **config: object) -> Path:
    shutil.copytree(folder, out)
    whole = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(whole | config))
    return out


def test_a_voice_clap_with_code_of_its_own_is_refused_and_not_drawn_at_random(folder, tmp_path):
    """As the files of voiceclap-small are described."""
    own = {"AutoModel": "modeling_voiceclap.VoiceCLAPSmall"}
    other = changed(folder, tmp_path / "voiceclap", model_type="voiceclap-small", auto_map=own)
    (other / "modeling_voiceclap.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(ConfigError, match=r"says model_type='voiceclap-small', not 'clap'; code .* is never run"):
        ClapScorer(model=str(other))


def test_weights_that_are_not_there_are_an_error_and_not_drawn_at_random(folder, tmp_path):
    less = changed(folder, tmp_path / "less")
    weights = load_file(less / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.startswith("text_projection")}
    save_file(kept, less / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 4 weights of ClapModel, text_projection\.linear1\.bias first"):
        ClapScorer(model=str(less))


def test_a_checkpoint_of_laion_clap_is_refused_with_what_is_read(tmp_path):
    (tmp_path / "music_speech_audioset_epoch_15_esc_89.98.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"is a file: give a directory .* \.pt files are not read"):
        ClapScorer(model=str(tmp_path / "music_speech_audioset_epoch_15_esc_89.98.pt"))
