"""A run directory, read: what report and listening page are made of. Nothing here writes.

A directory may hold a run that is under way, was killed, or never got to its first step. What a crash has torn is
left out; what is missing is absent, and whoever shows it says so.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_tts.checkpoints.manifest import MANIFEST
from verl_tts.errors import ConfigError
from verl_tts.files import read_json_object
from verl_tts.report.intervals import Scores
from verl_tts.report.run_dir import RunDir, Split, read_jsonl, read_metrics
from verl_tts.rewards.compose import VIOLATION
from verl_tts.rewards.guards import TRANSCRIPT

SCORE = "score"
EOS = "eos"
SECONDS = "clip/seconds"

_CONFIG_NAME = re.compile(r"config(?:\.(\d+))?\.yaml")
_VERSIONS_NAME = re.compile(r"versions(?:\.(\d+))?\.json")
_CHECKPOINT_NAME = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True)
class Clip:
    """One line of samples.jsonl. ``values`` are its finite numbers: ``score``, ``eos`` (0 or 1), and its parts."""

    split: Split
    step: int
    row_id: str
    sample: int
    text: str
    stop_reason: str
    frames: int
    path: Path | None  # None: no audio was sampled
    transcript: str | None
    violation: str | None  # why a guard or a gate turned it down
    values: Mapping[str, float]

    @property
    def key(self) -> tuple[str, int]:
        return self.row_id, self.sample

    @property
    def score(self) -> float | None:
        return self.values.get(SCORE)


@dataclass(frozen=True)
class History:
    path: Path
    metrics: list[dict[str, Any]]  # in the order of their steps, one a step
    val: dict[int, list[Clip]]  # step -> its clips, ordered by row and sample
    train: dict[int, list[Clip]]
    configs: dict[int, dict[str, Any]]  # attempt -> what it ran with
    checkpoints: list[int]  # steps that have a sealed one
    versions: dict[str, Any] = field(default_factory=dict)  # what the last attempt was made with

    @property
    def name(self) -> str:
        return self.path.name or str(self.path)

    @property
    def config(self) -> dict[str, Any]:
        """What the last attempt ran with."""
        return self.configs[max(self.configs)] if self.configs else {}

    @cached_property
    def val_steps(self) -> list[int]:
        return sorted(self.val)

    @cached_property
    def last_step(self) -> int | None:
        """The last update that has ended; None before the first line."""
        return max((line["step"] for line in self.metrics), default=None)

    @cached_property
    def attempts(self) -> int:
        """How often the run was started."""
        return 1 + max([*self.configs, *(line.get("attempt") or 0 for line in self.metrics)], default=0)

    def metric(self, name: str) -> list[tuple[int, float]]:
        """(step, value) wherever the metric is a finite number."""
        return [(line["step"], float(line[name])) for line in self.metrics if is_number(line.get(name))]

    @cached_property
    def metric_names(self) -> list[str]:
        """Every metric that is a number somewhere, in the order of its first line."""
        return list(dict.fromkeys(name for line in self.metrics for name, value in line.items() if is_number(value)))

    @cached_property
    def part_names(self) -> list[str]:
        """What the clips of validations were measured by: the score, EOS, then the parts by name."""
        return part_names(clip for clips in self.val.values() for clip in clips)


def read_history(run_dir: str | os.PathLike[str]) -> History:
    """Raises ConfigError where there is no run: no such directory, or one that a run has never written to."""
    path = Path(run_dir).absolute()
    if not path.is_dir():
        raise ConfigError(f"{run_dir} is no directory; name the OUTPUT_DIR of a run")
    directory = RunDir(path)
    metrics = {line["step"]: line for line in read_metrics(directory.metrics)}
    history = History(
        path,
        [metrics[step] for step in sorted(metrics)],
        _read_samples(directory, "val"),
        _read_samples(directory, "train"),
        _read_configs(path),
        _sealed(directory.checkpoints),
        _read_versions(path),
    )
    if not (history.metrics or history.val or history.train or history.configs):
        raise ConfigError(f"{run_dir} holds no run: no metrics.jsonl, samples or config.yaml; name its OUTPUT_DIR")
    return history


def by_row(clips: Iterable[Clip], name: str) -> Scores:
    """Row id -> the values of its clips; rows in which it was never measured are left out."""
    rows: dict[str, list[float]] = {}
    for clip in clips:
        if name in clip.values:
            rows.setdefault(clip.row_id, []).append(clip.values[name])
    return rows


def values_of(stop_reason: str, score: Any, parts: Mapping[str, Any]) -> dict[str, float]:
    """What a clip was measured by: the score, EOS, and its parts, where they are finite numbers."""
    measured = {EOS: float(stop_reason == "eos"), SCORE: score, **parts}
    return {name: float(value) for name, value in measured.items() if is_number(value)}


def part_names(clips: Iterable[Clip]) -> list[str]:
    return in_order(name for clip in clips for name in clip.values)


def in_order(names: Iterable[str]) -> list[str]:
    """Each once: the score, EOS, then the parts by name."""
    return sorted(set(names), key=lambda name: (name != SCORE, name != EOS, name))


def error_rate_part(names: Iterable[str]) -> str | None:
    """The character error rate among ``names``, else the word error rate: ``cer``, or ``SCORER.cer`` of several."""
    candidates = list(names)
    for rate in ("cer", "wer"):
        found = [name for name in candidates if name.rpartition(".")[2] == rate]
        if found:
            return min(found, key=len)
    return None


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


# ---------------------------------------------------------------- files


def _read_samples(directory: RunDir, split: Split) -> dict[int, list[Clip]]:
    steps = {}
    for folder in (directory.samples / split).glob("step_*"):
        number = folder.name.removeprefix("step_")
        if not number.isdecimal():
            continue
        lines = read_jsonl(folder / "samples.jsonl")
        clips = [_clip(line, directory.path, split, int(number)) for line in lines if _is_sample(line)]
        # Of a clip that was sampled twice, by a run that was killed in between, the later line holds.
        latest = {clip.key: clip for clip in clips}
        if latest:
            steps[int(number)] = [latest[key] for key in sorted(latest)]
    return {step: steps[step] for step in sorted(steps)}


def _is_sample(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("id"), str) and isinstance(line.get("sample"), int)


def _clip(line: Mapping[str, Any], root: Path, split: Split, step: int) -> Clip:
    notes = line.get("notes") or {}
    stop_reason = str(line.get("stop_reason"))
    return Clip(
        split=split,
        step=step,
        row_id=line["id"],
        sample=line["sample"],
        text=str(line.get("text", "")),
        stop_reason=stop_reason,
        frames=int(line.get("frames") or 0),
        path=_inside(root, line.get("path")),
        transcript=next((str(text) for key, text in notes.items() if key.rpartition(".")[2] == TRANSCRIPT), None),
        violation=None if notes.get(VIOLATION) is None else str(notes[VIOLATION]),
        values=values_of(stop_reason, line.get("score"), line.get("parts") or {}),
    )


def _inside(root: Path, name: Any) -> Path | None:
    """The clip's file; None for a name that leads out of the run directory, which nothing of ours writes."""
    if not isinstance(name, str) or name.startswith("/") or ".." in name.split("/"):
        return None
    return root / name


def _read_configs(root: Path) -> dict[int, dict[str, Any]]:
    found = [(_CONFIG_NAME.fullmatch(path.name), path) for path in root.glob("config*.yaml")]
    files = {int(match[1] or 0): path for match, path in found if match}
    configs = {}
    for attempt, file in sorted(files.items()):
        try:
            configs[attempt] = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(file), resolve=False))
        except (OSError, yaml.YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
    return configs


def _read_versions(root: Path) -> dict[str, Any]:
    """Of the last attempt. Raises CheckpointError for a file that is no JSON object."""
    found = [(_VERSIONS_NAME.fullmatch(path.name), path) for path in root.glob("versions*.json")]
    _, newest = max(((int(match[1] or 0), path) for match, path in found if match), default=(0, None))
    return {} if newest is None else read_json_object(newest)


def _sealed(checkpoints: Path) -> list[int]:
    """Steps by their manifest alone: whether every byte is as sealed is for export and resume to prove."""
    found = (_CHECKPOINT_NAME.fullmatch(path.parent.name) for path in checkpoints.glob(f"*/{MANIFEST}"))
    return sorted(int(match[1]) for match in found if match)
