"""The machine and what is installed on it: versions, platform, registration, memory, disk, shared memory, ports."""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_tts.config.compose import NVIDIA_DEVICE, worker_environment
from verl_tts.config.plan import Plan, answer
from verl_tts.config.plan_shown import GIB, verdict
from verl_tts.config.validate import external_modules
from verl_tts.doctor.findings import Finding
from verl_tts.launch import LOOPBACK, check_ray_address

SHARED_MEMORY = Path("/dev/shm")
REGISTRATION_LIMIT_S = 180
SOCKET_PATH_LIMIT = 107  # bytes of a Unix socket's path, Linux
RAY_SOCKET = "/verl-tts-12345678/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
SPARE = 1.2  # of what is needed; below it a warning
REGISTER = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
import verl.workers.engine_workers
from verl_tts import plugin
plugin.register()
plugin.check_registered(engine=True)
"""


def tested_stack() -> dict[str, Any]:
    """``stack.json``: the versions that work together, and the packages that are locked beside them."""
    return json.loads(resources.files(__package__).joinpath("stack.json").read_text(encoding="utf-8"))


def versions() -> Iterator[Finding]:
    """A failure for what is known to break with another version, a warning for what is merely untested."""
    stack = tested_stack()
    wrong, untested = _other_versions(stack["works_with"]), _other_versions(stack["tested_with"])
    if platform.python_version().rpartition(".")[0] not in stack["python"]:
        wrong.append(f"Python {platform.python_version()}, tested are {' and '.join(stack['python'])}")
    remedy = "`make setup` installs what was tested; README, The stack, says why these"
    if wrong:
        yield Finding("versions", "fail", "; ".join(wrong), remedy)
    elif untested:
        yield Finding("versions", "warn", "; ".join(untested), remedy)
    else:
        yield Finding("versions", "ok", ", ".join(f"{name} {tested}" for name, tested in stack["works_with"].items()))


def _other_versions(tested: Mapping[str, str]) -> list[str]:
    others = []
    for package, version in tested.items():
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed = "is not installed"
        if installed.partition("+")[0] != version:  # 0.24.0+cpu is the CPU build of 0.24.0
            others.append(f"{package} {installed}, tested is {version}")
    return others


def on_platform(config: DictConfig) -> Iterator[Finding]:
    if sys.platform != "linux":
        yield Finding("platform", "fail", f"{sys.platform}; verl and vLLM-Omni run on Linux alone")
    workers, pool = config.trainer.n_gpus_per_node, config.tts.engine.rollout_gpus
    if config.tts.platform == "cpu":
        said = f"CPU, {os.cpu_count()} cores for {workers} worker(s)"
        if NVIDIA_DEVICE.exists():
            yield Finding("platform", "warn", f"{said}; there is an NVIDIA device", "tts.platform=cuda uses it")
        else:
            yield Finding("platform", "ok", said)
        return
    cards = nvidia_cards()
    if len(cards) < workers + pool:
        asked = f"trainer.n_gpus_per_node={workers}" + (f", tts.engine.rollout_gpus={pool}" if pool else "")
        said = f"{asked}, and nvidia-smi shows {len(cards)} GPU(s)"
        yield Finding("platform", "fail", said, "lower their number, or set tts.platform=cpu")
    else:
        yield Finding("platform", "ok", f"{len(cards)} GPU(s): {', '.join(sorted(set(cards)))}")


def nvidia_cards() -> list[str]:
    try:
        told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.partition(": ")[2].partition(" (")[0] for line in told.splitlines()]


def registration(config: DictConfig) -> Iterator[Finding]:
    """In a process of its own, with the environment of a worker: what a run would import, imported."""
    command = [sys.executable, "-c", REGISTER, *external_modules(config)]
    environment = os.environ | worker_environment(config)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=REGISTRATION_LIMIT_S)
    except subprocess.TimeoutExpired:
        yield Finding("registration", "fail", f"importing our parts took more than {REGISTRATION_LIMIT_S} s")
        return
    if done.returncode == 0:
        yield Finding("registration", "ok", "platform, policy, rollout engine and actor engine are in place")
        return
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    said = lines[-1].removeprefix("verl_tts.errors.RegistrationError: ") if lines else f"exit code {done.returncode}"
    modules = ", ".join(external_modules(config))
    remedy = f"{sys.executable} -c 'import {modules}' shows where; `make setup` reinstalls what is ours"
    yield Finding("registration", "fail", said, remedy)


def memory(plan: Plan) -> Iterator[Finding]:
    if plan.machine.gpu_gib is None:
        return
    state = "ok" if answer(plan).fits else "fail"
    first, *remedies = verdict(plan)
    yield Finding("memory", state, " ".join(first.split()), " ".join(line.strip() for line in remedies))  # type: ignore[arg-type]


def disk(plan: Plan) -> Iterator[Finding]:
    """Checkpoints that are kept, and clips, beside what this run has written already."""
    out = Path(plan.config.tts.output_dir).absolute()
    place = next(folder for folder in (out, *out.parents) if folder.exists())
    written = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) if out.exists() else 0
    need, free = max(0.0, plan.disk - written), shutil.disk_usage(place).free
    said = (
        f"{need / GIB:.2f} GiB for {plan.checkpoints_kept} checkpoints of {plan.checkpoint / GIB:.2f} GiB and clips; "
        f"{free / GIB:.1f} GiB free at {place}"
    )
    remedy = "lower trainer.max_actor_ckpt_to_keep, raise trainer.save_freq, or name another OUTPUT_DIR"
    yield from _room("disk", need, free, said, remedy)


def shared_memory(plan: Plan) -> Iterator[Finding]:
    """What a weight sync writes there, beside Ray's object store."""
    store = plan.config.ray_kwargs.ray_init.get("object_store_memory") or 0
    need, free = float(plan.shared_memory + store), shutil.disk_usage(SHARED_MEMORY).free
    said = f"{need / GIB:.2f} GiB for a weight sync and Ray's objects; {free / GIB:.2f} GiB free at {SHARED_MEMORY}"
    yield from _room("shared memory", need, free, said, "give the container more: docker run --shm-size")


