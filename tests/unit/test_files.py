"""A disk that is full ends a run in one line, whatever it was that wrote."""

import errno
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from verl_tts.errors import ConfigError, RunStopped
from verl_tts.files import staged, writing

FULL = Path("/dev/full")  # takes no byte


def full_disk(file: str | None = None) -> OSError:
    return OSError(errno.ENOSPC, "No space left on device", file)


def test_a_file_that_cannot_be_written_is_named_with_the_systems_reason_and_the_remedy():
    with pytest.raises(RunStopped) as stopped, writing(Path("/run")), open(FULL, "wb", buffering=0) as file:
        file.write(b"1")
    assert str(stopped.value) == "cannot write /run: No space left on device; free space on its disk and resume"
    assert stopped.value.exit_code == 3


def test_the_file_that_the_system_names_is_the_one_that_is_named():
    with pytest.raises(RunStopped, match=r"^cannot write /run/shard: No space"), writing(Path("/run")):
        raise full_disk("/run/shard")


@pytest.mark.parametrize("values", [10, 10_000_000])
def test_torchs_own_words_for_a_full_disk_are_understood(values):
    """Small archives fail in the stream, large ones in the middle of a record."""
    message = r"^cannot write /dev/full: torch says '.*'; free space on its disk"
    with pytest.raises(RunStopped, match=message) as stopped, writing(FULL):
        torch.save({"a": torch.zeros(values)}, FULL)
    assert "\n" not in str(stopped.value)


def test_an_error_of_another_kind_stays_what_it_is():
    with pytest.raises(RuntimeError, match="out of memory"), writing(Path("/run")):
        raise RuntimeError("out of memory")


@pytest.fixture
def short_of_space():
    """No file of more than 1000 bytes can be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_weights(folder: Path) -> None:
    save_file({"a": torch.zeros(10_000)}, folder / "model.safetensors")


def copy_a_tree(folder: Path) -> None:
    shutil.copytree(Path(__file__).parent / "data", folder / "copy")


@pytest.mark.parametrize("write", [save_weights, copy_a_tree])
def test_a_directory_that_does_not_fit_is_one_line_and_leaves_nothing(write, tmp_path, short_of_space):
    with (
        pytest.raises(RunStopped, match=r"^cannot write .*File too large") as stopped,
        staged(tmp_path / "out") as folder,
    ):
        write(folder)
    assert "\n" not in str(stopped.value)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_below_a_file_is_the_users_mistake(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/out cannot be created"), staged(tmp_path / "file/out"):
        pytest.fail("there is none")
