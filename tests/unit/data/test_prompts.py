import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_tts.data.prompts import read_prompts, write_prompts
from verl_tts.data.schema import COLUMNS, to_columns
from verl_tts.errors import DataError
from verl_tts.types import PromptRow


def make_row(index: int, text: str = "Hello there.", **fields) -> PromptRow:
    return PromptRow(
        id=f"en-{index}", text=text, split="train", index=index, data_source="demo", ground_truth=text, **fields
    )


def test_rows_come_back_in_order_also_when_they_have_different_fields(tmp_path):
    rows = [make_row(0, extra={"target_seconds": 1.5}), make_row(1, speaker="asha"), make_row(2, language="English")]
    write_prompts(rows, tmp_path / "a.parquet")
    assert read_prompts(tmp_path / "a.parquet") == rows


def test_several_files_are_one_list(tmp_path):
    write_prompts([make_row(0)], tmp_path / "a.parquet")
    write_prompts([make_row(1)], tmp_path / "b.parquet")
    assert [row.id for row in read_prompts(tmp_path / "a.parquet", tmp_path / "b.parquet")] == ["en-0", "en-1"]


def test_a_bad_row_is_named_by_file_and_number(tmp_path):
    columns = [to_columns(make_row(index)) for index in range(4)]
    columns[2]["prompt"][0]["content"] = "?!"
    pq.write_table(pa.Table.from_pylist(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 2: the text '\?!' has no letter"):
        read_prompts(tmp_path / "a.parquet")


def test_a_duplicate_id_is_named_with_both_rows(tmp_path):
    write_prompts([make_row(0), make_row(1), make_row(0)], tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 2: the id en-0 is also that of .*a\.parquet, row 0"):
        read_prompts(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", COLUMNS)
def test_a_missing_column_is_named_with_those_that_are_there(tmp_path, name):
    columns = to_columns(make_row(0))
    del columns[name]
    pq.write_table(pa.Table.from_pylist([columns]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet lacks the column {name}; it has "):
        read_prompts(tmp_path / "a.parquet")


def test_a_file_that_is_empty_missing_or_no_parquet_is_refused(tmp_path):
    write_prompts([make_row(0)], tmp_path / "empty.parquet")
    pq.write_table(pq.read_table(tmp_path / "empty.parquet").slice(0, 0), tmp_path / "empty.parquet")
    (tmp_path / "text.parquet").write_text("id,text\n")
    for name, message in {
        "empty": "has no rows",
        "gone": "does not exist",
        "text": "cannot be read as parquet",
    }.items():
        with pytest.raises(DataError, match=message) as refused:
            read_prompts(tmp_path / f"{name}.parquet")
        assert "\n" not in str(refused.value)