def _room(look: str, need: float, free: float, said: str, remedy: str) -> Iterator[Finding]:
    if need > free:
        yield Finding(look, "fail", said, remedy)
    elif SPARE * need > free:
        yield Finding(look, "warn", f"{said}: hardly enough", remedy)
    else:
        yield Finding(look, "ok", said)


def ports(config: DictConfig) -> Iterator[Finding]:
    """What processes need to meet: ports, a short temporary directory, and a cluster to join where one is named."""
    address = os.environ.get("RAY_ADDRESS", "")
    check_ray_address(address)
    if config.trainer.nnodes > 1 and not address:
        said = f"trainer.nnodes={config.trainer.nnodes}, and RAY_ADDRESS names no cluster"
        yield Finding("ports", "fail", said, "`ray start` on every node, then set RAY_ADDRESS=HOST:PORT")
        return
    path = tempfile.gettempdir() + RAY_SOCKET
    if len(path) > SOCKET_PATH_LIMIT:
        said = (
            f"TMPDIR={tempfile.gettempdir()} is {len(path) - SOCKET_PATH_LIMIT} characters too long for Ray's sockets"
        )
        yield Finding("ports", "fail", said, "set TMPDIR to a short path, such as /tmp")
        return
    try:
        with socket.create_server((LOOPBACK, 0)):
            pass
    except OSError as error:
        said = f"no port of {LOOPBACK} can be listened to: {error}"
        yield Finding("ports", "fail", said, "a run is several processes that meet there; allow it")
        return
    yield Finding("ports", "ok", f"joins {address}" if address else f"a cluster of its own on {LOOPBACK}")
