"""The runs that the tests of the loop look at. Each fixture is one start or two of the real thing."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from verl_tts.checkpoints.tiny_moss import build_tiny_moss
from verl_tts.data.prompts import write_prompts
from verl_tts.data.quickstart import quickstart_rows, write_quickstart

from .fickle import Fault, Fickle, fickle_scorer
from .runs import (
    FP32,
    FP32_LIMIT,
    TRUNCATED,
    Inputs,
    OnLine,
    Run,
    children_of,
    listening_of,
    ray_cluster,
    scorer,
    start,
    with_fault,
)


@pytest.fixture(scope="session")
def inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    data = tmp_path_factory.mktemp("data")
    write_quickstart(data, tiny_checkpoint)
    return Inputs(tiny_checkpoint, data / "train.parquet", data / "val.parquet", data / "speaker.json")


# The gate compares log-probs before temperature and truncation. Eight rows are two steps an epoch.
EXACT = (*FP32, *TRUNCATED, f"tts.gates.logprob_max_abs={FP32_LIMIT}", "data.train_max_samples=8")
LORA = (
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=16",
    "actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]",
    f"tts.gates.logprob_max_abs={FP32_LIMIT}",
)
ATTEMPT_S, RETRIES, BACKOFF_S = 4.0, 1, 0.75  # of a scorer that does not answer
IMPATIENT = (f"tts.reward.timeout_s={ATTEMPT_S}", f"tts.reward.max_retries={RETRIES}", "tts.reward.retry_backoff_s=0.5")
HANGING_S = (RETRIES + 1) * ATTEMPT_S + BACKOFF_S


@pytest.fixture(scope="session")
def unbroken(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps in FP32, scored over HTTP, validated before and after, saved every second step."""
    listening: list[tuple[str, str]] = []

    def look_who_listens(line: str, process: subprocess.Popen) -> None:
        if line.startswith("step 2/"):
            listening.extend(listening_of(process.pid))

    with scorer() as server:
        run = start(
            tmp_path_factory.mktemp("unbroken") / "run",
            inputs,
            *EXACT,
            "trainer.val_before_train=true",
            scorer_url=server.url,
            steps=4,
            save_freq=2,
            test_freq=4,
            on_line=look_who_listens,
        )
    return replace(run, listening=listening)


