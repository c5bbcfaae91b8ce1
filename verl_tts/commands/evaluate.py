"""``verl-tts evaluate``: a policy speaks a prompt file, a scorer listens; with an interval against another evaluation.

    verl-tts evaluate MODEL --data validation.parquet --speaker speaker.json \
        --scorer-url http://127.0.0.1:18080/score --samples 4 --out before
    verl-tts evaluate RUN/checkpoints/global_step_400 --data validation.parquet \
        --scorer-url http://127.0.0.1:18080/score --samples 4 --out after --against before

A checkpoint is sampled and scored as in the validations of its run. For a model directory ``--config`` names a run's
config.yaml, or what a launcher prints with --dry-run, and ``--set`` changes single settings. The same command goes on
with an evaluation that was cut off.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

from verl_tts.files import sigterm_cleans_up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL_OR_CHECKPOINT", type=Path, help="model directory, or RUN/checkpoints/global_step_<n>"
    )
    parser.add_argument("--data", metavar="FILE", type=Path, required=True, help="prompt file, parquet")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="clips, their scores and the summary")
    parser.add_argument("--scorer-url", metavar="URL", help="full address of the scorer; default: that of the config")
    parser.add_argument("--speaker", metavar="PATH", type=Path, help="embedding or folder of them; default: the run's")
    parser.add_argument("--samples", metavar="K", type=int, default=1, help="clips, and seeds, a row (%(default)s)")
    parser.add_argument("--against", metavar="DIR", type=Path, help="a finished evaluation of the same rows")
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="settings of a run; default: of a checkpoint, those of its run"
    )
    parser.add_argument("--base", metavar="DIR", type=Path, help="of a checkpoint; default: what the run began with")
    parser.add_argument(
        "--set", dest="overrides", metavar="KEY=VALUE", nargs="+", action="extend", default=[], help="as for a launcher"
    )


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns of every policy that is not its own
    with sigterm_cleans_up():
        from verl_tts.evaluation import Request, evaluate
        from verl_tts.report.evaluation_dir import shown

        summary = evaluate(Request(**{name: value for name, value in vars(args).items() if name != "command"}))
    print("\n".join(shown(summary)))
    print(f"{args.out / 'summary.json'}, clips and scores in {args.out / 'samples.jsonl'}")
    return 0
