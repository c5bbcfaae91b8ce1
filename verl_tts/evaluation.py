"""An evaluation: a policy speaks every row of a prompt file ``samples`` times, a scorer listens, nothing is trained.

    settings -> rows, speakers, scorer -> what is done already -> checkpoint exported -> engine -> clips -> summary

The prompt, the sampler, the seeds and the reward are those of a validation during training, so that its numbers are
the same: the engine is that of ``rollout/server.py``, without Ray, and the reward that of ``rewards/manager.py``. A
normaliser ``running_z`` of a reward stays at its initial mean and deviation, so that two evaluations have one measure.
"""

import asyncio
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_tts import launch
from verl_tts.checkpoints.manifest import MANIFEST, verify
from verl_tts.config.compose import compose, tts_config
from verl_tts.config.inputs import check_languages
from verl_tts.config.model_dir import codec_dir, read_model_config, speaker_size, takes_speakers
from verl_tts.config.reward import reward_rule
from verl_tts.config.validate import validate_rollout
from verl_tts.data.prompts import read_prompts
from verl_tts.data.speaker import read_speakers, speaker_file
from verl_tts.errors import CheckpointError, ConfigError, RunStopped
from verl_tts.files import sha256_of
from verl_tts.report.console import Say, output_to
from verl_tts.report.evaluation_dir import EvaluationDir
from verl_tts.report.run_dir import RunDir
from verl_tts.rewards.protocol import ScorerInfo
from verl_tts.rollout.alone import engine, roll_out_and_score, spec_alone, use_environment
from verl_tts.rollout.spec import RolloutSpec, sampling_settings
from verl_tts.types import PromptRow

PROGRESS_S = 10.0  # between two lines that say how far it is

ROLLOUT, VAL = "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.val_kwargs"
OF_MOSS = ("text_temperature", "reference_format", "reference_seconds")  # of tts, what MOSS's clips depend on
# What an evaluation takes from the configuration of a run: how it samples, who speaks, what is rewarded. The rest, the
# platform first of all, is that of this machine.
OF_THE_RUN = (
    "data.seed",
    "data.max_prompt_length",
    "data.max_response_length",
    *(f"{VAL}.{name}" for name in ("do_sample", "temperature", "top_p", "top_k")),
    *(
        f"{ROLLOUT}.{name}"
        for name in (
            "dtype",
            "logprobs_mode",
            "max_num_seqs",
            "max_num_batched_tokens",
            "gpu_memory_utilization",
            "enforce_eager",
            "engine_kwargs",
        )
    ),
    "tts.prompt_layout",
    "tts.language",
    "tts.speaker_path",
    *(f"tts.{name}" for name in (*OF_MOSS, "codec_path", "reference_dir", "channel_reduction", "channel_weights")),
    "tts.rpc_timeout_s",
    "tts.reward",
)


@dataclass(frozen=True)
class Request:
    """What is asked for, as on the command line of ``verl-tts evaluate``."""

    model: Path  # a model directory, or RUN/checkpoints/global_step_<n>
    data: Path
    out: Path
    scorer_url: str | None = None
    speaker: Path | None = None
    samples: int = 1
    against: Path | None = None
    config: Path | None = None  # None: of a checkpoint, the newest of its run; of a model directory, our defaults
    base: Path | None = None  # of a checkpoint; None: the model that the run began with
    overrides: Sequence[str] = ()


