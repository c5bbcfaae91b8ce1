"""The runs that the tests of the loop look at. Each fixture is one start or two of the real thing."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from verl_tts.data.quickstart import write_quickstart

from .runs import FP32, FP32_LIMIT, TRUNCATED, Inputs, Run, children_of, ray_cluster, scorer, start, with_fault


@pytest.fixture(scope="session")
def inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    data = tmp_path_factory.mktemp("data")
    write_quickstart(data, tiny_checkpoint)
    return Inputs(tiny_checkpoint, data / "train.parquet", data / "val.parquet", data / "speaker.json")


# The gate compares log-probs before temperature and truncation.
EXACT = (*FP32, *TRUNCATED, f"tts.gates.logprob_max_abs={FP32_LIMIT}")
LORA = (
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=16",
    "actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]",
    f"tts.gates.logprob_max_abs={FP32_LIMIT}",
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


@pytest.fixture(scope="session")
def stale(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The engine gets weights after every second update only; the scorer is killed in step 4."""

    def kill_scorer(line: str, process: subprocess.Popen) -> None:
        if line.startswith("step 3/"):
            server.process.kill()

    with scorer() as server:
        return start(
            tmp_path_factory.mktemp("stale") / "run",
            inputs,
            *FP32,
            "tts.sync_every=2",
            "algorithm.rollout_correction.rollout_is=token",
            "tts.gates.logprob_max_abs=100",
            "tts.gates.logprob_mean_abs=100",
            "tts.reward.timeout_s=5",
            scorer_url=server.url,
            steps=6,
            save_freq=1,
            on_line=kill_scorer,
        )


@pytest.fixture(scope="session")
def lora(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """LoRA on two workers, one rollout of step 1 fails and its group is dropped."""
    overrides, environment = with_fault("rollout_fails_in_step_1")
    return start(
        tmp_path_factory.mktemp("lora") / "run",
        inputs,
        *FP32,
        *LORA,
        *overrides,
        "tts.failed_group=drop",
        steps=2,
        save_freq=1,
        workers=2,
        environment=environment,
    )


@pytest.fixture(scope="session")
def lora_resumed(inputs: Inputs, lora: Run) -> Run:
    """The same, resumed; a stage of a rollout engine is killed with -9 once step 3 is done."""

    def kill_a_stage(line: str, process: subprocess.Popen) -> None:
        if line.startswith("step 3/"):
            stages = [pid for pid, name in children_of(process.pid).items() if "StageEngineCore" in name]
            os.kill(stages[0], signal.SIGKILL)

    return start(lora.directory, inputs, *FP32, *LORA, steps=30, save_freq=1, workers=2, on_line=kill_a_stage)


@pytest.fixture(scope="session")
def broken_receiver(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The rollout engine's side of the weight sync raises."""
    overrides, environment = with_fault("receiver_raises")
    return start(tmp_path_factory.mktemp("receiver") / "run", inputs, *overrides, environment=environment)


@pytest.fixture(scope="session")
def terminated(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """In BF16 on a Ray cluster that was there before, with another environment; SIGTERM after step 2."""

    def terminate(line: str, process: subprocess.Popen) -> None:
        if line.startswith("step 2/"):
            process.terminate()

    with ray_cluster() as address:
        return start(
            tmp_path_factory.mktemp("terminated") / "run",
            inputs,
            *TRUNCATED,
            steps=20,
            save_freq=1,
            environment={"RAY_ADDRESS": address},
            on_line=terminate,
        )
