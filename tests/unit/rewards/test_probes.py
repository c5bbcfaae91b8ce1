"""Held-out probes: asked in validations, never part of the reward, and loud when they fall while it rises."""

import asyncio
import json
import math

import numpy as np
import pytest

from verl_tts.errors import ScorerUnavailable
from verl_tts.rewards.manager import RewardManager
from verl_tts.rewards.probes import MIN_ROWS, ProbeWatch
from verl_tts.types import Score, Waveform


def validation(scores, probe, name="dnsmos") -> list[tuple[str, Score]]:
    """One clip a row."""
    pairs = zip(scores, probe, strict=True)
    return [(f"row-{i}", Score(score, {f"probe/{name}": value, "cer": 0.1})) for i, (score, value) in enumerate(pairs)]


ROWS = 20
SPREAD = np.random.default_rng(0).normal(0, 1, ROWS)  # of rows: some are harder than others


def test_the_first_validation_is_what_others_are_compared_with():
    watch = ProbeWatch()
    metrics, alarms = watch.compare(0, validation(SPREAD, SPREAD + 3))
    assert metrics == {"val-probe/dnsmos/mean": pytest.approx(np.mean(SPREAD + 3))}
    assert alarms == []
    metrics, _ = watch.compare(20, validation(SPREAD, SPREAD + 3.5))
    assert metrics["val-probe/dnsmos/change"] == pytest.approx(0.5)
    assert metrics["val-probe/dnsmos/noise"] == pytest.approx(0, abs=1e-6), "rows differ, their changes do not"
    assert metrics["val-probe/dnsmos/rows"] == ROWS


@pytest.mark.parametrize(
    ("gained", "fell", "noise", "alarm"),
    [
        (0.1, 0.5, 0.1, True),
        (0.1, 0.5, 5.0, False),  # within its noise
        (-0.1, 0.5, 0.1, False),  # the score did not rise
        (0.1, -0.5, 0.1, False),  # the probe rose too
    ],
)
def test_the_alarm_is_for_a_score_that_rises_while_a_probe_falls_beyond_its_noise(gained, fell, noise, alarm):
    watch = ProbeWatch()
    watch.compare(0, validation(SPREAD, SPREAD))
    changes = np.random.default_rng(1).normal(0, noise, ROWS)
    changes += -fell - changes.mean()
    metrics, lines = watch.compare(40, validation(SPREAD + gained, SPREAD + changes))
    assert metrics["val-probe/dnsmos/alarm"] == float(alarm)
    assert len(lines) == alarm
    if alarm:
        assert lines[0].startswith("ALARM at step 40: the validation score rose by 0.1 and probe/dnsmos fell by 0.5")
        assert lines[0].endswith("20 rows, both since step 0")


def test_too_few_rows_give_no_alarm():
    watch, few = ProbeWatch(), MIN_ROWS - 1
    watch.compare(0, validation([0.0] * few, [1.0] * few))
    metrics, alarms = watch.compare(20, validation([1.0] * few, [0.0] * few))
    assert metrics["val-probe/dnsmos/change"] == -1.0
    assert alarms == []


def test_rows_are_paired_and_what_was_not_measured_is_left_out():
    watch = ProbeWatch()
    watch.compare(0, validation([0.0] * 10, [1.0] * 9 + [math.nan]))
    metrics, _ = watch.compare(20, [*validation([0.0] * 10, [math.nan] + [1.5] * 9), ("row-new", Score(0.0, {}))])
    assert metrics["val-probe/dnsmos/rows"] == 8
    assert metrics["val-probe/dnsmos/change"] == 0.5


def test_a_resumed_run_compares_with_the_same_validation():
    watch = ProbeWatch()
    watch.compare(0, validation(SPREAD, SPREAD))
    resumed = ProbeWatch.from_state(json.loads(json.dumps(watch.state())))
    now = validation(SPREAD + 1, SPREAD - 1)
    assert resumed.compare(40, now) == watch.compare(40, now)
    assert ProbeWatch.from_state({}) == ProbeWatch()


def test_without_probes_there_is_nothing_to_say():
    assert ProbeWatch().compare(0, [("a", Score(0.5, {"cer": 0.1}))]) == ({}, [])


# --- how they are asked ----------------------------------------------------------------------------------------------


def ask(rig, row, rollout, waveform, *probe_replies, held_out=True):
    async def main():
        async with rig.serve() as scorer, rig.serve(*probe_replies) as probe:
            node = {"scorer_url": scorer.url, "probes": {"second": probe.url}, "max_retries": 0, "startup_timeout_s": 1}
            rewards = RewardManager.from_config(node)
            try:
                return probe, await rewards.score(row, waveform, rollout, held_out=held_out)
            finally:
                await rewards.aclose()

    return asyncio.run(main())


def test_a_probe_is_asked_in_a_validation_and_is_no_part_of_the_reward(rig, row, rollout, speech):
    probe, result = ask(rig, row, rollout, speech, rig.http(200, {"score": 3.25}))
    assert result.total == 0.5
    assert result.parts["probe/second"] == 3.25
    assert probe.posts[0]["metadata"]["id"] == "en-1"


def test_a_probe_is_not_asked_in_training(rig, row, rollout, speech):
    probe, result = ask(rig, row, rollout, speech, held_out=False)
    assert probe.posts == []
    assert "probe/second" not in result.parts


def test_a_violation_is_probed_where_there_is_something_to_hear(rig, row, rollout):
    silent, nothing = (Waveform(np.zeros(count, np.float32), 24_000) for count in (24_000, 0))
    assert ask(rig, row, rollout, silent)[1].parts["probe/second"] == 0.5
    assert math.isnan(ask(rig, row, rollout, nothing)[1].parts["probe/second"])


def test_a_probe_that_fails_is_an_error_and_no_number(rig, row, rollout, speech):
    with pytest.raises(ScorerUnavailable, match="500"):
        ask(rig, row, rollout, speech, rig.http(500))