def evaluate(request: Request) -> dict[str, Any]:
    """Returns the summary, see ``report/evaluation_dir.py``. Goes on where an earlier call with the same request ended.

    Raises ``UserError`` before anything is started, ``RunStopped`` for what happens later; clips that have their line
    are kept.
    """
    if request.samples < 1:
        raise ConfigError(f"--samples {request.samples} has to be 1 or more")
    if request.out.resolve().is_relative_to(request.model.resolve()):
        raise ConfigError(f"--out {request.out} lies inside {request.model}; name a directory elsewhere")
    checkpoint = request.model if is_checkpoint(request.model) else None
    config = compose_evaluation(request, checkpoint)
    validate_rollout(config)
    rows = read_prompts(request.data)
    model_config = read_model_config(config.actor_rollout_ref.model.path)
    check_languages(config, model_config, rows)
    speakers = {}
    if takes_speakers(model_config):
        speakers = _speakers(config.tts.speaker_path, speaker_size(model_config), rows)
    else:
        codec_dir(config.actor_rollout_ref.model.path, model_config, config.tts.codec_path)
    conditioner = launch.check_prompts(config, rows)
    identity = {
        "policy_sha256": _policy_sha256(checkpoint, request.model, Path(config.actor_rollout_ref.model.path)),
        "data_sha256": sha256_of(request.data),
        "rows": len(rows),
        "samples": request.samples,
        "speakers_sha256": speakers,
        **_sampling_identity(config),
    }
    out = EvaluationDir(request.out)
    other = EvaluationDir(request.against) if request.against is not None else None
    if other is not None and other.path == out.path:
        raise ConfigError(f"--against {request.against} is the evaluation itself; name another one")
    scorer = asyncio.run(_probe(config))
    identity["scorer_fingerprint"] = scorer.fingerprint
    if other is not None:
        other.check_comparable(identity)
    named = {
        "model": str(request.model.absolute()),
        "data": str(request.data.absolute()),
        "scorer": scorer.name or config.tts.reward.scorer_url,
        "scorer_url": config.tts.reward.scorer_url,
        "speaker_path": config.tts.speaker_path,
    }
    done = out.start(identity, named)
    with closing(out):
        wanted = [(row, k) for row in rows for k in range(request.samples) if (row.id, k) not in done]
        if wanted:
            _sample_and_score(checkpoint, config, conditioner, wanted, out)
        return out.finish(other)


# ------------------------------------------------------------------ settings


def is_checkpoint(path: Path) -> bool:
    """A training checkpoint, whole or not. ``CheckpointError`` for a whole run, of which one has to be chosen."""
    if (path / "checkpoints").is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(f"{path} is a run; name one of its checkpoints, {path}/checkpoints/global_step_<n>")
    return (path / MANIFEST).is_file() or (path / "actor").is_dir()


def compose_evaluation(request: Request, checkpoint: Path | None) -> DictConfig:
    """The configuration of this machine, with what ``OF_THE_RUN`` names from that of a run, then the request's own."""
    saved: DictConfig | None = None
    if request.config is not None:
        saved = _read_config(request.config)
    elif checkpoint is not None:
        saved = RunDir(_run_of(checkpoint)).latest_config()
    given = _taken_from(saved, request.overrides) if saved is not None else {}
    given["actor_rollout_ref.model.path"] = str(_base(request, checkpoint) if checkpoint else request.model)
    if request.speaker is not None:
        given["tts.speaker_path"] = str(request.speaker)
    if request.scorer_url is not None:
        given["tts.reward.scorer_url"] = request.scorer_url
    model_config = read_model_config(given["actor_rollout_ref.model.path"])
    config = compose(request.overrides, given)
    if takes_speakers(model_config) and not config.tts.speaker_path:
        raise ConfigError("no speaker: name an embedding, or a folder of them, with --speaker")
    return config


