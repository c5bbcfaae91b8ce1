"""Writing files so that a crash leaves the old content or the new, and never half of it; and what a file holds."""

import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import file_digest
from pathlib import Path
from types import FrameType
from typing import IO, Any

from safetensors import SafetensorError

from verl_tts.errors import CheckpointError, ConfigError, RunStopped

# In the words of torch, whose writer of archives does not pass on what the system said, and of safetensors.
_CANNOT_WRITE = ("iostream error", "PytorchStreamWriter failed", "inline_container", "Error while serializing")


def sync_directory(directory: Path) -> None:
    """Makes the names in ``directory`` (created, renamed, removed) survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """SHA-256 of the content, in hexadecimal."""
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint or an adapter. Raises ``CheckpointError``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def write_whole(path: Path, content: str | bytes) -> None:
    """Replaces ``path`` by ``content`` in one step: written beside it, flushed to disk, renamed."""
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync_directory(path.parent)


def check_is_new(out: Path, *inputs: Path) -> None:
    """Raises ``ConfigError`` where something is at ``out``, be it a dangling link, or it lies inside an input."""
    with suppress(FileNotFoundError, NotADirectoryError):
        out.lstat()  # not lexists, which takes a name that is too long for one that is free
        raise ConfigError(f"{out} exists already; name another directory or remove it")
    for place in inputs:
        if out.resolve().is_relative_to(place.resolve()):
            raise ConfigError(f"{out} lies inside {place}, which it is made from; name another directory")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A directory to be filled, which becomes ``out`` once it is.

    Raises ``ConfigError`` where there can be no ``out``, ``RunStopped`` for what cannot be written inside.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be created: {error.strerror}; name another directory") from error
    with writing(out), tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as staging:
        place = Path(staging) / out.name
        place.mkdir()
        yield place
        place.rename(out)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A file that cannot be written inside ends the run with its name: raises ``RunStopped``.

    ``path`` is named where the error names no file: it may be the directory.
    """
    try:
        yield
    except shutil.Error as error:  # of a tree: source, copy and reason of each file
        _, copy, reason = error.args[0][0]
        raise _cannot_write(copy, reason) from error
    except OSError as error:
        raise _cannot_write(error.filename or path, error.strerror or error) from error
    except (RuntimeError, SafetensorError) as error:
        if not any(words in str(error) for words in _CANNOT_WRITE):
            raise
        library = "torch" if isinstance(error, RuntimeError) else "safetensors"
        raise _cannot_write(path, f"{library} says {str(error).splitlines()[0]!r}") from error


def _cannot_write(path: Any, reason: Any) -> RunStopped:
    return RunStopped(f"cannot write {path}: {reason}; free space on its disk and resume")


def lock_directory(directory: Path) -> IO[str]:
    """Creates ``directory`` and holds it against other processes until the file is closed, or this process ends.

    Raises ``BlockingIOError`` where another process holds it, another ``OSError`` where it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = open(directory / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise
    return lock


@contextmanager
def sigterm_cleans_up() -> Iterator[None]:
    """Inside, SIGTERM ends the process as an exit does. Its default would leave half-written directories behind."""

    def end(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
