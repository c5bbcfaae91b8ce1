"""Line charts and histograms as inline SVG, coloured by the page's own style sheet.

A drawing is text of a few kilobytes with its numbers as attributes: it follows the reader's light or dark theme,
scales to a phone, and can be checked against the files that it was drawn from. A plotting library fixes colours when it
draws and keeps coordinates, not numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup

Point = tuple[float, float]
Span = tuple[float, float, float]  # x, low, high

WIDTH, WIDE, HEIGHT = 340, 700, 168
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 24
ROUND = (1, 2, 5, 10)  # times a power of ten: the steps of an axis
MOST_MARKS = 60


@dataclass(frozen=True)
class Line:
    """``spread`` and ``band`` are areas behind it, wide and narrow. ``of`` names its numbers: ``of/<x>``."""

    label: str
    points: Sequence[Point]
    of: str = ""
    css: str = "a"
    spread: Sequence[Span] = ()
    band: Sequence[Span] = ()


@dataclass(frozen=True)
class Scale:
    """Maps data to a drawing of ``width`` x HEIGHT."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: int = WIDTH

    def at(self, x: float, y: float) -> str:
        (x0, x1), (y0, y1) = self.x, self.y
        px = LEFT + (x - x0) / (x1 - x0) * (self.width - LEFT - RIGHT)
        py = HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)
        return f"{px:.1f},{py:.1f}"


@dataclass(frozen=True)
class Frame:
    """Axes around a drawing."""

    scale: Scale
    y_ticks: Sequence[float]
    x_ticks: Sequence[float]
    parts: list[str] = field(default_factory=list)

    def drawn(self, label: str, x_end: str) -> Markup:
        """``x_end`` stands at the right end of the x axis: its unit, or its last value with it."""
        (x0, x1), right = self.scale.x, self.scale.width - RIGHT
        axes = []
        for y, text in zip(self.y_ticks, labels(self.y_ticks), strict=True):
            left, height = self.scale.at(x0, y).split(",")
            axes.append(f'<line class="grid" x1="{left}" y1="{height}" x2="{right}" y2="{height}"/>')
            axes.append(f'<text class="tick y" x="{LEFT - 6}" y="{height}" dy=".32em">{text}</text>')
        # As much room as the text at the end takes, at some 5 units a letter.
        room = right - 5.5 * len(x_end) - 8
        for x, text in zip(self.x_ticks, labels(self.x_ticks), strict=True):
            place = float(self.scale.at(x, 0).split(",")[0])
            if place + 3 * len(text) < room or x1 == x0:
                axes.append(f'<text class="tick x" x="{place:.1f}" y="{HEIGHT - 7}">{text}</text>')
        axes.append(f'<text class="tick unit" x="{right}" y="{HEIGHT - 7}">{Markup.escape(x_end)}</text>')
        return Markup(
            f'<svg class="chart" viewBox="0 0 {self.scale.width} {HEIGHT}" role="img" '
            f'aria-label="{Markup.escape(label)}">{"".join(axes)}{"".join(self.parts)}</svg>'
        )


