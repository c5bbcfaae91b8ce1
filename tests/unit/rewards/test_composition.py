"""Several numbers become one reward: the formulas, their order, and the statistics that a checkpoint keeps."""

import asyncio
import json
import math
from dataclasses import replace
from functools import cache

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from verl_tts.config.compose import compose, reward_presets, tts_config
from verl_tts.config.reward import RewardConfig, reward_config
from verl_tts.errors import CheckpointError, ConfigError, ScorerError, ScorerProtocolError
from verl_tts.rewards.compose import Composer, RunningStatistics, find_part
from verl_tts.rewards.manager import RewardManager
from verl_tts.rewards.protocol import ScorerInfo
from verl_tts.types import CodecRollout, Score, Waveform

PUBLISHED = ("cer_published", "laion_moss_published")
COMPOSED = tuple(name for name, preset in reward_presets().items() if "compose" in preset)
ORDERED = tuple(name for name in COMPOSED if name not in PUBLISHED)


def preset(name: str, *overrides: str) -> RewardConfig:
    return tts_config(compose(["tts.platform=cpu", f"tts.reward.preset={name}", *overrides])).reward


preset_once = cache(preset)


def composed(config: RewardConfig, **parts: float):
    return Composer(config.compose).compose(Score(parts.pop("score", 0.5), parts), "a")


class Answers:
    """In place of a scorer: gives every clip the same answer."""

    def __init__(self, answer: Score) -> None:
        self.answer, self.asked = answer, 0

    async def probe(self) -> ScorerInfo:
        return ScorerInfo(part_names=tuple(self.answer.parts))

    async def score(self, *_) -> Score:
        self.asked += 1
        return self.answer

    async def aclose(self) -> None: ...


def reward_of(config: RewardConfig, answer: Score, row, waveform: Waveform, rollout: CodecRollout) -> Score:
    return asyncio.run(RewardManager(config, Answers(answer)).score(row, waveform, rollout))


# --- presets ---------------------------------------------------------------------------------------------------------


def test_the_presets_are_those_of_the_documentation():
    assert set(reward_presets()) == {
        *("guards", "cer", "cer_published", "laion_moss", "laion_moss_published"),
        *("zone_gate", "cer_nll", "four_component"),
    }


def test_an_unknown_preset_is_answered_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"preset=cre is unknown; the nearest is cer; there are: cer, cer_nll,"):
        preset("cre")


def test_a_setting_of_the_command_line_wins_over_the_preset():
    config = preset("laion_moss", "tts.reward.compose.weight_set=v1", "tts.reward.guards.max_code_run=null")
    assert config.compose.chosen_weights == {"speaker": 0.6, "emotion": 0.4, "quality": 0.0}
    assert config.guards.max_code_run is None
    assert config.guards.max_trailing_silence_s == 2.0


def test_a_component_can_be_read_from_another_scorer():
    config = preset("cer", "tts.reward.compose.components.accuracy.part=parakeet_cer.cer_capped")
    assert config.compose.components["accuracy"].part == "parakeet_cer.cer_capped"


@pytest.mark.parametrize("name", COMPOSED)
def test_published_forms_are_warned_about_in_one_line_and_no_other(name, caplog):
    caplog.set_level("WARNING", logger="verl_tts.config.compose")  # some library may have made the root logger quieter
    preset(name)
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == (name in PUBLISHED)
    assert all(f"preset={name}" in line and "\n" not in line for line in warned)


# What the scorers of the presets may answer, in the ranges of their own /info.
ERROR, COSINE = st.floats(0, 1e6), st.floats(-1, 1)
RANGES = {
    "cer": ERROR,
    "wer": ERROR,
    "nll": st.floats(0, 1e6),
    "speaker_similarity.score": COSINE,
    "clap.score": COSINE,
    "clap_emotion.score": COSINE,
    "clap_quality.score": COSINE,
    "quality.score": st.floats(0, 1),
    "predictor.value": st.floats(-10, 10),
}
NAMES_OF_PARTS = (*RANGES, "cer_capped")
ANSWERS = st.fixed_dictionaries(RANGES).map(
    lambda parts: Score(0.5, {**parts, "cer_capped": min(1.0, parts["cer"])}, {"asr_text": "good morning"})
)


@settings(max_examples=60)
@given(answer=ANSWERS, history=st.lists(ANSWERS, max_size=8))
@pytest.mark.parametrize("name", ORDERED)
def test_no_clip_that_is_no_violation_gets_as_little_as_a_violation(name, answer, history):
    config = preset_once(name)
    composer = Composer(replace(config.compose, warmup_steps=0))
    composer.end_step(history)
    result = composer.compose(answer, "a")
    assert math.isfinite(result.total)
    if result.violation is None:
        assert result.total >= config.compose.feasible_floor > config.violation_score


