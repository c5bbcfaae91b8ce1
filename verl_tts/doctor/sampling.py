"""The process that the rollout engine is started in: ``python -m verl_tts.doctor.sampling CONFIG OUT ROW...``.

vLLM-Omni puts its own configuration of a model in the place of others', so the actor is not loaded beside it. What is
sampled crosses as arrays of numbers: OUT is an npz file without pickled objects.

Shapes: ``S`` audio sample; the others are those of ``types.CodecRollout``.
"""

import asyncio
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
from omegaconf import DictConfig, OmegaConf

from verl_tts.config.validate import data_files
from verl_tts.data.prompts import read_prompts
from verl_tts.errors import ProcessDied, TTSError
from verl_tts.launch import check_prompts
from verl_tts.rollout.alone import Clip, engine, roll_out_and_score, spec_alone, use_environment
from verl_tts.types import CodecRollout, GridRollout, PromptRow, Waveform

LIMIT_S = 300.0  # of the engine's end, beyond its start and its calls
LAST_LINES = 15


def sample(config: DictConfig, rows: Sequence[PromptRow]) -> list[Clip]:
    """One clip of each row, drawn by the engine in a process of its own. Raises ``ProcessDied`` with its last words."""
    conditioner = check_prompts(config)
    with tempfile.TemporaryDirectory(prefix="verl-tts-doctor-") as scratch:
        settings, out = Path(scratch, "config.yaml"), Path(scratch, "clips.npz")
        settings.write_text(OmegaConf.to_yaml(config, resolve=True), encoding="utf-8")
        command = [sys.executable, "-m", "verl_tts.doctor.sampling", str(settings), str(out)]
        limit_s = config.tts.engine.startup_timeout_s + config.tts.rpc_timeout_s + LIMIT_S
        try:
            done = subprocess.run(
                [*command, *(row.id for row in rows)], capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ProcessDied(f"the rollout engine sampled nothing within {limit_s:g} s") from error
        if done.returncode != 0:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            raise ProcessDied(f"the rollout engine failed: {_cause(lines)}")
        return _read(out, rows, conditioner)


def _cause(lines: Sequence[str]) -> str:
    """Of a traceback that went through several processes, the line that names an error."""
    named = [line.strip() for line in lines[-LAST_LINES:] if "Error" in line or "verl_tts: " in line]
    return (named or [*lines[-1:], "it said nothing"])[0]


def _read(file: Path, rows: Sequence[PromptRow], conditioner: object) -> list[Clip]:
    clips = []
    with np.load(file, allow_pickle=False) as arrays:
        for number, row in enumerate(rows):
            reason, seed, rate_hz = arrays[f"{number}.of"].tolist()
            kind = GridRollout if f"{number}.grid_TQ" in arrays else CodecRollout
            sampled = {name: arrays[f"{number}.{name}"] for name in _arrays_of(kind)}
            rollout = kind(stop_reason="eos" if reason else "length", seed=seed, **sampled)
            given = conditioner(row)  # type: ignore[operator]
            clips.append(Clip(row, 0, given, rollout, Waveform(arrays[f"{number}.samples_S"], rate_hz), None))
    return clips


def _arrays_of(kind: type[CodecRollout]) -> list[str]:
    return [field.name for field in fields(kind) if field.name not in ("stop_reason", "seed")]


async def _sample(config: DictConfig, names: Sequence[str], out: Path) -> None:
    by_id = {
        row.id: row for row in read_prompts(*data_files(config.data.train_files), *data_files(config.data.val_files))
    }
    numbers = {name: number for number, name in enumerate(names)}
    conditioner = check_prompts(config)
    arrays: dict[str, np.ndarray] = {}
    async with engine(spec_alone(config)) as server:
        async for clip in roll_out_and_score(
            config, server, conditioner, None, [(by_id[name], 0) for name in names], split="train", step=0
        ):
            number, rollout = numbers[clip.row.id], clip.rollout
            arrays |= {f"{number}.{name}": getattr(rollout, name) for name in _arrays_of(type(rollout))}
            arrays[f"{number}.samples_S"] = clip.waveform.samples_S
            arrays[f"{number}.of"] = np.array(
                [rollout.stop_reason == "eos", rollout.seed, clip.waveform.sample_rate_hz], np.int64
            )
    np.savez(out, **arrays)  # type: ignore[arg-type]


def main(settings: str, out: str, *names: str) -> int:
    logging.basicConfig(level=logging.WARNING)
    config = OmegaConf.load(settings)
    assert isinstance(config, DictConfig)
    use_environment(config)
    try:
        asyncio.run(_sample(config, names, Path(out)))
    except TTSError as error:
        print(f"verl_tts: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
