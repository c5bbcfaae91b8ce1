"""``verl-tts export CHECKPOINT OUT``: a training checkpoint becomes a directory that qwen-tts and vLLM-Omni load.

    verl-tts export RUN/checkpoints/global_step_400 EXPORTED
    verl-tts export RUN/checkpoints/global_step_400 ADAPTER --adapter

The directory is complete: a codec that the run had from elsewhere (tts.codec_path) is copied into it. --adapter writes
what LoRA has trained instead, as PEFT does: for generate, for merge-lora, or for a run to go on from.
"""

import argparse
import os
from pathlib import Path

from verl_tts.errors import CheckpointError, ConfigError
from verl_tts.files import check_is_new, sigterm_cleans_up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="RUN/checkpoints/global_step_<n>")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to create")
    parser.add_argument("--base", metavar="MODEL_DIR", type=Path, help="default: the model that the run began with")
    parser.add_argument("--codec", metavar="DIR", type=Path, help="codec to put in; default: that of the run, if apart")
    parser.add_argument("--adapter", action="store_true", help="the LoRA adapter alone, a PEFT directory")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; default: as in the base model")


def run(args: argparse.Namespace) -> int:
    from verl_tts.checkpoints.manifest import list_checkpoints
    from verl_tts.report.console import output_to

    if args.adapter and (args.base or args.codec or args.dtype):
        raise ConfigError("--adapter writes what was trained, as it is; leave --base, --codec and --dtype out")
    if args.checkpoint not in list_checkpoints(args.checkpoint.parent):
        raise CheckpointError(f"{args.checkpoint} is no checkpoint; name RUN/checkpoints/global_step_<n>")
    check_is_new(args.out, args.checkpoint)
    with sigterm_cleans_up(), output_to(Path(os.devnull)) as say:  # libraries have much to say when they are imported
        # Imported after all that: it takes seconds, and a wrong path is answered at once.
        from verl_tts.checkpoints.adapter import export_adapter
        from verl_tts.checkpoints.export import export, setting_of_run

        if args.adapter:
            export_adapter(args.checkpoint, args.out)
            say(f"exported the adapter of {args.checkpoint} to {args.out}")
            return 0
        codec = args.codec or setting_of_run(args.checkpoint, "tts.codec_path")
        export(args.checkpoint, args.out, base=args.base, dtype=args.dtype, codec=Path(codec) if codec else None)
        say(f"exported {args.checkpoint} to {args.out}")
    return 0
