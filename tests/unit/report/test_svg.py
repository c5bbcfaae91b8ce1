"""Drawings: numbers at their place, ticks that can be read, and no input that breaks one."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from verl_tts.report.svg import HEIGHT, WIDTH, Line, histogram, labels, line_chart, ticks

VALUES = st.floats(-1e9, 1e9) | st.floats(-1e-6, 1e-6)


@given(st.lists(st.tuples(st.integers(0, 10**6), VALUES), min_size=1, max_size=40, unique_by=lambda point: point[0]))
def test_every_mark_is_inside_the_drawing_whatever_the_values(points: list[tuple[int, float]]) -> None:
    points = sorted(points)
    spread = [(x, y - 1, y + 1) for x, y in points]
    drawn = ElementTree.fromstring(line_chart([Line("part", points, of="val/part", spread=spread)], label="a"))
    marks = [element for element in drawn.iter() if element.tag == "circle"]
    assert len(marks) == len(points)
    for mark, (_, y) in zip(marks, points, strict=True):
        assert 0 <= float(mark.attrib["cx"]) <= WIDTH
        assert 0 <= float(mark.attrib["cy"]) <= HEIGHT
        assert float(mark.attrib["data-value"]) == y


def test_higher_values_are_higher() -> None:
    drawn = line_chart([Line("part", [(0, 0.1), (1, 0.9)], of="part")], label="a")
    low, high = (float(y) for y in re.findall(r'cy="([\d.]+)"', drawn))
    assert high < low


@given(st.floats(-1e4, 1e4), st.floats(1e-3, 1e5), st.integers(2, 6))
@example(1.0, 40041.0, 2)
def test_ticks_are_few_within_the_range_and_told_apart(low: float, size: float, about: int) -> None:
    high = low + size
    found = ticks(low, high, about)
    assert 1 <= len(found) <= about + 1
    assert all(low - 1e-6 * size <= tick <= high + 1e-6 * size for tick in found)
    assert len(set(labels(found))) == len(found)


def test_labels_have_as_many_decimals_as_tell_them_apart() -> None:
    assert labels([0.0, 0.2, 0.4]) == ["0.0", "0.2", "0.4"]
    assert labels([0.0, 50.0]) == ["0", "50"]


@given(st.lists(VALUES, min_size=1, max_size=50), st.lists(VALUES, max_size=50))
def test_a_histogram_takes_any_values(first: list[float], second: list[float]) -> None:
    groups = [("step 0", first), ("step 9", second)] if second else [("step 0", first)]
    drawn = ElementTree.fromstring(histogram(groups, label="a", x_end="s"))
    outlines = [element for element in drawn.iter() if element.tag == "polygon"]
    assert len(outlines) == len(groups)
    for outline in outlines:
        places = [float(number) for pair in outline.attrib["points"].split() for number in pair.split(",")]
        assert all(math.isfinite(place) for place in places)


def test_labels_are_escaped() -> None:
    drawn = line_chart([Line("<b>", [(0, 1.0)], of='"x"')], label='<script>"')
    assert "<b>" not in drawn
    assert "<script>" not in drawn


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_a_value_that_never_changes_has_an_axis(value: float) -> None:
    assert 'class="tick y"' in line_chart([Line("part", [(0, value), (1, value)])], label="a")
