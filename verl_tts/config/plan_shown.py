"""A plan for a terminal, and the tables of the documents.

python -m verl_tts.config.plan_shown          prints the table of docs/gpu.md
python -m verl_tts.config.plan_shown moss     prints that of recipes/moss_voice_generator
"""

import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tts.config.compose import compose
from verl_tts.config.model_dir import CODEC_DIRS, CONFIG, policy_of
from verl_tts.config.plan import ACTOR, GIB, STAGES, Machine, Plan, answer
from verl_tts.files import read_json_object


def codec_config(model_path: str, model_config: Mapping[str, Any], codec_path: str | None) -> Mapping[str, Any] | None:
    """config.json of the codec, in the model's directory or in ``tts.codec_path``; None where it is not there."""
    directory = Path(codec_path) if codec_path else Path(model_path) / CODEC_DIRS[policy_of(dict(model_config)) or ""]
    return read_json_object(directory / CONFIG) if (directory / CONFIG).is_file() else None


def shown(plan: Plan) -> list[str]:
    """The plan in lines, the verdict last."""
    a, sizes, machine = plan.assumed, plan.sizes, plan.machine
    of = ""
    if plan.steps_an_epoch:
        epochs = plan.steps / plan.steps_an_epoch
        of = f", {plan.prompts} prompts: {plan.steps_an_epoch} steps an epoch, {epochs:.1f} epochs"
    data, rollout, actor = plan.config.data, plan.config.actor_rollout_ref.rollout, plan.config.actor_rollout_ref.actor
    updates = data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
    fast, slow = plan.hours()
    low, high = (f"{plan.cards * hours:.1f}" for hours in (fast, slow))
    pools = f" that train and {plan.pool} that sample," if plan.pool else ""
    seconds = plan.frames * plan.facts.samples_per_frame / plan.facts.sample_rate_hz
    lines = [
        f"plan for {machine.nodes} x {machine.gpus} GPUs{pools}"
        + (f" of {machine.gpu_gib:g} GiB" if machine.gpu_gib else "")
        + f", scorer: {machine.scorer}. Estimated; nothing was measured on a GPU",
        f"steps         {plan.steps} of {data.train_batch_size} prompts x {rollout.n} = {plan.clips_a_step} clips" + of,
        f"              {updates} optimizer step(s) each, at most {plan.frames} frames a clip ({seconds:.1f} s); "
        f"{plan.validations} validations" + (f" of {plan.clips_a_validation} clips" if plan.val_prompts else ""),
        f"model         {_millions(sizes.file)} parameters, {_millions(sizes.loaded)} loaded to train, "
        f"{_millions(sizes.trained)} of them trained ({plan.config.tts.trainable})",
        *_cards(plan),
        "              " + ", ".join(f"{name} {_gib(size)}" for name, size in plan.phases.items()),
        f"host          {_gib(plan.reference_host * machine.gpus)} GiB of reference a node, "
        + (f"{_gib(plan.codec_host)} GiB of codec for recordings, " if plan.codec_host else "")
        + f"{_gib(plan.shared_memory)} GiB of /dev/shm in a weight sync",
        f"disk          {_gib(plan.disk)} GiB: {plan.checkpoints_kept} checkpoints of {_gib(plan.checkpoint)}, "
        f"clips {_gib(plan.samples_bytes)}",
        f"time          {fast:.1f} to {slow:.1f} h, {low} to {high} GPU hours, if a frame of all clips in flight takes "
        f"{a.frame_s[0]:g} to {a.frame_s[1]:g} s, training reaches {a.flops[1] / 1e12:g} to {a.flops[0] / 1e12:g} "
        f"TFLOP/s, clips are {a.mean_length[0]:g} to {a.mean_length[1]:g} of the limit, and all else is "
        f"{a.overhead_s[0]:g} to {a.overhead_s[1]:g} s a step",
    ]
    return [*lines, *verdict(plan)]


def verdict(plan: Plan) -> list[str]:
    if plan.machine.gpu_gib is None:
        needs = _of_kinds({kind: peak / plan.assumed.usable for kind, peak in plan.peaks.items()})
        return [f"needs         {needs} GiB a GPU; --gpu-gib says whether a card has it"]
    found = answer(plan)
    need = f"{_of_kinds(plan.peaks)} of {plan.machine.gpu_gib * plan.assumed.usable:.1f} GiB that can be used"
    if found.fits:
        return [f"fits          {need}"]
    if found.changes is None:
        return [f"does not fit  {need}; no setting known here is enough: more GPUs, or larger ones"]
    return [
        f"does not fit  {need}; it does with",
        *(f"              {key}={_value(v)}" for key, v in found.changes.items()),
    ]


def _of_kinds(peaks: Mapping[str, float]) -> str:
    """One number, or one for each kind of GPU."""
    if len(peaks) == 1:
        return _gib(*peaks.values())
    return ", ".join(f"{_gib(peak)} ({kind})" for kind, peak in peaks.items())


