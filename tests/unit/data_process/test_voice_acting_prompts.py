"""On small corpora in the format of the real one: JSON files in tars, folders of emotions, recordings in clusters."""

import errno
import importlib.util
import io
import json
import os
import re
import sys
import tarfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from verl_tts.data.folding import fold
from verl_tts.data.prompts import read_prompts
from verl_tts.data.voices import read_references

SCRIPT = Path(__file__).parents[3] / "data_process" / "voice_acting_prompts.py"
SMALL = ["--validation-rows", "4"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("voice_acting_prompts", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def tar(path: Path, files: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


SENTENCES = (
    "I never thought that I would see you again.",
    "Get out of my house before I call the police.",
    "We have waited for this morning all year long.",
    "Did you really believe what they told you?",
    "The whole garden smells of rain and old leaves.",
    "Nobody told me that the train had left already.",
    "Please stay with me until the doctor is here.",
    "You have no idea how proud your mother would be.",
)
CORPUS = {
    f"speaker{number}/{emotion}/burst{number}.json": {"prompt": [f"[sighs] “{first}”", f"{second} (softly)"]}
    for number, (emotion, first, second) in enumerate(
        zip(("Anger", "Jealousy_Envy", "Hope_Optimism", "Relief"), SENTENCES[::2], SENTENCES[1::2], strict=True)
    )
}


@pytest.fixture
def references(tmp_path) -> Path:
    folder = tmp_path / "emolia"
    for cluster in range(6):
        (folder / f"c{cluster}").mkdir(parents=True)
        for utterance in range(2):
            soundfile.write(folder / f"c{cluster}/{utterance}.wav", np.zeros(16_000, np.float32), 16_000)
    return folder


@pytest.fixture
def prepare(script, tmp_path, references):
    def run(corpus: dict[str, Any], *words: str, out: str = "out") -> int:
        shards = tmp_path / "shards"
        tar(shards / "prompts-en.tar", corpus)
        return script.main(
            ["--out", str(tmp_path / out), "--references", str(references), "--shards", str(shards), *SMALL, *words]
        )

    return run


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


# ---------------------------------------------------------------- what comes out


def test_rows_carry_emotion_instruction_and_a_voice_of_their_own_split(prepare, tmp_path):
    assert prepare(CORPUS) == 0
    out = tmp_path / "out"
    rows = {split: read_prompts(out / f"{split}.parquet") for split in ("train", "validation")}
    voices = read_references(out / "references.json")
    assert len(rows["validation"]) == 4
    for split, clusters in (("train", voices.train), ("validation", voices.validation)):
        for index, row in enumerate(rows[split]):
            cluster, utterance = row.extra["ref_audio"].split("/")
            assert utterance in clusters[cluster]
            assert (row.index, row.split, row.ground_truth) == (index, split, row.text)
            assert row.text in SENTENCES
            assert row.extra["emotion"] in row.extra["instruction"]
    names = {row.extra["emotion_name"] for row in [*rows["train"], *rows["validation"]]}
    assert names <= {"anger", "jealousy_envy", "hope_enthusiasm_optimism", "relief"}


def test_no_file_and_no_voice_is_in_both_splits(prepare, script, tmp_path):
    corpus = {f"s/Anger/{n}.json": {"prompt": [f"{text} {n}" for text in SENTENCES]} for n in range(6)}
    assert prepare(corpus) == 0
    rows = {split: read_prompts(tmp_path / "out" / f"{split}.parquet") for split in ("train", "validation")}
    files = {split: {next(n for n in range(6) if row.text.endswith(f" {n}")) for row in rows[split]} for split in rows}
    assert not files["train"] & files["validation"]
    assert not {fold(row.text) for row in rows["train"]} & {fold(row.text) for row in rows["validation"]}
    assert manifest_of(tmp_path / "out")["rejected"]["file of a validation text"] > 0


def test_the_manifest_counts_the_rejected_by_reason_and_has_the_hashes(prepare, tmp_path, references):
    soundfile.write(references / "c0/short.wav", np.zeros(100, np.float32), 16_000)
    (references / "c1/broken.wav").write_bytes(b"no audio")
    more = CORPUS | {
        "s/Anger/de.json": {"prompt": "Ich kann nicht glauben, dass du wieder hier bist."},
        "s/Anger/same.json": {"prompt": SENTENCES[0].upper()},
        "s/Anger/empty.json": {"prompt": "[sobs]"},
        "s/Anger/one.json": {"prompt": "No!"},
        "s/Hunger/other.json": {"prompt": SENTENCES[0]},
    }
    assert prepare(more, "--validation-rows", "2") == 0
    manifest = manifest_of(tmp_path / "out")
    assert manifest["rejected"] | {"file of a validation text": 0} == {
        "language": 1, "duplicate": 1, "nothing to speak": 1, "length": 1, "emotion": 1, "file of a validation text": 0,
    }  # fmt: skip
    assert manifest["unknown_emotions"] == {"Hunger": 1}
    assert manifest["references"]["rejected"] == {"short": 1, "unreadable": 1}
    listed = (tmp_path / "out/references.json").read_bytes()
    assert manifest["references"]["sha256"] == sha256(listed).hexdigest()
    for split in ("train", "validation"):
        path = tmp_path / "out" / f"{split}.parquet"
        assert manifest["files"][split]["parquet_sha256"] == sha256(path.read_bytes()).hexdigest()


def test_one_seed_gives_the_same_bytes_and_another_seed_another_order(prepare, tmp_path):
    for out, seed in (("a", "42"), ("b", "42"), ("c", "43")):
        assert prepare(CORPUS, "--seed", seed, out=out) == 0
    for name in ("train.parquet", "validation.parquet", "references.json", "manifest.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    texts = [[row.text for row in read_prompts(tmp_path / out / "validation.parquet")] for out in ("a", "c")]
    assert texts[0] != texts[1]


def test_the_order_of_the_shards_is_the_order_of_their_names_and_other_formats_are_read(script, tmp_path, references):
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "b.jsonl").write_text("\n".join(json.dumps({"text": s, "emotion": "Anger"}) for s in SENTENCES[:4]))
    pq.write_table(
        pa.Table.from_pylist([{"text": s, "emotion": "jealousy and envy"} for s in SENTENCES[4:]]), shards / "a.parquet"
    )
    words = ["--references", str(references), "--shards", str(shards), "--validation-rows", "1"]
    assert script.main(["--out", str(tmp_path / "out"), *words]) == 0
    rows = [row for split in ("train", "validation") for row in read_prompts(tmp_path / "out" / f"{split}.parquet")]
    assert {row.text for row in rows} == set(SENTENCES)
    assert manifest_of(tmp_path / "out")["source"] == {"shards": ["a.parquet", "b.jsonl"]}


# ---------------------------------------------------------------- cleaning and language


@pytest.mark.parametrize(
    ("raw", "spoken"),
    [
        ("[sighs] “Oh, (softly) it's you.”", "Oh, it's you."),
        ('"Stop!" he *laughs* "Stop it."', "Stop! he Stop it."),
        ("(a [very] long pause) Well .", "Well."),
        ("'Never say that again.'", "Never say that again."),
        ("don't  touch\nthat", "don't touch that"),
        ("Wait<break/> here", "Wait here"),
        ("an [unclosed bracket", "an [unclosed bracket"),
        ("[gasps]", ""),
    ],
)
def test_quotes_and_stage_directions_are_not_spoken(script, raw, spoken):
    assert script.clean(raw) == spoken


@given(st.text(max_size=80) | st.text(alphabet="ab '’\"“[]()*<>.\n", max_size=40))
def test_what_is_clean_stays_as_it_is(script, raw):
    once = script.clean(raw)
    assert script.clean(once) == once
    assert not script.DIRECTION.search(once)


GERMAN = "Ich kann nicht glauben, dass du wieder hier bist, nach all den Jahren."


def test_german_passes_the_published_rule_and_not_the_identifier(script):
    by_share, by_identifier = (script.language_rule(name) for name in ("ascii80", "py3langid"))
    assert by_share(GERMAN)
    assert not by_identifier(GERMAN)
    assert all(by_share(text) and by_identifier(text) for text in SENTENCES)
    assert not by_share("मुझे विश्वास नहीं होता")


def test_the_published_rule_counts_characters_at_the_edge(script):
    assert script.language_rule("ascii80")("abcdefghéé")
    assert not script.language_rule("ascii80")("abcdefgééé")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("corpus", "words", "message"),
    [
        ({}, (), "0 texts for training and 0 for validation pass"),
        (CORPUS, ("--validation-rows", "100"), "8 for validation pass, wanted are 1 and 100"),
        (CORPUS, ("--train-rows", "7"), "wanted are 7 and 4"),
        (CORPUS, ("--validation-rows", "0"), "--validation-rows 0 has to be 1 or more"),
        (CORPUS, ("--max-words", "1"), "--max-words 1 has to be --min-words 2 or more"),
        (CORPUS, ("--validation-clusters", "6"), "6 clusters of references cannot give 6 to validation"),
        (CORPUS, ("--text-field", "line"), "has none of the fields line, it has prompt; name the one with the text"),
        ({"s/Anger/a.json": {"other": 1}}, (), "it has other; name the one with the text by --text-field"),
        ({"s/Anger/a.json": {"prompt": [1]}}, (), "prompt[0] has to be a text, but is '1'"),
        ({"s/Anger/a.json": ["text"]}, (), "has to be a JSON object with a text"),
        ({"s/Anger/a.json": b"{"}, (), "cannot be read"),
        ({"s/Anger/a.json": b"[" * 100_000}, (), "cannot be read"),
        ({"s/Anger/a.json": b'{"text": "Oh \\ud83d no."}'}, (), r"'Oh \ud83d no.' is no Unicode text"),
        ({"a.json": b'{"text": "Oh no.", "emotion": "An\\ud83dger"}'}, (), r"'An\ud83dger' is no Unicode text"),
        ({"s/caf\udce9/a.json": {"text": "Oh no."}}, (), "is no Unicode text"),
    ],
)
def test_a_wrong_corpus_or_setting_is_one_line_and_leaves_nothing(prepare, tmp_path, capsys, corpus, words, message):
    assert prepare(corpus, *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("voice_acting_prompts.py: ")
    assert message in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["emolia", "shards"]


@pytest.mark.parametrize("cut", [512 * 4 + 300, 512 * 4])
def test_a_tar_that_is_cut_between_or_inside_its_headers_is_not_taken_as_whole(
    script, tmp_path, references, capsys, cut
):
    whole = tar(tmp_path / "shards/a.tar", CORPUS).read_bytes()
    (tmp_path / "shards/a.tar").write_bytes(whole[:cut])
    words = ["--out", str(tmp_path / "out"), "--references", str(references), "--shards", str(tmp_path / "shards")]
    assert script.main([*words, "--validation-rows", "1"]) == 2
    assert "a.tar cannot be read: it is cut" in capsys.readouterr().err


def test_a_file_that_is_in_a_tar_twice_is_named(script, tmp_path, references, capsys):
    tar(tmp_path / "shards/a.tar", CORPUS)
    with tarfile.open(tmp_path / "shards/a.tar", "a") as archive:
        name, content = next(iter(CORPUS.items()))
        data = json.dumps(content).encode()
        member = tarfile.TarInfo(name)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    words = ["--out", str(tmp_path / "out"), "--references", str(references), "--shards", str(tmp_path / "shards")]
    assert script.main([*words, *SMALL]) == 2
    assert f"a.tar/{name} is in the corpus twice" in capsys.readouterr().err


def test_a_line_of_json_may_hold_the_separators_of_unicode(script, tmp_path, references):
    texts = [*SENTENCES, "Hello there\u2028my dear old friend.", "Hello again\u0085my dear old friend."]
    (tmp_path / "shards").mkdir()
    lines = [json.dumps({"text": text, "emotion": "Relief"}, ensure_ascii=False) for text in texts]
    (tmp_path / "shards/a.jsonl").write_text("\r\n".join(lines), encoding="utf-8", newline="")
    words = ["--out", str(tmp_path / "out"), "--references", str(references), "--shards", str(tmp_path / "shards")]
    assert script.main([*words, *SMALL, "--language-rule", "ascii80"]) == 0
    spoken = {row.text for split in ("train", "validation") for row in read_prompts(tmp_path / f"out/{split}.parquet")}
    assert "Hello there my dear old friend." in spoken
    assert len(spoken) == len(texts)


def test_recordings_whose_names_are_not_in_utf_8_are_left_out_and_counted(prepare, tmp_path, references):
    os.rename(references / "c0", os.fsencode(references) + b"/caf\xe9")
    os.rename(references / "c1/0.wav", os.fsencode(references) + b"/c1/caf\xe9.wav")
    assert prepare(CORPUS) == 0
    assert manifest_of(tmp_path / "out")["references"]["rejected"] == {"with a name that is not in UTF-8": 3}


def test_a_full_disk_is_one_line(prepare, script, tmp_path, monkeypatch, capsys):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28] No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    assert prepare(CORPUS) == 3
    assert re.fullmatch(r"voice_acting_prompts.py: cannot write .*/out: .*No space left.*\n", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_references_that_are_none_are_said_before_the_corpus_is_read(script, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for folder, message in (("gone", "are no folder"), ("empty", "has no CLUSTER/UTTERANCE recording")):
        words = [
            "--out",
            str(tmp_path / "out"),
            "--references",
            str(tmp_path / folder),
            "--shards",
            str(tmp_path / "no"),
        ]
        assert script.main(words) == 2
        assert message in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_one_line(prepare, capsys, tmp_path):
    (tmp_path / "file").touch()
    assert prepare(CORPUS, out="file/out") == 2
    assert "file/out cannot be created: " in capsys.readouterr().err


def test_an_existing_directory_is_left_alone(prepare, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert prepare(CORPUS) == 2
    assert "exists already" in capsys.readouterr().err


def test_rows_of_the_hub_are_those_of_its_english_tar(script, tmp_path, references, monkeypatch):
    """The hub's dataset is a streaming one of ``datasets`` over a tar; here the tar is local."""
    import datasets

    archive, load_dataset, asked = tar(tmp_path / "en.tar", CORPUS), datasets.load_dataset, []

    def from_here(*words: str, **options: Any) -> Any:
        asked.append((words, options))
        return load_dataset(
            "webdataset", data_files=[str(archive)], split="train", streaming=True, cache_dir=str(tmp_path / "c")
        )

    monkeypatch.setattr(datasets, "load_dataset", from_here)
    assert script.main(["--out", str(tmp_path / "out"), "--references", str(references), *SMALL]) == 0
    ((words, options),) = asked
    assert words == ("laion/voice-acting-prompts",)
    assert (options["data_files"], options["streaming"]) == ("geminittsprompts-output-en.tar", True)
    assert len(read_prompts(tmp_path / "out/validation.parquet")) == 4
