"""The engine without Ray: what is around it. That it speaks is in tests/loop."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from verl_tts.rollout.alone import temporary_directory


def made_by_a_child():
    program = "import tempfile; print(tempfile.mkstemp()[1])"
    return Path(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    )


@pytest.mark.parametrize("named", [True, False])
def test_temporary_files_of_a_process_and_of_its_children_go_with_the_block(monkeypatch, tmp_path, named):
    if named:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
    else:
        monkeypatch.delenv("TMPDIR", raising=False)
    before = tempfile.gettempdir()
    with temporary_directory() as directory:
        own, child = Path(tempfile.mkdtemp()), made_by_a_child()
        assert own.parent == child.parent == directory
    assert not directory.exists()
    assert tempfile.gettempdir() == before
    assert os.environ.get("TMPDIR") == (str(tmp_path) if named else None)


def test_they_go_when_the_engine_fails():
    seen = []

    def fail():
        with temporary_directory() as directory:
            seen.append(directory)
            (directory / "socket").touch()
            raise RuntimeError("stage 0 died")

    with pytest.raises(RuntimeError):
        fail()
    assert not seen[0].exists()
