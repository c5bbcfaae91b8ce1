"""Where every process of a run is, when the run hangs: a signal, and each writes its Python stacks to a file.

The signal handler is C, so a process that hangs in a system call or holds the interpreter lock answers, too. A
process takes part once it has called ``register`` in an environment that names a directory.
"""

import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import IO

DIRECTORY = "VERL_TTS_STACKS"
"""The environment variable: where the processes of this run write to, a file each, named ROLE.PID."""

SIGNAL = signal.SIGUSR2
WRITING_S = 1.0

_file: IO[str] | None = None


def register(role: str) -> None:
    """Answers the signal from now on. Does nothing outside a run, or a second time."""
    global _file
    if _file is not None or not (directory := os.environ.get(DIRECTORY)) or not Path(directory).is_dir():
        return  # a process on another node than the driver's
    _file = open(Path(directory, f"{role}.{os.getpid()}"), "w")  # noqa: SIM115 - the handler writes to it for life
    faulthandler.register(SIGNAL, file=_file, all_threads=True)


def dump(directory: Path, out: Path) -> list[str]:
    """Asks every registered process and joins the answers in ``out``; returns who was asked, as ROLE.PID."""
    asked = []
    for path in sorted(directory.iterdir()):
        try:
            os.kill(int(path.suffix[1:]), SIGNAL)
        except ProcessLookupError:
            continue
        asked.append(path.name)
    time.sleep(WRITING_S)
    out.write_text("".join(f"=== {name}\n{(directory / name).read_text()}\n" for name in asked))
    return asked
