"""Where the processes of a run are when it hangs."""

import os
import subprocess
import sys
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


def test_every_process_that_takes_part_writes_where_each_of_its_threads_is(tmp_path: Path) -> None:
    directory = tmp_path / "stacks"
    directory.mkdir()
    (directory / "trainer.4194304").touch()  # above every pid: it has ended
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS],
        env={**os.environ, stacks.DIRECTORY: str(directory)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    out = tmp_path / "stacks.txt"
    try:
        assert stacks.dump(directory, out) == [f"actor.{process.pid}"]
        assert process.poll() is None, "it goes on"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    text = out.read_text()
    assert text.startswith(f"=== actor.{process.pid}\n")
    assert "in in_the_update" in text
    assert text.count("most recent call first") == 2


def test_outside_a_run_or_on_another_node_nothing_is_registered(tmp_path: Path) -> None:
    program = "import os; from verl_tts import stacks; stacks.register('x'); print(stacks._file)"
    for environment in ({}, {stacks.DIRECTORY: str(tmp_path / "elsewhere")}):
        done = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "None"
