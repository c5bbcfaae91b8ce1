"""Where the processes of a run are when it hangs."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_tts import stacks

HANGS = """
import sys, threading, time
from verl_tts import stacks
stacks.register("actor")
stacks.register("actor")
def in_the_update(): time.sleep(60)
threading.Thread(target=in_the_update, daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""


@contextmanager
def hanging(directory: Path) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS],
        env={**os.environ, stacks.DIRECTORY: str(directory)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_every_process_that_takes_part_writes_where_each_of_its_threads_is(tmp_path: Path) -> None:
    directory, out = tmp_path / "stacks", tmp_path / "stacks.txt"
    directory.mkdir()
    (directory / f"trainer@{socket.gethostname()}.4194304").touch()  # above every pid: it has ended
    with hanging(directory) as process:
        answers = stacks.collect(directory)
        assert process.poll() is None, "it goes on"
    name = f"actor@{socket.gethostname()}.{process.pid}"
    assert answers.keys() == {name}
    stacks.write(answers, out)
    text = out.read_text()
    assert text.startswith(f"=== {name}\n")
    assert "in in_the_update" in text
    assert text.count("most recent call first") == 2


def test_a_process_of_another_node_is_asked_there_and_not_by_its_number_here(tmp_path: Path) -> None:
    """The directory is shared; the number of a process there is that of anybody here, whom the signal would end."""
    with subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        (tmp_path / f"actor@elsewhere.{other.pid}").touch()
        assert stacks.collect(tmp_path) == {}
        assert other.poll() is None
        other.kill()


def test_outside_a_run_or_where_its_directory_is_not_nothing_is_registered(tmp_path: Path) -> None:
    program = "import os; from verl_tts import stacks; stacks.register('x'); print(stacks._file)"
    for environment in ({}, {stacks.DIRECTORY: str(tmp_path / "elsewhere")}):
        done = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "None"
