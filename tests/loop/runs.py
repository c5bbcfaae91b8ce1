"""Starts the real loop through the published launcher, and looks at what it leaves behind.

A start costs about a minute, so runs are session fixtures (conftest.py) that many tests look at.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed.tensor  # checkpoints hold DTensors

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "examples/grpo_trainer/qwen3_tts/run_qwen3_tts_grpo.sh"
MARK = "VERL_TTS_TEST_RUN"  # in the environment of every process of a run, to find what it left

# Small and exact: FP32 on both sides, four prompts of four short samples a step, learning fast enough to see.
FP32 = (
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=fp32",
)
TRUNCATED = (  # as in the published Hindi run
    "actor_rollout_ref.rollout.temperature=0.9",
    "actor_rollout_ref.rollout.top_k=50",
    "actor_rollout_ref.rollout.top_p=0.95",
)
FP32_LIMIT, BF16_LIMIT = 1e-4, 0.05  # nats, that engine and actor may differ by about one token
BASE = ("tts.platform=cpu", "data.max_prompt_length=192", "tts.rpc_timeout_s=60")
SMALL = (
    *BASE,
    "data.max_response_length=24",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    "trainer.val_before_train=false",
    "tts.keep.train_samples_per_step=-1",
    # A random policy that is driven this hard goes where no gate would let it.
    "tts.gates.length_drift.stop=null",
    "tts.gates.kl.stop=null",
)
OnLine = Callable[[str, subprocess.Popen], None]


@dataclass
class Run:
    """One finished start of the launcher."""

    directory: Path
    returncode: int
    lines: list[str]
    """What the terminal showed."""
    seconds: float
    leftovers: list[str]
    """Command lines of processes of this run that were still there ten seconds after its end, or after ``end_s``."""
    shared_memory: list[str]
    """Files that it left in /dev/shm."""
    temporary: list[str]
    """What it left in its directory for temporary files, sockets among them."""
    overrides: tuple[str, ...] = field(default=())
    listening: list[tuple[str, str]] = field(default_factory=list)
    """Address and process title of each socket that was listened at in the middle of it, where somebody looked."""

    @property
    def metrics(self) -> dict[int, dict[str, Any]]:
        """Step -> its line of metrics.jsonl."""
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return {line["step"]: line for line in map(json.loads, lines)}

    @property
    def log(self) -> str:
        return (self.directory / "train.log").read_text(errors="replace")

    def samples(self, step: int, split: str = "train") -> list[dict[str, Any]]:
        """The lines of samples.jsonl of a step, ordered by row and sample number."""
        path = self.directory / "samples" / split / f"step_{step}" / "samples.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return sorted(lines, key=lambda line: (line["id"], line["sample"]))

    def checkpoint(self, step: int) -> Path:
        return self.directory / "checkpoints" / f"global_step_{step}"

    def tensors(self, step: int, kind: str = "model") -> dict[str, Any]:
        """The state dict of a checkpoint written by one worker."""
        path = self.checkpoint(step) / "actor" / f"{kind}_world_size_1_rank_0.pt"
        return torch.load(path, weights_only=True)


@dataclass(frozen=True)
class Inputs:
    """A tiny model and data for it."""

    model: Path
    train: Path
    val: Path
    speaker: Path


def start(
    directory: Path,
    inputs: Inputs,
    *overrides: str,
    base: tuple[str, ...] = SMALL,
    launcher: Path = LAUNCHER,
    scorer_url: str = "null",
    steps: int = 2,
    save_freq: int = -1,
    test_freq: int = -1,
    resume: str = "auto",
    workers: int = 1,
    environment: dict[str, str] | None = None,
    on_line: OnLine | None = None,
    timeout_s: float = 420,
    end_s: float = 10,
) -> Run:
    """Runs the launcher to its end; ``on_line`` sees each line of the terminal as it comes, and may kill.

    ``scorer_url`` "null" is a reward in the process; "" leaves the scorer to the launcher.
    What is still there ``end_s`` after the launcher has ended is left over.
    """
    mark = uuid.uuid4().hex
    reward = (
        ()
        if scorer_url != "null"
        else (
            "reward.custom_reward_function.path=pkg://verl_tts.rewards.functions",
            "reward.custom_reward_function.name=duration",
        )
    )
    process_environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHON_BIN": sys.executable,
        "MODEL_PATH": str(inputs.model),
        "TRAIN_FILE": str(inputs.train),
        "VAL_FILE": str(inputs.val),
        "SPK_EMBED_PATH": str(inputs.speaker),
        "SCORER_URL": scorer_url,
        "OUTPUT_DIR": str(directory),
        "NUM_GPUS": str(workers),
        "TOTAL_TRAINING_STEPS": str(steps),
        "SAVE_FREQ": str(save_freq),
        "TEST_FREQ": str(test_freq),
        "RESUME_MODE": resume,
        MARK: mark,
        "TMPDIR": tempfile.mkdtemp(prefix="t", dir="/tmp"),  # short, for Ray's sockets below it
        **(environment or {}),
    }
    before = set(os.listdir("/dev/shm"))
    began = time.monotonic()
    process = subprocess.Popen(
        ["bash", str(launcher), *base, *reward, *overrides],
        env=process_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # As in a terminal, also where the tests run in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    watchdog = threading.Timer(timeout_s, lambda: os.killpg(process.pid, signal.SIGKILL))
    watchdog.start()
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if on_line is not None:
            on_line(lines[-1], process)
    returncode = process.wait()
    seconds = time.monotonic() - began
    timed_out = not watchdog.is_alive()
    watchdog.cancel()
    leftovers = wait_for_end(mark, end_s)
    left_memory = sorted(name for name in set(os.listdir("/dev/shm")) - before if not _is_in_use(name))
    temporary = sorted(os.listdir(process_environment["TMPDIR"]))
    shutil.rmtree(process_environment["TMPDIR"])
    log = directory / "train.log"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-60:]) if log.exists() else "no log"
    assert not timed_out, f"the run did not end within {timeout_s} s\n" + "\n".join(lines) + f"\n{tail}"
    return Run(directory, returncode, lines, seconds, leftovers, left_memory, temporary, overrides)


def with_fault(fault: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Overrides and environment that put a fault of faults.py into a run."""
    overrides = (
        "actor_rollout_ref.model.external_lib=[verl_tts.plugin,tests.loop.faults]",
        f"ray_kwargs.ray_init.runtime_env.env_vars.VERL_TTS_TEST_FAULT={fault}",
        f"ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH='{ROOT}'",
    )
    return overrides, {"PYTHONPATH": str(ROOT)}


