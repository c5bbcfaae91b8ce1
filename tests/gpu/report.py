"""The one file that ``make test-gpu`` leaves: verdict, seconds and peak memory of each rung, and the stack."""

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

from verl_tts.files import write_whole
from verl_tts.report.run_dir import versions

SAMPLE_MS = 100


class Report:
    """Written anew after every rung, so that it is there however the ladder ends."""

    def __init__(self, path: Path, model: str, device: dict[str, Any]) -> None:
        self.path = path
        self._head = {"model": model, "device": device, "versions": versions()}
        self._rungs: list[dict[str, Any]] = []

    def add(self, rung: str, verdict: str, seconds: float, figures: dict[str, Any], error: str = "") -> None:
        """``figures``: what the rung measured, ``peak_gib`` among it. ``error``: the end of what it died of."""
        self._rungs.append({"rung": rung, "verdict": verdict, "seconds": round(seconds, 1), **figures})
        if error:
            self._rungs[-1]["error"] = error[-2000:]
        failed = any(found["verdict"] != "passed" for found in self._rungs)
        content = self._head | {"verdict": "failed" if failed else "passed", "rungs": self._rungs}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(content, indent=1) + "\n")


def nvidia_smi(*query: str, index: str = "0") -> list[str]:
    """What nvidia-smi answers about one GPU; raises ``OSError`` or ``CalledProcessError`` where there is none."""
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(query)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return [field.strip() for field in done.stdout.strip().split(",")]


class GpuMemoryWatch:
    """Peak memory in use on one GPU, by whatever process, while the block runs."""

    def __init__(self, index: str) -> None:
        self.peak_mib = 0
        command = ["nvidia-smi", f"--id={index}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        self._command = [*command, f"--loop-ms={SAMPLE_MS}"]

    def __enter__(self) -> "GpuMemoryWatch":
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip().isdigit():
                self.peak_mib = max(self.peak_mib, int(line))
