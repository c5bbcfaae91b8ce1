"""The real loop, by its launcher, and what its metrics say about time."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import MemoryWatch

ROOT = Path(__file__).parents[1]
LAUNCHER = ROOT / "examples/grpo_trainer/qwen3_tts/run_qwen3_tts_grpo.sh"
MARK = "VERL_TTS_BENCH"
LIMIT_S = 900
COLD_STEPS = 1  # the first update pays for what is made once

PROMPTS, SAMPLES, FRAMES = 4, 8, 48
SETTINGS = (
    "data.max_prompt_length=192",
    f"data.max_response_length={FRAMES + 1}",  # the last sampled token has no frame
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    "actor_rollout_ref.rollout.top_k=50",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "trainer.val_before_train=false",
    "tts.keep.train_samples_per_step=0",
    "tts.gates.eos_rate.stop=null",  # no clip ends by itself, so all are as long and score the same
    "tts.gates.flat_groups.stop=null",
)
ONE_AFTER_THE_OTHER = ("tts.engine.stages_side_by_side=false", "tts.engine.starts_early=false")
FUNCTION = (
    "reward.custom_reward_function.path=pkg://verl_tts.rewards.functions",
    "reward.custom_reward_function.name=duration",
)


@dataclass(frozen=True)
class Inputs:
    """A checkpoint that never ends a clip by itself, and prompts for it."""

    model: Path
    data: Path


@dataclass(frozen=True)
class Run:
    to_first_update_s: float
    """From the start of the launcher's process to the end of step 1."""
    steps: list[dict[str, Any]]
    """Lines of metrics.jsonl, the cold ones left out."""
    memory: MemoryWatch | None = None

    def median(self, name: str) -> float:
        return statistics.median(step[name] for step in self.steps)


def run(inputs: Inputs, updates: int, overrides: tuple[str, ...], *, watch_memory: bool = False) -> Run:
    """One start of the launcher. ``SystemExit`` where it failed."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "run")
        environment = os.environ | {
            "PYTHON_BIN": sys.executable,
            "MODEL_PATH": str(inputs.model),
            "TRAIN_FILE": str(inputs.data / "train.parquet"),
            "VAL_FILE": str(inputs.data / "val.parquet"),
            "SPK_EMBED_PATH": str(inputs.data / "speaker.json"),
            "SCORER_URL": "null",
            "OUTPUT_DIR": str(output),
            "NUM_GPUS": "1",
            "TOTAL_TRAINING_STEPS": str(updates),
            "SAVE_FREQ": "-1",
            "TEST_FREQ": "-1",
            MARK: mark,
        }
        watch = MemoryWatch(f"{MARK}={mark}") if watch_memory else None
        began = time.time()
        with watch or nullcontext():
            done = subprocess.run(
                ["bash", LAUNCHER, *SETTINGS, *FUNCTION, *overrides],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
            )
        if done.returncode:
            sys.exit(f"the run ended with exit code {done.returncode}\n{done.stdout[-3000:]}")
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return Run(lines[0]["time"] - began, lines[COLD_STEPS:], watch)
