"""The page of a blind test, and its key."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.report.simulated import simulate
from verl_tts.commands import main
from verl_tts.errors import ConfigError
from verl_tts.report.listening import write_listening
from verl_tts.report.votes import read_key


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("listening") / "run"
    simulate(directory, steps=4, val_freq=2, val_rows=9, samples=3, seconds=(0.2, 0.3), train_kept=0)
    return directory


def test_each_prompt_comes_once_before_any_comes_again_and_orders_are_balanced(run_dir: Path, tmp_path: Path) -> None:
    for pairs in (8, 9, 20):
        key = read_key(write_listening(run_dir, tmp_path / f"{pairs}.html", a=0, b=4, pairs=pairs))
        assert len({(pair.row_id, pair.sample) for pair in key.pairs}) == pairs
        rows = Counter(pair.row_id for pair in key.pairs)
        assert pairs > 8 or max(rows.values()) == 1  # a ninth row may have clips without audio
        orders = Counter(pair.first for pair in key.pairs)
        assert abs(orders["a"] - orders["b"]) == pairs % 2


def test_the_key_has_the_scores_of_both_clips_from_samples_jsonl(run_dir: Path, tmp_path: Path) -> None:
    key = read_key(write_listening(run_dir, tmp_path / "t.html", a=2, b=4, pairs=5))
    lines = {
        step: {
            (line["id"], line["sample"]): line
            for line in map(json.loads, (run_dir / f"samples/val/step_{step}/samples.jsonl").read_text().splitlines())
        }
        for step in (2, 4)
    }
    for pair in key.pairs:
        for step, values in ((2, pair.values_a), (4, pair.values_b)):
            line = lines[step][pair.row_id, pair.sample]
            assert (values["score"], values["cer"]) == (line["score"], line["parts"]["cer"])


def test_a_seed_gives_the_same_page_again_and_none_gives_another(run_dir: Path, tmp_path: Path) -> None:
    pages = []
    for number, seed in enumerate((7, 7, None, None)):
        write_listening(run_dir, tmp_path / f"{number}.html", a=0, b=4, pairs=6, seed=seed)
        pages.append((tmp_path / f"{number}.html").read_text())
    assert pages[0] == pages[1]
    assert len(set(pages)) == 3


def test_a_page_that_is_there_is_not_replaced(run_dir: Path, tmp_path: Path) -> None:
    write_listening(run_dir, tmp_path / "t.html", a=0, b=4, pairs=2)
    with pytest.raises(ConfigError, match=r"t\.html is there already"):
        write_listening(run_dir, tmp_path / "t.html", a=0, b=4, pairs=2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--a", "0", "--b", "3"], "--b 3: that step has no validation clips"),
        (["--a", "0", "--b", "0"], "are the same step"),
        (["--a", "0", "--b", "4", "--n", "0"], "between 1 and 200"),
        (["--a", "0", "--b", "4", "--n", "28"], "pairs of clips that both can be heard and differ"),
        (["--a", "0"], "name RUN_DIR, --a STEP and --b STEP"),
        (["--score", "answers.json"], "--score needs --key FILE"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run_dir: Path, tmp_path: Path, words, says, capsys) -> None:
    assert main(["listen", str(run_dir), "--out", str(tmp_path / "t.html"), *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_to_send_and_what_to_keep(run_dir: Path, tmp_path: Path, capsys) -> None:
    assert main(["listen", str(run_dir), "--a", "0", "--b", "4", "--n", "3", "--out", str(tmp_path / "t.html")]) == 0
    said = capsys.readouterr().out
    assert "send it to listeners" in said
    assert "t.key.json: keep it to yourself" in said
