"""``verl-tts serve`` on a tiny checkpoint: one start of the real engine, a request in each form, a clean stop."""

import base64
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.serving import Server, assert_ends_by_sigterm, heard, serving

from .runs import temporary_files

pytestmark = pytest.mark.loop

REFERENCE = Path(__file__).parents[1] / "unit/scorers/data/open_the_window.flac"
SEED_3 = {"sampling_params": {"seed": 3}}


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("voices")
    (folder / "anna").mkdir()
    (folder / "anna/1.flac").write_bytes(REFERENCE.read_bytes())
    soundfile.write(folder / "nan.wav", np.full(48_000, np.nan, np.float32), 24_000, subtype="FLOAT")
    (folder.parent / "outside.flac").write_bytes(REFERENCE.read_bytes())
    return folder


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """Where the server puts temporary files: short, for the sockets in it."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, voices: Path, temporary: Path) -> Iterator[Server]:
    words = ("--references", str(voices), "--max-frames", "64")
    with serving(tiny_checkpoint, *words, temporary=temporary) as started:
        yield started


def test_the_published_form_answers_with_a_clip_and_a_seed_repeats_it(server, voices):
    _, client = server
    body = {"text": "Good morning.", "audio_data": "anna/1.flac"} | SEED_3
    answers = [client.post("/generate", json=body | more) for more in ({}, {"audio_data": str(voices / "anna/1.flac")})]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    first, second = (answer.json() for answer in answers)
    samples_S, rate = heard(base64.b64decode(first["text"]))
    assert (len(samples_S), rate) == (1920 * (first["meta_info"]["completion_tokens"] - 1), 24_000)
    assert second["text"] == first["text"]


def test_the_openai_form_answers_with_a_clip(server, voices):
    _, client = server
    body = {"input": "Good morning.", "task_type": "Base", "x_vector_only_mode": True, "response_format": "wav"}
    answer = client.post("/v1/audio/speech", json=body | {"ref_audio": f"file://{voices}/anna/1.flac", "seed": 3})
    assert answer.status_code == 200, answer.text
    samples_S, rate = heard(answer.content)
    assert len(samples_S) > 0
    assert rate == 24_000
    published = client.post("/generate", json={"text": "Good morning.", "audio_data": "anna/1.flac"} | SEED_3)
    assert np.array_equal(samples_S, heard(base64.b64decode(published.json()["text"]))[0]), "one seed, one clip"


def test_neither_form_reads_what_is_outside_the_folder_or_elsewhere(server, voices):
    _, client = server
    outside = voices.parent / "outside.flac"
    for value in ("../outside.flac", str(outside)):
        answer = client.post("/generate", json={"text": "Hi.", "audio_data": value})
        assert (answer.status_code, "there is no recording" in answer.text) == (400, True)
    body = {"input": "Hi.", "task_type": "Base", "x_vector_only_mode": True}
    for value in (f"file://{outside}", "http://127.0.0.1:9/x.wav", "data:audio/wav;base64,UklGRg=="):
        answer = client.post("/v1/audio/speech", json=body | {"ref_audio": value})
        assert answer.status_code == 400


def test_a_request_that_is_wrong_does_not_end_the_server(server):
    _, client = server
    assert client.post("/generate", content=b"{").status_code == 400
    assert client.post("/generate", json={"text": "Hi."}).status_code == 400  # no voice
    assert client.post("/v1/audio/speech", json={"input": "Hi.", "voice": "nan.wav"}).status_code == 400
    body = {"input": "Hi.", "voice": "anna/1.flac"}
    for more in ({"extra_params": {"temperature": 1e-39}}, {"ref_text": "Hi.", "x_vector_only_mode": False}):
        assert client.post("/v1/audio/speech", json=body | more).status_code == 400
    for path in ("/v1/completions", "/v1/omni/sleep", "/v1/audio/voices"):
        assert client.post(path, json={"prompt": "Hi.", "stage_ids": [0]}).status_code == 404
    assert client.get("/health").status_code == 200
    assert client.post("/v1/audio/speech", json=body).status_code == 200, "the engine is there"


def test_sigterm_ends_it_with_all_of_its_processes_and_files(server, temporary):
    process, _ = server
    assert_ends_by_sigterm(process)
    assert not temporary_files(temporary)
