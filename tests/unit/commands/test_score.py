"""``verl-tts score``: a server in a process of its own, as a user starts it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile

from verl_tts.commands import main
from verl_tts.config.reward import ClientConfig
from verl_tts.rewards.client import ScorerClient
from verl_tts.types import Waveform

NOISE = Waveform(np.random.default_rng(0).normal(0, 0.1, 24_000).astype(np.float32), 24_000)
SPEECH = Path(__file__).parents[1] / "scorers/data/open_the_window.flac"


@contextmanager
def started(*arguments: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """The origin that the server prints, and its process."""
    command = [sys.executable, "-c", "from verl_tts.commands import main; raise SystemExit(main())", "score"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        line = process.stdout.readline()
        assert " listening on http://127.0.0.1:" in line, line
        yield line.split()[-1], process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def ask(client: ScorerClient, waveform: Waveform, count: int):
    metadata = [{"id": f"en-{i}", "target_seconds": 1.0 + i} for i in range(count)]
    return await asyncio.gather(*(client.score(waveform, "Please open the window.", m) for m in metadata))


def test_a_server_answers_32_requests_at_once_and_each_its_own(tmp_path):
    async def talk(origin: str):
        async with ScorerClient(ClientConfig(scorer_url=f"{origin}/score", max_in_flight=32)) as client:
            return await client.probe(), await ask(client, NOISE, 32)

    with started("--scorer", "duration", "--port", "0") as (origin, process):
        info, scores = asyncio.run(talk(origin))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == -signal.SIGTERM
    assert info.name == "duration"
    assert [score.total for score in scores] == [pytest.approx(1.0 / (1.0 + i)) for i in range(32)]


def test_sigterm_finishes_what_was_accepted():
    waveform = Waveform(*soundfile.read(SPEECH, dtype="float32"))

    async def talk(origin: str, process: subprocess.Popen):
        async with ScorerClient(ClientConfig(scorer_url=f"{origin}/score", max_retries=0)) as client:
            work = asyncio.create_task(ask(client, waveform, 2))
            async with httpx.AsyncClient() as http:
                while "in_flight 2.0" not in (await http.get(f"{origin}/metrics")).text:
                    await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            return await work

    with started("--scorer", "whisper_cer", "--device", "cpu", "--port", "0") as (origin, process):
        scores = asyncio.run(talk(origin, process))
        process.wait(timeout=20)
    assert len(scores) == 2
    assert all(score.parts["cer"] < 1.0 for score in scores)


def test_a_config_file_holds_what_the_flags_hold(tmp_path):
    file = tmp_path / "scorer.yaml"
    file.write_text("scorer: constant\noptions: {value: 0.25}\nserver: {port: 1, batch_size: 4}\n")
    with started("--config", str(file), "--port", "0") as (origin, _):  # a flag wins
        assert httpx.get(f"{origin}/info").json()["score_range"] == [0.25, 0.25]


def test_a_file_with_several_scorers_starts_one_server(tmp_path):
    file = tmp_path / "scorers.yaml"
    file.write_text(
        "scorers:\n- {scorer: duration}\n- {scorer: constant, name: flat, options: {value: 2}}\nserver: {port: 0}\n"
    )

    async def talk(origin: str):
        async with ScorerClient(ClientConfig(scorer_url=f"{origin}/score")) as client:
            return await client.probe(), (await ask(client, NOISE, 1))[0]

    with started("--config", str(file)) as (origin, _):
        info, score = asyncio.run(talk(origin))
    assert info.name == "duration+flat"
    assert score.total == 1.0
    assert set(score.parts) == set(info.part_names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scorer", "durations"], "there are: clap, constant, duration, "),
        (["--scorer", "duration", "--model", "x"], "has no option 'model'; it has: none"),
        (["--scorer", "duration", "--max-queue", "8"], "at least 64"),
        (["--scorer", "duration", "--batch-size", "0"], "batch_size=0"),
        (["--scorer", "whisper_cer", "--model", "no-such-owner/model"], "--allow-download"),
        (["--config", "no-such-file.yaml"], "no-such-file.yaml"),
    ],
)
def test_what_cannot_be_started_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(["score", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        "scorer: 1",
        "scorer: duration\nport: 1",
        "scorer: duration\nserver: {prot: 1}",
        "scorer: duration\nscorers: [{scorer: duration}]",
        "scorers: []",
        "scorers: duration",
        "scorers: [duration]",
        "scorers: [{scorer: duration, weight: 1}]",
        "scorers: [{scorer: duration, name: 1}]",
        "scorers: [{scorer: duration, options: 1}]",
        "a: [",
        "a: ${b}",
    ],
)
def test_a_config_file_that_makes_no_sense_is_one_line_and_exit_code_2(text, tmp_path, capsys):
    file = tmp_path / "scorer.yaml"
    file.write_text(text)
    assert main(["score", "--config", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"verl-tts score: --config {file}: ")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("token_env: 5", "token_env=5 must be"),
        ("host: 5", "host=5 must be"),
        ("batch_size: '16'", "batch_size='16' must"),
    ],
)
def test_a_server_setting_of_the_wrong_type_is_one_line_and_exit_code_2(setting, message, tmp_path, capsys):
    (tmp_path / "scorer.yaml").write_text(f"scorer: duration\nserver: {{{setting}}}\n")
    assert main(["score", "--config", str(tmp_path / "scorer.yaml")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_help_is_quick():
    command = [sys.executable, "-c", "from verl_tts.commands import main; main(['score', '--help'])"]
    started_s = time.monotonic()
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert time.monotonic() - started_s < 2.0  # half a second on an idle machine
    for flag in ("--model", "--revision", "--device", "--dtype", "--language", "--host", "--port", "--allow-download"):
        assert flag in text
