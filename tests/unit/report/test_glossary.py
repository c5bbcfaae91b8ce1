"""The report and docs/reading_a_run.md say the same, and leave no metric out."""

from pathlib import Path

import pytest

from verl_tts.report.glossary import ADVICE, MEANINGS, METRICS, meaning_of

DOCUMENT = (Path(__file__).parents[3] / "docs/reading_a_run.md").read_text(encoding="utf-8")


def test_the_document_has_what_the_report_says_about_each_metric() -> None:
    for meaning in METRICS:
        assert f"| `{meaning.pattern}` | {meaning.text} | {meaning.healthy} |" in DOCUMENT
    for name, text in MEANINGS.items():
        assert f"| `{name}` | {text} |" in DOCUMENT
    for seen, change_first in ADVICE:
        assert f"| {seen} | {change_first} |" in DOCUMENT


@pytest.mark.parametrize(
    ("metric", "pattern"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/parts/clip/seconds", "reward/parts/*"),
        ("response_length_non_aborted/mean", "response_length*/*"),
        ("training/off_policy/trajectory_staleness/mean", "training/off_policy/trajectory_staleness/mean"),
        ("training/off_policy/trajectory_spans/max", "training/off_policy/*"),
        ("training/rollout_probs_diff_max", "training/rollout_*"),
    ],
)
def test_a_metric_has_the_first_meaning_that_matches(metric: str, pattern: str) -> None:
    found = meaning_of(metric)
    assert found is not None
    assert found.pattern == pattern


def test_each_pattern_can_be_reached() -> None:
    for meaning in METRICS:
        assert meaning_of(meaning.pattern.replace("*", "x")) is meaning
