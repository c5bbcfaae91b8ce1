"""What ``make bench`` rests on; the measuring itself takes minutes and is run by hand."""

import asyncio
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from verl_tts.config.compose import compose

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HOLDS_100_MIB = "import time; held = bytearray(b'x' * (100 << 20)); print('ready', flush=True); time.sleep(60)"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """A module of the folder, which are found there by each other alone."""

    def load(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module(name)

    return load


def test_memory_is_that_of_the_processes_that_carry_the_mark(script, monkeypatch):
    machine = script("machine")
    monkeypatch.setattr(machine, "SAMPLE_S", 0.05)
    command = [sys.executable, "-c", HOLDS_100_MIB]
    with subprocess.Popen(command, env=os.environ | {"BENCH_MARK": "one"}, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with machine.MemoryWatch("BENCH_MARK=one") as marked, machine.MemoryWatch("BENCH_MARK=other") as other:
            time.sleep(0.5)
        process.kill()
    assert 100 / 1024 < marked.peak_gib < 200 / 1024
    assert marked.processes == 1
    assert marked.biggest[0][0].startswith("python")
    assert (other.peak_gib, other.processes) == (0.0, 0)


@pytest.mark.parametrize(("load", "busy"), [(0.9, False), (1.1, True)])
def test_a_load_of_half_a_core_each_is_called_busy(script, load, busy):
    assert script("machine").is_busy({"load_average": load, "cores": 2}) is busy


@pytest.mark.parametrize("server", ["verl-tts score", "ThreadingHTTPServer"])
def test_both_servers_that_are_compared_answer_the_same_requests(script, server):
    scorer = script("scorer")
    with scorer.serving(scorer.COMMANDS[server]) as (port, process):
        answers = asyncio.run(scorer.ask(port, first=7, count=3))
        assert process.memory_info().rss > 0
    assert answers.ids == {"00000007": 1, "00000008": 1, "00000009": 1}
    assert len(answers.seconds) == 3
    assert not answers.failures


def test_the_settings_of_its_runs_compose(script):
    loop = script("loop")
    for more in ((), loop.ONE_AFTER_THE_OTHER):
        config = compose(["tts.platform=cpu", *loop.SETTINGS, *loop.FUNCTION, *more])
        assert config.tts.engine.starts_early is not bool(more)
        assert config.data.max_response_length == loop.FRAMES + 1


def test_random_weights_write_one_text_for_every_clip_on_both_backends(script, monkeypatch, tmp_path):
    """So that a batch and both backends are timed at equal work."""
    whisper = script("whisper")
    monkeypatch.setitem(whisper.SIZES, "tiny", (64, 1, 2, 64))
    scorers = whisper.scorers("tiny", 5, "cpu", tmp_path)
    answers = [answer for scorer in scorers.values() for answer in scorer.score_batch(whisper.clips(3))]
    assert len(answers) == 6
    assert len({answer["asr_text"] for answer in answers}) == 1
    assert answers[0]["asr_text"]
