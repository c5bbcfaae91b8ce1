import errno
import json
import os
import shutil
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_tts.checkpoints import manifest as module
from verl_tts.checkpoints.manifest import (
    INCOMPLETE,
    MANIFEST,
    TRACKER,
    commit,
    discard_incomplete,
    list_checkpoints,
    newest_valid,
    prune,
    set_aside,
    staging,
    step_of,
    verify,
    world_size_of,
    write_manifest,
)
from verl_tts.errors import CheckpointError, RunStopped

SHARD = "actor/model_world_size_1_rank_0.pt"


def stage(checkpoints: Path, step: int, ranks: int = 1) -> Path:
    """What verl would have written by the time that commit() is called."""
    folder = checkpoints / INCOMPLETE / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    for rank in range(ranks):
        (folder / "actor" / f"model_world_size_{ranks}_rank_{rank}.pt").write_bytes(f"step {step}".encode() * 100)
    (folder / "data.pt").write_bytes(b"dataloader")
    return folder


def save(checkpoints: Path, *steps: int) -> None:
    for step in steps:
        stage(checkpoints, step)
        commit(checkpoints, step)


def steps_in(checkpoints: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(checkpoints)]


def damage(checkpoint: Path) -> None:
    (checkpoint / SHARD).write_bytes(b"")


# ---------------------------------------------------------------- sealing and checking


def test_a_committed_checkpoint_is_whole_keeps_what_it_was_told_and_is_named_by_the_tracker(tmp_path):
    stage(tmp_path, 20)
    final = commit(tmp_path, 20, scorer_fingerprint="ab12", reward_statistics={"mean": 0.5}, extra={"attempt": 1})
    sealed = verify(final)
    assert (sealed.step, sealed.scorer_fingerprint) == (20, "ab12")
    assert (sealed.reward_statistics, sealed.extra) == ({"mean": 0.5}, {"attempt": 1})
    assert set(sealed.files) == {SHARD, "data.pt"}
    assert (tmp_path / TRACKER).read_text() == "20"


def half(checkpoint):
    shard = checkpoint / SHARD
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


def other_content(checkpoint):
    shard = checkpoint / SHARD
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")


def change_manifest(**changes):
    def change(checkpoint):
        content = json.loads((checkpoint / MANIFEST).read_text())
        (checkpoint / MANIFEST).write_text(json.dumps(content | changes))

    return change


def torn_manifest(checkpoint):
    (checkpoint / MANIFEST).write_text((checkpoint / MANIFEST).read_text()[:-20])


def link(checkpoint):
    shard = checkpoint / SHARD
    shutil.move(shard, checkpoint.parent / "elsewhere")
    shard.symlink_to(checkpoint.parent / "elsewhere")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (damage, "has 0 bytes"),
        (half, "has 350 bytes, its MANIFEST.json says 700"),
        (other_content, "the content of actor/model_world_size_1_rank_0.pt is not what"),
        (lambda c: (c / SHARD).unlink(), "actor/model_world_size_1_rank_0.pt is missing"),
        (lambda c: (c / "actor" / "model_world_size_2_rank_0.pt").write_bytes(b"x"), "is not in its MANIFEST.json"),
        (link, "symbolic link"),
        (lambda c: (c / MANIFEST).unlink(), "has no MANIFEST.json"),
        (torn_manifest, "MANIFEST.json is damaged"),
        (lambda c: (c / MANIFEST).write_text("[]"), "MANIFEST.json is damaged"),
        (change_manifest(step=10), "is that of step 10"),
        (change_manifest(format=2), "has format 2"),
        (change_manifest(unknown=1), "MANIFEST.json is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_its_reason_and_the_one_before_is_used(tmp_path, spoil, reason):
    save(tmp_path, 10, 20)
    spoil(tmp_path / "global_step_20")
    with pytest.raises(CheckpointError, match=reason):
        verify(tmp_path / "global_step_20")
    newest = newest_valid(tmp_path)
    assert newest.path == tmp_path / "global_step_10"
    assert len(newest.skipped) == 1
    assert newest.skipped[0].startswith("global_step_20: ")
    assert "\n" not in newest.skipped[0]


def test_the_newest_is_the_one_with_the_highest_number_not_the_last_in_the_alphabet(tmp_path):
    save(tmp_path, 9, 100, 20)
    assert newest_valid(tmp_path).path == tmp_path / "global_step_100"


def test_without_a_directory_or_a_whole_checkpoint_there_is_no_newest(tmp_path):
    assert newest_valid(tmp_path / "absent") == (None, [])
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        verify(tmp_path / "global_step_10")
    save(tmp_path, 10)
    damage(tmp_path / "global_step_10")
    assert newest_valid(tmp_path).path is None


def test_a_changed_file_that_looks_untouched_is_found_by_reading_it_again(tmp_path):
    save(tmp_path, 10)
    shard = tmp_path / "global_step_10" / SHARD
    before = shard.stat()
    with open(shard, "r+b") as file:
        file.write(b"X")
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    verify(tmp_path / "global_step_10", reread=False)
    with pytest.raises(CheckpointError, match="content"):
        verify(tmp_path / "global_step_10")


@pytest.mark.parametrize("name", ["step_7", "global_step_", "global_step_07", "global_step_7.incomplete", "actor"])
def test_another_name_is_not_a_checkpoint(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match="global_step_<n>"):
        step_of(tmp_path / name)
    assert list_checkpoints(tmp_path) == []


def test_the_world_size_is_read_from_the_shards(tmp_path):
    assert world_size_of(stage(tmp_path, 10, ranks=3)) == 3
    with pytest.raises(CheckpointError, match="found none"):
        world_size_of(tmp_path)


# ---------------------------------------------------------------- saving


def test_a_missing_rank_is_refused_and_named(tmp_path):
    save(tmp_path, 10)
    (stage(tmp_path, 20, ranks=3) / "actor" / "model_world_size_3_rank_1.pt").unlink()
    with pytest.raises(
        RunStopped, match=r"model_world_size_3_rank_1.pt is missing.*last whole one is .*global_step_10"
    ):
        commit(tmp_path, 20)
    assert steps_in(tmp_path) == [10]


def test_a_full_disk_stops_the_run_in_one_line_and_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch):
    save(tmp_path, 10)
    stage(tmp_path, 20)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunStopped, match="No space left on device") as stopped:
        commit(tmp_path, 20)
    assert "\n" not in str(stopped.value)
    assert newest_valid(tmp_path).path == tmp_path / "global_step_10"


