"""Both pages in headless Chromium: as a person opens them, from a file."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.report import simulated
from tests.unit.report.browser import CHROMIUM, LOADED, MISSING, OVERFLOWING, UNLABELLED, Tab, tab
from tests.unit.report.page_numbers import Files, PageNumbers
from tests.unit.report.simulated import HOSTILE, simulate
from verl_tts.commands import main
from verl_tts.report.listening import write_listening
from verl_tts.report.page import write_report
from verl_tts.report.votes import read_ballots, read_key, tally

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]
PAIRS = 6


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("browser") / "run"
    simulate(directory, steps=4, val_freq=2, val_rows=8, seconds=(0.2, 0.4))
    return directory


@pytest.fixture
def browser() -> Iterator[Tab]:
    with tab() as opened:
        yield opened


@pytest.fixture
def listening(run_dir: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The page and its key."""
    out = tmp_path / "test.html"
    return out, write_listening(run_dir, out, a=0, b=4, pairs=PAIRS)


def assert_quiet(browser: Tab) -> None:
    assert not browser.complaints
    assert not [url for url in browser.requests if not url.startswith(("file:", "data:", "blob:"))]


def test_the_report_opens_without_a_complaint_and_every_player_has_a_source_that_decodes(
    browser: Tab, run_dir: Path, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    shelf = write_report(run_dir, page)
    browser.open(page)
    lengths = browser.run(LOADED)
    assert lengths.keys() == shelf.sounds.keys()
    for name, seconds in lengths.items():
        assert seconds == pytest.approx(shelf.sounds[name].seconds, abs=0.12), "MP3 frames are 24 ms"
    players = browser.run("[...document.querySelectorAll('.player')].map((e) => e.dataset.clip)")
    assert set(players) == lengths.keys()
    assert not browser.run(UNLABELLED)
    assert_quiet(browser)


def test_the_numbers_that_the_browser_shows_are_those_of_the_files(browser: Tab, run_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_report(run_dir, page)
    browser.open(page)
    shown = browser.run("[...document.querySelectorAll('[data-of]')].map((e) => [e.dataset.of, e.dataset.value])")
    assert len(shown) == len(PageNumbers(page.read_text(encoding="utf-8")).found) > 200
    files = Files(run_dir)
    for of, value in shown:
        assert float(value) == pytest.approx(files.expected(of), rel=1e-9, abs=1e-12), of


def test_a_player_plays_to_its_end_one_at_a_time_and_by_keyboard(browser: Tab, run_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_report(run_dir, page)
    browser.open(page)
    # Clips are shorter than a question to the browser takes, so the page itself notes what happens.
    browser.run(
        "window.at_once = []; window.ended = 0; document.addEventListener('heard', () => window.ended++);"
        "document.addEventListener('played', () =>"
        " window.at_once.push(document.querySelectorAll('.player.playing').length)); 0"
    )
    browser.click(".steps li:nth-child(1) .player")
    browser.wait("window.ended === 1")
    browser.run("document.querySelector('.player').focus(); 0")
    browser.press(" ")
    browser.wait("window.ended === 2")
    browser.run("[...document.querySelectorAll('.player')].slice(0, 3).forEach((player) => player.click()); 0")
    browser.wait("window.ended === 3")
    assert browser.run("window.at_once") == [1, 1, 1], "of three started at once the last is heard"
    assert browser.run("document.querySelectorAll('.player.playing').length") == 0
    assert_quiet(browser)


def test_hostile_prompts_neither_run_nor_break_the_page(browser: Tab, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(simulated, "TEXTS", HOSTILE)
    simulate(tmp_path / "run", steps=2, val_freq=1, val_rows=len(HOSTILE), seconds=(0.2, 0.3))
    write_report(tmp_path / "run", tmp_path / "report.html")
    write_listening(tmp_path / "run", tmp_path / "test.html", a=0, b=2, pairs=4)
    browser.resize(390, 800, phone=True)
    for page in ("report.html", "test.html"):
        browser.open(tmp_path / page)
        assert "owned" not in browser.run("document.title")
        assert not browser.run(OVERFLOWING)
    browser.run("state.listener = 'x'; go(); 0")
    for number, pair in enumerate(browser.run("test.pairs.map((pair) => pair.text)")):
        browser.run(f"state.at = {number}; go(); 0")
        assert browser.run("document.querySelector('#text').textContent") == pair
        assert not browser.run(OVERFLOWING)
    assert_quiet(browser)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True), (320, False)])
def test_nothing_runs_out_of_the_page_at_any_width(
    browser: Tab, run_dir: Path, tmp_path: Path, listening: tuple[Path, Path], width: int, dark: bool
) -> None:
    page = tmp_path / "report.html"
    write_report(run_dir, page)
    browser.resize(width, 800, phone=width < 500, dark=dark)
    for file in (page, listening[0]):
        browser.open(file)
        assert not browser.run(OVERFLOWING)
        assert not browser.run(UNLABELLED)
    assert_quiet(browser)


def test_the_colours_of_both_themes_can_be_read(browser: Tab, run_dir: Path, tmp_path: Path) -> None:
    """Contrast of text to its ground by WCAG 2: at least 4.5."""
    page = tmp_path / "report.html"
    write_report(run_dir, page)
    for dark in (False, True):
        browser.resize(1280, 800, dark=dark)
        browser.open(page)
        pick = "(name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
        colours = browser.run(
            f"Object.fromEntries(['paper', 'raised', 'ink', 'quiet', 'a', 'b', 'alarm', 'good'].map("
            f"(name) => [name, ({pick})('--' + name)]))"
        )
        for name in ("ink", "quiet", "a", "b", "alarm", "good"):
            for ground in ("paper", "raised"):
                assert contrast(colours[name], colours[ground]) >= 4.5, (dark, name, ground)


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def listen_to_both(browser: Tab) -> None:
    for number in ("1", "2"):
        heard = f"document.querySelector('#play-{'first' if number == '1' else 'second'}').classList.contains('heard')"
        browser.press(number)
        browser.wait(heard)


def test_the_listening_page_is_answered_survives_a_reload_and_its_answers_are_scored(
    browser: Tab, listening: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A listener who always prefers step 4."""
    page, key_file = listening
    key = read_key(key_file)
    browser.open(page)
    browser.run("document.querySelector('#listener').value = 'Anna B.'; 0")
    browser.click("#who button")
    for number, pair in enumerate(key.pairs, start=1):
        browser.wait(f"document.querySelector('#count').textContent === '{number} of {PAIRS}'")
        assert browser.run("document.querySelector('#text').textContent") == pair.text
        assert browser.run("document.querySelector('#choices').disabled"), "nothing was heard yet"
        listen_to_both(browser)
        if number == 3:
            browser.call("Page.reload")
            browser.wait("document.readyState === 'complete' && !document.querySelector('#pair').hidden")
            assert browser.run("document.querySelector('#count').textContent") == f"3 of {PAIRS}"
            assert not browser.run("document.querySelector('#choices').disabled"), "what was heard stays heard"
        browser.press("ArrowLeft" if pair.first == "b" else "ArrowRight")
    browser.wait("!document.querySelector('#end').hidden")
    browser.click("#save")
    saved = browser.downloads / f"answers_{key.page}_Anna_B_.json"
    for _ in range(200):
        if saved.exists() and saved.stat().st_size:
            break
        browser.run("new Promise((done) => setTimeout(done, 50))")
    answers = tmp_path / "answers.json"
    shutil.copy(saved, answers)
    ballot = json.loads(answers.read_text())
    assert ballot == json.loads(browser.run("document.querySelector('#answers').value"))
    assert [answer["pair"] for answer in ballot["answers"]] == [pair.id for pair in key.pairs]
    assert all(min(answer["plays"].values()) >= 1 and answer["seconds"] > 0 for answer in ballot["answers"])
    browser.click("#another")
    browser.wait("!document.querySelector('#begin').hidden")
    assert browser.run("[state.listener, state.at, Object.keys(state.answers).length]") == ["", 0, 0]
    assert_quiet(browser)

    result = tally(key, read_ballots([answers], key))
    assert (result.pairs.wins, result.pairs.decided) == (PAIRS, PAIRS)
    assert main(["listen", "--score", str(answers), "--key", str(key_file)]) == 0
    assert f"{PAIRS} of {PAIRS}, 1.00" in capsys.readouterr().out


def test_an_answer_can_be_changed_by_going_back(browser: Tab, listening: tuple[Path, Path]) -> None:
    browser.open(listening[0])
    browser.run("document.querySelector('#listener').value = 'x'; 0")
    browser.click("#who button")
    listen_to_both(browser)
    browser.click("[data-choice=first]")
    browser.wait(f"document.querySelector('#count').textContent === '2 of {PAIRS}'")
    browser.click("#back")
    browser.wait(f"document.querySelector('#count').textContent === '1 of {PAIRS}'")
    assert browser.run("document.querySelector('[data-choice=first]').ariaPressed") == "true"
    browser.click("[data-choice=none]")
    assert browser.run("ballot().answers.map((one) => one.choice).join()") == "none"
    assert_quiet(browser)


def test_the_key_of_the_pair_is_nowhere_in_the_page(listening: tuple[Path, Path], run_dir: Path) -> None:
    """Neither step nor score nor file name; and each pair's clips are named in the order they are played."""
    page, key_file = listening
    html, key = page.read_text(encoding="utf-8"), read_key(key_file)
    test = json.loads(html.split('id="test">')[1].split("</script>")[0])
    assert test.keys() == {"format", "page", "pairs"}
    for pair in test["pairs"]:
        assert pair.keys() == {"id", "text", "first", "second"}
        number = int(pair["id"].removeprefix("p"))
        assert (pair["first"], pair["second"]) == (f"c{2 * number - 1}", f"c{2 * number}")
    for pair in key.pairs:
        assert pair.row_id not in html
        for value in (*pair.values_a.values(), *pair.values_b.values()):
            assert value in (0.0, 1.0) or repr(value) not in html
    assert str(run_dir) not in html
