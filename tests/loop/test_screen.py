"""``verl-tts screen`` with the real rollout engine: one start of it, without Ray."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl_tts.config.reward import RewardConfig
from verl_tts.screen import RESCORED

from .noted import AGAIN
from .runs import MARK, Inputs, temporary_files, wait_for_end

pytestmark = pytest.mark.loop

PROMPTS, SAMPLES, FRAMES = 4, 4, 40


@dataclass
class Screening:
    returncode: int
    printed: str
    found: Mapping[str, Any]
    """What ``--json`` wrote."""
    clips: Sequence[Mapping[str, Any]]
    """What the reward was asked of clips that it had not heard."""
    again: Sequence[Mapping[str, Any]]
    """The same of clips that it had."""
    leftovers: Sequence[str]
    shared_memory: Sequence[str]
    temporary: Sequence[str]


@pytest.fixture(scope="module")
def screening(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Screening:
    out, mark, scratch = tmp_path_factory.mktemp("screen"), uuid.uuid4().hex, tempfile.mkdtemp(prefix="t", dir="/tmp")
    settings = [
        "tts.platform=cpu", f"actor_rollout_ref.model.path={inputs.model}", f"data.train_files={inputs.train}",
        f"data.val_files={inputs.val}", f"tts.speaker_path={inputs.speaker}", "data.max_prompt_length=192",
        f"data.max_response_length={FRAMES}", f"actor_rollout_ref.rollout.n={SAMPLES}", f"tts.output_dir={out}/run",
        f"reward.custom_reward_function.path={Path(__file__).with_name('noted.py')}",
        "reward.custom_reward_function.name=seconds",
        f"+reward.custom_reward_function.reward_kwargs.notes={out}/notes.jsonl", "tts.reward.guards.enforce=false",
    ]  # fmt: skip
    command = [sys.executable, "-m", "verl_tts.commands", "screen", *settings]
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        [*command, "--prompts", str(PROMPTS), "--json", str(out / "found.json")],
        env=os.environ | {MARK: mark, "TMPDIR": scratch},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    # Python's own tracker of shared memory ends when it sees that its process has, a moment after it.
    leftovers, temporary = wait_for_end(mark, 10), temporary_files(Path(scratch))
    shared_memory = sorted(set(os.listdir("/dev/shm")) - before)
    shutil.rmtree(scratch)
    assert (out / "found.json").exists(), done.stdout
    asked = [json.loads(line) for line in (out / "notes.jsonl").read_text().splitlines()]
    first, again = ([call for call in asked if call["again"] is wanted] for wanted in (False, True))
    found = json.loads((out / "found.json").read_text())
    return Screening(done.returncode, done.stdout, found, first, again, leftovers, shared_memory, temporary)


def scores_of_groups(screening: Screening) -> np.ndarray:
    groups: dict[str, list[float]] = {}
    for clip in screening.clips:
        groups.setdefault(clip["prompt"], []).append(clip["score"])
    # A clip without a frame is a violation, and the reward is not asked.
    violation = RewardConfig().violation_score
    return np.array([scores + [violation] * (SAMPLES - len(scores)) for scores in groups.values()])


def test_its_numbers_are_those_of_the_clips_that_were_scored(screening: Screening) -> None:
    found, score_BG = screening.found, scores_of_groups(screening)
    assert score_BG.shape == (found["prompts"], found["samples"]) == (PROMPTS, SAMPLES)
    assert found["mean"] == pytest.approx(score_BG.mean())
    assert found["standard_error"] == pytest.approx(score_BG.mean(axis=1).std(ddof=1) / PROMPTS**0.5)
    assert found["spread"] == pytest.approx(score_BG.std(axis=1).mean())
    assert found["violations"] == 1 - len(screening.clips) / score_BG.size
    spreads = [np.std(scores[scores > 0]) for scores in score_BG]
    assert found["spread_of_parts"]["length"] == pytest.approx(np.mean(spreads))
    assert found["best_of_group"] == pytest.approx(score_BG.max(axis=1).mean())
    assert found["flat_groups"] == (score_BG.std(axis=1) < 1e-6).mean()


def test_its_times_are_those_of_the_audio(screening: Screening) -> None:
    found, audio_s = screening.found, sum(clip["seconds"] for clip in screening.clips)
    assert found["rtf"] * audio_s == pytest.approx(found["seconds_a_clip"] * PROMPTS * SAMPLES)
    longest = (FRAMES - 1) * 1920 / 24_000
    short = sum(clip["seconds"] < longest for clip in screening.clips)
    assert found["eos_rate"] >= short / len(screening.clips) > 0.5


def test_the_noise_of_the_scorer_is_that_of_a_second_score(screening: Screening) -> None:
    assert 0 < len(screening.again) <= RESCORED
    assert screening.found["scorer_noise"] == pytest.approx(AGAIN * len(screening.again) / RESCORED)


def test_the_verdict_is_printed_and_is_the_exit_code(screening: Screening) -> None:
    assert screening.returncode == 0, screening.printed
    lines = screening.printed.splitlines()
    assert lines[-1] == "there is something to learn"
    found = screening.found
    (reward,) = [line for line in lines if line.startswith("reward")]
    assert reward.split()[1:4] == [f"{found['mean']:.3f}", "+-", f"{found['standard_error']:.3f}"]
    (headroom,) = [line for line in lines if line.startswith("headroom")]
    assert headroom.split()[1] == f"{found['best_of_group'] - found['mean']:.3f}:"


def test_nothing_is_left_of_it(screening: Screening) -> None:
    assert not screening.leftovers
    assert not screening.shared_memory
    assert not screening.temporary
