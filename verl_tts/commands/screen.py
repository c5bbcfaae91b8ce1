"""``verl-tts screen``: the starting policy speaks some prompts and is scored; is there something to learn?

    verl-tts screen actor_rollout_ref.model.path=MODEL data.train_files=train.parquet ...
    COMMAND=screen bash examples/grpo_trainer/qwen3_tts/run_qwen3_tts_grpo.sh KEY=VALUE ... --prompts 100

Takes the overrides of a run: prompts, group size, sampling, guards and reward are those of its first step. Starts the
rollout engine, without Ray, and writes nothing but a log. Exit code 3: there is hardly anything to learn.
"""

import argparse
import json
import logging
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from verl_tts.errors import ConfigError
from verl_tts.files import sigterm_cleans_up

NOTHING_TO_LEARN = 3
LAST_LINES = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="the settings of the run, as for a launcher")
    parser.add_argument("--prompts", type=int, default=50, metavar="N", help="training prompts to try (%(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the numbers there, too")


def run(args: argparse.Namespace) -> int:
    from verl_tts.config.compose import compose
    from verl_tts.config.inputs import check_inputs
    from verl_tts.config.validate import validate
    from verl_tts.report.console import output_to
    from verl_tts.screen import screen, shown, verdict

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if args.prompts < 1:
        raise ConfigError(f"--prompts {args.prompts} has to be 1 or more")
    config = compose(args.settings)
    validate(config)
    check_inputs(config)
    with sigterm_cleans_up(), tempfile.TemporaryDirectory(prefix="verl-tts-screen-") as scratch:
        log = Path(scratch, "screen.log")
        try:
            with output_to(log):
                found = screen(config, args.prompts)
        except BaseException:
            sys.stderr.write("\n".join([*log.read_text(errors="replace").splitlines()[-LAST_LINES:], ""]))
            raise
    print("\n".join(shown(found)))
    if args.json:
        args.json.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    return 0 if verdict(found)[0] else NOTHING_TO_LEARN
