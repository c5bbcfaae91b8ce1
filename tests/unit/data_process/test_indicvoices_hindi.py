"""On small corpora in the format of the real one, audio column included."""

import http.server
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_tts.data import prepared
from verl_tts.data.prompts import read_prompts
from verl_tts.data.schema import to_columns

SCRIPT = Path(__file__).parents[3] / "data_process" / "indicvoices_hindi.py"
SMALL = ["--read-pool", "6", "--train-rows", "4", "--validation-rows", "2"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("indicvoices_hindi", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def row(text: str | None, **fields: Any) -> dict[str, Any]:
    audio = {"bytes": b"RIFF", "path": "a.wav"}
    whole = {"text": text, "normalized": None, "scenario": "Read", "duration": 5.0, "snr": 30.0, "audio": audio}
    return whole | fields


# A pool of six rows of scenario Read, of which four pass; then two that pass, and more.
CORPUS = [
    row("पहला वाक्य"),
    row("बोला हुआ", scenario="Extempore"),
    row("दूसरा वाक्य", normalized="दूसरा वाक्य है"),
    row("बहुत छोटा", duration=0.99),
    row("शोर", snr=19.9),
    row("तीसरा वाक्य", normalized="", duration=14.0, snr=20.0),
    row("चौथा वाक्य", duration=1.0),
    row("पाँचवाँ वाक्य"),
    row("छठा वाक्य", duration=float("nan")),
    row("सातवाँ वाक्य"),
    row("आठवाँ वाक्य", scenario="बिना देखे"),  # never reached
]


def shards(folder: Path, rows: list[dict[str, Any]], size: int = 4) -> Path:
    folder.mkdir()
    schema = pa.schema(
        [
            ("audio", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
            *((name, pa.string()) for name in ("text", "normalized", "scenario")),
            *((name, pa.float64()) for name in ("duration", "snr")),
        ]
    )
    for number, start in enumerate(range(0, len(rows), size)):
        table = pa.Table.from_pylist(rows[start : start + size], schema=schema)
        pq.write_table(table, folder / f"train-{number:05d}-of-00100.parquet")
    return folder


@pytest.fixture
def prepare(script, tmp_path):
    """Runs the script on the rows of a corpus; the exit code."""

    def run(rows: list[dict[str, Any]], *words: str) -> int:
        folder = tmp_path / "shards"
        return script.main(["--out", str(tmp_path / "out"), "--shards", str(shards(folder, rows)), *SMALL, *words])

    return run


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "manifest.json").read_text())


# ---------------------------------------------------------------- the split


def test_the_first_read_rows_that_pass_are_for_training_and_the_next_for_validation(prepare, tmp_path):
    assert prepare(CORPUS) == 0
    train = read_prompts(tmp_path / "out/train.parquet")
    assert [row.id for row in train] == [f"indicvoices-hi-{index:08d}" for index in (0, 2, 5, 6)]
    assert [row.text for row in train] == ["पहला वाक्य", "दूसरा वाक्य है", "तीसरा वाक्य", "चौथा वाक्य"]
    assert [(row.index, row.split, row.ground_truth == row.text) for row in train] == [
        (index, "train", True) for index in range(4)
    ]
    validation = read_prompts(tmp_path / "out/validation.parquet")
    assert [(row.id[-2:], row.index, row.split) for row in validation] == [
        ("07", 0, "validation"),
        ("09", 1, "validation"),
    ]


def test_the_manifest_counts_the_rejected_and_has_the_hashes(prepare, tmp_path):
    prepare(CORPUS)
    manifest = manifest_of(tmp_path)
    assert manifest["rejected"] == {"train": {"duration": 1, "snr": 1}, "validation": {"duration": 1}}
    assert manifest["settings"] == {
        "filter": "published",
        "read_pool": 6,
        "train_rows": 4,
        "validation_rows": 2,
        "seconds": [1.0, 14.0],
        "min_snr_db": 20.0,
    }
    for split, rows in (("train", 4), ("validation", 2)):
        path = tmp_path / "out" / f"{split}.parquet"
        columns = [to_columns(row) for row in read_prompts(path)]
        content = json.dumps(columns, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        assert manifest["files"][split] == {
            "path": path.name,
            "rows": rows,
            "content_sha256": sha256(content.encode()).hexdigest(),
            "parquet_sha256": sha256(path.read_bytes()).hexdigest(),
        }
    assert manifest["source"] == {"shards": [f"train-0000{n}-of-00100.parquet" for n in range(3)]}


def test_the_same_corpus_gives_the_same_bytes(script, tmp_path):
    folder = shards(tmp_path / "shards", CORPUS)
    for out in ("a", "b"):
        script.main(["--out", str(tmp_path / out), "--shards", str(folder), *SMALL])
    for name in ("train.parquet", "validation.parquet", "manifest.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_published_counts_are_863_and_100(script, tmp_path, capsys):
    """863 of the first 1,000 pass; then every second one does."""
    rows = [row(f"वाक्य {index}", snr=10.0 if index < 137 else 30.0) for index in range(1000)]
    rows += [row(f"वाक्य {index}", snr=10.0 if index % 2 else 30.0) for index in range(1000, 1300)]
    out, folder = tmp_path / "out", shards(tmp_path / "shards", rows, size=500)
    assert script.main(["--out", str(out), "--shards", str(folder)]) == 0
    files = json.loads((out / "manifest.json").read_text())["files"]
    assert (files["train"]["rows"], files["validation"]["rows"]) == (863, 100)

    rows[0]["snr"] = 30.0
    more = shards(tmp_path / "more", rows, size=500)
    assert script.main(["--out", str(tmp_path / "other"), "--shards", str(more)]) == 2
    assert "864 training rows pass, expected are 863: not the published corpus" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


# ---------------------------------------------------------------- duplicates and leaks

LEAKY = [
    *CORPUS[:6],
    row("पहला वाक्य।"),  # as row 0, but for a danda
    row("तीसरा वाक्य!"),  # as row 5, which is for training
    row("पाँचवाँ वाक्य"),
    row("छठा वाक्य"),
    row("सातवाँ वाक्य"),
]


def test_published_keeps_and_reports_what_is_the_same_after_folding(prepare, tmp_path, capsys):
    assert prepare(LEAKY) == 0
    manifest = manifest_of(tmp_path)
    assert manifest["duplicates"] == {
        "train": [["indicvoices-hi-00000006", "indicvoices-hi-00000000"]],
        "validation": [],
    }
    assert manifest["overlaps"] == [["indicvoices-hi-00000007", "indicvoices-hi-00000005"]]
    assert len(read_prompts(tmp_path / "out/train.parquet")) == 4
    said = capsys.readouterr().out
    assert "duplicate in train, kept, as published: indicvoices-hi-00000006 reads like indicvoices-hi-00000000" in said
    assert (
        "overlap, kept, as published: indicvoices-hi-00000007 of validation reads like indicvoices-hi-00000005" in said
    )


def test_strict_rejects_them_and_counts_them(prepare, tmp_path, capsys):
    assert prepare(LEAKY, "--filter", "strict", "--train-rows", "0") == 0
    manifest = manifest_of(tmp_path)
    assert manifest["rejected"]["train"] == {"duplicate": 1, "duration": 1, "snr": 1}
    assert manifest["rejected"]["validation"] == {"overlap": 1}
    assert len(read_prompts(tmp_path / "out/train.parquet")) == 3
    assert [row.id[-2:] for row in read_prompts(tmp_path / "out/validation.parquet")] == ["08", "09"]
    assert "overlap, rejected: " in capsys.readouterr().out


def test_the_text_that_was_not_chosen_leaks_too(prepare, tmp_path):
    corpus = [*CORPUS[:7], row("दूसरा-वाक्य", normalized="और कुछ"), *CORPUS[9:10]]
    assert prepare(corpus) == 0
    assert manifest_of(tmp_path)["overlaps"] == [["indicvoices-hi-00000007", "indicvoices-hi-00000002"]]


def test_a_leak_letter_by_letter_is_against_the_published_rules(prepare, tmp_path, capsys):
    assert prepare([*CORPUS[:7], row("पहला वाक्य"), *CORPUS[9:10]]) == 2
    error = capsys.readouterr().err
    assert "indicvoices-hi-00000007 of validation has the text of indicvoices-hi-00000000 of train" in error
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scenario": "Sung"}, "row 1: scenario='Sung' has to be Read or Extempore"),
        ({"scenario": None}, "row 1: scenario=None has to be Read or Extempore"),
        ({"text": None}, "3 training rows pass, expected are 4"),
        ({"text": " "}, "3 training rows pass, expected are 4"),
        ({"text": "?!"}, "the text '?!' has no letter or digit to be spoken"),
    ],
)
def test_a_row_that_is_not_as_published_ends_it_in_one_line(change, message, prepare, tmp_path, capsys):
    corpus = [row for row in CORPUS if row["scenario"] == "Read"]
    corpus[1] = row("दूसरा वाक्य") | change
    assert prepare(corpus) == 2
    error = capsys.readouterr().err
    assert error.startswith("indicvoices_hindi.py: ")
    assert message in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shards"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"duration": 1.0, "snr": 20.0}, None),
        ({"duration": 14.0}, None),
        ({"duration": 14.01}, "duration"),
        ({"duration": 0.99, "snr": 1.0}, "duration"),
        ({"duration": None}, "duration"),
        ({"snr": 19.99}, "snr"),
        ({"snr": float("inf")}, "snr"),
        ({"text": None, "normalized": "एक"}, None),
        ({"text": " ", "normalized": None}, "text"),
    ],
)
def test_each_rule_has_its_edge(fields, reason, script):
    utterance, found = script.judge(row("एक") | fields, 0)
    assert (found, utterance is None) == (reason, reason is not None)


