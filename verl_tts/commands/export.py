"""``verl-tts export CHECKPOINT OUT``: a training checkpoint becomes a directory that qwen-tts and vLLM-Omni load."""

import argparse
from pathlib import Path

from verl_tts.files import sigterm_cleans_up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="RUN/checkpoints/global_step_<n>")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to create")
    parser.add_argument("--base", metavar="MODEL_DIR", type=Path, help="default: the model that the run began with")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; default: as in the base model")


def run(args: argparse.Namespace) -> int:
    from verl_tts.checkpoints.export import export

    with sigterm_cleans_up():
        export(args.checkpoint, args.out, base=args.base, dtype=args.dtype)
    print(f"exported {args.checkpoint} to {args.out}")
    return 0
