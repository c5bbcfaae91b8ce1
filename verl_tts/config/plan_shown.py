"""A plan for a terminal, and the table of the documents.

python -m verl_tts.config.plan_shown       prints the table of docs/gpu.md
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tts.config.compose import compose
from verl_tts.config.model_dir import CODEC_DIR, CONFIG
from verl_tts.config.plan import GIB, Machine, Plan, answer
from verl_tts.files import read_json_object
from verl_tts.models.qwen3_tts_prompt import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME


def codec_config(model_path: str) -> Mapping[str, Any] | None:
    file = Path(model_path) / CODEC_DIR / CONFIG
    return read_json_object(file) if file.is_file() else None


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
    low, high = (f"{plan.machine.workers * hours:.1f}" for hours in (fast, slow))
    lines = [
        f"plan for {machine.nodes} x {machine.gpus} GPUs"
        + (f" of {machine.gpu_gib:g} GiB" if machine.gpu_gib else "")
        + f", scorer: {machine.scorer}. Estimated; nothing was measured on a GPU",
        f"steps         {plan.steps} of {data.train_batch_size} prompts x {rollout.n} = {plan.clips_a_step} clips" + of,
        f"              {updates} optimizer step(s) each, at most {data.max_response_length} frames a clip "
        f"({data.max_response_length * SAMPLES_PER_FRAME / SAMPLE_RATE_HZ:.1f} s); {plan.validations} validations"
        + (f" of {plan.clips_a_validation} clips" if plan.val_prompts else ""),
        f"model         {_millions(sizes.file)} parameters, {_millions(sizes.loaded)} loaded to train, "
        f"{_millions(sizes.trained)} of them trained ({plan.config.tts.trainable})",
        "GiB of a GPU  " + _parts(plan),
        "              " + ", ".join(f"{name} {_gib(size)}" for name, size in plan.phases.items()),
        f"host          {_gib(plan.reference_host * machine.gpus)} GiB of reference a node, "
        f"{_gib(plan.shared_memory)} GiB of /dev/shm in a weight sync",
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
        return [
            f"needs         {_gib(plan.peak / plan.assumed.usable)} GiB a GPU; --gpu-gib says whether a card has it"
        ]
    found = answer(plan)
    need = f"{_gib(plan.peak)} of {plan.machine.gpu_gib * plan.assumed.usable:.1f} GiB that can be used"
    if found.fits:
        return [f"fits          {need}"]
    if found.changes is None:
        return [f"does not fit  {need}; no setting known here is enough: more GPUs, or larger ones"]
    return [
        f"does not fit  {need}; it does with",
        *(f"              {key}={_value(v)}" for key, v in found.changes.items()),
    ]


def _parts(plan: Plan) -> str:
    parts = {
        "parameters": plan.parameters,
        "gradients": plan.gradients,
        "optimizer": plan.optimizer,
        "gathered": plan.gathered + plan.reduced,
        "activations": plan.activations,
        "reference": plan.reference,
        "engine weights": plan.engine_weights,
        "cache": plan.engine_cache,
        "contexts and scorer": plan.always,
    }
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= GIB / 10 or size == 0 else f"{size / GIB:.3f}"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M"


# ---------------------------------------------------------------------- the table of the documents

TABLE_GPUS = (1, 2, 4, 8)
TABLE_GIB = (24, 48, 80)
SIZES = Path(__file__).with_name("sizes.yaml")
LAUNCHER = ("actor_rollout_ref.rollout.n=8", "data.max_response_length=360", "trainer.max_actor_ckpt_to_keep=26")
WAYS: Mapping[str, tuple[str, ...]] = {
    "full": (),
    "LoRA, rank 16": ("actor_rollout_ref.model.lora_rank=16",),
}


def table() -> str:
    """Markdown: a line a model, way of training and number of GPUs, a column a card; numbers are the peak in GiB."""
    lines = ["| | GPUs | " + " | ".join(f"{gib} GiB" for gib in TABLE_GIB) + " |"]
    lines.append("| --- | --- |" + " --- |" * len(TABLE_GIB))
    for size, model_config in published_sizes().items():
        for way, overrides in WAYS.items():
            config = compose(["tts.platform=cuda", "tts.model=qwen3_tts", *LAUNCHER, *overrides])
            for gpus in TABLE_GPUS:
                cells = [_cell(config, model_config, gpus, gib) for gib in TABLE_GIB]
                lines.append(f"| {size} B, {way} | {gpus} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def published_sizes() -> dict[str, dict[str, Any]]:
    """ "0.6" and "1.7" -> as much of their config.json as a plan needs."""
    sizes: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(SIZES), resolve=True)  # type: ignore[assignment]
    return {str(name): size for name, size in sizes.items() if not name.startswith("_")}


def _cell(config: DictConfig, model_config: Mapping[str, Any], gpus: int, gib: int) -> str:
    config = deepcopy(config)
    config.trainer.n_gpus_per_node = gpus
    found = answer(Plan(config, Machine(gpus, 1, gib, "own"), model_config, None, None))
    if found.changes is None:
        return f"no ({_gib(found.plan.peak)})"
    if found.fits:
        return f"fits ({_gib(found.plan.peak)})"
    return " ".join(
        [
            f"({_gib(found.plan.peak)})",
            *(f"`{key.rpartition('.')[2]}={_value(value)}`" for key, value in found.changes.items()),
        ]
    )


if __name__ == "__main__":
    print(table())
