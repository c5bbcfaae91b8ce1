"""The scripts behind ``make``: what they say when they are called wrongly, and what they leave running."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "requirements/install.sh"
QUICKSTART = ROOT / "examples/quickstart.sh"

# Stands in for the Python of the environment: a scorer that says its address and stays, a run that writes down
# its words and ends as RUN says. Each leaves its process id.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *"commands score"*) echo $$ >"$SEEN/scorer.pid"; eval "$SCORER" ;;
  *main_omni*) echo $$ >"$SEEN/run.pid"; printf '%s\\n' "$@" >"$SEEN/run.words"; eval "$RUN" ;;
esac
"""
LISTENS = 'echo "scorer duration listening on http://127.0.0.1:40123"; exec sleep 60'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tpu"], "PLATFORM=tpu is unknown; use cpu or cuda"),
        (["cpu", "3.13"], "PYTHON=3.13 is neither 3.11, 3.12 nor a program"),
        (["cpu", "/bin/sh"], "PYTHON=/bin/sh does not run as a Python; 3.11 or 3.12 is needed"),
    ],
)
def test_setup_refuses_what_it_cannot_install_in_one_line(arguments: list[str], message: str) -> None:
    ended = subprocess.run(["bash", INSTALL, *arguments], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, f"make setup: {message}\n")


def test_make_alone_lists_the_targets() -> None:
    ended = subprocess.run(["make", "-C", ROOT, "--no-print-directory"], capture_output=True, text=True, check=True)
    assert [line.split()[:2] for line in ended.stdout.splitlines()][:2] == [["make", "help"], ["make", "setup"]]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The two scripts in a repository of their own, so that nothing is written into this one."""
    for script in (QUICKSTART, ROOT / "examples/grpo_trainer/qwen3_tts/run_qwen3_tts_grpo.sh"):
        target = tmp_path / script.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(script, target)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def quickstart(copy: Path, *words: str, scorer: str = LISTENS, run: str = "exit 0") -> subprocess.Popen[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHON_BIN": str(copy / "python"), "SEEN": str(copy)}
    return subprocess.Popen(
        ["bash", copy / "examples/quickstart.sh", *words],
        env=environment | {"SCORER": scorer, "RUN": run, "STEPS": "7", "OUTPUT_DIR": str(copy / "run")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def is_alive(copy: Path, name: str) -> bool:
    return Path("/proc", (copy / f"{name}.pid").read_text().strip()).exists()


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_quickstart_ends_as_the_run_ends_and_stops_the_scorer(copy: Path, code: int) -> None:
    process = quickstart(copy, "data.seed=7", run=f"exit {code}")
    out, _ = process.communicate(timeout=20)
    words = (copy / "run.words").read_text().splitlines()
    assert process.returncode == code
    assert not is_alive(copy, "scorer")
    assert "tts.reward.scorer_url='http://127.0.0.1:40123/score'" in words
    assert {"trainer.total_training_steps=7", "trainer.n_gpus_per_node=1", "tts.platform=cpu"} <= set(words)
    assert words[-1] == "data.seed=7"
    assert (f"{copy}/run/checkpoints/global_step_7" in out) == (code == 0)


def test_a_scorer_that_does_not_start_ends_quickstart_before_the_run(copy: Path) -> None:
    process = quickstart(copy, scorer="exit 2")
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (3, "quickstart: the scorer did not start\n")
    assert not (copy / "run.words").exists()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_and_the_scorer(copy: Path, sent: signal.Signals, code: int) -> None:
    process = quickstart(copy, run="exec sleep 60")
    deadline = time.monotonic() + 10
    while not (copy / "run.words").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(sent)
    process.communicate(timeout=20)
    assert process.returncode == code
    assert not is_alive(copy, "run")
    assert not is_alive(copy, "scorer")
