"""The report: a ``History`` becomes one HTML file that needs nothing else.

Every number on the page stands in an element with ``data-of``, what it is of, and ``data-value``, exact; the text that
a person reads is rounded. tests/unit/report/test_page.py computes them again from the files of the run.
"""

import base64
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from verl_tts.config.compose import compose
from verl_tts.config.tts import KeepConfig
from verl_tts.errors import ConfigError
from verl_tts.files import write_whole
from verl_tts.report import findings, svg
from verl_tts.report.best import (
    PREFIX,
    Candidate,
    Constraints,
    constraints_of,
    measured_in,
    parse_constraints,
    validations,
)
from verl_tts.report.clips import Shelf, Sound
from verl_tts.report.findings import (
    CURVE_POINTS,
    METRIC_POINTS,
    Distribution,
    PartCurve,
    ProbePoint,
    thinned,
)
from verl_tts.report.glossary import ADVICE, MEANINGS, METRICS, NO_PROBES, TEXTS, meaning_of
from verl_tts.report.history import SCORE, History, by_row, is_number, read_history
from verl_tts.report.intervals import Interval, row_means

AUDIO_MB = 12.0
MINUS = "\u2212"
SHORT_RUN = 100  # updates below which a curve says little, whatever its shape
_UNSET = object()
NOT_SET = "not set"


def write_report(
    run_dir: Path,
    out: Path,
    *,
    compare: Path | None = None,
    keep: str | None = None,
    audio_mb: float = AUDIO_MB,
) -> Shelf:
    """Writes the page of ``run_dir``; returns what it holds of audio.

    ``keep`` is a constraint as ``parse_constraints`` reads it; None: those that the run itself keeps checkpoints by.
    Raises ConfigError: no run there, a constraint on a part that nobody measured.
    """
    check_place(out)
    history = read_history(run_dir)
    other = read_history(compare) if compare is not None else None
    constraints = constraints_of_run(history) if keep is None else parse_constraints(keep)
    shelf = Shelf(int(audio_mb * 1e6))
    write_whole(out, render(history, shelf, other=other, constraints=constraints))
    return shelf


def constraints_of_run(history: History) -> Constraints:
    names = _select(history.config, "tts.keep.best_not_above_start")
    if names is None:
        names = KeepConfig().best_not_above_start
    return constraints_of(names, measured_in(validations(history.metrics)))


def render(history: History, shelf: Shelf, *, other: History | None, constraints: Constraints) -> str:
    draws = findings.draws_for(history)
    curves = findings.part_curves(history, draws)
    theirs = {curve.name: curve for curve in findings.part_curves(other, findings.FEWEST_DRAWS)} if other else {}
    score = next((curve for curve in curves if curve.name == SCORE), None)
    probed = findings.probes(history)
    kept = findings.keep(history, constraints)
    differences, differences_text = differences_from_defaults(history.config)
    context: dict[str, Any] = {
        "history": history,
        "other": other,
        "shelf": shelf,
        "facts": _facts(history),
        "score": score,
        "overall": _overall(history),
        "kept": kept,
        "candidates": _shown_candidates(kept),
        "mean_prefix": PREFIX,
        "curves": [curve for curve in curves if not curve.is_constant or curve.name == SCORE],
        "constant": [curve for curve in curves if curve.is_constant and curve.name != SCORE],
        "curve_chart": lambda curve: _curve_chart(curve, theirs.get(curve.name)),
        "meanings": {curve.name: meaning for curve in curves if (meaning := MEANINGS.get(_plain_name(curve.name)))},
        "comparison": _comparison(history, other) if other else None,
        "grid": findings.grid(history),
        "featured": findings.featured(history),
        "distributions": findings.distributions(history),
        "endings": findings.endings(history),
        "histogram": _histogram,
        "probes": probed,
        "alarms": _alarms(probed),
        "probe_chart": lambda name, points: _probe_chart(history, name, points),
        "training": _training(history, other),
        "metrics": _metric_rows(history),
        "non_finite": _non_finite(history),
        "throughput": findings.throughput(history),
        "speed": _speed(history),
        "scorer": _scorer(history),
        "versions": _versions(history),
        "differences": differences,
        "differences_text": differences_text,
        "attempts": _changes_at_resumes(history),
        "other_differences": differences_between(other.config, history.config) if other else [],
        "advice": ADVICE,
        "texts": TEXTS | {"no_probes": NO_PROBES},
        "no_validation": _no_validation(history),
        "unfinished": _unfinished(history),
        "closing": lambda: _closing(history, shelf, draws),
    }
    context["sections"] = _sections(context)
    return render_page("report.html.j2", ("players.js",), shelf.sounds, context)


