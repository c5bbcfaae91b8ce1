"""Faults whose starts are not part of CI: ``make test-faults``."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl_tts import stacks
from verl_tts.checkpoints.manifest import verify
from verl_tts.launch import stacks_elsewhere

from .runs import FP32, ROOT, Inputs, OnLine, Run, children_of, explain, start, with_fault

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]


def on(beginning: str, act: Callable[[subprocess.Popen], None]) -> OnLine:
    """Acts once, on the first line that begins so."""
    done = threading.Event()

    def look(line: str, process: subprocess.Popen) -> None:
        if line.startswith(beginning) and not done.is_set():
            done.set()
            act(process)

    return look


def assert_nothing_left(run: Run) -> None:
    assert (run.leftovers, run.shared_memory, run.temporary) == ([], [], [])


def test_a_killed_actor_worker_ends_the_run_with_three_and_leaves_the_last_checkpoint(
    inputs: Inputs, tmp_path: Path
) -> None:
    def kill_the_actor(process: subprocess.Popen) -> None:
        workers = [pid for pid, name in children_of(process.pid).items() if "WorkerDict" in name]
        os.kill(workers[0], signal.SIGKILL)

    run = start(tmp_path / "run", inputs, *FP32, steps=30, save_freq=1, on_line=on("step 1/", kill_the_actor))
    assert run.returncode == 3, explain(run)
    assert "is gone" in run.lines[-1]
    verify(run.checkpoint(1))
    assert_nothing_left(run)


def test_a_run_that_hangs_ends_with_three_and_the_stacks_of_its_processes(inputs: Inputs, tmp_path: Path) -> None:
    overrides, environment = with_fault("second_update_hangs")
    settings = ("tts.stall_s=30", "tts.heartbeat_s=10")
    run = start(tmp_path / "run", inputs, *FP32, *overrides, *settings, steps=4, save_freq=1, environment=environment)
    assert run.returncode == 3, explain(run)
    assert any(line.startswith("still in the update: ") for line in run.lines)
    assert "the update: 3" in run.lines[-1]
    assert "nothing has moved for 30 s (tts.stall_s)" in run.lines[-1]
    text = (run.directory / "stacks.txt").read_text()
    roles = {line.split()[1].split("@")[0] for line in text.splitlines() if line.startswith("===")}
    assert {"driver", "trainer", "actor", "rollout-server", "talker"} <= roles
    assert "in this_update_hangs" in text
    assert not (run.directory / ".stacks").exists()
    verify(run.checkpoint(1))
    assert_nothing_left(run)


def test_the_stacks_of_another_node_are_asked_for_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of Ray on this host. What hangs is on the other one."""
    import ray
    from ray.cluster_utils import Cluster

    class Hanging:
        def hang(self) -> None:
            stacks.register("actor")
            time.sleep(600)

    monkeypatch.setenv("RAY_PRESTART_WORKER_FIRST_DRIVER", "0")
    environment = {"env_vars": {stacks.DIRECTORY: str(tmp_path), "PYTHONPATH": str(ROOT)}}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1, resources={"other": 1})
        ray.init(address=cluster.address, runtime_env=environment)
        ray.remote(Hanging).options(resources={"other": 1}).remote().hang.remote()
        assert wait_for(lambda: list(tmp_path.iterdir()))
        (name, text) = next(iter(stacks_elsewhere(tmp_path).items()))
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert name.startswith("actor@")
    assert "in hang" in text


