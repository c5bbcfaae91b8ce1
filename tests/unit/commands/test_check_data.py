"""``verl-tts check-data`` on files that each break one thing, and on ones that break nothing."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_tts.commands import main
from verl_tts.data import check
from verl_tts.data.check import scripts_of
from verl_tts.data.prompts import write_prompts
from verl_tts.data.schema import to_columns
from verl_tts.types import PromptRow


def prompt(name: str, text: str, **fields) -> PromptRow:
    return PromptRow(
        id=name, text=text, split="train", index=0, data_source="demo", ground_truth=text, **fields
    )  # fmt: skip


def save(path: Path, *rows: PromptRow) -> str:
    write_prompts(rows, path)
    return str(path)


@pytest.fixture
def checked(capsys):
    """Runs the command; its exit code and what it said."""

    def run(*words: str | Path) -> tuple[int, str]:
        code = main(["check-data", *map(str, words)])
        return code, capsys.readouterr().out

    return run


def test_files_with_nothing_wrong_are_a_table(checked, tmp_path):
    train = save(
        tmp_path / "train.parquet",
        prompt("a", "नमस्ते दुनिया", language="Auto", speaker="asha"),
        prompt("b", "चलो mall चलें", language="Auto"),
        prompt("c", "दो"),
    )
    val = save(tmp_path / "val.parquet", prompt("d", "How are you?", language="English"))
    code, said = checked(train, val)
    assert code == 0
    header, first, second, *rest = said.splitlines()
    assert header.split() == ["file", "rows", "characters", "scripts", "languages", "speakers"]
    assert first.split("  ")[0] == train
    assert "  3     2-13, median 13" in first
    assert "Devanagari 2, Devanagari+Latin 1" in first
    assert "Auto 2, (the run's) 1" in first
    assert "(the run's) 2, asha 1" in first
    assert "Latin 1" in second
    assert "English 1" in second
    assert rest == ["", "refused: none", "", "warnings: none"]


@pytest.mark.parametrize(
    ("text", "scripts"),
    [("नमस्ते world 1", ["Devanagari", "Latin"]), ("12", ["none"]), ("日本語", ["Cjk"]), ("ಕನ್ನಡ", ["Kannada"])],
)
def test_scripts_are_those_of_the_letters(text, scripts):
    assert scripts_of(text) == scripts


def test_every_bad_row_is_named_and_a_run_would_refuse_it(checked, tmp_path):
    columns = [to_columns(prompt(name, "Hello.")) for name in "abcd"]
    columns[1]["prompt"][0]["content"] = "…!"
    columns[3]["reward_model"]["ground_truth"] = ""
    pq.write_table(pa.Table.from_pylist(columns), tmp_path / "a.parquet")
    code, said = checked(tmp_path / "a.parquet")
    assert code == 2
    assert "refused: 2" in said
    assert "a.parquet, row 1: the text '…!' has no letter or digit to be spoken" in said
    assert "a.parquet, row 3: reward_model.ground_truth is empty" in said


def test_an_id_twice_in_a_file_is_refused_and_in_two_files_it_is_not(checked, tmp_path):
    twice = save(tmp_path / "a.parquet", prompt("a", "One."), prompt("a", "Two."))
    assert checked(twice)[0] == 2
    assert "the id a is that of 2 rows" in checked(twice)[1]
    files = [save(tmp_path / f"{n}.parquet", prompt("a", n)) for n in ("one", "two")]
    assert checked(*files)[0] == 0


def test_files_that_are_no_prompt_files_are_refused_beside_others(checked, tmp_path):
    good = save(tmp_path / "good.parquet", prompt("a", "Hello."))
    (tmp_path / "text.parquet").write_text("id,text")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "other.parquet")
    code, said = checked(good, tmp_path / "text.parquet", tmp_path / "other.parquet", tmp_path / "gone.parquet")
    assert code == 2
    for reason in ("cannot be read as parquet", "lacks the column data_source; it has text", "does not exist"):
        assert reason in said


def test_texts_that_are_the_same_after_folding_are_warnings(checked, tmp_path):
    train = save(tmp_path / "train.parquet", prompt("a", "चलो, घर!"), prompt("b", "चलो घर।"), prompt("c", "कल आना"))
    val = save(tmp_path / "val.parquet", prompt("d", "“कल” आना"), prompt("e", "और कुछ"))
    code, said = checked(train, val)
    assert code == 0
    assert "warnings: 2" in said
    assert f"{train}: a, b read the same after folding: चलो घर" in said
    assert f"c of {train}, d of {val} read the same: कल आना" in said


def test_more_findings_than_a_screen_are_counted(checked, tmp_path):
    rows = [prompt(f"{twin}{number}", f"number {number}") for number in range(23) for twin in "ab"]
    assert "  and 3 more" in checked(save(tmp_path / "a.parquet", *rows))[1]


# ---------------------------------------------------------------- speakers and languages


@pytest.fixture
def speakers(tmp_path) -> Path:
    folder = tmp_path / "speakers"
    folder.mkdir()
    (folder / "asha.json").write_text(json.dumps([0.1] * 64))
    (folder / "short.json").write_text("[0.1]")
    return folder


@pytest.mark.parametrize(
    ("speaker", "with_model", "reason"),
    [
        ("asha", True, None),
        ("short", False, None),  # the length of an embedding is the model's business
        ("short", True, "2 rows: .*short.json has 1 values, but the model's speaker embedding has 64"),
        ("meera", False, "2 rows: the speaker embedding .*meera.json does not exist"),
        (None, False, "2 rows: .* is a folder, so extra_info.speaker has to name one"),
        ("../asha", False, "2 rows: .*has to be a plain name"),
    ],
)
def test_speakers_are_looked_up(speaker, with_model, reason, checked, speakers, tiny_checkpoint, tmp_path):
    file = save(tmp_path / "a.parquet", prompt("a", "One.", speaker=speaker), prompt("b", "Two.", speaker=speaker))
    code, said = checked(file, "--speakers", speakers, *(["--model", tiny_checkpoint] if with_model else []))
    assert (code, bool(reason)) in ((0, False), (2, True))
    if reason:
        assert re.search(reason, said)


def test_languages_are_compared_with_those_of_the_model(checked, tiny_checkpoint, tmp_path):
    rows = [prompt(name, name, language=name) for name in ("Auto", "english", "Hindi")]
    code, said = checked(save(tmp_path / "a.parquet", *rows), "--model", tiny_checkpoint)
    assert code == 2
    assert "refused: 1" in said
    assert "1 rows have extra_info.language=Hindi; the model knows auto, chinese, english" in said


# ---------------------------------------------------------------- nested columns


def test_a_map_column_is_refused_wherever_it_is(checked, tmp_path):
    """verl reads with ``datasets``, and all columns."""
    import datasets

    table = pa.Table.from_pylist([to_columns(prompt("a", "Hello."))])
    tags = pa.array([[("mood", 1)]], type=pa.map_(pa.string(), pa.int64()))
    pq.write_table(table.append_column("more", pa.StructArray.from_arrays([tags], ["tags"])), tmp_path / "a.parquet")
    code, said = checked(tmp_path / "a.parquet")
    assert code == 2
    assert "the column more is a map (struct<tags: map<string, int64" in said
    with pytest.raises(ValueError, match="does not have a datasets dtype"):
        datasets.load_dataset("parquet", data_files=str(tmp_path / "a.parquet"), cache_dir=str(tmp_path / "cache"))


def test_a_nested_column_that_is_too_big_for_one_array_is_refused(checked, tmp_path, monkeypatch):
    file = save(tmp_path / "a.parquet", prompt("a", "Hello."), prompt("b", "Goodbye, and a word that takes room."))
    monkeypatch.setattr(check, "NESTED_LIMIT_BYTES", 100)
    code, said = checked(file)
    assert code == 2
    assert "prompt.list.element.content has " in said
    assert "nested columns can be read up to 100; write smaller row groups" in said


def test_files_whose_fields_have_two_types_cannot_be_one_list(checked, tmp_path):
    one = save(tmp_path / "one.parquet", prompt("a", "One.", extra={"rank": 1}))
    other = save(tmp_path / "two.parquet", prompt("b", "Two.", extra={"rank": "first", "more": 1}))
    code, said = checked(one, other)
    assert code == 0
    assert f"extra_info.rank is int64 in {one} and string in {other}: they cannot be in one list" in said
    assert "extra_info.more" not in said


def test_a_file_that_is_not_there_has_no_row_in_the_table(checked, tmp_path):
    code, said = checked(tmp_path / "gone.parquet")
    assert code == 2
    assert re.fullmatch(r"refused: 1\n  .*gone.parquet does not exist\n", said)
    good = save(tmp_path / "good.parquet", prompt("a", "one"))
    _, said = checked(tmp_path / "gone.parquet", good)
    assert [line.split()[0] for line in said.split("\n\n")[0].splitlines()] == ["file", good]
