"""``verl-tts serve`` as a process, and what a client makes of its answers."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil
import soundfile

STOP_LIMIT_S = 60
Server = tuple[subprocess.Popen[str], httpx.Client]


@contextmanager
def serving(model: Path, *words: str, temporary: Path | None = None) -> Iterator[Server]:
    """A server that answers, on a port of its own; killed if it is still there at the end.

    ``temporary`` is where it puts temporary files; None: where everybody does.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "verl_tts.commands", "serve", str(model), "--port", "0", *words],
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        | ({} if temporary is None else {"TMPDIR": str(temporary)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith(f"serving {model} on http://127.0.0.1:"), line + process.stdout.read()
        with httpx.Client(base_url=line.split(" on ")[1].split(": POST")[0], timeout=60) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()


def heard(content: bytes) -> tuple[np.ndarray, int]:
    """The samples (S,) of an audio file, and their rate."""
    return soundfile.read(io.BytesIO(content), dtype="float32")


def assert_ends_by_sigterm(process: subprocess.Popen[str]) -> None:
    """With exit code 0, without a traceback, in time, and with all of its stages."""
    children = psutil.Process(process.pid).children(recursive=True)
    assert children, "the stages of the engine"
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    output, _ = process.communicate(timeout=STOP_LIMIT_S)
    assert process.returncode == 0, output
    assert "Traceback" not in output, output
    _, left = psutil.wait_procs(children, timeout=5)
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]
    assert time.monotonic() - began < STOP_LIMIT_S