def _taken_from(saved: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    taken = {}
    for key in OF_THE_RUN:
        if key == "tts.reward" and any(word.startswith("tts.reward.preset=") for word in overrides):
            continue  # another reward altogether
        value = OmegaConf.select(saved, key)
        if value is not None:
            taken[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return taken


def _read_config(path: Path) -> DictConfig:
    try:
        config = OmegaConf.load(path)
    except (OSError, YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(config, DictConfig) or OmegaConf.select(config, VAL) is None:
        raise ConfigError(f"--config {path} is no configuration of a run, such as config.yaml of a run directory")
    return config


def _run_of(checkpoint: Path) -> Path:
    run = next((folder for folder in checkpoint.absolute().parents if (folder / "config.yaml").is_file()), None)
    if run is None:
        raise CheckpointError(f"no config.yaml above {checkpoint} says how its run samples; name one with --config")
    return run


def _base(request: Request, checkpoint: Path) -> Path:
    from verl_tts.checkpoints.export import base_of_run

    return request.base or base_of_run(checkpoint)


def _sampling_identity(config: DictConfig) -> dict[str, Any]:
    """All settings that decide what a clip sounds like and what it is worth."""
    rollout, tts = config.actor_rollout_ref.rollout, config.tts
    function = OmegaConf.to_container(config.reward.custom_reward_function, resolve=True)
    return {
        "seed": config.data.seed,
        **sampling_settings(rollout, "val"),
        "max_frames": config.data.max_response_length,
        "prompt_layout": tts.prompt_layout,
        "language": tts.language,
        "dtype": rollout.dtype,
        **({name: tts[name] for name in OF_MOSS} if tts.model == "moss" else {}),
        **{f"reward.{name}": value for name, value in reward_rule(tts_config(config).reward).items()},
        "reward_function": function if function["path"] else None,  # type: ignore[index,call-overload]
    }


def _speakers(path: str, hidden_size: int, rows: Sequence[PromptRow]) -> dict[str, str]:
    """Name to hash of the embeddings that the rows use; the one of rows that name none is called "" here."""
    names = {row.speaker for row in rows}
    read_speakers(path, names, hidden_size)
    return {name or "": sha256_of(speaker_file(path, name)) for name in sorted(names, key=lambda name: name or "")}


def _policy_sha256(checkpoint: Path | None, model: Path, base: Path) -> str:
    """One hash of all that decides the policy: every file of the model directory; of a checkpoint, its manifest too."""
    directory = base if checkpoint else model
    names = sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    shown = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    digest = sha256()
    for name in shown:
        digest.update(f"{name.as_posix()} {sha256_of(directory / name)}\n".encode())
    if checkpoint is not None:
        verify(checkpoint)
        digest.update(sha256_of(checkpoint / MANIFEST).encode())
    return digest.hexdigest()


async def _probe(config: DictConfig) -> ScorerInfo:
    rewards = launch.reward_manager(config)
    try:
        return await rewards.probe()
    finally:
        await rewards.aclose()


# ------------------------------------------------------------------ clips


def _sample_and_score(
    checkpoint: Path | None,
    config: DictConfig,
    conditioner: Any,
    wanted: Sequence[tuple[PromptRow, int]],
    out: EvaluationDir,
) -> None:
    use_environment(config)
    with output_to(out.log) as say, _model_directory(checkpoint, config, out, say) as model:
        say(f"starting the engine, log {out.log}")
        spec = replace(spec_alone(config), model_path=str(model))
        progress = Progress(len(wanted), len(wanted) + len(out.lines()), say)
        try:
            asyncio.run(_run(config, spec, conditioner, wanted, out, progress))
        except RunStopped:
            say(f"{progress.done} clips are kept in {out.path}; the same command goes on from there")
            raise


@contextmanager
def _model_directory(checkpoint: Path | None, config: DictConfig, out: EvaluationDir, say: Say) -> Iterator[Path]:
    """What the engine loads; of a checkpoint, an export beside the clips, gone when the evaluation ends."""
    base = Path(config.actor_rollout_ref.model.path)
    if checkpoint is None:
        yield base
        return
    from verl_tts.checkpoints.export import export

    shutil.rmtree(out.model, ignore_errors=True)  # of one that was killed
    say(f"exporting {checkpoint}")
    try:
        export(checkpoint, out.model, base=base)
        yield out.model
    finally:
        shutil.rmtree(out.model, ignore_errors=True)


class Progress:
    """Says how far it is: at the first clip, at the last one, and every ``PROGRESS_S`` between them."""

    def __init__(self, wanted: int, total: int, say: Say) -> None:
        self.total, self._say = total, say
        self.done = self._before = total - wanted
        self._sum = 0.0
        self._first_s = self._said_s = 0.0
        if self.done:
            say(f"{self.done} of {total} clips are there already")

    def add(self, score: float) -> None:
        self.done += 1
        self._sum += score
        now_s, new = time.monotonic(), self.done - self._before
        if new == 1:
            self._first_s = now_s  # what comes before it is the start of the engine
        if new == 1 or self.done == self.total or now_s - self._said_s >= PROGRESS_S:
            self._said_s = now_s
            pace = f"  {(new - 1) / (now_s - self._first_s):.2f} clips/s" if now_s > self._first_s else ""
            self._say(f"{self.done}/{self.total} clips  score {self._sum / new:.3f}{pace}")


async def _run(
    config: DictConfig,
    spec: RolloutSpec,
    conditioner: Any,
    wanted: Sequence[tuple[PromptRow, int]],
    out: EvaluationDir,
    progress: Progress,
) -> None:
    rewards = launch.reward_manager(config)
    try:
        await rewards.probe()
        async with engine(spec) as server:
            async for clip in roll_out_and_score(config, server, conditioner, rewards, wanted, split="val"):
                assert clip.score is not None
                of_clip = clip.row, clip.rollout, clip.waveform, clip.score
                await asyncio.to_thread(out.save, *of_clip, sample=clip.k, language=clip.given.language)
                progress.add(clip.score.total)
    finally:
        await rewards.aclose()
