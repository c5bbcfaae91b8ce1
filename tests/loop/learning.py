"""Two targets told apart by the text alone: does the policy learn both?

    python -m tests.loop.learning OUT [--model moss] [--seed 42] [--updates N] [--permuted]

runs it and prints the rise of each group with its interval. ``--permuted`` is the negative control: each score
goes to another sample of the batch, and nothing can be learned.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from verl_tts.checkpoints.tiny import build_tiny_qwen3_tts
from verl_tts.checkpoints.tiny_moss import build_tiny_moss
from verl_tts.config.model_dir import policy_of, read_model_config, speaker_size, takes_speakers
from verl_tts.data.prompts import write_prompts
from verl_tts.data.quickstart import invented_speaker
from verl_tts.report.intervals import paired_difference
from verl_tts.types import PromptRow

from .runs import BASE, Inputs, Run, start, with_fault

TEXTS = {
    "qwen3_tts": {"short": "Stop!", "long": "Once upon a time, far away, there was a king."},
    # A prompt of MOSS is mostly template, in Latin letters.
    "moss": {"short": "Stop!", "long": "एक समय की बात है, दूर देश में एक राजा था।"},
}
TARGET_SECONDS = {"short": 0.24, "long": 4.0}  # 3 and 50 frames; an untrained clip has about 18
TRAIN_ROWS = 64
VAL_ROWS = 64
LEARNING_RATE = 2e-3
BUILDERS = {"qwen3_tts": build_tiny_qwen3_tts, "moss": build_tiny_moss}
# Room for 52 frames. An answer of MOSS has 18 positions more, and its prompt is mostly template. Where a clip ends is
# in its text channel, which is a thirty-third of a position by default.
OWN = {
    "qwen3_tts": ("data.max_response_length=52",),
    "moss": ("data.max_response_length=70", "data.max_prompt_length=320", "tts.channel_reduction=codebook0"),
}
UPDATES = {"qwen3_tts": 14, "moss": 12}


def write_inputs(directory: Path, model: Path) -> Inputs:
    """One voice and no language tag: the two groups differ in their text alone."""
    directory.mkdir(parents=True)
    config = read_model_config(str(model))
    texts = TEXTS[policy_of(config) or ""]
    for split, number in (("train", TRAIN_ROWS), ("val", VAL_ROWS)):
        groups = [*texts] * (number // len(texts))
        rows = [
            PromptRow(
                id=f"{split}-{index:02d}-{group}",
                text=texts[group],
                split=split,
                index=index,
                data_source=group,
                ground_truth=texts[group],
                extra={"target_seconds": TARGET_SECONDS[group]},
            )
            for index, group in enumerate(groups)
        ]
        write_prompts(rows, directory / f"{split}.parquet")
    speaker = directory / "speaker.json"
    if takes_speakers(config):
        speaker.write_text(json.dumps(invented_speaker(speaker_size(config))))
    return Inputs(model, directory / "train.parquet", directory / "val.parquet", speaker)


def learn(
    directory: Path, inputs: Inputs, *, seed: int = 42, updates: int | None = None, permuted: bool = False
) -> Run:
    """The launcher's defaults but for learning rate, warm-up, batch and limits; its precision too."""
    policy = policy_of(read_model_config(str(inputs.model))) or ""
    updates = updates or UPDATES[policy]
    overrides, environment = with_fault("rewards_permuted") if permuted else ((), None)
    return start(
        directory,
        inputs,
        *OWN[policy],
        "data.train_batch_size=24",
        f"data.seed={seed}",
        f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "trainer.val_before_train=true",
        "tts.keep.train_samples_per_step=0",
        # What is learned is to speak three times shorter and longer; in the end all clips of a group are alike.
        "tts.gates.length_drift.stop=null",
        "tts.gates.kl.stop=null",
        "tts.gates.flat_groups.stop=null",
        "tts.gates.identical_clips.stop=null",
        *overrides,
        base=BASE,
        environment=environment,
        steps=updates,
        test_freq=updates,
        timeout_s=1500,
    )


def scores(run: Run, step: int, group: str) -> np.ndarray:
    """Validation scores of a group, ordered by row."""
    return np.array([line["score"] for line in run.samples(step, "val") if line["data_source"] == group])


def rise(run: Run, group: str) -> tuple[float, float, float]:
    """(mean rise, lower end of its paired 95 % bootstrap interval, three standard errors of step 0)."""
    steps = (0, max(run.metrics))
    before, after = ({str(row): [score] for row, score in enumerate(scores(run, step, group))} for step in steps)
    interval = paired_difference(before, after)
    start = scores(run, 0, group)
    return interval.mean, interval.low, float(3 * start.std(ddof=1) / np.sqrt(len(start)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=sorted(BUILDERS), default="qwen3_tts")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--updates", type=int, help=f"how many; default: {UPDATES}")
    parser.add_argument("--permuted", action="store_true")
    args = parser.parse_args()
    model = args.out / args.model
    if not model.exists():
        BUILDERS[args.model](model)
    name = f"{args.model}_seed_{args.seed}{'_permuted' if args.permuted else ''}"
    inputs = write_inputs(args.out / f"{name}_data", model)
    run = learn(args.out / name, inputs, seed=args.seed, updates=args.updates, permuted=args.permuted)
    print("\n".join(run.lines))
    for group in TARGET_SECONDS:
        mean, lower, bar = rise(run, group)
        first, last = scores(run, 0, group).mean(), scores(run, max(run.metrics), group).mean()
        verdict = "learned" if lower > bar else "not learned"
        print(f"{group}: {first:.3f} -> {last:.3f}, rise {mean:.3f}, at least {lower:.3f}, needed {bar:.3f}: {verdict}")
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
