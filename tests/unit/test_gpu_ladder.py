"""The ladder of tests/gpu, as far as it can be tried where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.gpu.report import Report

ROOT = Path(__file__).parents[2]


def pytest_on_the_ladder(*words: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "-q", *words],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


def test_the_suite_deselects_every_rung():
    done = pytest_on_the_ladder("--collect-only", "-m", "not gpu and not gpu_engine")
    assert done.returncode == 5, "nothing is left to run"
    assert "deselected" in done.stdout


def test_rungs_are_climbed_from_the_actor_to_the_launcher():
    done = pytest_on_the_ladder("--collect-only", "-m", "gpu or gpu_engine")
    files = [line.split("::")[0] for line in done.stdout.splitlines() if "::" in line]
    assert list(dict.fromkeys(files)) == [f"tests/gpu/test_{name}.py" for name in ("1_actor", "2_rollout", "3_updates")]


def test_a_model_that_is_not_there_ends_it_in_one_line():
    done = pytest_on_the_ladder("-m", "gpu", MODEL_PATH="gone", VERL_TTS_GPU_TESTS_ON="cpu")
    assert done.returncode == 2
    assert "MODEL_PATH=gone has no config.json" in done.stdout


def test_the_report_is_there_after_every_rung_and_has_failed_once_one_has(tmp_path):
    path = tmp_path / "new" / "report.json"
    report = Report(path, "model", {"name": "H200"})
    report.add("one", "passed", 1.26, {"peak_gib": 2.5})
    first = json.loads(path.read_text())
    assert (first["verdict"], first["rungs"]) == (
        "passed",
        [{"rung": "one", "verdict": "passed", "seconds": 1.3, "peak_gib": 2.5}],
    )
    assert first["device"] == {"name": "H200"}
    assert first["versions"]["packages"]["verl"]
    report.add("two", "failed", 1, {}, error="x" * 5000)
    second = json.loads(path.read_text())
    assert second["verdict"] == "failed"
    assert second["rungs"][0] == first["rungs"][0]
    assert len(second["rungs"][1]["error"]) == 2000