def flat(node: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor and number of a state dict, by path."""
    if isinstance(node, dict | list | tuple):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        return {key: value for k, item in items for key, value in flat(item, f"{name}/{k}").items()}
    if hasattr(node, "full_tensor"):
        return {name: node.full_tensor()}
    return {name: torch.as_tensor(node)} if isinstance(node, torch.Tensor | int | float) else {}


def explain(run: Run) -> str:
    """For the message of an assertion: what the terminal showed, and the end of the log."""
    log = run.directory / "train.log"
    tail = log.read_text(errors="replace").splitlines()[-80:] if log.exists() else []
    return "\n".join([f"exit code {run.returncode}", *run.lines, *tail])


def processes_with(mark: str) -> dict[int, str]:
    """pid -> command line of the processes whose environment carries the mark."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def children_of(pid: int) -> dict[int, str]:
    """pid -> process title of everything that a process has started, and that has started in turn."""
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[child.pid] = " ".join(child.cmdline())
    return found


def listening_of(pid: int) -> list[tuple[str, str]]:
    """(address, process title) of every TCP socket that a process, or what it has started, listens at."""
    found = []
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            sockets = process.net_connections(kind="tcp")
            found += [(s.laddr.ip, " ".join(process.cmdline())) for s in sockets if s.status == psutil.CONN_LISTEN]
    return found


@contextmanager
def ray_cluster() -> Iterator[str]:
    """A cluster that knows nothing of us: started by ``ray start`` with its own temp directory."""
    directory = tempfile.mkdtemp(prefix="ray-test-")
    ray = Path(sys.executable).with_name("ray")
    command = [ray, "start", "--head", "--port=0", f"--temp-dir={directory}", "--num-cpus=32", "--num-gpus=1"]
    quiet = ["--include-dashboard=false", "--disable-usage-stats", "--block"]
    environment = {"RAY_prestart_worker_first_driver": "0", "VERL_PLATFORM": "nvidia", "RAY_AUTH_MODE": "disabled"}
    process = subprocess.Popen(
        [*map(str, command), *quiet],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        address = next(match[1] for line in process.stdout if (match := re.search(r"--address='([^']+)'", line)))
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)
        shutil.rmtree(directory, ignore_errors=True)


def temporary_files(directory: Path) -> list[str]:
    """What is left there, but for torch's cache, which is the user's and every program that imports torch makes."""
    return sorted(name for name in os.listdir(directory) if not name.startswith("torchinductor_"))


def wait_for_end(mark: str, limit_s: float) -> list[str]:
    """What is still there after the limit, which is then killed so that the next run has the machine to itself."""
    deadline = time.monotonic() + limit_s
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return list(left.values())


def _is_in_use(name: str) -> bool:
    """Whether a semaphore belongs to a process that is there: of somebody else on this machine."""
    match = re.match(r"sem\.loky-(\d+)-", name)
    return match is not None and psutil.pid_exists(int(match[1]))


@contextmanager
def scorer(name: str = "duration") -> Iterator["Scorer"]:
    """A scorer server in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "verl_tts.commands", "score", "--scorer", name, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield Scorer(f"{line.split()[-1]}/score", process)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(timeout=30)


@dataclass(frozen=True)
class Scorer:
    url: str
    process: subprocess.Popen
