"""``verl-tts generate``: command and prompts are real, the engine is not; tests/loop/test_serving.py has a real one."""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile

from verl_tts.commands import main
from verl_tts.errors import RolloutError
from verl_tts.rollout import server as server_module
from verl_tts.types import Waveform

REFERENCE = Path(__file__).parents[1] / "scorers/data/open_the_window.flac"


class Engine:
    """In place of the server around vLLM-Omni: as many frames as a text has tokens; ``none`` of them for a text."""

    started: list["Engine"] = []
    fails: str | None = None
    silent: set[int] = set()

    def __init__(self, spec: Any, replica_rank: int) -> None:
        self.spec, self.requests, self.is_down = spec, [], False
        Engine.started.append(self)

    async def launch(self) -> None:
        if Engine.fails:
            raise RolloutError(Engine.fails)

    async def sample(self, name: str, **request: Any) -> tuple[Any, Waveform]:
        self.requests.append(request | {"name": name})
        frames = 0 if int(request["sample_id"]) in Engine.silent else len(request["prompt_ids"])
        noise = np.random.default_rng(request["seed"]).uniform(-0.5, 0.5, frames * 1920).astype(np.float32)
        return SimpleNamespace(stop_reason="length"), Waveform(noise, 24_000)

    async def shutdown(self) -> None:
        self.is_down = True


@pytest.fixture(autouse=True)
def engine(monkeypatch, tmp_path_factory):
    Engine.started, Engine.fails, Engine.silent = [], None, set()
    monkeypatch.setattr(server_module, "RolloutServer", Engine)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("logs")))
    return Engine


@pytest.fixture
def generate(tiny_checkpoint, places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*words: str, voice: str | None = places["SPK_EMBED_PATH"]) -> int:
        reference = ["--ref-audio", voice] if voice else []
        return main(["generate", "--model", str(tiny_checkpoint), *reference, *words])

    return run


