import json

from verl_tts.data.prompts import read_prompts
from verl_tts.data.quickstart import TARGET_SECONDS, invented_speaker, main, quickstart_rows


def test_train_and_val_have_both_languages_and_no_sentence_in_common():
    rows = quickstart_rows()
    assert {split: len(found) for split, found in rows.items()} == {"train": 48, "val": 16}
    for found in rows.values():
        assert [row.id[:2] for row in found] == ["en", "hi"] * (len(found) // 2)
        assert [row.extra["target_seconds"] for row in found[:2]] == [*TARGET_SECONDS.values()]
    texts = [row.text for found in rows.values() for row in found]
    assert len(set(texts)) == len(texts)


def test_the_files_are_those_rows_and_the_same_each_time(tmp_path, tiny_checkpoint):
    for out in ("a", "b"):
        assert main([str(tmp_path / out), "--model", str(tiny_checkpoint)]) == 0
    for split, rows in quickstart_rows().items():
        assert read_prompts(tmp_path / "a" / f"{split}.parquet") == rows
    speaker = json.loads((tmp_path / "a" / "speaker.json").read_text())
    assert speaker == json.loads((tmp_path / "b" / "speaker.json").read_text())


def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert main([str(tmp_path), "--model", str(tmp_path / "gone")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_invented_voice_is_fixed_and_of_unit_variance():
    speaker = invented_speaker(1024)
    assert speaker[:2] == [0.482989, -1.645411]
    assert abs(sum(speaker) / 1024) < 0.1
    assert abs(sum(value**2 for value in speaker) / 1024 - 1) < 0.1
