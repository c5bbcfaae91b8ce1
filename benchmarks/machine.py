"""What a measurement was made on, and how much memory a run takes."""

import os
import platform
import re
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from verl_tts.report.run_dir import versions

BUSY_LOAD_PER_CORE = 0.5  # load average above which somebody else is at work
SAMPLE_S = 2.0


def machine() -> dict[str, Any]:
    """Hardware, load and the versions that are installed."""
    cpu = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    installed = versions()
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "python": installed["python"],
        "packages": {name: version for name, version in installed["packages"].items() if version},
    }


def is_busy(found: dict[str, Any]) -> bool:
    return found["load_average"] > BUSY_LOAD_PER_CORE * found["cores"]


class MemoryWatch:
    """Peak memory of the processes that carry a mark in their environment: the sum of their proportional set sizes.

    Shared pages are counted once in all. A thread looks every other second, so a shorter peak may be missed: looking
    walks the page tables of twenty processes, and takes a tenth of a core at that.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark.encode()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_gib, self.processes = 0.0, 0
        self.biggest: list[tuple[str, float]] = []  # name, GiB, at the peak

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            sizes: Counter[str] = Counter()
            found = 0
            for folder in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):  # ended meanwhile, or somebody else's
                    if self._mark in (folder / "environ").read_bytes():
                        sizes[_name(folder)] += _pss_bytes(folder)
                        found += 1
            if (total := sizes.total() / 2**30) > self.peak_gib:
                self.peak_gib, self.processes = total, found
                self.biggest = [(name, size / 2**30) for name, size in sizes.most_common(6)]


def _pss_bytes(folder: Path) -> int:
    line = re.search(r"^Pss: +(\d+) kB$", (folder / "smaps_rollup").read_text(), flags=re.MULTILINE)
    return int(line[1]) * 1024 if line else 0


def _name(folder: Path) -> str:
    """A process title such as ``ray::TaskRunner.run``, or the name of a program or of a Python module."""
    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
    if not words:
        return (folder / "comm").read_text().strip()
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    programs = [word for word in words if not word.startswith("-")]
    script = next((word for word in programs if word.endswith(".py")), programs[0])
    return Path(script).name
