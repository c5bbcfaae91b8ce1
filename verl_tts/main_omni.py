"""``python -m verl_tts.main_omni KEY=VALUE ...``: a training run, from the command line to its exit code.

compose -> validate -> look at model, prompts and speakers -> verl_tts.launch.run. Up to the last step nothing
heavy is imported: a mistake is answered in about a second, by one line.

    0 done | 2 the input is wrong, nothing was started | 3 the run was stopped | 130, 143 a signal | 1 a bug of ours
"""

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from verl_tts.config.compose import compose
from verl_tts.config.inputs import check_inputs
from verl_tts.config.validate import validate
from verl_tts.dry_run import add_machine
from verl_tts.errors import TTSError


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code. What is not a ``TTSError`` is raised: it is ours to fix and keeps its traceback."""
    args = _parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, _raise_exit)
    try:
        if args.dry_run:
            from verl_tts.dry_run import dry_run

            return dry_run(args)
        config = compose(args.overrides)
        validate(config)
        check_inputs(config)
        from verl_tts.launch import run

        run(config)
    except TTSError as error:
        print(f"verl_tts: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("verl_tts: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m verl_tts.main_omni",
        description="Train a codec text-to-speech policy with GRPO.",
        epilog="The settings are verl's and ours below tts:, each with its default and reason in "
        "verl_tts/config/omni_trainer.yaml and verl_tts/config/tts.py; --dry-run prints them all.",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and the plan, start nothing"
    )
    add_machine(parser)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="a setting, as in data.train_batch_size=8")
    return parser.parse_intermixed_args(argv)


def _raise_exit(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
