"""The report of a real run: nothing left out, every number right, opened in a browser."""

from pathlib import Path

import pytest

from tests.unit.report.browser import CHROMIUM, LOADED, MISSING, OVERFLOWING, tab
from tests.unit.report.page_numbers import Files, PageNumbers
from verl_tts.report.glossary import meaning_of
from verl_tts.report.history import read_history
from verl_tts.report.listening import write_listening
from verl_tts.report.page import write_report

from .runs import Run, explain

pytestmark = pytest.mark.loop
OURS = {"step", "time", "attempt", "non_finite"}


def test_every_number_in_the_report_of_a_real_run_is_that_of_its_files(unbroken: Run, tmp_path: Path) -> None:
    assert unbroken.returncode == 0, explain(unbroken)
    page = tmp_path / "report.html"
    write_report(unbroken.directory, page)
    files, found = Files(unbroken.directory), PageNumbers(page.read_text(encoding="utf-8")).found
    assert len(found) > 200
    for of, value, _ in found:
        assert value == pytest.approx(files.expected(of), rel=1e-9, abs=1e-12), of


def test_every_metric_that_a_run_writes_has_its_meaning_in_the_document(unbroken: Run) -> None:
    assert unbroken.returncode == 0, explain(unbroken)
    names = {name for line in unbroken.metrics.values() for name in line} - OURS
    assert not sorted(name for name in names if meaning_of(name) is None)


def test_a_resumed_run_is_read_as_one(resumed: Run) -> None:
    history = read_history(resumed.directory)
    assert [line["step"] for line in history.metrics] == list(resumed.metrics)
    assert history.attempts == 2


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_the_report_of_a_real_run_opens_in_a_browser(unbroken: Run, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    shelf = write_report(unbroken.directory, page)
    with tab() as browser:
        browser.open(page)
        lengths = browser.run(LOADED)
        assert lengths.keys() == shelf.sounds.keys()
        assert lengths
        assert all(lengths.values())
        assert not browser.run(OVERFLOWING)
        assert not browser.complaints


def test_steps_of_a_real_run_can_be_compared_by_ear(unbroken: Run, tmp_path: Path) -> None:
    key = write_listening(unbroken.directory, tmp_path / "test.html", a=0, b=4, pairs=4)
    assert key.exists()