# ---------------------------------------------------------------- what both pages share


def check_place(out: Path) -> None:
    """Before any work is done. Raises ConfigError for a page that could not be written."""
    if out.is_dir():
        raise ConfigError(f"--out {out} is a directory; name a file in it")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no directory {out.absolute().parent}; make it, or name another place")


def render_page(template: str, scripts: Sequence[str], sounds: Mapping[str, Sound], context: Mapping[str, Any]) -> str:
    """A template over page.html.j2: its clips, style and scripts inside, and a policy that lets nothing else run.

    ``sounds`` may still be filled while the body is rendered.
    """
    environment = Environment(
        loader=PackageLoader("verl_tts.report"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"figure": figure, "signed": signed, "exact": exact, "median": median}
    script = "\n".join(_asset(name) for name in scripts)
    digest = base64.b64encode(sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        **context,
        style=Markup(_asset("style.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        sounds=lambda: {name: sound.data_uri for name, sound in sounds.items()},
    )


def _asset(name: str) -> str:
    return (files("verl_tts.report") / "templates" / name).read_text(encoding="utf-8").strip()


def figure(value: float) -> str:
    """Three significant digits: 0.343, 28.6, 12,800, 1.23e-5."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", MINUS)
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace("-", MINUS)
    if abs(value) < 1e-4:
        return f"{value:.2e}".replace("e-0", "e-").replace("-", MINUS)
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}".replace("-", MINUS)


def signed(value: float) -> str:
    """As ``figure``, with the sign of a difference."""
    return f"+{figure(value)}" if value > 0 else figure(value)


def exact(value: float) -> str:
    return repr(float(value))


# ---------------------------------------------------------------- head


def _facts(history: History) -> list[tuple[str, Any, str]]:
    """(name, value, what it is of); a text has no ``of``."""
    config, clips = history.config, history.val[history.val_steps[-1]] if history.val else []
    facts: list[tuple[str, Any, str]] = []
    if history.last_step is not None:
        facts.append(("updates done", history.last_step, "run/last_step"))
    times = [line["time"] for line in history.metrics if is_number(line.get("time"))]
    if len(times) > 1:
        facts.append(("wall time", _duration(times[-1] - times[0]), ""))
    if times:
        facts.append(("last written", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(times[-1])), ""))
    if history.attempts > 1:
        facts.append(("starts", history.attempts, "run/attempts"))
    if clips:
        facts.append(("validation prompts", len({clip.row_id for clip in clips}), "run/val_rows"))
        facts.append(("validation clips", len(clips), "run/val_clips"))
    for name, path in (
        ("policy", "tts.model"),
        ("trained", "tts.trainable"),
        ("platform", "tts.platform"),
        ("reward preset", "tts.reward.preset"),
    ):
        if (value := _select(config, path)) is not None:
            facts.append((name, str(value), ""))
    if (model := _select(config, "actor_rollout_ref.model.path")) is not None:
        facts.append(("model", Path(str(model)).name, ""))
    return facts


def _versions(history: History) -> str:
    """What somebody who is asked for help wants to know first; empty where the run has not written it."""
    if not (made := history.versions):
        return ""
    packages = [f"{name} {version}" for name, version in made["packages"].items() if version]
    return ", ".join([f"Python {made['python']} on {made['platform']}", *packages])


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


def _plain_name(part: str) -> str:
    """A part's name without the scorer that it came from, where there are several: ``asr.cer`` is ``cer``."""
    return part.rpartition(".")[2] if "/" not in part else part


def _overall(history: History) -> Interval | None:
    """First to last validation, with more draws than a curve's points have."""
    if len(history.val_steps) < 2:
        return None
    first, last = (by_row(history.val[step], SCORE) for step in (history.val_steps[0], history.val_steps[-1]))
    return findings.change_between(first, last)


def _no_validation(history: History) -> str:
    if history.train:
        return "No validation has clips in this directory; what follows are training samples."
    return "No clip was kept: tts.keep.val_samples_per_step and tts.keep.train_samples_per_step say how many are."


def _unfinished(history: History) -> str:
    wanted = _select(history.config, "trainer.total_training_steps")
    if not history.metrics:
        return "This run has not ended a step: metrics.jsonl has no line. train.log says what happened."
    if isinstance(wanted, int) and history.last_step is not None and history.last_step < wanted:
        return (
            f"Not finished: {history.last_step} of {wanted} updates are done. "
            "It is under way, or was stopped; see train.log."
        )
    return ""


def _shown_candidates(kept: findings.Keep | None) -> list[Candidate]:
    """Enough to see why: evenly spaced, with the first, the best, the chosen and the last."""
    if kept is None:
        return []
    steps = [candidate.step for candidate in kept.candidates]
    best = max(kept.candidates, key=lambda candidate: candidate.score).step
    shown = {*thinned(steps, 12), best, kept.step}
    return [candidate for candidate in kept.candidates if candidate.step in shown]


def _sections(context: Mapping[str, Any]) -> list[tuple[str, str]]:
    present = {
        "curves": bool(context["curves"]),
        "listen": context["grid"] is not None,
        "extremes": context["featured"] is not None,
        "distributions": bool(context["distributions"] or context["endings"]),
        "training": bool(context["training"]),
        "throughput": context["throughput"] is not None,
    }
    titles = {
        "curves": "Validation",
        "listen": "Across steps",
        "extremes": "Best and worst",
        "distributions": "Distributions",
        "probes": "Probes",
        "training": "Training",
        "throughput": "Throughput",
        "config": "Configuration",
        "next": "What to change first",
    }
    return [(anchor, title) for anchor, title in titles.items() if present.get(anchor, True)]


def _closing(history: History, shelf: Shelf, draws: int) -> list[str]:
    """What was thinned, by which rule. Called last: the shelf is full then."""
    lines = [
        f"Written {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())} from {history.path}.",
        f"{len(shelf.sounds)} clips are in this file, {shelf.used_bytes / 1e6:.1f} MB as MP3 "
        f"(--audio-mb {shelf.limit_bytes / 1e6:g}). "
        f"Chosen: {findings.GRID_PROMPTS} prompts and {findings.GRID_STEPS} validations, evenly spaced, and "
        f"{findings.FEATURED} clips of each kind. All others are in {history.path / 'samples'}.",
    ]
    if shelf.left_out:
        lines.append(
            f"{shelf.left_out} chosen clips are left out: the limit of {shelf.limit_bytes / 1e6:g} MB is reached."
        )
    if shelf.missing:
        lines.append(f"{shelf.missing} chosen clips have no file that can be read; their numbers are of samples.jsonl.")
    if len(history.val_steps) > CURVE_POINTS:
        lines.append(
            f"Curves show {CURVE_POINTS} of {len(history.val_steps)} validations, evenly spaced, with first and last."
        )
    if (shown := len(findings.interval_steps(history))) < len(thinned(history.val_steps, CURVE_POINTS)):
        lines.append(
            f"{shown} of the validations shown have an interval, evenly spaced: there are many prompts and parts."
        )
    if len(history.metrics) > METRIC_POINTS:
        lines.append(f"Training curves show {METRIC_POINTS} of {len(history.metrics)} steps, evenly spaced.")
    if history.val:
        lines.append(
            f"Intervals: paired bootstrap over prompts and the samples of each, {draws:,} draws; "
            f"{findings.DRAWS:,} for the change at the top."
        )
    return lines


# ---------------------------------------------------------------- drawings


def _curve_chart(curve: PartCurve, theirs: PartCurve | None) -> Markup:
    base = curve.first.mean
    changes = [(point.step, point.change) for point in curve.points if point.change is not None]
    lines = [
        svg.Line(
            curve.name,
            [(point.step, point.mean) for point in curve.points],
            of=f"val/{curve.name}",
            spread=[] if curve.is_share else [(point.step, point.low, point.high) for point in curve.points],
            # The interval is that of the change; it is drawn where the mean is, seen from step 0's.
            band=[(curve.first.step, base, base)] * bool(changes)
            + [(step, base + change.low, base + change.high) for step, change in changes],
        )
    ]
    if theirs is not None:
        points = [(point.step, point.mean) for point in theirs.points]
        lines.append(svg.Line(f"{curve.name}, the other run", points, of=f"other/val/{curve.name}", css="b"))
    summary = f"{curve.name} over steps, {base:.3g} at step {curve.first.step}"
    if len(curve.points) > 1:
        summary += f", {curve.last.mean:.3g} at step {curve.last.step}"
    narrow = svg.line_chart(lines, label=summary, baseline=base)
    if curve.name != SCORE:
        return narrow
    # It leads, over two columns where there are two; its letters would be tiny on a phone.
    wide = svg.line_chart(lines, label=summary, baseline=base, width=svg.WIDE)
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(wide, narrow)


def _histogram(one: Distribution) -> Markup:
    groups = [(f"step {step}", values) for step, values in one.values.items() if values]
    return svg.histogram(groups, label=f"Distribution of {one.name}", x_end=one.name.rpartition("/")[2])


def _probe_chart(history: History, name: str, points: Sequence[ProbePoint]) -> Markup:
    """Changes since the first validation: both in their own units, on one axis that starts at 0."""
    first = points[0].step
    scores = {step: by_row(clips, SCORE) for step, clips in history.val.items() if step >= first}
    changes = [(point.step, point.change) for point in points if point.change is not None]
    noise = [
        (point.step, point.change - point.noise, point.change + point.noise)
        for point in points
        if point.change is not None and point.noise is not None
    ]
    lines = [svg.Line(name, [(first, 0.0), *changes], of=f"probe-change/{name}", css="b", spread=noise)]
    if first in scores:
        gains = [
            (step, change)
            for step in thinned(sorted(scores), CURVE_POINTS)
            if (change := _mean_change(scores[first], scores[step])) is not None
        ]
        lines.insert(0, svg.Line("score", gains, of="score-change"))
    return svg.line_chart(lines, label=f"Change of {name} and of the score over steps", baseline=0.0)


def _mean_change(before: findings.Scores, after: findings.Scores) -> float | None:
    was, now = row_means(before), row_means(after)
    shared = was.keys() & now.keys()
    return math.fsum(now[row] - was[row] for row in shared) / len(shared) if shared else None


def _alarms(probed: Mapping[str, Sequence[ProbePoint]]) -> list[str]:
    struck = [(point.step, name, point) for name, points in probed.items() for point in points if point.alarm]
    return [
        f"Step {step}: the score rose and {name} fell by {figure(-(point.change or 0.0))}, "
        f"noise {figure(point.noise or 0.0)}."
        for step, name, point in sorted(struck, key=lambda entry: entry[:2])
    ]


# ---------------------------------------------------------------- training


@dataclass(frozen=True)
class Card:
    name: str
    points: Sequence[tuple[int, float]]
    text: str
    healthy: str
    chart: Markup | None  # None: it never changed


def _training(history: History, other: History | None) -> list[Card]:
    """The metrics that have a healthy range and that this run wrote in a training step."""
    cards = []
    for name in history.metric_names:
        meaning = meaning_of(name)
        points = history.metric(name)
        if meaning is None or not meaning.is_charted:
            continue
        if len({value for _, value in points}) == 1:
            cards.append(Card(name, points, meaning.text, meaning.healthy, None))
            continue
        shown = thinned(points, METRIC_POINTS)
        lines = [svg.Line(name, shown, of=f"metric/{name}")]
        if other is not None and (theirs := other.metric(name)):
            lines.append(svg.Line(f"{name}, the other run", thinned(theirs, METRIC_POINTS), css="b"))
        chart = svg.line_chart(lines, label=f"{name} over steps, last {points[-1][1]:.3g}")
        cards.append(Card(name, points, meaning.text, meaning.healthy, chart))
    order = {meaning.pattern: position for position, meaning in enumerate(METRICS)}
    return sorted(cards, key=lambda card: order[meaning_of(card.name).pattern])  # type: ignore[union-attr]


def _metric_rows(history: History) -> list[dict[str, Any]]:
    rows = []
    for name in sorted(history.metric_names):
        if name not in ("step", "time"):
            values = [value for _, value in history.metric(name)]
            rows.append(
                {"name": name, "first": values[0], "last": values[-1], "least": min(values), "most": max(values)}
            )
    return rows


def _non_finite(history: History) -> str:
    """Which metrics were NaN or infinite, and in how many lines."""
    counts: dict[str, int] = {}
    for line in history.metrics:
        for name in line.get("non_finite") or ():
            counts[str(name)] = counts.get(str(name), 0) + 1
    return ", ".join(f"{name} in {count} line(s)" for name, count in counts.items())


def _speed(history: History) -> list[tuple[str, float, str]]:
    """(name, value, what it is of): the last line's."""
    found = [(name, history.metric(name)) for name in history.metric_names if name.startswith("speed/")]
    return [
        (name.removeprefix("speed/").replace("_", " "), points[-1][1], f"metric/{name}/{points[-1][0]}")
        for name, points in found
    ]


def _scorer(history: History) -> list[tuple[str, float, str]]:
    """How the scorer served, means over training steps, and its part of the time in which clips are made."""
    rows = []
    for key, title in (
        ("latency_p50_s", "median latency, s"),
        ("latency_p95_s", "95th percentile, s"),
        ("requests", "requests a step"),
        ("retries", "retries a step"),
    ):
        values = [value for _, value in history.metric(f"reward/scorer/{key}")]
        if values:
            rows.append((title, sum(values) / len(values), f"scorer/{key}"))
    shares = [
        100 * line["reward/scorer/latency_p50_s"] / line["timing_s/gen"]
        for line in history.metrics
        if all(is_number(line.get(name)) for name in ("reward/scorer/latency_p50_s", "timing_s/gen"))
        and line["timing_s/gen"] > 0
    ]
    if shares:
        rows.append(
            ("the median clip waits for its score, % of gen", sum(shares) / len(shares), "scorer/share_percent")
        )
    return rows


# ---------------------------------------------------------------- configuration


def differences_from_defaults(config: Mapping[str, Any]) -> tuple[list[tuple[str, str, str]], str]:
    """(key, default, value) of each setting that is not its platform's and reward preset's default; and a sentence."""
    if not config:
        return [], "This directory has no config.yaml: nothing says how the run was set up."
    words = [f"tts.platform={_select(config, 'tts.platform') or 'auto'}"]
    if preset := _select(config, "tts.reward.preset"):
        words.append(f"tts.reward.preset={preset}")
    try:
        default = compose(words)
    except ConfigError as error:
        return [], f"The defaults of this version of verl_tts cannot be composed for it: {error}"
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(default, resolve=True)
    rows = differences_between(plain, config)
    here = [row for row in rows if row[2] != NOT_SET]
    sentence = f"{len(here)} settings differ from the defaults of this version for {' '.join(words)}. "
    if len(here) < len(rows):
        sentence += f"{len(rows) - len(here)} that this version knows are not in its config.yaml. "
    return here, sentence + "Everything else is in config.yaml."


def differences_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(key, before, after) of each leaf that differs, ours first."""
    flat_before, flat_after = _leaves(before), _leaves(after)
    keys = [*flat_after, *(key for key in flat_before if key not in flat_after)]
    rows = [
        (key, _shown(flat_before.get(key, _UNSET)), _shown(flat_after.get(key, _UNSET)))
        for key in keys
        if flat_before.get(key, _UNSET) != flat_after.get(key, _UNSET)
    ]
    return sorted(rows, key=lambda row: (not row[0].startswith("tts."), row[0]))


def _changes_at_resumes(history: History) -> dict[int, list[tuple[str, str, str]]]:
    attempts = sorted(history.configs)
    return {
        now: differences_between(history.configs[before], history.configs[now]) for before, now in pairwise(attempts)
    }


def _leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(node, Mapping) and node:
        return {
            key: value
            for name, child in node.items()
            for key, value in _leaves(child, f"{prefix}.{name}" if prefix else str(name)).items()
        }
    return {prefix: node}


def _shown(value: Any) -> str:
    if value is _UNSET:
        return NOT_SET
    text = (
        {None: "null", True: "true", False: "false"}.get(value)
        if value is None or value is True or value is False
        else None
    )
    text = str(value) if text is None else text
    return text if len(text) <= 120 else f"{text[:117]}..."


def _select(config: Mapping[str, Any], path: str) -> Any:
    node: Any = config
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


# ---------------------------------------------------------------- comparison


@dataclass(frozen=True)
class ComparedPart:
    name: str
    here: float
    there: float
    difference: Interval | None


@dataclass(frozen=True)
class Comparison:
    step: int
    other_step: int
    shared: int
    rows: Sequence[ComparedPart]


def _comparison(history: History, other: History) -> Comparison | None:
    """The last validations, over the rows that both have; None where they share none."""
    if not history.val or not other.val:
        return None
    step, other_step = history.val_steps[-1], other.val_steps[-1]
    shared = {clip.row_id for clip in history.val[step]} & {clip.row_id for clip in other.val[other_step]}
    rows = []
    for name in history.part_names:
        here, there = (
            {row: values for row, values in by_row(clips, name).items() if row in shared}
            for clips in (history.val[step], other.val[other_step])
        )
        both = here.keys() & there.keys()
        if both:
            ours, others = (
                math.fsum(row_means({row: side[row] for row in both}).values()) / len(both) for side in (here, there)
            )
            rows.append(ComparedPart(name, ours, others, findings.change_between(there, here)))
    return Comparison(step, other_step, len(shared), rows) if rows else None