SILENT = Waveform(np.zeros(24_000, np.float32), 24_000)
SPOKEN = Waveform(np.random.default_rng(0).normal(0, 0.1, 24_000).astype(np.float32), 24_000)


@pytest.mark.parametrize("name", ORDERED)
@settings(max_examples=20)
@given(answer=ANSWERS, error=st.sampled_from(["cer", "wer", "cer_capped", "nll", "quality.score", "predictor.value"]))
def test_silence_and_an_empty_transcript_are_violations_and_a_missing_number_is_an_error(
    name, row, rollout, answer, error
):
    varied = replace(rollout, codes_FQ=np.arange(12 * 16).reshape(12, 16))
    config = preset_once(name)
    assert reward_of(config, answer, row, SILENT, varied).total == config.violation_score
    assert (
        reward_of(config, replace(answer, notes={"asr_text": ""}), row, SPOKEN, varied).total == config.violation_score
    )
    spoken = reward_of(config, answer, row, SPOKEN, varied)
    assert spoken.total >= config.compose.feasible_floor or "violation" in spoken.notes
    asked = {c.part for c in config.compose.components.values()} | {config.compose.gate.part}
    if error in asked:
        parts = {part: value for part, value in answer.parts.items() if part != error}
        with pytest.raises(ScorerError, match=rf"sample 'en-1': the answer has no number '{error}'"):
            reward_of(config, replace(answer, parts=parts), row, SPOKEN, varied)


@pytest.mark.parametrize("name", COMPOSED)
def test_a_component_that_the_answer_lacks_is_an_error_and_never_zero(name, row, rollout):
    varied = replace(rollout, codes_FQ=np.arange(12 * 16).reshape(12, 16))
    with pytest.raises(ScorerProtocolError, match=r"it has score, loudness, and tts\.reward\.compose"):
        reward_of(preset(name), Score(1.0, {"loudness": 0.3}), row, SPOKEN, varied)


# --- the formulas ----------------------------------------------------------------------------------------------------


def test_the_published_laion_form_rewards_garbled_speech_below_the_baseline_and_ours_does_not():
    """Both clips are one standard deviation below the baseline in everything; one of them has every word wrong."""
    clean = {"speaker_similarity.score": -1.0, "clap_emotion.score": -1.0, "clap_quality.score": -1.0, "wer": 0.0}
    garbled = {**clean, "wer": 1.0}
    published, ours = preset("laion_moss_published"), preset("laion_moss")
    assert composed(published, **garbled).total > composed(published, **clean).total == pytest.approx(-1.0)
    assert composed(ours, **garbled).total < composed(ours, **clean).total == pytest.approx(1 / (1 + math.e))


@given(st.floats(-1, 1), st.floats(-1, 1), st.floats(-1, 1), st.floats(0, 3), st.floats(0, 3))
def test_with_equal_components_a_lower_error_is_never_rewarded_less(speaker, emotion, quality, wer, other):
    parts = {"speaker_similarity.score": speaker, "clap_emotion.score": emotion, "clap_quality.score": quality}
    low, high = sorted((wer, other))
    config = preset_once("laion_moss")
    assert composed(config, **parts, wer=low).total >= composed(config, **parts, wer=high).total


def test_the_weight_sets_of_laion_are_the_published_ones():
    ours, published = (preset(name).compose.weight_sets for name in ("laion_moss", "laion_moss_published"))
    assert (
        ours
        == published
        == {
            "v1": {"speaker": 0.6, "emotion": 0.4, "quality": 0.0},
            "v7": {"speaker": 0.5, "emotion": 0.4, "quality": 0.1},
        }
    )


def test_a_component_of_weight_zero_is_not_asked_for():
    config = preset("laion_moss", "tts.reward.compose.weight_set=v1")
    result = composed(config, **{"speaker_similarity.score": 0.0, "clap_emotion.score": 0.0, "wer": 0.0})
    assert result.total == 0.5


@pytest.mark.parametrize(("cer", "total"), [(0.0, 1.1), (0.10, 1.1), (0.11, 0.6), (0.30, 0.6)])
def test_zones_of_the_error_rate_lift_the_predictor_or_leave_it(cer, total):
    assert composed(preset("zone_gate"), **{"predictor.value": 3.0}, cer=cer).total == pytest.approx(total)


def test_beyond_the_last_zone_is_a_violation():
    assert composed(preset("zone_gate"), **{"predictor.value": 5.0}, cer=0.31).violation == "cer 0.31, limit 0.3"


@pytest.mark.parametrize(
    ("cer", "nll", "total"),
    [
        (0.0, 0.0, 1.0),
        (0.1, 0.6, 1 / (0.6 / (1 - math.tanh(0.3)) + 0.4 / math.exp(-0.2))),
        (1e6, 0.0, 0.0),  # tanh is 1 there, and its mean would be divided by it
        (0.0, 1e6, 0.0),
    ],
)
def test_the_harmonic_mean_is_the_papers(cer, nll, total):
    assert composed(preset("cer_nll"), cer=cer, nll=nll).total == pytest.approx(total)


def test_cer_published_is_one_minus_the_capped_error_and_no_guard_is_in_it(row, rollout):
    config = preset("cer_published")
    answer = Score(0.75, {"cer": 0.25, "cer_capped": 0.25}, {"asr_text": ""})
    result = reward_of(config, answer, row, SILENT, rollout)
    assert result.total == 0.75
    assert result.parts["guard/silence"] == 1.0, "it is logged"
    assert result.parts["guard/empty_transcript"] == 1.0


def test_parts_show_what_was_composed(row, rollout):
    varied = replace(rollout, codes_FQ=np.arange(12 * 16).reshape(12, 16))
    parts = {"speaker_similarity.score": 0.5, "clap_emotion.score": 0.2, "clap_quality.score": 0.1, "wer": 0.25}
    result = reward_of(preset("laion_moss"), Score(0.5, parts), row, SPOKEN, varied)
    assert result.parts["component/speaker"] == 0.5
    assert result.parts["component/gate"] == 0.25
    assert result.parts["score"] == 0.5, "the scorer's own"
    assert result.parts["wer"] == 0.25


def test_parts_have_the_same_names_whether_a_clip_was_sent_or_not(row, rollout):
    varied = replace(rollout, codes_FQ=np.arange(12 * 16).reshape(12, 16))
    answer = Score(0.5, {"cer": 0.1, "predictor.value": 3.0}, {"asr_text": "x"})
    names = [set(reward_of(preset("zone_gate"), answer, row, clip, varied).parts) for clip in (SPOKEN, SILENT)]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("parts", "part", "value"),
    [
        ({"cer": 0.1}, "cer", 0.1),
        ({"whisper_cer.cer": 0.1, "quality.score": 3.0}, "cer", 0.1),
        ({"cer": 0.1, "other.cer": 0.2}, "cer", 0.1),
        ({"other.cer": 0.2}, "other.cer", 0.2),
        ({}, "score", 0.5),
    ],
)
def test_a_part_is_found_under_its_own_name_or_under_that_of_one_scorer(parts, part, value):
    assert find_part(Score(0.5, parts), part, "a") == value


def test_a_part_that_two_scorers_have_is_named_by_its_scorer():
    with pytest.raises(ScorerProtocolError, match=r"more than one 'cer': whisper_cer\.cer, parakeet\.cer"):
        find_part(Score(0.5, {"whisper_cer.cer": 0.1, "parakeet.cer": 0.2}), "cer", "a")


def test_a_reward_that_overflows_is_an_error():
    node = {"a": {"part": "score", "normaliser": "affine", "scale": 1e308}}
    config = reward_config({"compose": {"components": node, "weights": {"a": 1.0}}, "violation_score": -1.0})
    with pytest.raises(ScorerProtocolError, match="sample 'a': component a, normalised, is inf"):
        composed(config, score=1e300)


@pytest.mark.parametrize("name", ["laion_moss", "zone_gate"])
def test_an_error_rate_below_zero_is_an_error_of_the_scorer(name):
    parts = {"speaker_similarity.score": 0.0, "clap_emotion.score": 0.0, "clap_quality.score": 0.0}
    with pytest.raises(ScorerProtocolError, match=r"er=-0\.1 is no error rate"):
        composed(preset_once(name), **parts, **{"predictor.value": 3.0}, wer=-0.1, cer=-0.1)


FINITE = st.floats(allow_nan=False, allow_infinity=False)
WILD = dict.fromkeys(NAMES_OF_PARTS, FINITE)
NONSENSE = (st.fixed_dictionaries(WILD) | st.fixed_dictionaries({}, optional=WILD)).map(lambda parts: Score(0.5, parts))


@settings(max_examples=100)
@given(answer=NONSENSE, history=st.lists(NONSENSE, max_size=3))
@pytest.mark.parametrize("name", ORDERED)
def test_any_finite_numbers_are_a_reward_in_order_or_an_error_and_nothing_else(name, answer, history):
    config = preset_once(name)
    composer = Composer(replace(config.compose, warmup_steps=0))
    try:
        composer.end_step(history)
        result = composer.compose(answer, "a")
    except ScorerProtocolError:
        return
    assert math.isfinite(result.total)
    assert result.violation is not None or result.total >= config.compose.feasible_floor > config.violation_score


