"""A long run that is hit by faults at random, and resumed, until it is done.

    python -m tests.loop.soak OUT [--seed 0] [--updates 60]

Each attempt lives for a few steps; then it is hit: the whole run, an actor worker, a stage of the rollout engine or the
scorer is killed with -9, or it gets SIGTERM or Ctrl-C, or SIGTERM and the newest checkpoint is cut in half. At the end
no step may be missing or doubled, no process, shared memory or temporary file may be left, and memory may not have
grown. After kill -9 of the whole run only processes are asked for: nobody is left to remove files.
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


def soak(out: Path, seed: int, updates: int) -> list[str]:
    """Returns what is wrong; nothing, as it should be."""
    model = out / "model"
    if not model.exists():
        build_tiny_qwen3_tts(model)
        write_quickstart(out / "data", model)
    inputs = Inputs(model, *(out / "data" / name for name in ("train.parquet", "val.parquet", "speaker.json")))
    directory, draw, began = out / f"seed_{seed}", random.Random(seed), time.monotonic()
    wrong: list[str] = []
    memory: list[float] = []
    bag: list[str] = []
    done = attempts = 0
    while done < updates:
        attempts += 1
        # Every fault comes up before any comes up again.
        bag = bag or draw.sample(sorted(ALLOWED.keys() - {"none"}), k=len(ALLOWED) - 1)
        lives = draw.randint(SHORTEST, LONGEST)
        fault = bag.pop() if done + lives < updates else "none"
        run = attempt(directory, inputs, fault, lives, updates, memory)
        done = max(run.metrics, default=0)
        say(f"attempt {attempts}: {fault}, exit code {run.returncode}, at step {done} after {run.seconds:.0f} s")
        if run.returncode not in ALLOWED[fault]:
            wrong.append(f"attempt {attempts} ({fault}) ended with {run.returncode}: {explain(run)[-2000:]}")
            break
        left = run.leftovers + ([] if fault == "run killed" else run.shared_memory + run.temporary)
        if left:
            wrong.append(f"attempt {attempts} ({fault}) left {left}")
        if fault == "checkpoint cut":
            shard = list_checkpoints(directory / "checkpoints")[0] / "actor" / "model_world_size_1_rank_0.pt"
            os.truncate(shard, shard.stat().st_size // 2)
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    kept = sorted(int(path.name.removeprefix("step_")) for path in (directory / "samples" / "train").iterdir())
    for what, found in (("lines", steps), ("samples", kept)):
        if found != [*range(1, updates + 1)]:
            wrong.append(f"there are {what} of the steps {found}")
    third = len(memory) // 3
    early, late = statistics.median(memory[:third]), statistics.median(memory[-third:])
    if late > early * (1 + GROWTH):
        wrong.append(f"memory went from {early:.0f} to {late:.0f} MiB")
    say(f"{len(steps)} steps, {attempts} attempts, {time.monotonic() - began:.0f} s")
    say(f"memory, median over the first and the last third of the steps: {early:.0f} and {late:.0f} MiB")
    say("\n".join(wrong) or "nothing lost, nothing left")
    return wrong


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=60)
    args = parser.parse_args()
    return 1 if soak(args.out, args.seed, args.updates) else 0


if __name__ == "__main__":
    sys.exit(main())
