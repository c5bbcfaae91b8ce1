"""Where every process of a run is, when the run hangs: a signal, and each writes its Python stacks to a file.

The signal handler is C, so a process that hangs in a system call or holds the interpreter lock answers, too. A
process takes part once it has called ``register`` in an environment that names a directory. The directory is one that
all nodes share, as they do the run directory; a process is signalled, and its file read, on its own node: ``collect``.
"""

import faulthandler
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

DIRECTORY = "VERL_TTS_STACKS"
"""The environment variable: where the processes of this run write to, a file each, named ROLE@HOST.PID."""

SIGNAL = signal.SIGUSR2
WRITING_S = 1.0

_file: IO[str] | None = None


def register(role: str) -> None:
    """Answers the signal from now on. Does nothing outside a run, or a second time."""
    global _file
    if _file is not None or not (directory := os.environ.get(DIRECTORY)) or not Path(directory).is_dir():
        return
    name = f"{role}@{socket.gethostname()}.{os.getpid()}"
    _file = open(Path(directory, name), "w")  # noqa: SIM115 - the handler writes to it for life
    faulthandler.register(SIGNAL, file=_file, all_threads=True)


def collect(directory: Path) -> dict[str, str]:
    """Asks every registered process of this host; ROLE@HOST.PID of each to its answer."""
    asked = []
    for path in sorted(directory.glob(f"*@{socket.gethostname()}.*")):
        try:
            os.kill(int(path.suffix[1:]), SIGNAL)
        except ProcessLookupError:
            continue
        asked.append(path)
    time.sleep(WRITING_S)
    return {path.name: path.read_text() for path in asked}


def write(answers: Mapping[str, str], out: Path) -> None:
    out.write_text("".join(f"=== {name}\n{answers[name]}\n" for name in sorted(answers)))