@pytest.fixture(scope="session")
def killed(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same, killed with -9 at the edge of an epoch, after step 2 was saved and before it had its line."""
    overrides, environment = with_fault("waits_after_saving_step_2")

    def kill(line: str, process: subprocess.Popen) -> None:
        if line == "saved step 2":
            os.killpg(process.pid, signal.SIGKILL)

    with scorer() as server:
        return start(
            tmp_path_factory.mktemp("killed") / "run",
            inputs,
            *EXACT,
            *overrides,
            scorer_url=server.url,
            steps=4,
            save_freq=2,
            environment=environment,
            on_line=kill,
        )


@pytest.fixture(scope="session")
def resumed(inputs: Inputs, killed: Run) -> Run:
    """The killed run, started again with the same command."""
    with scorer() as server:
        return start(killed.directory, inputs, *EXACT, scorer_url=server.url, steps=4, save_freq=2)


@pytest.fixture(scope="session")
def stale(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The engine does not get the weights of the first update; the scorer is killed in step 4."""
    overrides, environment = with_fault("sync_skipped_in_step_1")

    def kill_scorer(line: str, process: subprocess.Popen) -> None:
        if line.startswith("step 3/"):
            server.process.kill()

    with scorer() as server:
        return start(
            tmp_path_factory.mktemp("stale") / "run",
            inputs,
            *FP32,
            *overrides,
            "tts.gates.logprob_max_abs=100",
            "tts.gates.logprob_mean_abs=100",
            "tts.reward.timeout_s=5",
            scorer_url=server.url,
            steps=6,
            save_freq=1,
            environment=environment,
            on_line=kill_scorer,
        )


@pytest.fixture(scope="session")
def fickle() -> Iterator[Fickle]:
    """One scorer for several runs, one after the other."""
    with fickle_scorer() as server:
        yield server


def copied(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run, to be resumed there: what was left of the run stays as it is."""
    directory = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(run.directory, directory)
    return directory


def turning(scorer: Fickle, fault: Fault, after_line: str) -> OnLine:
    """Three scores after the line, so that it is in the middle of a step."""

    def on_line(line: str, process: subprocess.Popen) -> None:
        scorer.line_came()
        if line.startswith(after_line):
            scorer.turn(fault, after=3)

    scorer.recover()
    return on_line


@pytest.fixture(scope="session")
def lora(inputs: Inputs, fickle: Fickle, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """LoRA on two workers; a rollout of step 1 fails and its group is dropped, the scorer hangs after step 2."""
    overrides, environment = with_fault("rollout_fails_in_step_1")
    return start(
        tmp_path_factory.mktemp("lora") / "run",
        inputs,
        *FP32,
        *LORA,
        *overrides,
        *IMPATIENT,
        "tts.failed_group=drop",
        scorer_url=fickle.url,
        steps=30,
        save_freq=1,
        workers=2,
        environment=environment,
        on_line=turning(fickle, "hangs", "step 2/"),
    )


@pytest.fixture(scope="session")
def lora_resumed(inputs: Inputs, fickle: Fickle, lora: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same, resumed with a scorer that is well; a stage of a rollout engine is killed with -9 after a step."""

    def kill_a_stage(line: str, process: subprocess.Popen) -> None:
        if line.startswith("step "):
            stages = [pid for pid, name in children_of(process.pid).items() if "StageEngineCore" in name]
            os.kill(stages[0], signal.SIGKILL)

    fickle.recover()
    return start(
        copied(lora, tmp_path_factory),
        inputs,
        *FP32,
        *LORA,
        scorer_url=fickle.url,
        steps=30,
        save_freq=1,
        workers=2,
        on_line=kill_a_stage,
    )


@pytest.fixture(scope="session")
def lied_to(inputs: Inputs, fickle: Fickle, stale: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run whose scorer died, resumed with one that is well, and that answers nonsense after a step."""
    return start(
        copied(stale, tmp_path_factory),
        inputs,
        *FP32,
        scorer_url=fickle.url,
        steps=30,
        save_freq=1,
        on_line=turning(fickle, "lies", "step "),
    )


@pytest.fixture(scope="session")
def believed(inputs: Inputs, fickle: Fickle, lied_to: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same, resumed with the scorer that is well again, for one step and to its end."""
    fickle.recover()
    return start(
        copied(lied_to, tmp_path_factory),
        inputs,
        *FP32,
        scorer_url=fickle.url,
        steps=max(lied_to.metrics) + 1,
        save_freq=1,
    )


@pytest.fixture(scope="session")
def moss_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and rows of which every other one has an instruction and a reference."""
    data = tmp_path_factory.mktemp("moss")
    build_tiny_moss(data / "model")
    write_moss_rows(data)
    return data


@pytest.fixture(scope="session")
def moss(moss_data: Path) -> Run:
    """MOSS with LoRA and the joint log-prob."""
    return start_moss(moss_data, "run")


@pytest.fixture(scope="session")
def moss_again(moss_data: Path, moss: Run) -> Run:
    """The same command once more."""
    return start_moss(moss_data, "again")


def start_moss(data: Path, name: str) -> Run:
    return start(
        data / name,
        Inputs(data / "model", data / "train.parquet", data / "val.parquet", data / "no-speaker"),
        *FP32,
        *LORA,
        "data.max_prompt_length=640",
        "data.max_response_length=40",
        "data.train_batch_size=4",
        f"tts.reference_dir={data}",
        "tts.channel_reduction=sum",
        "actor_rollout_ref.rollout.temperature=0.9",
        "actor_rollout_ref.rollout.top_k=50",
        "actor_rollout_ref.rollout.top_p=0.95",
        "actor_rollout_ref.actor.calculate_entropy=true",
        steps=2,
        save_freq=2,
    )


def write_moss_rows(directory: Path) -> None:
    noise = np.random.default_rng(0).normal(scale=0.1, size=24_000).astype(np.float32)
    soundfile.write(directory / "voice.wav", noise, 24_000)
    for split, rows in quickstart_rows().items():
        given = {"instruction": "In a warm voice.", "ref_audio": "voice.wav"}
        write_prompts(
            [replace(row, extra={**row.extra, **(given if row.index % 2 else {})}) for row in rows],
            directory / f"{split}.parquet",
        )


@pytest.fixture(scope="session")
def broken_receiver(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The rollout engine's side of the weight sync raises."""
    overrides, environment = with_fault("receiver_raises")
    return start(tmp_path_factory.mktemp("receiver") / "run", inputs, *overrides, environment=environment)


@pytest.fixture(scope="session")
def terminated(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """In BF16 on a Ray cluster that was there before, with another environment; SIGTERM in step 3, nothing saved."""

    def terminate(line: str, process: subprocess.Popen) -> None:
        if line.startswith("step 2/"):
            process.terminate()

    with ray_cluster() as address:
        return start(
            tmp_path_factory.mktemp("terminated") / "run",
            inputs,
            *TRUNCATED,
            steps=20,
            environment={"RAY_ADDRESS": address},
            on_line=terminate,
        )
