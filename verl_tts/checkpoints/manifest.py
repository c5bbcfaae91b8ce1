"""Which training checkpoints exist: those whose ``MANIFEST.json`` says so.

A checkpoint is staged, sealed, renamed, and only then named by verl's tracker file:

    checkpoints/.incomplete/global_step_20/{actor/*.pt, data.pt}   staging(): verl writes here
    checkpoints/.incomplete/global_step_20/MANIFEST.json           commit(): every file hashed and flushed
    checkpoints/global_step_20/                                    commit(): renamed
    checkpoints/latest_checkpointed_iteration.txt                  commit(): written last

A crash between any two lines leaves the checkpoints that were there before as they were. A directory
without a manifest, or with one that does not match, does not exist for resuming and is not counted
among those that are kept.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from verl_tts.errors import CheckpointError, RunStopped
from verl_tts.files import sync_directory, write_whole

MANIFEST = "MANIFEST.json"
INCOMPLETE = ".incomplete"
TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = 1
REWARD_RULE = "reward"  # key of ``extra``: how answers became rewards, ``config.reward.reward_rule``
TRAINED = "trained"  # another: which parameters the run trains, ``config.compose.trained_rule``

_STEP_NAME = re.compile(r"global_step_(0|[1-9]\d*)")
_SHARD_NAME = re.compile(r"(?P<kind>\w+)_world_size_(?P<world_size>\d+)_rank_(?P<rank>\d+)\.pt")
_HASHING_THREADS = 8  # hashing releases the interpreter lock
_digests: dict[tuple[int, int, int, int], str] = {}  # device, inode, size, mtime in ns: survives our renames


@dataclass(frozen=True)
class FileSeal:
    sha256: str
    size: int  # bytes


@dataclass(frozen=True)
class Manifest:
    """What ``MANIFEST.json`` says. ``files`` holds every file but itself, by path relative to the checkpoint."""

    step: int
    scorer_fingerprint: str | None
    reward_statistics: Mapping[str, Any]
    extra: Mapping[str, Any]
    files: Mapping[str, FileSeal]
    format: int = FORMAT


class Newest(NamedTuple):
    """``path`` is None where no checkpoint is whole; ``skipped`` says of each newer one what is wrong with it."""

    path: Path | None
    skipped: list[str]


# ---------------------------------------------------------------- names


def step_of(checkpoint: Path) -> int:
    """The step in ``global_step_<n>``; CheckpointError for any other name."""
    match = _STEP_NAME.fullmatch(checkpoint.name)
    if match is None:
        raise CheckpointError(f"{checkpoint} is not a training checkpoint: its name must be global_step_<n>")
    return int(match[1])


def list_checkpoints(checkpoints_dir: Path) -> list[Path]:
    """Every ``global_step_<n>`` directory, whole or not, newest first."""
    if not checkpoints_dir.is_dir():
        return []
    found = [path for path in checkpoints_dir.iterdir() if _STEP_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def world_size_of(checkpoint: Path) -> int:
    """How many actor ranks wrote it; CheckpointError where their files are not one complete set."""
    sizes = {
        int(match["world_size"])
        for path in (checkpoint / "actor").glob("model_world_size_*.pt")
        if (match := _SHARD_NAME.fullmatch(path.name))
    }
    if len(sizes) != 1:
        raise CheckpointError(
            f"{checkpoint / 'actor'} must hold model shards of one world size, found {sorted(sizes) or 'none'}"
        )
    return sizes.pop()


# ---------------------------------------------------------------- sealing and checking


def write_manifest(
    directory: Path,
    *,
    step: int,
    scorer_fingerprint: str | None = None,
    reward_statistics: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Manifest:
    """Seals ``directory``: flushes every file to disk, hashes it, and writes ``MANIFEST.json`` last.

    ``reward_statistics`` and ``extra`` must be JSON with finite numbers. A rank whose shard is missing is a
    CheckpointError: with several nodes it means that they do not share the file system.
    """
    names = _files_in(directory)
    _require_every_rank(directory, names)
    manifest = Manifest(
        step=step,
        scorer_fingerprint=scorer_fingerprint,
        reward_statistics=dict(reward_statistics or {}),
        extra=dict(extra or {}),
        files=dict(zip(names, _seal(directory, names, flush=True), strict=True)),
    )
    for folder in {(directory / name).parent for name in names}:
        sync_directory(folder)
    write_whole(directory / MANIFEST, json.dumps(asdict(manifest), indent=1, allow_nan=False) + "\n")
    return manifest


def verify(directory: Path, *, reread: bool = True) -> Manifest:
    """The manifest of a whole checkpoint; CheckpointError with the first thing that is wrong with it.

    Wrong are: no or a torn manifest, a step other than the directory's, a missing file, a file of another size or
    content, and a file that the manifest does not list, because verl unpickles what it finds by name.
    ``reread=False`` trusts the content of files that this process has read before and nobody has touched since.
    """
    if not directory.is_dir():
        raise CheckpointError(f"there is no checkpoint {directory}")
    manifest = read_manifest(directory)
    if manifest.step != step_of(directory):
        raise CheckpointError(f"{directory.name}: its {MANIFEST} is that of step {manifest.step}")
    names = _files_in(directory)
    if missing := sorted(manifest.files.keys() - set(names)):
        raise CheckpointError(f"{directory.name}: {missing[0]} is missing")
    if unlisted := sorted(set(names) - manifest.files.keys()):
        raise CheckpointError(f"{directory.name}: {unlisted[0]} is not in its {MANIFEST}; move it away")
    for name in names:
        size, sealed = (directory / name).stat().st_size, manifest.files[name].size
        if size != sealed:
            raise CheckpointError(f"{directory.name}: {name} has {size} bytes, its {MANIFEST} says {sealed}")
    for name, seal in zip(names, _seal(directory, names, reread=reread), strict=True):
        if seal.sha256 != manifest.files[name].sha256:
            raise CheckpointError(f"{directory.name}: the content of {name} is not what its {MANIFEST} says")
    return manifest


def newest_valid(checkpoints_dir: Path) -> Newest:
    """The newest whole checkpoint, read in full, and why newer ones were skipped."""
    skipped = []
    for checkpoint in list_checkpoints(checkpoints_dir):
        try:
            verify(checkpoint)
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            return Newest(checkpoint, skipped)
    return Newest(None, skipped)


# ---------------------------------------------------------------- saving and pruning


@contextmanager
def staging(trainer: Any) -> Iterator[Path]:
    """verl's ``PPOTrainer._save_checkpoint`` runs inside; what it writes lands in ``.incomplete/``, also its tracker.

    ``trainer`` is verl's ``config.trainer`` (a DictConfig). verl's own keep-N is off meanwhile: it counts paths
    that it has written, whole or not, and forgets them at a restart. Follow with ``commit`` and ``prune``.
    """
    from omegaconf import OmegaConf, flag_override, open_dict

    root = Path(trainer.default_local_dir) / INCOMPLETE
    discard_incomplete(root.parent)
    root.mkdir(parents=True)
    ours = {
        "default_local_dir": str(root),
        "max_actor_ckpt_to_keep": None,
        "max_critic_ckpt_to_keep": None,
        "remove_previous_ckpt_in_save": False,
    }
    as_written: Any = OmegaConf.to_container(trainer, resolve=False)  # keeps ${...} what it is
    before = {key: as_written[key] for key in ours if key in as_written}
    with flag_override(trainer, "readonly", False), open_dict(trainer):
        trainer.update(ours)
        try:
            yield root
        finally:
            for key in ours.keys() - before.keys():
                del trainer[key]
            trainer.update(before)


def commit(
    checkpoints_dir: Path,
    step: int,
    *,
    scorer_fingerprint: str | None = None,
    reward_statistics: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Seals ``.incomplete/global_step_<step>`` and makes it ``global_step_<step>``; returns the new path.

    A whole checkpoint of the same step stays and the new one is dropped: both are the same weights, and so there is
    no moment without either. RunStopped where it cannot be written (disk full, a rank's shard missing); all
    checkpoints that were whole before still are.
    """
    staged = checkpoints_dir / INCOMPLETE / f"global_step_{step}"
    final = checkpoints_dir / staged.name
    try:
        if not _is_whole(final):
            write_manifest(
                staged,
                step=step,
                scorer_fingerprint=scorer_fingerprint,
                reward_statistics=reward_statistics,
                extra=extra,
            )
            if final.exists():
                _discard(final)
            os.rename(staged, final)
            sync_directory(checkpoints_dir)
        write_whole(checkpoints_dir / TRACKER, str(step))
        discard_incomplete(checkpoints_dir)
    except (OSError, CheckpointError) as error:
        newest = newest_valid(checkpoints_dir).path
        last = f"the last whole one is {newest}" if newest else "there is no whole one yet"
        raise RunStopped(f"the checkpoint of step {step} could not be written: {error}; {last}") from error
    return final


