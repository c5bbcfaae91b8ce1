"""``verl-tts report RUN_DIR``: one HTML file that shows a run and lets it be heard.

    verl-tts report outputs/run
    verl-tts report outputs/run --out run.html --compare outputs/other --keep "cer<=first"

The run may still be under way. The file needs no network and can be sent as it is.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="OUTPUT_DIR of the run")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="the page; default: <name of RUN_DIR>.report.html here"
    )
    parser.add_argument("--compare", metavar="RUN_DIR", type=Path, help="another run, drawn into the same curves")
    parser.add_argument(
        "--keep",
        metavar="CONSTRAINT",
        help="what the checkpoint to keep has to meet, as in 'cer<=first', 'eos>=0.9' or none; "
        "first is the first validation; default: what the run keeps its best one by (tts.keep.best_not_above_start)",
    )
    parser.add_argument(
        "--audio-mb", metavar="MB", type=float, default=12.0, help="how much audio the page may hold (%(default)g)"
    )


def run(args: argparse.Namespace) -> int:
    from verl_tts.errors import ConfigError
    from verl_tts.report.page import write_report

    if not 0 <= args.audio_mb < 1000:
        raise ConfigError(f"--audio-mb {args.audio_mb:g} has to be between 0 and 1000")
    out = args.out or Path(f"{args.run_dir.absolute().name}.report.html")
    shelf = write_report(args.run_dir, out, compare=args.compare, keep=args.keep, audio_mb=args.audio_mb)
    print(f"{out}, {out.stat().st_size / 1e6:.1f} MB, {len(shelf.sounds)} clips")
    return 0