# --- running statistics ----------------------------------------------------------------------------------------------

Z = {"compose": {"components": {"a": {"part": "x", "normaliser": "running_z"}}, "weights": {"a": 1.0}}}


def z_composer(warmup_steps: int = 1) -> Composer:
    config = reward_config({**Z, "violation_score": -100.0}).compose
    return Composer(replace(config, warmup_steps=warmup_steps, feasible_floor=-99.0))


def answers(*values: float) -> list[Score]:
    return [Score(0.0, {"x": value}) for value in values]


BATCHES = st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), min_size=1, max_size=5)


@given(BATCHES)
def test_running_statistics_are_those_of_everything_seen(batches):
    running, seen = RunningStatistics(), np.concatenate(batches)
    for batch in batches:
        running.add(batch)
    assert running.count == len(seen)
    assert running.mean == pytest.approx(seen.mean(), abs=1e-9)
    assert running.std == pytest.approx(max(seen.std(), 1e-3), rel=1e-6, abs=1e-6)


@given(st.permutations([0.1, 0.2, 0.3, 1e6, -1e6, 0.7]))
def test_a_batch_counts_the_same_in_any_order(values):
    shuffled, sorted_ = RunningStatistics(), RunningStatistics()
    shuffled.add(values)
    sorted_.add(sorted(values))
    assert shuffled == sorted_


@pytest.mark.parametrize("values", [(1e200, -1e200), (1e308, 1e308)])
def test_numbers_that_no_statistics_can_hold_are_an_error_of_the_scorer(values):
    with pytest.raises(ScorerProtocolError, match="too large for statistics of x"):
        z_composer().end_step(answers(*values))


def test_z_scores_stay_as_they_are_within_a_step_and_move_with_the_next():
    composer = z_composer(warmup_steps=1)
    (clip,) = answers(2.0)
    assert composer.compose(clip, "a").total == 2.0, "warm-up: mean 0, deviation 1"
    assert composer.compose(clip, "a").total == 2.0
    composer.end_step(answers(1.0, 3.0, 5.0))
    assert composer.compose(clip, "a").total == pytest.approx((2.0 - 3.0) / math.sqrt(8 / 3))


def test_the_warm_up_gathers_statistics_and_does_not_use_them():
    composer = z_composer(warmup_steps=2)
    composer.end_step(answers(1.0, 3.0))
    assert composer.compose(*answers(2.0), "a").total == 2.0
    composer.end_step(answers(1.0, 3.0))
    assert composer.compose(*answers(2.0), "a").total == 0.0


def test_a_violation_does_not_move_the_statistics():
    composer = z_composer()
    composer.end_step([*answers(1.0, 3.0), Score(-1.0, {"x": math.nan}, {"violation": "silence"})])
    assert composer.state() == {"steps": 1, "components": {"a": {"count": 2, "mean": 2.0, "m2": 2.0}}}


@given(BATCHES, BATCHES)
def test_a_run_that_is_resumed_goes_on_bit_for_bit(before, after):
    unbroken, stopped = z_composer(), z_composer()
    for batch in before:
        unbroken.end_step(answers(*batch))
        stopped.end_step(answers(*batch))
    resumed = z_composer()
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    for batch in after:
        unbroken.end_step(answers(*batch))
        resumed.end_step(answers(*batch))
        assert resumed.compose(*answers(0.3), "a") == unbroken.compose(*answers(0.3), "a")
    assert resumed.state() == unbroken.state()


def test_statistics_of_other_components_are_refused():
    with pytest.raises(CheckpointError, match=r"running statistics of \['b'\].*running_z for \['a'\]"):
        z_composer().load_state({"steps": 1, "components": {"b": {"count": 1, "mean": 0.0, "m2": 0.0}}})
    without = Composer(RewardConfig().compose)
    without.load_state({})
    with pytest.raises(CheckpointError):
        without.load_state(z_composer().state())


def test_where_another_reward_is_allowed_known_statistics_go_on_and_new_ones_begin():
    composer = z_composer()
    composer.load_state({"steps": 7, "components": {"b": {"count": 9, "mean": 1.0, "m2": 1.0}}}, allow_other=True)
    assert composer.state() == {"steps": 7, "components": {"a": {"count": 0, "mean": 0.0, "m2": 0.0}}}
    known = {"steps": 7, "components": {"a": {"count": 2, "mean": 2.0, "m2": 2.0}}}
    composer.load_state(known, allow_other=True)
    assert composer.state() == known


