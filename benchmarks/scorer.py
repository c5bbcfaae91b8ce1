"""What ``make bench-scorer`` prints: requests a second that the scorer server answers, beside a plain one.

    python benchmarks/scorer.py [--requests N] [--json FILE]
    python benchmarks/scorer.py --whisper SIZE [...]           what whisper.py prints

Each request is a clip of 8 s at 24 kHz, 1 MB of base64; 64 are in flight. The scorer is ``constant``, so that
what is measured is the way to a scorer and back. Client and server share this machine. The plain server is Python's
ThreadingHTTPServer with ``json``, which keeps to the same protocol in thirty lines.
"""

import argparse
import asyncio
import base64
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from machine import is_busy, machine

IN_FLIGHT = 64
SECONDS, RATE_HZ = 8, 24_000
ID = b"%08d"
COMMANDS = {
    "verl-tts score": [sys.executable, "-m", "verl_tts.commands", "score", "--scorer", "constant", "--port", "0"],
    "ThreadingHTTPServer": [sys.executable, __file__, "--plain-server"],
}


@dataclass
class Answers:
    """``seconds`` of each request from its first byte to the answer's last; ``ids`` of the answers with a 200."""

    seconds: list[float] = field(default_factory=list)
    ids: Counter = field(default_factory=Counter)
    failures: Counter = field(default_factory=Counter)  # by status or by the name of what was raised
    wall_s: float = 0.0


@contextmanager
def serving(command: list[str]) -> Iterator[tuple[int, psutil.Process]]:
    """Port and process of a server, which prints its address when it listens."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline().rpartition(":")[2]), psutil.Process(process.pid)
        finally:
            process.kill()


def make_request() -> tuple[bytes, bytes]:
    """A whole HTTP request in two pieces; an id of eight digits belongs between them."""
    samples = np.random.default_rng(0).normal(0, 0.1, SECONDS * RATE_HZ).astype("<f4")
    fields = {
        "protocol_version": "1",
        "waveform_f32_base64": base64.b64encode(samples.tobytes()).decode(),
        "num_samples": len(samples),
        "sample_rate": RATE_HZ,
        "prompt": "Please open the window and close the door.",
    }
    head, tail = json.dumps(fields)[:-1].encode() + b', "metadata": {"id": "', b'"}}'
    length = len(head) + len(ID % 0) + len(tail)
    headers = f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    return headers.encode() + head, tail


async def ask(port: int, first: int, count: int) -> Answers:
    """Requests with the ids ``first`` to ``first + count - 1``, each sent once; nothing is tried again."""
    head, tail = make_request()
    answers = Answers()
    ids = iter(range(first, first + count))

    async def connection() -> None:
        streams = None
        for number in ids:
            started_s = time.monotonic()
            try:
                streams = streams or await asyncio.open_connection("127.0.0.1", port)
                reader, writer = streams
                writer.writelines((head, ID % number, tail))
                await writer.drain()
                status_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
                headers = dict(line.split(": ", 1) for line in lines if line)
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
            except (OSError, asyncio.IncompleteReadError) as error:
                answers.failures[type(error).__name__] += 1
                streams = None
                continue
            answers.seconds.append(time.monotonic() - started_s)
            if " 200 " in status_line:
                answers.ids[body["id"]] += 1
            else:
                answers.failures[status_line] += 1
        if streams:
            streams[1].close()

    started_s = time.monotonic()
    await asyncio.gather(*(connection() for _ in range(IN_FLIGHT)))
    answers.wall_s = time.monotonic() - started_s
    return answers


class PlainHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        samples = np.frombuffer(base64.b64decode(request["waveform_f32_base64"], validate=True), "<f4")
        right = len(samples) == request["num_samples"] and np.isfinite(samples).all()
        body = json.dumps({"score": 0.5, "id": request["metadata"]["id"]} if right else {"error": "samples"}).encode()
        self.send_response(200 if right else 400)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """A line a request is not what is measured."""


def run_plain_server() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), PlainHandler) as server:
        print(f"listening on 127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()


def measure(command: list[str], requests: int) -> dict[str, Any]:
    with serving(command) as (port, process):
        asyncio.run(ask(port, 0, IN_FLIGHT))  # imports and allocations of the first requests are no throughput
        server_s, client_s = _cpu_s(process), time.process_time()
        answers = asyncio.run(ask(port, IN_FLIGHT, requests))
        server_s, client_s = _cpu_s(process) - server_s, time.process_time() - client_s
        memory_mib = process.memory_info().rss / 2**20
    return {
        "requests_per_s": len(answers.seconds) / answers.wall_s,
        "p50_ms": 1000 * statistics.median(answers.seconds),
        "p95_ms": 1000 * statistics.quantiles(answers.seconds, n=20)[-1],
        "server_cpu_ms": 1000 * server_s / requests,
        "client_cpu_ms": 1000 * client_s / requests,
        "answered_once": sum(times == 1 for times in answers.ids.values()),
        "failures": dict(answers.failures),
        "memory_mib": memory_mib,
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--json", type=Path, help="write everything there, too")
    parser.add_argument("--whisper", metavar="SIZE", help="clips a second of whisper_cer instead: whisper.py has more")
    parser.add_argument("--plain-server", action="store_true", help=argparse.SUPPRESS)
    args, more = parser.parse_known_args()
    if args.plain_server:
        return run_plain_server()
    if args.whisper:
        # In a process of its own, since the plain server and the client need none of what it imports.
        more += ["--json", str(args.json)] if args.json else []
        sys.exit(
            subprocess.run([sys.executable, Path(__file__).with_name("whisper.py"), args.whisper, *more]).returncode
        )
    if more:
        parser.error(f"unknown: {' '.join(more)}")

    where = machine()
    print(f"{where['cpu']}, {where['cores']} cores, load average before {where['load_average']}")
    if is_busy(where):
        print("WARNING: the machine was busy before anything was measured; figures are not to be trusted")
    print(f"{args.requests} requests of {SECONDS} s at {RATE_HZ} Hz, {IN_FLIGHT} in flight\n")
    columns = f"{'requests/s':>11}{'p50':>9}{'p95':>9}{'CPU server, client':>20}{'answered once':>15}{'memory':>11}"
    print(f"{'server':<22}{columns}  failures")
    measured = {}
    for name, command in COMMANDS.items():
        found = measured[name] = measure(command, args.requests)
        print(
            f"{name:<22}{found['requests_per_s']:>11.0f}{found['p50_ms']:>6.0f} ms{found['p95_ms']:>6.0f} ms"
            f"{found['server_cpu_ms']:>11.2f}, {found['client_cpu_ms']:.2f} ms"
            f"{found['answered_once']:>15}{found['memory_mib']:>7.0f} MiB  {found['failures'] or 'none'}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps({"machine": where, "measured": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