def test_a_number_that_is_none_is_named_by_its_row(script):
    with pytest.raises(script.DataError, match="row 0: duration='5' has to be a number or null"):
        script.select([row("एक", duration="5")], script.Settings())


def test_a_corpus_that_ends_too_soon_is_refused(prepare, capsys):
    assert prepare(CORPUS[:4]) == 2
    assert "has 3 rows of scenario Read, the training rows are among 6" in capsys.readouterr().err


def test_validation_rows_that_are_not_there_are_refused(prepare, capsys):
    assert prepare(CORPUS[:9]) == 2
    assert "1 validation rows pass, 2 are needed" in capsys.readouterr().err


def test_shards_of_another_format_are_refused(script, tmp_path, capsys):
    for name, message in (("empty", "has no parquet files"), ("other", "lacks the column normalized; it has text")):
        (tmp_path / name).mkdir()
        if name == "other":
            pq.write_table(pa.table({"text": ["एक"]}), tmp_path / name / "a.parquet")
        assert script.main(["--out", str(tmp_path / "out"), "--shards", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


def test_an_existing_directory_is_not_written(prepare, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert prepare(CORPUS) == 2
    assert "exists already" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_a_script_ended_by_a_signal_leaves_nothing(prepare, script, tmp_path, monkeypatch):
    def ended(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(prepared, "read_prompts", ended)  # when the first file is there
    with pytest.raises(SystemExit) as ended_with:
        prepare(CORPUS)
    assert ended_with.value.code == 143
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shards"]


# ---------------------------------------------------------------- the hub


def test_rows_of_the_hub_are_those_of_the_pinned_revision_without_audio(script, tmp_path, monkeypatch, capsys):
    """The hub's dataset is a streaming one of ``datasets`` over parquet files; here the files are local."""
    import datasets

    folder, load_dataset, asked = shards(tmp_path / "shards", CORPUS), datasets.load_dataset, []

    def from_here(*words: str, **options: Any) -> Any:
        asked.append((words, options))
        files = [str(path) for path in sorted(folder.iterdir())]
        return load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path / "c"))

    monkeypatch.setattr(datasets, "load_dataset", from_here)
    assert script.main(["--out", str(tmp_path / "out"), *SMALL]) == 0
    ((words, options),) = asked
    assert words == ("ai4bharat/indicvoices_r", "Hindi")
    assert options["revision"] == "5f4495c91d500742a58d1be2ab07d77f73c0acf8"
    assert options["streaming"] is options["token"] is True
    assert len(read_prompts(tmp_path / "out/train.parquet")) == 4
    assert manifest_of(tmp_path)["source"] == {"hub": words[0], "revision": options["revision"]}


class Gated(http.server.BaseHTTPRequestHandler):
    """The hub's answer to somebody who has not accepted the terms."""

    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("token", [None, "hf_of_somebody_else"])
def test_without_access_the_page_and_the_login_are_named(token, tmp_path):
    """Through the real client: nobody logged in, and somebody who has not accepted the terms."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gated) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
        environment |= {"HF_TOKEN": token} if token else {}
        done = subprocess.run(
            [sys.executable, SCRIPT, "--out", tmp_path / "out"],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        hub.shutdown()
    assert done.returncode == 2
    assert done.stderr == (
        "indicvoices_hindi.py: no access to ai4bharat/indicvoices_r: accept its terms at "
        "https://huggingface.co/datasets/ai4bharat/indicvoices_r, then `hf auth login`\n"
    )
    assert not (tmp_path / "out").exists()
