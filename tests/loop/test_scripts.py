"""The scripts that a person starts, as they are."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import soundfile

from .runs import BF16_LIMIT, ROOT

pytestmark = pytest.mark.loop


def run_script(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / script)],
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "PYTHON_BIN": sys.executable,
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=420,
        check=False,
    )


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in metrics_of(run)]


def test_the_smoke_run_ends_on_exactly_step_two(tmp_path: Path) -> None:
    """With the published line: no validation, no checkpoint, a reward in the process, the launcher's own settings."""
    done = run_script("tests/special_e2e/run_qwen3_tts_grpo_smoke.sh", WORK_DIR=str(tmp_path), NUM_GPUS="1")
    assert done.returncode == 0, done.stdout
    assert steps_of(tmp_path / "run") == [1, 2]


def test_the_quickstart_leaves_clips_metrics_and_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = run_script("examples/quickstart.sh", OUTPUT_DIR=str(run), STEPS="2", PLATFORM="cpu", NUM_GPUS="1")
    assert done.returncode == 0, done.stdout
    assert steps_of(run) == [0, 1, 2]
    assert (run / "checkpoints" / "global_step_2" / "MANIFEST.json").exists()
    clips = sorted((run / "samples").glob("*/step_*/*.flac"))
    assert clips
    assert soundfile.info(clips[0]).samplerate == 24000
    for place in (run / "metrics.jsonl", run / "checkpoints"):
        assert str(place) in done.stdout
    # Sampled from the whole distribution in BF16, before an update and after one and its sync.
    assert all(line["gate/logprob_max_abs"] < BF16_LIMIT for line in metrics_of(run) if line["step"] > 0)
