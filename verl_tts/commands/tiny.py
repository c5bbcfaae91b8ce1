"""``verl-tts tiny OUT``: a tiny-random checkpoint, for tests and for trying the loop without a download."""

import argparse
from pathlib import Path

from verl_tts.checkpoints.tiny import build_tiny_qwen3_tts
from verl_tts.checkpoints.tiny_moss import build_tiny_moss

BUILDERS = {"qwen3_tts": build_tiny_qwen3_tts, "moss": build_tiny_moss}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(BUILDERS), default="qwen3_tts", help="default: %(default)s")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to create")


def run(args: argparse.Namespace) -> int:
    BUILDERS[args.model](args.out)
    print(f"tiny {args.model} checkpoint: {args.out}")
    return 0