class Killed(BaseException):
    """Stands for kill -9: no handler of ours sees it coming."""


def killed_at(monkeypatch, owners_and_names, call: int):
    """From here on the process dies in the call-th call of any of these functions."""
    calls = count()

    def deadly(function):
        def wrapper(*args, **kwargs):
            if next(calls) == call:
                raise Killed
            return function(*args, **kwargs)

        return wrapper

    for owner, name in owners_and_names:
        monkeypatch.setattr(owner, name, deadly(getattr(owner, name)))


def every_point_of_death(tmp_path, monkeypatch, points, action):
    """Yields a directory with checkpoints 10 and 20 after ``action`` has died there, for each place to die."""
    for call in count():
        directory = tmp_path / str(call)
        save(directory, 10, 20)
        with monkeypatch.context() as patch:
            killed_at(patch, points, call)
            try:
                action(directory)
            except Killed:
                pass
            else:
                assert call > 2, "the action never came by the places where it is to die"
                return
        yield directory


def test_dying_anywhere_in_a_save_leaves_whole_checkpoints_and_the_next_save_works(tmp_path, monkeypatch):
    points = [(os, "fsync"), (os, "rename"), (os, "replace"), (module, "sync_directory"), (module, "write_whole")]

    def save_30(directory):
        stage(directory, 30)
        commit(directory, 30)

    for directory in every_point_of_death(tmp_path, monkeypatch, points, save_30):
        newest = newest_valid(directory)
        assert step_of(newest.path) in (20, 30)
        assert newest.skipped == []
        verify(directory / f"global_step_{(directory / TRACKER).read_text()}")
        discard_incomplete(directory)
        save_30(directory)
        assert newest_valid(directory).path == directory / "global_step_30"


