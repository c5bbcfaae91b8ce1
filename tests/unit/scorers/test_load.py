"""2,000 clips of 8 s, 64 in flight: every one is answered, once, and nothing of it stays behind.

The requests are those of ``make bench-scorer``, sent by its client.
"""

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

# ``verl-tts score`` which says, for a line on its standard input, how many bytes it holds. Free blocks that the
# allocator keeps for later are given back first: they come and go by tens of MB with the order of requests.
SERVER = """
import ctypes, gc, sys, threading, time
import psutil
from verl_tts.commands import main

def report():
    for _ in sys.stdin:
        time.sleep(0.2)  # for the connections to close
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        print(psutil.Process().memory_info().rss, flush=True)

threading.Thread(target=report, daemon=True).start()
raise SystemExit(main(["score", "--scorer", "constant", "--port", "0"]))
"""


def held_bytes(server: subprocess.Popen) -> int:
    server.stdin.write("\n")
    server.stdin.flush()
    return int(server.stdout.readline())


def test_2000_requests_are_answered_once_each_and_leave_no_memory_behind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    ask = importlib.import_module("scorer").ask
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline().rpartition(":")[2])
            first = asyncio.run(ask(port, 0, 500))
            after_500 = held_bytes(server)
            rest = asyncio.run(ask(port, 500, 1500))
            at_the_end = held_bytes(server)
        finally:
            server.kill()
    assert not first.failures + rest.failures
    assert first.ids + rest.ids == {f"{number:08d}": 1 for number in range(2000)}
    assert at_the_end <= 1.05 * after_500, (after_500, at_the_end)
