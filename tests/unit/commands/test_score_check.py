"""``verl-tts score-check`` against real servers: one that is honest, one that is not, and those of the package."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import soundfile

from verl_tts.commands import main
from verl_tts.rewards.doctor import RIGHT, TEXT, bundled_clip, cases
from verl_tts.rewards.protocol import Clip, decode_request, encode_answer

NAMES = ["right", "truncated", "repeated", "wrong_text", "right_silence", "noise", "silence"]


@contextmanager
def serving(score: Callable[[Clip], dict]) -> Iterator[str]:
    """A server of the protocol around a function; a ValueError of it is a 400, a RuntimeError a 500."""

    class Scorer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            clip = decode_request(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, body = 200, encode_answer(score(clip))
            except (ValueError, RuntimeError) as error:
                status = 400 if isinstance(error, ValueError) else 500
                body = json.dumps({"error": str(error)}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Scorer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def command(name: str) -> Iterator[str]:
    """The server that ``verl-tts score`` starts."""
    words = [sys.executable, "-m", "verl_tts.commands", "score", "--scorer", name, "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"{process.stdout.readline().split()[-1]}/score"
    finally:
        process.terminate()
        process.wait(timeout=30)
        process.stdout.close()


def check(url: str, capsys, *words: str) -> tuple[int, str]:
    code = main(["score-check", url, *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


SPEECH = bundled_clip()


def honest(clip: Clip) -> dict:
    """Correlation with the one clip that it knows, less what is longer, and nothing for another text."""
    samples_S, known_S = clip.waveform.samples_S, SPEECH.samples_S
    if clip.prompt != TEXT or not samples_S.any():
        return {"score": 0.0}
    length = max(len(samples_S), len(known_S))
    one, other = (np.pad(x, (0, length - len(x))) for x in (samples_S, known_S))
    likeness = max(0.0, float(np.corrcoef(one, other)[0, 1]))
    return {"score": likeness * len(known_S) / length, "likeness": likeness}


def line_of(output: str, name: str) -> str:
    return next(line for line in output.splitlines() if line.startswith(f"{name} "))


def test_an_honest_scorer_is_sane_with_and_without_guards(capsys):
    with serving(honest) as url:
        code, output = check(url, capsys)
    assert code == 0, output
    assert "order without our guards: sane" in output
    assert "order with our guards: sane" in output
    assert [line.split()[0] for line in output.splitlines()[3:10]] == NAMES
    assert re.search(r"right +1\.000 +0\.\d\d s +- +likeness 1\n", output)
    assert "latency, one clip at a time: p50 0.0" in output
    assert "silence: RMS 0.00e+00" in line_of(output, "silence")
    assert "mostly_silent" in line_of(output, "right_silence")


def test_the_duration_scorer_is_not_sane_and_each_reason_is_named(capsys):
    with command("duration") as url:
        code, output = check(url, capsys)
    assert code == 3, output
    assert output.endswith(
        "order with our guards: not sane\n"
        "  wrong_text gets 1.000, right gets 1.000\n"
        "  noise gets 1.000, right gets 1.000\n"
    )
    assert "  silence gets 1.000, right gets 1.000\norder with" in output, "without guards it is one more"


def test_a_recogniser_is_sane_with_our_guards_and_blind_to_silence_without_them(capsys):
    with command("whisper_cer") as url:
        code, output = check(url, capsys)
    assert code == 0, output
    assert "order without our guards: not sane\n  right_silence gets 1.000, right gets 1.000\norder with" in output


@pytest.mark.parametrize("failure", [ValueError, RuntimeError])
def test_a_scorer_that_fails_on_silence_is_sane_where_a_guard_keeps_silence_from_it(capsys, failure):
    def picky(clip: Clip) -> dict:
        if not clip.waveform.samples_S.any():
            raise failure("waveform: nothing to hear")
        return honest(clip)

    with serving(picky) as url:
        code, output = check(url, capsys)
    assert code == 0, output
    assert "order without our guards: not sane\n  silence gets an error, which ends a run: " in output
    assert "an error" in line_of(output, "silence")


def test_an_answer_that_is_none_is_not_sane(capsys):
    with serving(lambda clip: {"loudness": 1.0}) as url:
        code, output = check(url, capsys)
    assert code == 3
    assert "right gets an error: " in output
    assert "has no score" in output


def test_a_clip_of_ones_own_with_what_its_scorer_needs(capsys, tmp_path):
    soundfile.write(tmp_path / "hi.wav", SPEECH.samples_S, SPEECH.sample_rate_hz)
    seen = []

    def score(clip: Clip) -> dict:
        seen.append((clip.prompt, clip.metadata["speaker"], clip.metadata["id"]))
        return {"score": float(len(seen) == 1)}

    words = ["--audio", str(tmp_path / "hi.wav"), "--text", "नमस्ते", "--wrong-text", "धन्यवाद"]
    with serving(score) as url:
        code, output = check(url, capsys, *words, "--metadata", "speaker=anna")
    assert code == 0, output
    assert [name for *_, name in seen] == NAMES
    assert seen[0] == ("नमस्ते", "anna", "right")
    assert seen[3][0] == "धन्यवाद"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--audio", "gone.wav", "--text", "a", "--wrong-text", "b"], "--audio gone.wav: No such file"),
        (["--audio", __file__, "--text", "a", "--wrong-text", "b"], "give a WAV or FLAC file"),
        (["--text", "a"], "go together"),
        (["--metadata", "speaker"], "it has to be KEY=VALUE"),
        (["--timeout", "0"], "timeout_s=0.0"),
        ([], "the scorer cannot be examined: http://127.0.0.1:9/healthz: no scorer within"),
    ],
)
def test_bad_input_and_a_scorer_that_is_not_there_end_with_two_and_one_line(capsys, words, message):
    code, output = check("http://127.0.0.1:9/score", capsys, *words)
    assert code == 2
    assert message in output
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("2", 2),
        ("0.5", 0.5),
        ("true", True),
        ("null", None),
        ('"7"', "7"),
        ("007", "007"),
        ("NaN", "NaN"),
        ("[1]", "[1]"),
        ("a=b", "a=b"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_metadata_are_scalars_as_json_has_them_and_texts_otherwise(capsys, word, value):
    seen = []

    def score(clip: Clip) -> dict:
        seen.append(clip.metadata["key"])
        return {"score": float(len(seen) == 1)}

    with serving(score) as url:
        code, output = check(url, capsys, "--metadata", f"key={word}")
    assert code == 0, output
    assert seen[0] == value
    assert type(seen[0]) is type(value)


def test_a_scorer_that_refuses_the_right_clip_was_asked_wrongly(capsys):
    def needs_a_speaker(clip: Clip) -> dict:
        raise ValueError("metadata.speaker: missing")

    with serving(needs_a_speaker) as url:
        code, output = check(url, capsys)
    assert code == 2
    assert "metadata.speaker: missing" in output


def test_all_clips_are_made_of_the_right_one():
    made = {case.name: case.waveform for case in cases(SPEECH, TEXT, "x")}
    assert list(made) == NAMES
    seconds = SPEECH.seconds
    expected = [seconds, seconds / 2, 2 * seconds, seconds, seconds + 15, seconds, seconds]
    assert [waveform.seconds for waveform in made.values()] == pytest.approx(expected, abs=1e-4)
    assert made["noise"].samples_S.std() == pytest.approx(made[RIGHT].samples_S.std(), rel=0.01)
