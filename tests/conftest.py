"""Fixtures shared by every test. Light: a test that needs torch imports it itself."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from verl_tts.checkpoints.tiny import build_tiny_qwen3_tts
from verl_tts.checkpoints.tiny_moss import build_tiny_moss
from verl_tts.data.quickstart import write_quickstart

# A busy machine is slow now and then; that says nothing about the code.
hypothesis.settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-machine")

# In the background of a script Ctrl-C is ignored, and by the children of a test that sends them one, too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> list[str]:
    if any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        return []
    return ["chromium is missing (Debian: apt-get install chromium): the tests marked browser are skipped"]


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """A variable that a test leaves behind, such as TMPDIR with a directory that is gone, fails some other test.

    Libraries add some of their own when they are imported. ``main_omni`` takes SIGTERM for its whole process.
    """
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)
    kept = {name: os.environ.get(name) for name in {*before, "TMPDIR", "RAY_ADDRESS"} if name != "PYTEST_CURRENT_TEST"}
    assert kept == {name: before.get(name) for name in kept}


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny-random Qwen3-TTS checkpoint. Read only: every test shares it."""
    out = tmp_path_factory.mktemp("checkpoints") / "tiny"
    build_tiny_qwen3_tts(out)
    return out


@pytest.fixture(scope="session")
def tiny_moss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny-random MOSS checkpoint with its codec. Read only: every test shares it."""
    out = tmp_path_factory.mktemp("checkpoints") / "tiny_moss"
    build_tiny_moss(out)
    return out


@pytest.fixture(scope="session")
def places(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables that the launchers ask for, with a scorer that nobody has started. Read only."""
    data = tmp_path_factory.mktemp("data")
    write_quickstart(data, tiny_checkpoint)
    return {
        "MODEL_PATH": str(tiny_checkpoint),
        "TRAIN_FILE": f"{data}/train.parquet",
        "VAL_FILE": f"{data}/val.parquet",
        "SPK_EMBED_PATH": f"{data}/speaker.json",
        "SCORER_URL": "http://127.0.0.1:9/score",
    }
