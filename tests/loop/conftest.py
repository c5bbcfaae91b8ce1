"""The runs that the tests of the loop look at. Each fixture is one start or two of the real thing."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from verl_tts.data.quickstart import write_quickstart

from .runs import FP32, Inputs, Run, scorer, start


@pytest.fixture(scope="session")
def inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    data = tmp_path_factory.mktemp("data")
    write_quickstart(data, tiny_checkpoint)
    return Inputs(tiny_checkpoint, data / "train.parquet", data / "val.parquet", data / "speaker.json")


# Sampling as in the published Hindi run: the gate compares log-probs before temperature and truncation.
EXACT = (
    *FP32,
    "actor_rollout_ref.rollout.temperature=0.9",
    "actor_rollout_ref.rollout.top_k=50",
    "actor_rollout_ref.rollout.top_p=0.95",
    "tts.gates.logprob_max_abs=1e-4",
)


@pytest.fixture(scope="session")
def unbroken(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps in FP32, scored over HTTP, validated before and after, saved every second step."""
    with scorer() as server:
        return start(
            tmp_path_factory.mktemp("unbroken") / "run",
            inputs,
            *EXACT,
            "trainer.val_before_train=true",
            scorer_url=server.url,
            steps=4,
            save_freq=2,
            test_freq=4,
        )


@pytest.fixture(scope="session")
def killed(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same, killed with -9 in the middle of step 3."""

    def kill_in_step_3(line: str, process: subprocess.Popen) -> None:
        if line.startswith("step 2/4"):
            os.killpg(process.pid, signal.SIGKILL)

    with scorer() as server:
        return start(
            tmp_path_factory.mktemp("killed") / "run",
            inputs,
            *EXACT,
            scorer_url=server.url,
            steps=4,
            save_freq=2,
            on_line=kill_in_step_3,
        )


@pytest.fixture(scope="session")
def resumed(inputs: Inputs, killed: Run) -> Run:
    """The killed run, started again with the same command."""
    with scorer() as server:
        return start(killed.directory, inputs, *EXACT, scorer_url=server.url, steps=4, save_freq=2)