def line_chart(lines: Sequence[Line], *, label: str, baseline: float | None = None, width: int = WIDTH) -> Markup:
    """Lines over steps; ``baseline`` is drawn across. At least one line has a point."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    ys += [y for line in lines for _, *limits in (*line.spread, *line.band) for y in limits]
    ys += [] if baseline is None else [baseline]
    scale = Scale(_widened(min(xs), max(xs)), _padded(*_widened(min(ys), max(ys))), width)
    steps = [x for x in ticks(*scale.x, width // 68) if x == int(x)]
    frame = Frame(scale, ticks(*scale.y, 4), steps if len(set(xs)) > 1 else [])
    for line in lines:
        frame.parts.append(_area(scale, line.spread, f"spread {line.css}"))
    for line in lines:
        frame.parts.append(_area(scale, line.band, f"band {line.css}"))
    if baseline is not None:
        (x0, y0), (x1, _) = (scale.at(x, baseline).split(",") for x in scale.x)
        frame.parts.append(f'<line class="baseline" x1="{x0}" y1="{y0}" x2="{x1}" y2="{y0}"/>')
    frame.parts.extend(_drawn(scale, line) for line in lines)
    return frame.drawn(label, f"step {max(xs):g}")


def histogram(groups: Sequence[tuple[str, Sequence[float]]], *, label: str, x_end: str) -> Markup:
    """Outlines of shares over shared bins; the first group is the quiet one."""
    values = np.concatenate([np.asarray(group, dtype=np.float64) for _, group in groups])
    bins = int(np.clip(2 * np.sqrt(len(values) / len(groups)), 6, 24))
    edges = np.linspace(*_widened(float(values.min()), float(values.max())), bins + 1)
    shares = [np.histogram(group, edges)[0] / max(1, len(group)) for _, group in groups]
    top = max(float(share.max()) for share in shares)
    scale = Scale((float(edges[0]), float(edges[-1])), (0.0, top * 1.08))
    frame = Frame(scale, ticks(0.0, top, 3), ticks(*scale.x, 5))
    for css, share in zip(("b", "a")[-len(groups) :], shares, strict=True):
        outline = [(float(edges[0]), 0.0)]
        for i, height in enumerate(share):
            outline += [(float(edges[i]), float(height)), (float(edges[i + 1]), float(height))]
        path = " ".join(scale.at(*point) for point in [*outline, (float(edges[-1]), 0.0)])
        frame.parts.append(f'<polygon class="histogram {css}" points="{path}"/>')
    return frame.drawn(label, x_end)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between ``low`` and ``high``, one at least: multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    fitting = next(index for index, factor in enumerate(ROUND) if power * factor >= raw * 0.999)
    # The step that gives the number asked for may step over the whole range; the next smaller one does not.
    for factor in reversed(ROUND[: fitting + 1]):
        step = power * factor
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if first <= last:
            break
    return [i * step + 0.0 for i in range(first, last + 1)]


def labels(values: Sequence[float]) -> list[str]:
    """As many decimals as tell each from its neighbour."""
    step = values[1] - values[0] if len(values) > 1 else 0.0
    return [_label(value, step) for value in values]


def _label(value: float, step: float) -> str:
    largest = max(abs(value), abs(step))
    if largest >= 1e6 or (value and largest < 1e-4):
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")
    decimals = max(0, -math.floor(math.log10(abs(step)) + 1e-9)) if step else 0 if value == int(value) else 2
    return f"{value:.{decimals}f}"


def _drawn(scale: Scale, line: Line) -> str:
    path = " ".join(scale.at(*point) for point in line.points)
    drawn = f'<polyline class="line {line.css}" points="{path}"/>' if len(line.points) > 1 else ""
    if line.of and len(line.points) <= MOST_MARKS:
        radius = 2.6 if len(line.points) <= MOST_MARKS / 3 else 1.6
        for x, y in line.points:
            px, py = scale.at(x, y).split(",")
            title = Markup.escape(f"{line.label}, step {x:g}: {y:.4g}")
            of = Markup.escape(f"{line.of}/{x:g}")
            drawn += (
                f'<circle class="mark {line.css}" cx="{px}" cy="{py}" r="{radius}" data-of="{of}" data-value="{y!r}">'
            )
            drawn += f"<title>{title}</title></circle>"
    return drawn


def _area(scale: Scale, spans: Sequence[Span], css: str) -> str:
    if len(spans) < 2:
        return "".join(
            f'<line class="{css} bar" x1="{x}" y1="{y0}" x2="{x}" y2="{y1}"/>'
            for span in spans
            for (x, y0), (_, y1) in [(scale.at(span[0], span[1]).split(","), scale.at(span[0], span[2]).split(","))]
        )
    lower = [scale.at(x, low) for x, low, _ in spans]
    upper = [scale.at(x, high) for x, _, high in reversed(spans)]
    return f'<polygon class="{css}" points="{" ".join([*lower, *upper])}"/>'


def _widened(low: float, high: float) -> tuple[float, float]:
    if high > low:
        return low, high
    margin = 0.5 * abs(low) or 0.5
    return (low - margin, high + margin) if low else (0.0, 1.0)


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.06 * (high - low)
    return low - margin, high + margin
