"""``verl-tts merge-lora``: a LoRA adapter and its base become one model directory.

verl-tts merge-lora --base BASE --adapter PEFT_DIR --out OUT
verl-tts merge-lora --base BASE --adapter adapters.safetensors --rank 8 --alpha 16 --out OUT
verl-tts merge-lora --base BASE --adapter adapters.safetensors --expect hindi --out OUT
"""

import argparse
import os
from pathlib import Path

from verl_tts.files import sigterm_cleans_up

LAYOUTS = ("rank-in", "in-rank")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="DIR", type=Path, required=True, help="model that the adapter was made for")
    parser.add_argument("--adapter", metavar="FILE_OR_DIR", type=Path, required=True, help="PEFT or MLX adapter")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="directory to create")
    parser.add_argument("--rank", type=int, help="where the adapter does not say it")
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument("--alpha", type=float, help="scale x rank, where the adapter does not say it")
    scale.add_argument("--scale", type=float, help="in place of --alpha: what B A is multiplied with")
    parser.add_argument(
        "--layout", choices=LAYOUTS, help="shape of lora_a in an MLX adapter; default: decided for each module"
    )
    parser.add_argument("--expect", metavar="NAME_OR_FILE", help="check hashes and topology: hindi, or a JSON file")


def run(args: argparse.Namespace) -> int:
    from verl_tts.config.model_dir import read_model_config
    from verl_tts.report.console import output_to

    read_model_config(str(args.base))
    with sigterm_cleans_up(), output_to(Path(os.devnull)) as say:  # libraries have much to say when they are imported
        # Imported after that: it takes seconds, and a wrong path is answered at once.
        from verl_tts.checkpoints.lora import Scaling, merge, read_pins

        given = Scaling(rank=args.rank, alpha=args.alpha, scale=args.scale)
        pins = read_pins(args.expect) if args.expect else None
        record = merge(args.base, args.adapter, args.out, given=given, layout=args.layout, pins=pins)
        proof = record["proof"]
        say(f"merged {len(record['modules'])} modules of {args.adapter} into {args.out}")
        say(
            f"logits: base + adapter and merge differ by {proof['float32_max_abs']:.2g} in float32, "
            f"by {proof['written_max_abs']:.2g} as written in {'/'.join(record['dtypes'])}; "
            f"the adapter moves them by {proof['adapter_max_abs']:.2g}"
        )
    return 0
