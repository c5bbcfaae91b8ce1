"""The numbers of a page, and the same numbers computed again from the lines that a run wrote.

Nothing of verl_tts/report but the interval and its number of draws is used: another way to the same figures.
"""

import json
import statistics
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from verl_tts.report.findings import DRAWS, change_between, draws_for
from verl_tts.report.history import read_history


class PageNumbers(HTMLParser):
    """``found``: (what a number is of, its exact value, the text that is shown or None in a drawing)."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, float, str | None]] = []
        self._open: tuple[str, float] | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if of := given.get("data-of"):
            value = float(given["data-value"] or "nan")
            if tag == "circle":
                self.found.append((of, value, None))
            else:
                self._open = of, value

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.found.append((*self._open, data))
            self._open = None


class Files:
    """The lines of a run directory, and what any number of its page has to be."""

    def __init__(self, run_dir: Path) -> None:
        self.metrics = {line["step"]: line for line in _lines(run_dir / "metrics.jsonl")}
        self.clips = {
            split: {
                int(folder.name.removeprefix("step_")): list(_lines(folder / "samples.jsonl"))
                for folder in sorted((run_dir / "samples" / split).glob("step_*"))
            }
            for split in ("val", "train")
        }
        self.draws = draws_for(read_history(run_dir))

    def expected(self, of: str) -> float:
        kind, _, rest = of.partition("/")
        return float(getattr(self, f"_{kind.replace('-', '_')}")(rest))

    # ------------------------------------------------------------ one for each kind

    def _val(self, rest: str) -> float:
        if rest.rpartition("/")[2].isdigit():  # a mark of a drawing
            rest += "/mean"
        change = "/change/" in rest
        stem, _, what = rest.rpartition("/change/" if change else "/")
        part, _, step = stem.rpartition("/")
        rows = self._rows("val", int(step), part)
        means = [statistics.fmean(values) for values in rows.values()]
        if change:
            first = min(step for step in self.clips["val"] if self._rows("val", step, part))
            return getattr(change_between(self._rows("val", first, part), rows, self.draws), what)
        return {
            "mean": statistics.fmean(means),
            "low": np.percentile(means, 25),
            "high": np.percentile(means, 75),
            "rows": len(means),
        }[what]

    def _overall(self, rest: str) -> float:
        first, last = (self._rows("val", pick(self.clips["val"]), "score") for pick in (min, max))
        return getattr(change_between(first, last, DRAWS), rest.rpartition("/")[2])

    def _clip(self, rest: str) -> float:
        split, step, stem = rest.split("/", 2)
        row, sample, _ = stem.rsplit("/", 2)
        (line,) = [line for line in self.clips[split][int(step)] if line["id"] == row and line["sample"] == int(sample)]
        return line["score"]

    def _row(self, rest: str) -> float:
        row = rest.removesuffix("/change")
        first, last = (self._rows("val", pick(self.clips["val"]), "score") for pick in (min, max))
        return statistics.fmean(last[row]) - statistics.fmean(first[row])

    def _score_change(self, rest: str) -> float:
        first, now = (self._rows("val", step, "score") for step in (min(self.clips["val"]), int(rest)))
        return statistics.fmean(statistics.fmean(now[row]) - statistics.fmean(first[row]) for row in now)

    def _probe_change(self, rest: str) -> float:
        name, _, step = rest.rpartition("/")
        return self.metrics[int(step)].get(f"val-probe/{name}/change", 0.0)

    def _probe(self, rest: str) -> float:
        name, step, what = rest.rsplit("/", 2)
        return self.metrics[int(step)][f"val-probe/{name}/{what}"]

    def _distribution(self, rest: str) -> float:
        part, step, what = rest.rsplit("/", 2)
        split = "val" if self.clips["val"] else "train"
        values = [value for values in self._rows(split, int(step), part).values() for value in values]
        return {"median": statistics.median(values), "clips": len(values)}[what] if values else float("nan")

    def _endings(self, rest: str) -> float:
        step, what = rest.split("/")
        clips = (self.clips["val"] or self.clips["train"])[int(step)]
        ended = sum(clip["stop_reason"] == "eos" for clip in clips)
        silent = sum(clip["frames"] == 0 for clip in clips)
        return {"clips": len(clips), "eos": ended, "cut_off": len(clips) - ended, "silent": silent}[what]

    def _metric(self, rest: str) -> float:
        name, _, step = rest.rpartition("/")
        return self.metrics[int(step)][name]

    def _metrics(self, rest: str) -> float:
        name, _, what = rest.rpartition("/")
        values = [
            line[name]
            for _, line in sorted(self.metrics.items())
            if isinstance(line.get(name), int | float) and not isinstance(line[name], bool)
        ]
        return {"first": values[0], "last": values[-1], "least": min(values), "most": max(values)}[what]

    def _throughput(self, rest: str) -> float:
        steps = [line for line in self.metrics.values() if "timing_s/step" in line]
        total = sum(line["timing_s/step"] for line in steps)
        if rest in ("steps", "step_seconds"):
            return {"steps": len(steps), "step_seconds": total / len(steps)}[rest]
        phase, _, what = rest.rpartition("/")
        seconds = [line[f"timing_s/{phase}"] for line in steps if f"timing_s/{phase}" in line]
        return {"seconds": statistics.fmean(seconds), "percent": 100 * sum(seconds) / total}[what]

    def _scorer(self, rest: str) -> float:
        lines = [line for line in self.metrics.values() if "reward/scorer/latency_p50_s" in line]
        if rest == "share_percent":
            return statistics.fmean(100 * line["reward/scorer/latency_p50_s"] / line["timing_s/gen"] for line in lines)
        return statistics.fmean(line[f"reward/scorer/{rest}"] for line in lines)

    def _run(self, rest: str) -> float:
        val = self.clips["val"]
        return {
            "last_step": max(self.metrics, default=0),
            "attempts": 1 + max((line["attempt"] for line in self.metrics.values()), default=0),
            "val_rows": len({clip["id"] for clip in val[max(val)]}) if val else 0,
            "val_clips": len(val[max(val)]) if val else 0,
        }[rest]

    def _rows(self, split: str, step: int, part: str) -> dict[str, list[float]]:
        rows: dict[str, list[float]] = {}
        # In the order that the page has them: a draw of the bootstrap takes the k-th sample of a row.
        for clip in sorted(self.clips[split][step], key=lambda clip: (clip["id"], clip["sample"])):
            value = _measured(clip, part)
            if value is not None:
                rows.setdefault(clip["id"], []).append(value)
        return rows


def _measured(clip: dict[str, Any], part: str) -> float | None:
    if part == "score":
        return clip["score"]
    if part == "eos":
        return 1.0 if clip["stop_reason"] == "eos" else 0.0
    return clip["parts"].get(part)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []
