"""What ``make bench`` prints: start-up, steps by phase, rollout speed against qwen-tts's own, memory.

    python benchmarks/run.py [--updates N] [--repeats N] [--json FILE] [OVERRIDE ...]

Everything runs on this machine, on one tiny-random checkpoint whose clips all reach the limit, so that the work is
the same each time. Figures are medians. docs/bench.md says what they mean.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import loop
from machine import is_busy, machine
from safetensors.numpy import load_file, save_file

from verl_tts.checkpoints.tiny import CODEC_EOS, build_tiny_qwen3_tts
from verl_tts.config.compose import compose, worker_environment
from verl_tts.data.quickstart import write_quickstart

LIMIT_S = 900
HEAD = "talker.codec_head.weight"
DTYPES = ("bfloat16", "float32")  # of the rollout engine; the first is the default
PHASES = {
    "rollout and scoring": "timing_s/gen",
    "log-probs of the actor": "timing_s/old_log_prob",
    "log-probs of the reference": "timing_s/ref",
    "advantages": "timing_s/adv",
    "update": "timing_s/update_actor",
    "weight sync": "timing_s/update_weights",
}


def make_inputs(folder: Path) -> loop.Inputs:
    """The tiny checkpoint with EOS out of reach: its logit is 0, far below the 50 most probable of 2049."""
    inputs = loop.Inputs(folder / "model", folder / "data")
    build_tiny_qwen3_tts(inputs.model)
    weights = load_file(inputs.model / "model.safetensors")
    weights[HEAD][CODEC_EOS] = 0
    save_file(weights, inputs.model / "model.safetensors", metadata={"format": "pt"})
    write_quickstart(inputs.data, inputs.model)
    return inputs


def script(name: str, inputs: loop.Inputs, rounds: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    """What a script of this folder measured, in a process with the environment of a run's workers."""
    environment = worker_environment(compose(overrides)) | {"VLLM_LOGGING_LEVEL": "WARNING"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, Path(__file__).with_name(name), inputs.model, inputs.data, out, str(rounds)]
        done = subprocess.run(
            [*command, *overrides],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode:
            sys.exit(f"{name} ended with exit code {done.returncode}\n{done.stdout[-3000:]}")
        return json.loads(out.read_text())


def measure(inputs: loop.Inputs, updates: int, repeats: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    def say(what: str) -> None:
        print(f"  {what} ...", file=sys.stderr, flush=True)

    say(f"{updates} updates")
    long = loop.run(inputs, updates, overrides)
    starts: dict[str, list[float]] = {"at once": [long.to_first_update_s], "one after the other": []}
    for repeat in range(repeats):
        say(f"start-up, {repeat + 1} of {repeats}")
        starts["one after the other"].append(
            loop.run(inputs, 1, (*overrides, *loop.ONE_AFTER_THE_OTHER)).to_first_update_s
        )
        if repeat:
            starts["at once"].append(loop.run(inputs, 1, overrides).to_first_update_s)
    say("memory")
    memory = loop.run(inputs, 2, overrides, watch_memory=True).memory
    assert memory is not None
    engines = {}
    for dtype in DTYPES:  # a run's own, and the one that qwen-tts is fastest in on most CPUs
        say(f"the rollout engine alone, {dtype}")
        engines[dtype] = script("engine.py", inputs, repeats, (*overrides, f"actor_rollout_ref.rollout.dtype={dtype}"))
    say("qwen-tts")
    upstream = script("upstream.py", inputs, repeats, overrides)

    step_s = long.median("timing_s/step")
    speeds = {
        dtype: statistics.median(round["frames"] / round["seconds"] for round in engine["rounds"])
        for dtype, engine in engines.items()
    }
    generate = statistics.median(round["frames"] / round["generate_s"] for round in upstream["rounds"])
    decoded = statistics.median(
        round["frames"] / (round["generate_s"] + round["decode_s"]) for round in upstream["rounds"]
    )
    return {
        "start_s": {way: statistics.median(seconds) for way, seconds in starts.items()},
        "starts": {way: len(seconds) for way, seconds in starts.items()},
        "engine_start_s": engines[DTYPES[0]]["start_s"],
        "warm_steps": len(long.steps),
        "frames_per_step": long.median("rollout/frames/mean") * long.median("rollout/rows_real"),
        "step_s": step_s,
        "phases_s": {phase: long.median(name) for phase, name in PHASES.items()},
        "outside_rollout_and_scoring_s": statistics.median(
            step["timing_s/step"] - step["timing_s/gen"] for step in long.steps
        ),
        "gates_s": long.median("timing_s/gate"),
        "gates_share": statistics.median(step["timing_s/gate"] / step["timing_s/step"] for step in long.steps),
        "engine": {
            dtype: {"frames_per_s": speed, "of_generate": speed / generate, "of_generate_and_decode": speed / decoded}
            for dtype, speed in speeds.items()
        },
        "qwen_tts": {
            "dtype": upstream["dtype"],
            "threads": upstream["threads"],
            "generate_frames_per_s": generate,
            "with_decoding_frames_per_s": decoded,
            "frames": upstream["rounds"][-1]["frames"],
        },
        "memory": {"peak_gib": memory.peak_gib, "processes": memory.processes, "biggest": memory.biggest},
    }


def show(found: dict[str, Any], where: dict[str, Any]) -> None:
    def line(what: str, figure: str, note: str = "") -> None:
        print(f"{what:<52}{figure:>10}  {note}".rstrip())

    packages = " ".join(f"{name} {version}" for name, version in where["packages"].items())
    print(f"{where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, Python {where['python']}\n{packages}")
    print(f"load average before {where['load_average']}, overrides: {' '.join(where['overrides']) or 'none'}")
    if is_busy(where):
        print("WARNING: the machine was busy before anything was measured; times and ratios are not to be trusted")
    print()
    for way, seconds in found["start_s"].items():
        line(f"start to first update, servers {way}", f"{seconds:.1f} s", f"median of {found['starts'][way]}")
    line("of which the rollout engine, alone", f"{found['engine_start_s']:.1f} s")
    shape = f"{loop.PROMPTS} prompts x {loop.SAMPLES} samples, {found['frames_per_step']:.0f} frames"
    line("a step", f"{found['step_s']:.2f} s", f"{shape}, median of {found['warm_steps']} warm ones")
    for phase, seconds in found["phases_s"].items():
        line(f"  {phase}", f"{seconds:.2f} s")
    line("  all but rollout and scoring", f"{found['outside_rollout_and_scoring_s']:.2f} s")
    line("  gates", f"{1000 * found['gates_s']:.1f} ms", f"{found['gates_share']:.2%} of a step")
    qwen_tts, clips = found["qwen_tts"], loop.PROMPTS * loop.SAMPLES
    note = f"frames, not decoded, {qwen_tts['dtype']}, {qwen_tts['threads']} thread(s): its fastest here"
    line(f"qwen-tts generate, batch {loop.SAMPLES}", f"{qwen_tts['generate_frames_per_s']:.0f} /s", note)
    line("  and decoded", f"{qwen_tts['with_decoding_frames_per_s']:.0f} /s")
    for dtype, engine in found["engine"].items():
        both = f"{engine['of_generate_and_decode']:.2f} x where both decode"
        note = f"decoded; {engine['of_generate']:.2f} x generate, {both}"
        line(f"rollout engine, {clips} in flight, {dtype}", f"{engine['frames_per_s']:.0f} /s", note)
    memory = found["memory"]
    line("peak memory of the run", f"{memory['peak_gib']:.2f} GiB", f"{memory['processes']} processes")
    for name, size in memory["biggest"]:
        line(f"  {name}", f"{size:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=21, help="steps of the run that is timed by phase, 2 or more")
    parser.add_argument("--repeats", type=int, default=3, help="starts and rounds that a median is taken of")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    parser.add_argument("overrides", nargs="*", help="settings; without any, tts.platform=cpu")
    args = parser.parse_args()
    if args.updates <= loop.COLD_STEPS or args.repeats < 1:
        parser.error("--updates has to be 2 or more, --repeats 1 or more")
    overrides = tuple(args.overrides) or ("tts.platform=cpu",)
    where = machine() | {"overrides": list(overrides)}
    folder = Path(tempfile.mkdtemp(prefix="verl-tts-bench-"))
    try:
        found = measure(make_inputs(folder), args.updates, args.repeats, overrides)
    finally:
        shutil.rmtree(folder)
    show(found, where)
    if args.json:
        args.json.write_text(json.dumps({"machine": where, "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
