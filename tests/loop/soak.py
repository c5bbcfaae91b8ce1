"""A long run that is hit by faults at random, and resumed, until it is done.

    python -m tests.loop.soak OUT [--seed 0] [--updates 60]

Each attempt lives for a few steps; then a fault is drawn: the whole run, an actor worker, a stage of the rollout engine or
the scorer killed with -9, SIGTERM, Ctrl-C, or SIGTERM and the newest checkpoint cut in half. At the end no step may be
missing or doubled, no process, shared memory or temporary file may be left, and memory may not have grown.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from verl_tts.checkpoints.manifest import list_checkpoints
from verl_tts.checkpoints.tiny import build_tiny_qwen3_tts
from verl_tts.data.quickstart import write_quickstart

from .runs import FP32, Inputs, Run, Scorer, children_of, explain, scorer, start

SAVE_FREQ = 3
SHORTEST, LONGEST = 5, 14  # steps of an attempt before its fault
GROWTH = 0.1  # that memory may differ by between early and late steps
ALLOWED = {
    "run killed": (-signal.SIGKILL,),
    "actor killed": (3,),
    "stage killed": (3,),
    "scorer killed": (3,),
    "SIGTERM": (143,),
    "Ctrl-C": (130,),
    "checkpoint cut": (143,),
    "none": (0,),
}


def child(process: subprocess.Popen, title: str) -> int:
    return next(pid for pid, name in children_of(process.pid).items() if title in name)


def strike(fault: str, process: subprocess.Popen, server: Scorer) -> None:
    match fault:
        case "run killed":
            os.killpg(process.pid, signal.SIGKILL)
        case "actor killed":
            os.kill(child(process, "WorkerDict"), signal.SIGKILL)
        case "stage killed":
            os.kill(child(process, "StageEngineCore"), signal.SIGKILL)
        case "scorer killed":
            server.process.kill()
        case "SIGTERM" | "checkpoint cut":
            process.terminate()
        case "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)


def memory_mib(process: subprocess.Popen) -> float:
    """Proportional set sizes of the run's processes, summed."""
    total = 0
    for pid in (process.pid, *children_of(process.pid)):
        with suppress(psutil.Error):
            total += psutil.Process(pid).memory_full_info().pss
    return total / 2**20


def attempt(directory: Path, inputs: Inputs, fault: str, lives: int, updates: int, memory: list[float]) -> Run:
    seen = 0
    with scorer() as server:

        def look(line: str, process: subprocess.Popen) -> None:
            nonlocal seen
            if line.startswith("step "):
                seen += 1
                if seen > 2:  # what is made once has been made
                    memory.append(memory_mib(process))
                if seen == lives:
                    strike(fault, process, server)

        return start(
            directory,
            inputs,
            *FP32,
            "tts.reward.timeout_s=5",
            "tts.keep.train_samples_per_step=1",
            scorer_url=server.url,
            steps=updates,
            save_freq=SAVE_FREQ,
            test_freq=20,
            on_line=look,
            timeout_s=1500,
        )


def soak(out: Path, seed: int, updates: int, say: Callable[[str], None] = print) -> list[str]:
    """Returns what is wrong; nothing, as it should be."""
    model = out / "model"
    if not model.exists():
        build_tiny_qwen3_tts(model)
        write_quickstart(out / "data", model)
    inputs = Inputs(model, *(out / "data" / name for name in ("train.parquet", "val.parquet", "speaker.json")))
    draw, directory, wrong, memory = random.Random(seed), out / f"seed_{seed}", [], []
    bag: list[str] = []
    done, began, attempts = 0, time.monotonic(), 0
    while done < updates:
        attempts += 1
        bag = bag or draw.sample([fault for fault in ALLOWED if fault != "none"], k=len(ALLOWED) - 1)
        lives = draw.randint(SHORTEST, LONGEST)
        fault = bag.pop() if done + lives < updates else "none"
        of_attempt: list[float] = []
        run = attempt(directory, inputs, fault, lives, updates, of_attempt)
        memory.append(of_attempt)
        done = max(run.metrics, default=0)
        say(
            f"attempt {attempts}: {fault} after {lives} steps, exit code {run.returncode}, step {done}, {run.seconds:.0f} s"
            + (f", {of_attempt[0]:.0f} to {of_attempt[-1]:.0f} MiB" if of_attempt else "")
        )
        if run.returncode not in ALLOWED[fault]:
            wrong.append(f"attempt {attempts} ({fault}) ended with {run.returncode}: {explain(run)[-2000:]}")
            break
        left = [*run.leftovers, *run.shared_memory]
        if fault != "run killed":  # nobody is there to clean up after kill -9 but the processes themselves
            left += run.temporary
        elif run.leftovers == []:
            left = []
        if left:
            wrong.append(f"attempt {attempts} ({fault}) left {left}")
        if fault == "checkpoint cut":
            shard = list_checkpoints(directory / "checkpoints")[0] / "actor" / "model_world_size_1_rank_0.pt"
            os.truncate(shard, shard.stat().st_size // 2)
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    if steps != [*range(1, updates + 1)]:
        wrong.append(f"metrics.jsonl has the steps {steps}")
    kept = sorted(int(path.name.removeprefix("step_")) for path in (directory / "samples" / "train").iterdir())
    if kept != [*range(1, updates + 1)]:
        wrong.append(f"samples of the steps {kept}")
    levels = [level for of_attempt in memory for level in of_attempt]
    early, late = (statistics.median(part) for part in (levels[: len(levels) // 3], levels[-len(levels) // 3 :]))
    if late > early * (1 + GROWTH):
        wrong.append(f"memory went from {early:.0f} to {late:.0f} MiB")
    say(
        f"{len(steps)} steps in {attempts} attempts and {time.monotonic() - began:.0f} s; memory {early:.0f} MiB in the "
        f"first third of the steps, {late:.0f} MiB in the last; {'; '.join(wrong) or 'nothing lost, nothing left'}"
    )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=60)
    args = parser.parse_args()
    return 1 if soak(args.out, args.seed, args.updates, lambda line: print(line, flush=True)) else 0


if __name__ == "__main__":
    sys.exit(main())
