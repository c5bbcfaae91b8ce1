"""The directory of an evaluation: what it was made of, a line a clip, and what the clips amount to.

    OUT/
      evaluation.json       what is sampled and who scores it; a restart with anything else is refused
      samples.jsonl         one line a clip, as in a run directory; in the order in which clips were done
      clips/<id>_<k>.flac
      summary.json          written when every clip has its line
      evaluate.log          what the engine said
      .lock  .model/        held, and there, while it runs

A clip's line is written last, once and whole: a restart scores what has none, and nothing else again.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_tts.errors import ConfigError
from verl_tts.files import lock_directory, write_whole
from verl_tts.report.intervals import Scores, mean_interval, paired_difference
from verl_tts.report.run_dir import read_jsonl, read_jsonl_to_append, write_sample
from verl_tts.rewards.compose import VIOLATION
from verl_tts.types import CodecRollout, PromptRow, Score, Waveform

HIGH_CER = 0.3  # beyond it a listener loses the sentence; the zone that the reward preset zone_gate turns down, too
# What two evaluations may differ in and still be compared: the policy, and how often it was asked with which noise.
OF_THE_POLICY = ("policy_sha256", "samples", "seed")

Line = Mapping[str, Any]
Key = tuple[str, int]  # row id, sample number


class EvaluationDir:
    """``EvaluationDir(path)`` touches nothing; ``start`` creates the directory and holds it until ``close``."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.settings = self.path / "evaluation.json"
        self.samples = self.path / "samples.jsonl"
        self.clips = self.path / "clips"
        self.summary = self.path / "summary.json"
        self.log = self.path / "evaluate.log"
        self.model = self.path / ".model"
        self._lock: Any = None

    def start(self, identity: Mapping[str, Any], named: Mapping[str, Any]) -> set[Key]:
        """Begins, or goes on with, the evaluation that ``identity`` describes; returns the clips that are done.

        ``named`` are the paths and addresses behind it, which may change. ConfigError: the directory holds another
        evaluation, something else, or is being written.
        """
        known = self._settings()
        if known is None and self.path.exists() and any(self.path.iterdir()):
            raise ConfigError(f"{self.path} is not empty and holds no evaluation; name another directory with --out")
        if known is not None and (key := _difference(known["identity"], identity)):
            raise ConfigError(
                f"{self.path} holds an evaluation with {key}={_short(known['identity'].get(key))}, this one has "
                f"{_short(identity.get(key))}; name another directory with --out, or remove it"
            )
        try:
            self._lock = lock_directory(self.path)
            if known is None:
                content = {"identity": identity, "named": named}
                write_whole(self.settings, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        except BlockingIOError:
            raise ConfigError(f"another process is writing {self.path}; wait for it, or end it") from None
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror or error}") from error
        return {(line["id"], line["sample"]) for line in read_jsonl_to_append(self.samples)}

    def save(
        self, row: PromptRow, rollout: CodecRollout, waveform: Waveform, score: Score, *, sample: int, language: str
    ) -> None:
        """The clip, then its line. Blocks for the length of a file write, some milliseconds."""
        scored = (row, rollout, waveform, score)
        write_sample(
            self.samples,
            self.clips,
            self.path,
            {"split": "val"},
            scored,
            sample=sample,
            language=language,
            speaker=row.speaker,
        )

    def lines(self) -> list[Line]:
        """Ordered by row and sample number, whatever the order in which they were done."""
        return sorted(read_jsonl(self.samples), key=lambda line: (line["id"], line["sample"]))

    def finish(self, other: "EvaluationDir | None") -> dict[str, Any]:
        """Writes ``summary.json`` and returns it. ``other`` is what it is compared with."""
        lines = self.lines()
        summary = summarise(lines)
        if other is not None:
            summary["against"] = {"path": str(other.path), **compare(other.lines(), lines)}
        write_whole(self.summary, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
        return summary

    def check_comparable(self, identity: Mapping[str, Any]) -> None:
        """ConfigError unless a paired difference between this finished evaluation and another one means something."""
        known = self._settings()
        if known is None:
            raise ConfigError(f"--against {self.path}: there is no evaluation")
        if not self.summary.is_file():
            raise ConfigError(f"--against {self.path}: the evaluation is not finished; its own command goes on with it")
        ours, theirs = (
            {key: value for key, value in side.items() if key not in OF_THE_POLICY}
            for side in (identity, known["identity"])
        )
        if key := _difference(theirs, ours):
            raise ConfigError(
                f"--against {self.path} was made with {key}={_short(theirs.get(key))}, this evaluation has "
                f"{_short(ours.get(key))}: the two cannot be compared"
            )

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _settings(self) -> dict[str, Any] | None:
        try:
            content = json.loads(self.settings.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise ConfigError(f"{self.settings} is not JSON: {error}; name another directory, or remove it") from error
        if not isinstance(content, dict) or not isinstance(content.get("identity"), dict):
            raise ConfigError(f"{self.settings} is no record of an evaluation; name another directory, or remove it")
        return content


def _difference(known: Mapping[str, Any], asked: Mapping[str, Any]) -> str | None:
    """The first key in which the two differ."""
    asked = json.loads(json.dumps(asked))  # as it would have been read: a tuple is a list
    return next((key for key in [*asked, *known] if known.get(key) != asked.get(key)), None)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ------------------------------------------------------------------ what the clips amount to


def summarise(lines: Sequence[Line]) -> dict[str, Any]:
    """Numbers of an evaluation, each over all clips but ``score.mean``, which is over rows, with its interval.

    A clip that was not sent to the scorer has no error rate; it counts as one above ``HIGH_CER``, so that a policy
    gains nothing by saying nothing.
    """
    scores = scores_of(lines)
    interval = mean_interval(scores)
    names = sorted({name for line in lines for name in line["parts"]})
    measured = {name: [value for line in lines if (value := line["parts"].get(name)) is not None] for name in names}
    above = {
        f"{name}_above_{HIGH_CER}": _share(not _at_most(line["parts"].get(name), HIGH_CER) for line in lines)
        for name in names
        if name.rpartition(".")[2] == "cer"
    }
    return {
        "rows": len(scores),
        "clips": len(lines),
        "score": {
            "mean": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "median": statistics.median(line["score"] for line in lines),
        },
        **above,
        "eos_rate": _share(line["stop_reason"] == "eos" for line in lines),
        "violation_rate": _share(VIOLATION in line["notes"] for line in lines),
        "frames": statistics.fmean(line["frames"] for line in lines),
        "parts": {name: math.fsum(values) / len(values) for name, values in measured.items() if values},
    }


def compare(before: Sequence[Line], after: Sequence[Line]) -> dict[str, Any]:
    """Mean score of ``after`` minus that of ``before`` over the same rows, with its paired bootstrap interval."""
    before_scores, after_scores = scores_of(before), scores_of(after)
    interval = paired_difference(before_scores, after_scores)
    return {
        "score_mean": mean_interval(before_scores).mean,
        "difference": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "excludes_zero": interval.excludes_zero,
    }


def scores_of(lines: Iterable[Line]) -> Scores:
    """Row id -> the scores of its samples, in the order of the lines."""
    scores: dict[str, list[float]] = {}
    for line in lines:
        scores.setdefault(line["id"], []).append(line["score"])
    return scores


def _at_most(value: float | None, limit: float) -> bool:
    return value is not None and value <= limit


def _share(flags: Iterable[bool]) -> float:
    return statistics.fmean(map(float, flags))


def shown(summary: Mapping[str, Any]) -> list[str]:
    """The summary in a few lines for a terminal."""
    score = summary["score"]
    lines = [
        f"{summary['clips']} clips of {summary['rows']} rows",
        f"score  mean {score['mean']:.4f}, 95 % in [{score['low']:.4f}, {score['high']:.4f}], "
        f"median {score['median']:.4f}",
    ]
    lines += [f"{name}  {100 * value:.1f} %" for name, value in summary.items() if "_above_" in name]
    lines.append(
        f"ended by EOS {100 * summary['eos_rate']:.1f} %, violations {100 * summary['violation_rate']:.1f} %, "
        f"frames {summary['frames']:.1f}"
    )
    if against := summary.get("against"):
        verdict = "more than chance" if against["excludes_zero"] else "not told from chance: more rows or more samples"
        lines.append(
            f"against {against['path']}: {against['score_mean']:.4f} -> {score['mean']:.4f}, difference "
            f"{against['difference']:+.4f}, 95 % in [{against['low']:+.4f}, {against['high']:+.4f}], {verdict}"
        )
    return lines