def prune(checkpoints_dir: Path, keep: int | None, *, protect: Collection[int] = ()) -> list[Path]:
    """Removes all but the newest ``keep`` whole checkpoints and the steps in ``protect``; returns what it removed.

    ``keep`` None or below 1 keeps everything. Damaged ones are not counted, and those newer than the kept ones stay
    for a person to look at; so do directories that were never sealed. With no whole checkpoint nothing is removed.
    """
    if keep is None or keep < 1:
        return []
    whole, removed = 0, []
    for checkpoint in list_checkpoints(checkpoints_dir):
        if step_of(checkpoint) in protect:
            continue
        if whole == keep:
            if (checkpoint / MANIFEST).exists():
                _discard(checkpoint)
                removed.append(checkpoint)
            continue
        whole += _is_whole(checkpoint)
    return removed


def set_aside(checkpoints_dir: Path, above_step: int, label: str) -> list[Path]:
    """Moves the checkpoints above ``above_step`` to ``set_aside/<label>/``, for a run that goes on from below them.

    They belong to a future that the run has left, or are damaged. Nothing deletes them. Returns their new places.
    """
    moved = []
    for checkpoint in list_checkpoints(checkpoints_dir):
        if step_of(checkpoint) > above_step:
            place = checkpoints_dir / "set_aside" / label / checkpoint.name
            place.parent.mkdir(parents=True, exist_ok=True)
            os.rename(checkpoint, place)
            moved.append(place)
    return moved


