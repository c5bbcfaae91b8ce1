"""The LoRA adapter of a training checkpoint as PEFT writes one: to be merged, or for another run to go on from.

seal checked -> shards of all ranks joined -> halves named as PEFT names them -> written beside -> renamed
"""

import json
from pathlib import Path

from safetensors.torch import save_file

from verl_tts.checkpoints.export import PEFT_ROOT, lora_settings, read_tensors, setting_of_run, write_origin
from verl_tts.checkpoints.lora import SETTINGS_FILE, WEIGHT_FILES
from verl_tts.checkpoints.manifest import verify
from verl_tts.errors import CheckpointError
from verl_tts.files import check_is_new, staged


def export_adapter(checkpoint: Path, out: Path) -> None:
    """Writes the directory ``out`` from ``checkpoint``, in float32; it appears whole or not at all.

    CheckpointError: the checkpoint is damaged, or was not trained with LoRA. ConfigError: ``out`` exists.
    """
    check_is_new(out, checkpoint)
    verify(checkpoint)
    tensors = read_tensors(checkpoint / "actor")
    halves = {name.replace(".default.", "."): half.float() for name, half in tensors.items() if ".lora_" in name}
    if not halves:
        raise CheckpointError(f"{checkpoint} has no adapter: its run trained the weights themselves; export those")
    rank, alpha = lora_settings(checkpoint / "actor")
    for name, half in halves.items():
        if (found := half.shape[0 if ".lora_A." in name else 1]) != rank:
            raise CheckpointError(f"{name} is of rank {found}, and lora_train_meta.json beside it says {rank}")
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": setting_of_run(checkpoint, "actor_rollout_ref.model.path"),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.removeprefix(PEFT_ROOT).partition(".lora_")[0] for name in halves}),
    }
    with staged(out) as adapter:
        save_file({name: half.contiguous() for name, half in halves.items()}, adapter / WEIGHT_FILES[0])
        (adapter / SETTINGS_FILE).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        write_origin(adapter, checkpoint, dtype="float32")
