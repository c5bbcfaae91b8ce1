"""The ladder: rungs run in order, the first that fails ends it, and each leaves its line in one report.

Set by hand, for work on the ladder itself: ``VERL_TTS_GPU_TESTS_ON=cpu`` climbs it on a CPU with a tiny checkpoint,
except for what is asked of a GPU alone.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from verl_tts.config.compose import compose, worker_environment

from .report import GpuMemoryWatch, Report, nvidia_smi

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "outputs/gpu-report.json"
HERE = Path(__file__).parent
OUTCOME = pytest.StashKey[pytest.TestReport]()
Job = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def platform() -> str:
    return os.environ.get("VERL_TTS_GPU_TESTS_ON", "cuda")


@pytest.fixture(scope="session")
def gpu(platform: str) -> str | None:
    """nvidia-smi's name of the GPU that torch takes first; None on a CPU."""
    if platform != "cuda":
        return None
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    try:
        nvidia_smi("name", index=index)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.exit(f"make test-gpu needs an NVIDIA GPU and nvidia-smi: {error}", returncode=2)
    return index


@pytest.fixture(scope="session")
def model() -> Path:
    path = os.environ.get("MODEL_PATH", "")
    if not Path(path, "config.json").is_file():
        pytest.exit(f"MODEL_PATH={path} has no config.json; set it to a Qwen3-TTS Base directory", returncode=2)
    return Path(path).absolute()


@pytest.fixture(scope="session")
def report(model: Path, gpu: str | None, platform: str) -> Report:
    device = {"platform": platform}
    if gpu is not None:
        device |= dict(
            zip(
                ("name", "driver", "memory_mib"),
                nvidia_smi("name", "driver_version", "memory.total", index=gpu),
                strict=True,
            )
        )
    return Report(REPORT, model.name, device)


@pytest.fixture(autouse=True)
def rung(request: pytest.FixtureRequest, report: Report, gpu: str | None) -> Iterator[dict[str, Any]]:
    """What this rung measured; its line is written when it has ended."""
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        watch = stack.enter_context(GpuMemoryWatch(gpu)) if gpu is not None else None
        yield figures
    if watch is not None:
        figures["peak_gib"] = round(watch.peak_mib / 1024, 2)
    outcome = request.node.stash[OUTCOME]
    report.add(request.node.name, outcome.outcome, outcome.duration, figures, outcome.longreprtext)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    if outcome.when == "call" or outcome.failed:
        item.stash[OUTCOME] = outcome
        if outcome.failed:
            item.session.shouldstop = f"rung {item.name} failed; the report is {REPORT}"
    return outcome


@pytest.fixture
def job(model: Path, platform: str, rung: dict[str, Any], tmp_path: Path) -> Job:
    """``job(script, *words)`` runs a script of this folder, and returns what it found."""

    def run(script: str, *words: str) -> dict[str, Any]:
        out = tmp_path / "out.json"
        environment = worker_environment(compose([f"tts.platform={platform}"])) | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/unit/engine")])
        }
        done = subprocess.run(
            [sys.executable, HERE / script, model, out, platform, *words],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=840,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        found = json.loads(out.read_text())
        rung.update(found)
        return found

    return run