def discard_incomplete(checkpoints_dir: Path) -> None:
    """Removes what an interrupted save or removal has left in ``.incomplete/``."""
    root = checkpoints_dir / INCOMPLETE
    if root.exists():
        shutil.rmtree(root)


def _discard(checkpoint: Path) -> None:
    """Removes a checkpoint; interrupted, it leaves no damaged one behind but something in ``.incomplete/``."""
    bin_ = checkpoint.parent / INCOMPLETE / f"removed.{checkpoint.name}"
    bin_.parent.mkdir(exist_ok=True)
    if bin_.exists():
        shutil.rmtree(bin_)
    os.rename(checkpoint, bin_)
    shutil.rmtree(bin_)


# ---------------------------------------------------------------- files


def _files_in(directory: Path) -> list[str]:
    """Relative paths of the files that a manifest of ``directory`` answers for, sorted."""
    names = []
    for path in sorted(directory.rglob("*")):
        if path.is_symlink():
            raise CheckpointError(f"{directory.name}: {path.relative_to(directory)} is a symbolic link; copy the file")
        if path.is_file() and path != directory / MANIFEST:
            names.append(path.relative_to(directory).as_posix())
    return names


def read_manifest(directory: Path) -> Manifest:
    """What the manifest says, without a look at the files; CheckpointError where there is none or a damaged one."""
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckpointError(f"{directory.name}: {MANIFEST} has format {content['format']}, not {FORMAT}")
        files = {name: FileSeal(**seal) for name, seal in content["files"].items()}
        return Manifest(**{**content, "files": files})
    except FileNotFoundError:
        raise CheckpointError(f"{directory.name}: it has no {MANIFEST}, so its save was never finished") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory.name}: {MANIFEST} is damaged ({type(error).__name__})") from None


def _require_every_rank(directory: Path, names: list[str]) -> None:
    present = {Path(name) for name in names}
    if not present:
        raise CheckpointError(f"{directory.name} is empty")
    for path in sorted(present):
        if match := _SHARD_NAME.fullmatch(path.name):
            for rank in range(int(match["world_size"])):
                other = path.with_name(f"{match['kind']}_world_size_{match['world_size']}_rank_{rank}.pt")
                if other not in present:
                    raise CheckpointError(
                        f"{directory.name}: {other} is missing; do all nodes write to one shared OUTPUT_DIR?"
                    )


def _is_whole(checkpoint: Path) -> bool:
    try:
        verify(checkpoint, reread=False)
    except CheckpointError:
        return False
    return True


def _seal(directory: Path, names: list[str], *, flush: bool = False, reread: bool = True) -> list[FileSeal]:
    """One seal a name, in order; ``flush`` also makes the content survive a power cut."""

    def seal(name: str) -> FileSeal:
        with open(directory / name, "rb") as file:
            if flush:
                os.fsync(file.fileno())
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if reread or identity not in _digests:
                _digests[identity] = hashlib.file_digest(file, "sha256").hexdigest()
            return FileSeal(_digests[identity], status.st_size)

    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return list(pool.map(seal, names))