def wait_for(there: Callable[[], object], limit_s: float = 60) -> object:
    deadline = time.monotonic() + limit_s
    while not (found := there()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def test_a_second_signal_stops_at_once_with_the_last_checkpoint(inputs: Inputs, tmp_path: Path) -> None:
    """The step in hand hangs, so that it is not its end that ends the run."""
    overrides, environment = with_fault("second_update_hangs")
    first = on("step 1/", subprocess.Popen.terminate)
    second = on("signal SIGTERM: stopping after this step", subprocess.Popen.terminate)

    def both(line: str, process: subprocess.Popen) -> None:
        first(line, process)
        second(line, process)

    run = start(
        tmp_path / "run",
        inputs,
        *FP32,
        *overrides,
        steps=4,
        save_freq=1,
        environment=environment,
        on_line=both,
    )
    assert run.returncode == 143, explain(run)
    assert run.lines[-1] == "signal SIGTERM: stopping now"
    assert max(run.metrics) == 1
    verify(run.checkpoint(1))
    assert_nothing_left(run)


@pytest.fixture(scope="module")
def interrupted(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Ctrl-C in a terminal reaches every process of the group, Ray's and the engine's too."""
    interrupt = on("step 1/", lambda process: os.killpg(process.pid, signal.SIGINT))
    directory = tmp_path_factory.mktemp("interrupted") / "run"
    return start(directory, inputs, *FP32, steps=20, save_freq=1, on_line=interrupt)


def test_ctrl_c_lets_the_step_in_hand_end_and_saves_it(interrupted: Run) -> None:
    assert interrupted.returncode == 130, explain(interrupted)
    assert max(interrupted.metrics) == 2
    verify(interrupted.checkpoint(2))
    assert_nothing_left(interrupted)


@pytest.fixture(scope="module")
def cut_off(inputs: Inputs, interrupted: Run) -> Run:
    """The same, its newest checkpoint cut in half; killed with -9 in the validation of its last step."""
    shard = interrupted.checkpoint(2) / "actor" / "model_world_size_1_rank_0.pt"
    os.truncate(shard, shard.stat().st_size // 2)
    overrides, environment = with_fault("waits_after_validating")
    kill = on("validated step 3", lambda process: os.killpg(process.pid, signal.SIGKILL))
    steps = {"steps": 3, "save_freq": 1, "test_freq": 3}
    return start(interrupted.directory, inputs, *FP32, *overrides, **steps, environment=environment, on_line=kill)


def test_a_checkpoint_that_was_cut_in_half_is_skipped_and_the_run_says_so(cut_off: Run) -> None:
    assert cut_off.returncode < 0, explain(cut_off)
    assert any(
        line.startswith("skipped global_step_2: actor/model_world_size_1_rank_0.pt has") for line in cut_off.lines
    )
    assert "ready: training from step 2 to 3" in cut_off.lines
    verify(cut_off.checkpoint(3))


def test_a_validation_of_the_last_step_that_was_cut_off_is_made_up_for(inputs: Inputs, cut_off: Run) -> None:
    resumed = start(cut_off.directory, inputs, *FP32, steps=3, save_freq=1, test_freq=3)
    assert resumed.returncode == 0, explain(resumed)
    assert "restored the line of step 3 from its checkpoint" in resumed.lines
    assert "ready: no step is left to train" in resumed.lines
    assert {step: line["attempt"] for step, line in resumed.metrics.items()} == {1: 0, 2: 1, 3: 1}
    assert any(name.startswith("val-core/") for name in resumed.metrics[3])
    clips = [(line["id"], line["sample"]) for line in resumed.samples(3, "val")]
    assert len(clips) == len(set(clips)) > 0, "those of the first attempt are gone"
    assert_nothing_left(resumed)


@pytest.fixture(scope="module")
def full(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The disk is full while the second checkpoint is saved."""
    overrides, environment = with_fault("disk_is_full_in_step_2")
    directory = tmp_path_factory.mktemp("full") / "run"
    return start(directory, inputs, *FP32, *overrides, steps=4, save_freq=1, environment=environment)


def test_a_disk_that_is_full_in_a_save_ends_the_run_with_three_and_the_place(full: Run) -> None:
    assert full.returncode == 3, explain(full)
    place = full.directory / "checkpoints" / ".incomplete" / "global_step_2" / "actor"
    assert full.lines[-1].startswith(f"verl_tts: cannot write {place}: ")
    assert full.lines[-1].endswith("; free space on its disk and resume")
    verify(full.checkpoint(1))
    assert not full.checkpoint(2).exists()
    assert_nothing_left(full)


def test_with_space_again_it_goes_on_from_the_checkpoint_before(inputs: Inputs, full: Run) -> None:
    resumed = start(full.directory, inputs, *FP32, steps=2, save_freq=1)
    assert resumed.returncode == 0, explain(resumed)
    assert "ready: training from step 2 to 2" in resumed.lines
    assert {step: line["attempt"] for step, line in resumed.metrics.items()} == {1: 0, 2: 1}
    verify(resumed.checkpoint(2))
    assert not (resumed.checkpoint(2).parent / ".incomplete").exists()


def test_two_runs_at_once_on_one_host_both_finish(inputs: Inputs, tmp_path: Path) -> None:
    def run_one(name: str) -> Run:
        return start(tmp_path / name, inputs, *FP32, steps=2, timeout_s=900, end_s=60)

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(run_one, ("one", "other")))
    for run in runs:
        assert run.returncode == 0, explain(run)
        assert sorted(run.metrics) == [1, 2]
        assert (run.leftovers, run.temporary) == ([], [])
