"""``main_omni --dry-run``: the resolved configuration and the plan, on this machine or on one that is not there.

    python -m verl_tts.main_omni --dry-run KEY=VALUE ...                                    checks all that a run checks
    python -m verl_tts.main_omni --dry-run --gpus 4 --gpu-gib 24 --nodes 1 --scorer shared \\
        actor_rollout_ref.model.path=DIR_WITH_CONFIG_JSON KEY=VALUE ...                     config.json alone is enough

What is printed is YAML; the plan is its comment at the end. Exit code 2: the plan says that it does not fit.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from omegaconf import DictConfig

from verl_tts.config.compose import compose
from verl_tts.config.inputs import check_inputs
from verl_tts.config.model_dir import read_policy_config
from verl_tts.config.plan import SCORERS, Machine, Plan, answer
from verl_tts.config.plan_shown import codec_config, shown
from verl_tts.config.validate import data_files, validate, validate_settings
from verl_tts.data.prompts import read_prompts
from verl_tts.errors import ConfigError
from verl_tts.report.run_dir import config_yaml

DOES_NOT_FIT = 2
ELSEWHERE = ("gpus", "gpu_gib", "nodes", "scorer")
MIB_A_GIB = 1024


def add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "a machine that is not there", "with --dry-run; of the model, config.json is enough"
    )
    group.add_argument("--gpus", type=int, metavar="N", help="GPUs of a node")
    group.add_argument("--gpu-gib", type=float, metavar="GIB", help="memory of each")
    group.add_argument("--nodes", type=int, metavar="N", help="nodes (1)")
    group.add_argument(
        "--scorer", choices=SCORERS, help="on a card of the run, on one of its own (the default), or none"
    )


def is_elsewhere(args: argparse.Namespace) -> bool:
    return any(getattr(args, name) is not None for name in ELSEWHERE)


def dry_run(args: argparse.Namespace) -> int:
    """Prints, and returns the exit code. Raises a ``UserError`` where a run would."""
    plan = _plan_elsewhere(args) if is_elsewhere(args) else _plan_here(args.overrides)
    for line in shown(plan):
        print(f"# {line}")
    return DOES_NOT_FIT if plan.machine.gpu_gib is not None and not answer(plan).fits else 0


def _plan_here(overrides: list[str]) -> Plan:
    config = compose(overrides)
    _print(config)
    validate(config)
    check_inputs(config)
    if config.reward.custom_reward_function.path:
        from verl_tts.launch import reward_manager

        reward_manager(config)  # which imports the function, and has no connection to close
    return plan_here(config)


def plan_here(config: DictConfig) -> Plan:
    """Of a configuration that is valid, on the cards of this machine."""
    gib = _card_gib() if config.tts.platform == "cuda" else None
    return _plan(config, Machine(config.trainer.n_gpus_per_node, config.trainer.nnodes, gib))


def _plan_elsewhere(args: argparse.Namespace) -> Plan:
    here = ["tts.platform=cuda", *args.overrides]
    sizes = [("gpus", "trainer.n_gpus_per_node"), ("nodes", "trainer.nnodes")]
    given = [f"{key}={getattr(args, name)}" for name, key in sizes if getattr(args, name) is not None]
    config = compose([*here, *given])
    _print(config)
    validate_settings(config)
    machine = Machine(
        config.trainer.n_gpus_per_node, config.trainer.nnodes, args.gpu_gib, args.scorer or Machine.scorer
    )
    if args.gpu_gib is not None and not args.gpu_gib > 0:
        raise ConfigError(f"--gpu-gib {args.gpu_gib} has to be above 0")
    return _plan(config, machine)


def _print(config: DictConfig) -> None:
    print(config_yaml(config), end="", flush=True)


def _plan(config: DictConfig, machine: Machine) -> Plan:
    path = config.actor_rollout_ref.model.path
    if not path:
        raise ConfigError("actor_rollout_ref.model.path is not set; a plan needs the config.json of a model")
    model_config = read_policy_config(path)
    train = _count(config.data.train_files, config.data.train_max_samples)
    val = _count(config.data.val_files, config.data.val_max_samples)
    codec = codec_config(path, model_config, config.tts.codec_path)
    return Plan(config, machine, model_config, train, val, codec)


def _count(files: object, kept: int) -> int | None:
    """Rows of prompt files; None where none is named, or not here."""
    paths = data_files(files)  # type: ignore[arg-type]
    if not paths or not all(Path(path).exists() for path in paths):
        return None
    rows = len(read_prompts(*paths))
    return min(rows, kept) if kept > 0 else rows


def _card_gib() -> float | None:
    """Of the smallest card here, as nvidia-smi says; None without it."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        print("no card was found by nvidia-smi; --gpu-gib names the memory of one", file=sys.stderr)
        return None
    return min(int(line) for line in told.stdout.split()) / MIB_A_GIB