# --- what is refused -------------------------------------------------------------------------------------------------

ONE = {"components": {"a": {"part": "x"}}, "weights": {"a": 1.0}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"compose": ONE}, r"violation_score=0\.0 must be below .*feasible_floor=0\.0"),
        ({"compose": ONE, "violation_score": 0.5}, "a violation may never pay"),
        ({"compose": {**ONE, "weights": {"a": 0.9}}}, "sum to 0.9; they must sum to 1"),
        ({"compose": {**ONE, "weights": {"a": 1.5, "b": -0.5}}}, "give each component one weight"),
        ({"compose": {**ONE, "weights": {"a": -1.0}}}, "weights.a=-1.0"),
        ({"compose": {**ONE, "weights": {}}}, "give each component one weight"),
        ({"compose": {**ONE, "weight_set": "v9"}}, "weight_set='v9' is unknown"),
        ({"compose": {**ONE, "weight_set": "v1", "weight_sets": {"v1": 3}}}, "weight_sets.v1=3 must be name: weight"),
        ({"compose": {"gate": {"kind": "exp", "part": "wer"}}}, "gate.kind=exp and squash=none without components"),
        ({"compose": {"squash": "sigmoid"}}, "squash=sigmoid without components"),
        ({"compose": {**ONE, "combine": "product"}}, "one of sum, harmonic_mean"),
        ({"compose": {**ONE, "squash": "tanh"}}, "one of none, sigmoid"),
        ({"compose": {**ONE, "gate": {"kind": "exp"}}}, "gate.part=None with kind=exp"),
        ({"compose": {**ONE, "gate": {"part": "wer"}}}, "gate.part=wer with kind=none"),
        ({"compose": {**ONE, "gate": {"kind": "zones", "part": "cer", "clean": 0.5}}}, "gate.limit=0.3"),
        ({"compose": {**ONE, "gate": {"kinds": "exp"}}}, r"unknown key tts\.reward\.compose\.gate\.kinds"),
        ({"compose": {"components": {"a": "x"}}}, "components.a='x' must be a mapping with the key part"),
        ({"compose": {"components": {"a": {"part": "x", "norm": "z"}}}}, r"unknown key .*components\.a\.norm"),
        ({"compose": {"components": {"a": {"part": "x", "normaliser": "z"}}}}, "running_z"),
        ({"compose": {"components": {"a": {"part": "x", "initial_std": 0}}}}, "initial_std=0"),
        ({"compose": {"components": {"a": {"part": "x", "low": 1.0, "high": 0.0}}}}, r"low=1\.0 is above high=0\.0"),
        ({"compose": {"components": {"a": {"part": "x", "scale": math.nan}}}}, "scale=nan"),
        ({"compose": {**ONE, "warmup_steps": 1.5}}, "warmup_steps=1.5"),
        ({"compose": None}, "compose=None must be a mapping of settings"),
        ({"compose": {**ONE, "gate": "exp"}}, "gate='exp' must be a mapping of settings"),
        ({"compose": {**ONE, "gate": {"kind": "exp", "part": 5}}}, "gate.part=5 must be a text or null"),
        ({"compose": {"components": ["a"]}}, r"components=\['a'\] must be a mapping"),
        ({"compose": {"components": {1: {"part": "x"}}}}, "must be a mapping with names as keys"),
        ({"compose": {"components": {"a": {"part": ""}}}}, "with the key part"),
        ({"compose": {**ONE, "weights": [1.0]}}, r"weights=\[1\.0\] must be a mapping"),
        ({"compose": {**ONE, "weight_sets": None, "weight_set": "v1"}}, "weight_sets=None must be a mapping"),
        ({"guards": "all"}, "guards='all' must be a mapping of settings"),
        ({"probes": ["http://h/s"]}, "must be a mapping"),
        ({"probes": {"a/b": "http://h/s"}}, "'a/b' names a metric"),
        ({"scorer_url": 5}, "scorer_url=5 must be a text"),
        ({"token_env": 5}, "token_env=5 must be the name of a variable"),
        ({"probes": {"dnsmos": "127.0.0.1:1"}}, r"probes\.dnsmos: '127\.0\.0\.1:1' is not an HTTP address"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_composition_that_cannot_work_is_refused_in_one_line(values, message):
    with pytest.raises(ConfigError, match=message) as refused:
        reward_config(values)
    assert "\n" not in str(refused.value)


def test_without_components_a_violation_may_have_the_score_of_the_worst_clip():
    assert RewardConfig(violation_score=0.0).violation_score == 0.0