def _cards(plan: Plan) -> list[str]:
    """A line for each kind of GPU, with what lies on it."""
    training = {
        "parameters": plan.parameters,
        "gradients": plan.gradients,
        "optimizer": plan.optimizer,
        "gathered": plan.gathered + plan.reduced,
        "activations": plan.activations,
        "reference": plan.reference,
    }
    sampling = {"engine weights": plan.engine_weights, "cache": plan.engine_cache, "heads in FP32": plan.engine_heads}
    around = "contexts and scorer"
    if not plan.pool:
        return ["GiB of a GPU  " + _parts(training | sampling | {around: plan.always(ACTOR + STAGES)})]
    return [
        "GiB of each   training GPU: " + _parts(training | {around: plan.always(ACTOR)}),
        "              rollout GPU: " + _parts(sampling | {around: plan.always(STAGES)}),
    ]


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= GIB / 10 or size == 0 else f"{size / GIB:.3f}"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M"


# ---------------------------------------------------------------------- the tables of the documents

TABLE_GIB = (24, 48, 80)
SIZES = Path(__file__).with_name("sizes.yaml")

TABLE_GPUS = (1, 2, 4, 8)
LAUNCHER = ("actor_rollout_ref.rollout.n=8", "data.max_response_length=360", "trainer.max_actor_ckpt_to_keep=26")
WAYS: Mapping[str, tuple[str, ...]] = {
    "full": (),
    "LoRA, rank 16": ("actor_rollout_ref.model.lora_rank=16",),
}

# GPUs that train, that sample (0: the same) and that score (0: none).
MOSS_PLACEMENTS = ((1, 6, 1), (1, 2, 1), (1, 1, 0), (2, 0, 0), (1, 0, 0))
MOSS_LAUNCHER = (
    "data.train_batch_size=8",
    "data.max_prompt_length=1024",
    "data.max_response_length=600",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "trainer.total_training_steps=1600",
    "trainer.test_freq=50",
    "trainer.save_freq=200",
    "trainer.max_actor_ckpt_to_keep=8",
)
MOSS_WAYS: Mapping[str, tuple[str, ...]] = {
    "LoRA, rank 8": (
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]",
    ),
    "full": (),
}


def table() -> str:
    """Markdown: a line a model, way of training and number of GPUs, a column a card; numbers are the peak in GiB."""
    lines = _head("", "GPUs")
    for size, model_config in published_sizes("qwen3_tts").items():
        for way, overrides in WAYS.items():
            config = compose(["tts.platform=cuda", "tts.model=qwen3_tts", *LAUNCHER, *overrides])
            for gpus in TABLE_GPUS:
                lines.append(_row([f"{size} B, {way}", str(gpus), *_cells(config, model_config, gpus)]))
    return "\n".join(lines)


def moss_table() -> str:
    """The same, a line a way of training and a placement."""
    lines = _head("", "train + sample + score")
    (model_config,) = published_sizes("moss_tts_delay").values()
    for way, overrides in MOSS_WAYS.items():
        for train, sample, score in MOSS_PLACEMENTS:
            config = compose([
                "tts.platform=cuda", "tts.model=moss", f"tts.engine.rollout_gpus={sample}", *MOSS_LAUNCHER, *overrides,
            ])  # fmt: skip
            lines.append(_row([way, f"{train} + {sample} + {score}", *_cells(config, model_config, train)]))
    return "\n".join(lines)


def _head(*columns: str) -> list[str]:
    columns = (*columns, *(f"{gib} GiB" for gib in TABLE_GIB))
    return [_row(columns), _row(["---"] * len(columns))]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def published_sizes(model_type: str) -> dict[str, dict[str, Any]]:
    """Name of a published model of this type -> as much of its config.json as a plan needs."""
    sizes: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(SIZES), resolve=True)  # type: ignore[assignment]
    return {
        str(name): size for name, size in sizes.items() if not name.startswith("_") and size["model_type"] == model_type
    }


def _cells(config: DictConfig, model_config: Mapping[str, Any], gpus: int) -> list[str]:
    config = deepcopy(config)
    config.trainer.n_gpus_per_node = gpus
    return [_cell(Plan(config, Machine(gpus, 1, gib, "own"), model_config, None, None)) for gib in TABLE_GIB]


def _cell(plan: Plan) -> str:
    found, peaks = answer(plan), " + ".join(map(_gib, plan.peaks.values()))
    if found.changes is None:
        return f"no ({peaks})"
    if found.fits:
        return f"fits ({peaks})"
    return " ".join(
        [f"({peaks})", *(f"`{key.rpartition('.')[2]}={_value(value)}`" for key, value in found.changes.items())]
    )


if __name__ == "__main__":
    print(moss_table() if sys.argv[1:] == ["moss"] else table())
