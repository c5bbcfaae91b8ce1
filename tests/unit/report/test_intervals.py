import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tts.report.intervals import Interval, mean_interval, paired_difference

SCORES = st.dictionaries(
    st.text(min_size=1, max_size=3), st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=8
)


def drawn(random: np.random.Generator, rows: int, samples: int, mean: float = 0.5) -> dict[str, list[float]]:
    """Texts differ by 0.1, the samples of a text by 0.2."""
    texts = mean + 0.1 * random.standard_normal(rows)
    return {f"row-{i}": list(text + 0.2 * random.standard_normal(samples)) for i, text in enumerate(texts)}


@given(SCORES)
@settings(max_examples=40, deadline=None)
def test_a_mean_lies_within_its_interval_and_the_interval_within_the_scores(scores):
    interval = mean_interval(scores, draws=200)
    flat = [score for row in scores.values() for score in row]
    assert min(flat) - 1e-9 <= interval.low <= interval.high <= max(flat) + 1e-9
    assert interval.mean == pytest.approx(np.mean([np.mean(row) for row in scores.values()]))


@given(SCORES)
@settings(max_examples=40, deadline=None)
def test_an_evaluation_does_not_differ_from_itself_with_one_sample_a_row(scores):
    ones = {row: samples[:1] for row, samples in scores.items()}
    assert paired_difference(ones, ones, draws=200) == Interval(0.0, 0.0, 0.0)


def test_a_shift_of_every_row_is_found_exactly_where_each_row_has_one_sample():
    before = {f"row-{i}": [i / 10] for i in range(10)}
    after = {row: [samples[0] + 0.25] for row, samples in before.items()}
    interval = paired_difference(before, after)
    assert (interval.mean, interval.low, interval.high) == pytest.approx((0.25, 0.25, 0.25))
    assert interval.excludes_zero


def test_two_evaluations_of_one_policy_differ_by_sampling_noise_that_the_interval_holds():
    """Of 200 pairs of evaluations without a true difference about one in twenty may exclude 0."""
    random = np.random.default_rng(7)
    excluded = 0
    for _ in range(200):
        texts = 0.1 * random.standard_normal(40)
        sides = [{f"row-{i}": list(t + 0.2 * random.standard_normal(3)) for i, t in enumerate(texts)} for _ in range(2)]
        excluded += paired_difference(*sides, draws=500).excludes_zero
    assert excluded <= 20


def test_more_samples_a_row_give_a_narrower_interval():
    random = np.random.default_rng(0)
    narrow, wide = (mean_interval(drawn(random, 50, samples)) for samples in (16, 1))
    assert narrow.high - narrow.low < wide.high - wide.low


def test_rows_may_have_different_numbers_of_samples():
    interval = mean_interval({"a": [0.0], "b": [1.0, 1.0, 1.0], "c": [0.5, 0.5]})
    assert interval.mean == pytest.approx(0.5)
    assert 0.0 <= interval.low < interval.high <= 1.0


def test_the_same_scores_give_the_same_interval_whatever_the_order_of_rows():
    scores = drawn(np.random.default_rng(3), 20, 2)
    assert mean_interval(scores) == mean_interval(dict(reversed(scores.items())))


def test_rows_that_are_on_one_side_only_are_refused_by_name():
    with pytest.raises(ValueError, match=r"1 row\(s\) are on one side only, the first is 'b'"):
        paired_difference({"a": [1.0]}, {"a": [1.0], "b": [0.0]})


@pytest.mark.parametrize("scores", [{}, {"a": []}])
def test_there_is_no_interval_of_nothing(scores):
    with pytest.raises(ValueError, match="no interval without rows"):
        mean_interval(scores)