def test_a_text_becomes_a_clip_sampled_as_in_training(generate, engine, capfd):
    assert generate("--text", "Good morning.", "--output", "out.wav") == 0
    (started,) = engine.started
    (request,) = started.requests
    assert request["sampling_params"] == {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    assert (started.spec.max_response_tokens, started.spec.external_lib, started.is_down) == (360, (), True)
    samples, rate = soundfile.read("out.wav")
    assert (len(samples), rate) == (1920 * len(request["prompt_ids"]), 24_000)
    assert capfd.readouterr().out == f"out.wav: {len(samples) / 24_000:.2f} s, cut off at 360 frames\n"


def test_one_seed_gives_the_same_clip_and_another_another(generate):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert generate("--text", "Hello.", "--seed", seed, "--output", f"{name}.flac") == 0
    clips = [Path(f"{name}.flac").read_bytes() for name in "abc"]
    assert clips[0] == clips[1] != clips[2]


def test_a_file_of_texts_becomes_a_folder_of_clips_each_as_it_would_be_alone(generate, engine):
    Path("lines.txt").write_text("First line.\n\n  Second line. \n")
    assert generate("--texts", "lines.txt", "--output", "clips") == 0
    assert sorted(path.name for path in Path("clips").iterdir()) == ["0000.wav", "0001.wav"]
    assert generate("--text", "First line.", "--output", "alone.wav") == 0
    assert Path("alone.wav").read_bytes() == Path("clips/0000.wav").read_bytes()


def test_lines_of_json_bring_voices_and_languages_of_their_own(generate, engine, places):
    lines = [{"text": "One.", "language": "English"}, {"text": "Two.", "ref_audio": places["SPK_EMBED_PATH"]}]
    Path("lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert generate("--texts", "lines.jsonl", "--output", "clips", "--language", "Chinese") == 0
    assert [request["language"] for request in engine.started[0].requests] == ["English", "Chinese"]


def test_a_line_ends_where_the_file_says_and_not_inside_a_text(generate, engine):
    lines = [{"text": "One\u2028line."}, {"text": "Another\x85one."}]
    Path("lines.jsonl").write_text("\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    assert generate("--texts", "lines.jsonl", "--output", "clips") == 0
    assert len(engine.started[0].requests) == 2


def test_a_recording_is_a_voice(generate, engine):
    assert generate("--text", "Hello.", "--output", "out.wav", voice=str(REFERENCE)) == 0
    (request,) = engine.started[0].requests
    assert np.isfinite(request["speaker"]).all()
    assert len(request["speaker"]) == 64


def test_an_adapter_is_merged_first_and_leaves_nothing(generate, engine, tiny_checkpoint, tmp_path, monkeypatch):
    from verl_tts.checkpoints import lora

    merged = []
    monkeypatch.setattr(lora, "merge", lambda base, adapter, out, **_: (merged.append(out), out.symlink_to(base)))
    assert generate("--adapter", "v1", "--text", "Hello.", "--output", "out.wav") == 0
    assert engine.started[0].spec.model_path == str(merged[0])
    assert not merged[0].parent.exists()


def test_a_policy_that_ends_at_once_is_no_clip_and_the_others_are_kept(generate, engine, capfd):
    Path("lines.txt").write_text("One.\nTwo.\nThree.")
    engine.silent = {1}
    assert generate("--texts", "lines.txt", "--output", "clips") == 3
    assert sorted(path.name for path in Path("clips").iterdir()) == ["0000.wav", "0002.wav"]
    assert "1 of 3 clips have no audio, clips/0001.wav is one; try another --seed" in capfd.readouterr().err


def test_a_clip_that_cannot_be_written_ends_it_in_one_line(generate, engine, capfd, monkeypatch):
    from verl_tts.commands import generate as command

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "write_whole", full)
    assert generate("--text", "Hello.", "--output", "out.wav") == 3
    assert capfd.readouterr().err == "verl-tts generate: out.wav cannot be written: No space left on device\n"
    assert engine.started[0].is_down


def test_an_engine_that_fails_is_one_line_and_its_log_stays(generate, engine, capfd):
    engine.fails = "no memory"
    assert generate("--text", "Hello.", "--output", "out.wav") == 3
    captured = capfd.readouterr()
    log = Path(captured.out.split("the log is ")[1].strip())
    assert log.is_file()
    log.unlink()
    assert captured.err == "verl-tts generate: no memory\n"
    assert engine.started[0].is_down
    assert not Path("out.wav").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--text", "...", "--output", "o.wav"), "no letter or digit to be spoken"),
        (("--text", "Hi", "--output", "o.mp3"), "--output o.mp3 has to end in .wav or .flac"),
        (("--text", "Hi", "--output", "there"), "--output there exists already"),
        (("--text", "Hi", "--output", "empty.txt/o.wav"), "--output empty.txt/o.wav cannot be created in /"),
        (("--text", "Hi \udcff", "--output", "o.wav"), "the text is no Unicode"),
        (("--text", "Hi", "--output", "o.wav", "--temperature", "-1"), "temperature=-1.0 has to be between 0.01"),
        (("--text", "Hi", "--output", "o.wav", "--temperature", "nan"), "temperature=nan has to be between 0.01"),
        (("--text", "Hi", "--output", "o.wav", "--temperature", "1e-38"), "temperature=1e-38 has to be between 0.01"),
        (("--text", "Hi", "--output", "o.wav", "--top-p", "0"), "top_p=0.0 has to be above 0"),
        (("--text", "Hi", "--output", "o.wav", "--top-k", "0"), "top_k=0 has to be between 1 and 65536"),
        (("--text", "Hi", "--output", "o.wav", "--max-frames", "9999"), "max_frames=9999 has to be between 1 and 4096"),
        (("--text", "Hi", "--output", "o.wav", "--seed", "-1"), "seed=-1 has to be between 0"),
        (("--text", "Hi", "--output", "o.wav", "--language", "Klingon"), "Unknown language 'Klingon'"),
        (("--text", "Hi", "--output", "o.wav", "--emotion", "relief"), "takes no instruction and no emotion"),
        (("--text", "Hi", "--output", "o.wav", "--emotion", "hunger"), "the emotion 'hunger' is unknown"),
        (
            ("--text", "Hi", "--output", "o.wav", "--emotion", "awe", "--instruction", "Softly."),
            "an emotion stands for an instruction",
        ),
        (("--text", "word " * 2000, "--output", "o.wav"), "the limit is 512; cut it into sentences"),
        (("--text", "Hi", "--output", "o.wav", "--set", "tts.engine.no=1"), "there is no setting tts.engine.no"),
        (("--texts", "gone.txt", "--output", "clips"), "gone.txt: No such file or directory"),
        (("--texts", "there", "--output", "clips"), "there: Is a directory"),
        (("--texts", "empty.txt", "--output", "clips"), "empty.txt has 0 texts; it needs 1 to 10000"),
        (("--texts", "bytes.txt", "--output", "clips"), "bytes.txt is not UTF-8"),
        (("--texts", "bad.txt", "--output", "clips"), "bad.txt, line 2: the text '!!' has no letter"),
        (("--texts", "a.jsonl", "--output", "clips"), "a.jsonl, line 1: it is not JSON"),
        (("--texts", "b.jsonl", "--output", "clips"), "b.jsonl, line 1: unknown key 'txt'; there are: text, ref_audio"),
        (("--texts", "c.jsonl", "--output", "clips"), "c.jsonl, line 1: text=1 has to be a text"),
        (("--texts", "d.jsonl", "--output", "clips"), "d.jsonl, line 1: it has to be an object with the key text"),
        (("--texts", "deep.jsonl", "--output", "clips"), "deep.jsonl, line 1: it is not JSON"),
        (("--texts", "half.jsonl", "--output", "clips"), "half.jsonl, line 1: the ref_audio is no Unicode"),
    ],
)
def test_a_wrong_word_is_one_line_before_anything_is_started(generate, engine, capfd, words, message):
    Path("there").mkdir()
    Path("empty.txt").write_text("\n \n")
    Path("bytes.txt").write_bytes(b"\xff\xfe")
    Path("bad.txt").write_text("Good.\n!!\n")
    lines = {"a": "{", "b": '{"text": "x", "txt": "y"}', "c": '{"text": 1}', "d": "[]", "deep": "[" * 100_000}
    for name, line in (lines | {"half": r'{"text": "x", "ref_audio": "\ud800"}'}).items():
        Path(f"{name}.jsonl").write_text(line)
    assert generate(*words) == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not engine.started
    assert not {path.name for path in Path().iterdir()} & {"o.wav", "clips"}


