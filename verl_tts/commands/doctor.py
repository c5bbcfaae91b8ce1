"""``verl-tts doctor``: what would go wrong, before a GPU is booked.

    verl-tts doctor actor_rollout_ref.model.path=MODEL data.train_files=train.parquet ...
    COMMAND=doctor bash examples/grpo_trainer/qwen3_tts/run_qwen3_tts_grpo.sh KEY=VALUE ...

Takes the overrides of a run. A failure does not keep the other looks from being made; a look that needs what has failed
is left out and says so. Exit code 2: at least one failure. Warnings alone are 0.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from omegaconf import DictConfig

from verl_tts.doctor.findings import FOUND_SOMETHING, Finding, looked_at
from verl_tts.errors import ConfigError, TTSError
from verl_tts.report.console import output_to
from verl_tts.rewards.doctor import Reading, read_clip

SAMPLES = 8  # rows that the engine speaks
Look = Callable[[], Iterator[Finding]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="the settings of the run, as for a launcher")
    parser.add_argument("--quick", action="store_true", help="start no engine: leaves out synthesis and log-probs")
    parser.add_argument("--audio", metavar="FILE", help="a clip of your own for the scorer; default: an English one")
    parser.add_argument("--text", help="what is said in it")
    parser.add_argument("--wrong-text", help="another sentence of the same language")


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    states, reading = [], _reading(args)
    # The libraries that are looked at have much to say, too.
    with tempfile.NamedTemporaryFile(prefix="verl-tts-doctor-") as log, output_to(Path(log.name)) as say:
        for finding in examine(args.settings, quick=args.quick, reading=reading):
            states.append(finding.state)
            say("\n".join(finding.lines))
        failures, warnings = states.count("fail"), states.count("warn")
        say(f"{failures} failure(s), {warnings} warning(s)")
    return FOUND_SOMETHING if failures else 0


def _reading(args: argparse.Namespace) -> Reading | None:
    own = (args.audio, args.text, args.wrong_text)
    if any(own) and not all(own):
        raise ConfigError("--audio, --text and --wrong-text go together: a clip, what it says, what it does not say")
    return Reading(read_clip(args.audio), args.text, args.wrong_text) if args.audio else None


def examine(words: list[str], *, quick: bool = False, reading: Reading | None = None) -> Iterator[Finding]:
    """Every finding, in the order in which the looks are made."""
    from verl_tts.doctor import inputs, machine
    from verl_tts.doctor.settings import read_settings, settings
    from verl_tts.dry_run import plan_here

    yield from looked_at("versions", machine.versions)
    config, mistakes = read_settings(words)
    yield from mistakes
    if config is None:
        yield Finding("the rest", "skip", "not looked at: there is no configuration")
        return
    failed: set[str] = {finding.look for finding in mistakes}

    def made(look: str, at: Look, needs: tuple[str, ...] = ()) -> Iterator[Finding]:
        if missing := [need for need in needs if need in failed]:
            failed.add(look)
            yield Finding(look, "skip", f"not looked at: it needs {', '.join(missing)}")
            return
        for finding in looked_at(look, at):
            if finding.state == "fail":
                failed.add(look)
            yield finding

    yield from made("settings", lambda: settings(config, mistakes))
    yield from made("platform", lambda: machine.on_platform(config))
    yield from made("registration", lambda: machine.registration(config))
    yield from made("model", lambda: inputs.model(config))
    yield from made("data", lambda: inputs.data(config))
    yield from made("tokenizer", lambda: inputs.tokenizer(config), ("model", "data"))
    yield from made("codec", lambda: inputs.codec(config), ("model",))
    yield from made("speaker", lambda: inputs.voices(config), ("model", "data"))
    room = (("memory", machine.memory), ("disk", machine.disk), ("shared memory", machine.shared_memory))
    for look, at in room:
        yield from made(look, lambda at=at: at(plan_here(config)), ("model",))  # type: ignore[misc]
    yield from made("ports", lambda: machine.ports(config))
    yield from made("scorer", lambda: inputs.scorer(config, reading))
    if quick:
        yield Finding("engine", "skip", "not looked at: --quick")
        return
    needs = ("registration", "model", "tokenizer", "codec", "speaker", "data")
    yield from made("engine", lambda: _engine(config), needs)


def _engine(config: DictConfig) -> Iterator[Finding]:
    from verl_tts.doctor import listening
    from verl_tts.doctor.inputs import prompt_rows
    from verl_tts.doctor.sampling import sample

    try:
        clips = sample(config, prompt_rows(config)[:SAMPLES])
    except TTSError as error:
        yield Finding("synthesis", "fail", str(error), "the same engine would be started by the run")
        return
    yield from looked_at("synthesis", lambda: listening.synthesis(config, clips))
    yield from looked_at("log-probs", lambda: listening.agreement(config, clips))