def test_dying_anywhere_while_pruning_leaves_the_newest_whole_and_no_ruin_behind(tmp_path, monkeypatch):
    points = [(os, "rename"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree")]
    for directory in every_point_of_death(tmp_path, monkeypatch, points, lambda path: prune(path, 1)):
        assert newest_valid(directory) == (directory / "global_step_20", [])
        prune(directory, 1)
        assert steps_in(directory) == [20]


def test_a_second_save_of_a_step_leaves_the_first_where_it_is(tmp_path):
    save(tmp_path, 10)
    inode = (tmp_path / "global_step_10" / SHARD).stat().st_ino
    save(tmp_path, 10)
    assert (tmp_path / "global_step_10" / SHARD).stat().st_ino == inode
    assert not (tmp_path / INCOMPLETE / "global_step_10").exists()


def test_a_save_takes_the_place_of_a_damaged_one_of_its_step(tmp_path):
    save(tmp_path, 10)
    damage(tmp_path / "global_step_10")
    save(tmp_path, 10)
    verify(tmp_path / "global_step_10")


def test_an_empty_directory_is_not_sealed(tmp_path):
    with pytest.raises(CheckpointError, match="is empty"):
        write_manifest(tmp_path, step=1)


# ---------------------------------------------------------------- verl's save, redirected


def verls_save(trainer, step: int) -> None:
    folder = Path(trainer.default_local_dir) / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    (folder / SHARD).write_bytes(b"weights")
    (Path(trainer.default_local_dir) / TRACKER).write_text(str(step))
    assert trainer.max_actor_ckpt_to_keep is None


def trainer_config(tmp_path):
    config = OmegaConf.create(
        {
            "tts": {"output_dir": str(tmp_path)},
            "trainer": {"default_local_dir": "${tts.output_dir}/checkpoints", "max_actor_ckpt_to_keep": 3},
        }
    )
    OmegaConf.set_struct(config, True)
    OmegaConf.set_readonly(config, True)
    return config


def test_what_verl_saves_is_seen_only_after_the_commit(tmp_path):
    config, checkpoints = trainer_config(tmp_path), tmp_path / "checkpoints"
    before = OmegaConf.to_container(config)
    with staging(config.trainer):
        verls_save(config.trainer, 20)
    assert not (checkpoints / TRACKER).exists()
    assert newest_valid(checkpoints).path is None
    commit(checkpoints, 20)
    assert newest_valid(checkpoints).path == checkpoints / "global_step_20"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["global_step_20", TRACKER]
    assert OmegaConf.to_container(config) == before


def test_a_save_of_verl_that_fails_leaves_the_config_as_it_was_and_the_next_one_starts_clean(tmp_path):
    config, checkpoints = trainer_config(tmp_path), tmp_path / "checkpoints"
    before = OmegaConf.to_container(config)

    def fail():
        with staging(config.trainer):
            verls_save(config.trainer, 20)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert OmegaConf.to_container(config) == before
    with staging(config.trainer):
        verls_save(config.trainer, 40)
    assert {path.name for path in (checkpoints / INCOMPLETE).iterdir()} == {TRACKER, "global_step_40"}


# ---------------------------------------------------------------- pruning


@pytest.mark.parametrize(
    ("whole", "damaged", "keep", "protect", "left"),
    [
        ([10, 20, 30, 40], [], 2, (), [40, 30]),
        ([10, 20], [], 2, (), [20, 10]),
        ([10, 20, 30], [], None, (), [30, 20, 10]),
        ([10, 20, 30], [], 0, (), [30, 20, 10]),
        ([10, 20, 30], [40], 1, (), [40, 30]),  # the damaged one is not counted, and stays to be looked at
        ([20, 40], [10, 30], 2, (), [40, 30, 20]),  # below the kept ones it goes
        ([10, 20, 30], [], 1, (10,), [30, 10]),  # the best one, kept beside the last
        ([], [10, 20], 1, (), [20, 10]),  # nothing is whole: nothing goes
    ],
)
def test_keep_n_counts_whole_checkpoints(tmp_path, whole, damaged, keep, protect, left):
    save(tmp_path, *whole, *damaged)
    for step in damaged:
        damage(tmp_path / f"global_step_{step}")
    removed = prune(tmp_path, keep, protect=protect)
    assert steps_in(tmp_path) == left
    assert {step_of(path) for path in removed} == {*whole, *damaged} - {*left}


def test_what_was_never_sealed_is_not_ours_to_remove(tmp_path):
    save(tmp_path, 20, 30)
    (tmp_path / "global_step_10").mkdir()
    prune(tmp_path, 1)
    assert steps_in(tmp_path) == [30, 10]


@settings(max_examples=12, deadline=None)
@given(states=st.lists(st.sampled_from(["whole", "damaged"]), max_size=5), keep=st.integers(1, 3))
def test_pruning_keeps_exactly_the_newest_whole_ones(tmp_path_factory, states, keep):
    directory = tmp_path_factory.mktemp("checkpoints")
    save(directory, *range(len(states)))
    for step, state in enumerate(states):
        if state == "damaged":
            damage(directory / f"global_step_{step}")
    prune(directory, keep)
    whole = [step for step, state in enumerate(states) if state == "whole"]
    assert [step for step in steps_in(directory) if step in whole] == whole[::-1][:keep]
    assert newest_valid(directory).path == (directory / f"global_step_{whole[-1]}" if whole else None)


def test_checkpoints_of_a_future_that_was_left_are_set_aside_whole(tmp_path):
    save(tmp_path, 10, 20, 30)
    moved = set_aside(tmp_path, above_step=10, label="attempt_1")
    assert steps_in(tmp_path) == [10]
    assert sorted(step_of(path) for path in moved) == [20, 30]
    for path in moved:
        verify(path)