@pytest.mark.parametrize(
    ("voice", "message"),
    [
        (None, "speaks with the voice of a recording; name one (--ref-audio, or in a request)"),
        ("gone.wav", "the recording gone.wav does not exist"),
        ("gone.json", "gone.json does not exist"),
    ],
)
def test_a_voice_that_is_none_is_one_line(generate, engine, capfd, voice, message):
    assert generate("--text", "Hi.", "--output", "o.wav", voice=voice) == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not engine.started


def test_a_model_that_is_none_is_one_line(engine, capfd, tmp_path):
    words = ["--text", "Hi.", "--output", str(tmp_path / "o.wav")]
    assert main(["generate", "--model", str(tmp_path / "gone"), *words]) == 2
    assert "is not a directory; it has to be a local checkpoint" in capfd.readouterr().err


def test_a_training_checkpoint_has_to_be_exported_first(engine, capfd, tmp_path):
    checkpoint = tmp_path / "checkpoints/global_step_4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "MANIFEST.json").write_text("{}")
    words = ["--text", "Hi.", "--output", str(tmp_path / "o.wav")]
    assert main(["generate", "--model", str(checkpoint), *words]) == 2
    assert f"make a model of it first: verl-tts export {checkpoint} OUT" in capfd.readouterr().err


@pytest.fixture(scope="module")
def tiny_moss(tmp_path_factory) -> Path:
    from verl_tts.checkpoints.tiny_moss import build_tiny_moss

    out = tmp_path_factory.mktemp("moss") / "model"
    build_tiny_moss(out)
    return out


def test_a_recording_that_is_not_there_is_the_same_line_for_moss(engine, tiny_moss, tmp_path, capfd):
    words = ["--text", "Hi.", "--ref-audio", "/gone.wav", "--output", str(tmp_path / "o.wav")]
    assert main(["generate", "--model", str(tiny_moss), *words]) == 2
    assert "the reference /gone.wav does not exist" in capfd.readouterr().err


def test_moss_speaks_as_an_emotion_says_with_the_voice_of_a_recording_or_with_none(engine, tiny_moss, tmp_path):
    words = ["generate", "--model", str(tiny_moss), "--text", "Good morning."]
    requests = {}
    for name, more in {
        "plain": [],
        "emotion": ["--emotion", "relief"],
        "same": ["--instruction", "Speak with relief, clearly, in a high quality recording."],
        "voice": ["--ref-audio", str(REFERENCE)],
    }.items():
        assert main([*words, *more, "--output", str(tmp_path / f"{name}.wav")]) == 0
        (requests[name],) = engine.started[-1].requests
    assert requests["emotion"]["prompt_ids"] == requests["same"]["prompt_ids"] != requests["plain"]["prompt_ids"]
    codes = {name: request["codes"] for name, request in requests.items()}
    assert (codes["plain"] == 1024).all(), "the pad code everywhere"
    assert (codes["voice"] != 1024).any()
    assert all(len(codes[name]) == len(requests[name]["prompt_ids"]) for name in codes)
