"""One rung of the actor alone: ``python actor_job.py MODEL OUT.json cpu|cuda RUNG``.

The actor is verl's own worker, of one rank, as tests/unit/engine/engine_job.py builds it. Its memory is what torch
has allocated; what it is given are rows that an FP32 copy of the policy drew, one alone and on the CPU.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from engine_cases import ACTOR, FP32, MODEL, ROWS, Case
from engine_job import actor, log_probs, make_batch, parameters, update
from transformers import AutoTokenizer
from verl.utils.device import get_torch_device

from verl_tts.models import qwen3_tts_prompt as prompts
from verl_tts.models.qwen3_tts import support_index
from verl_tts.rollout.agent_loop import Sample
from verl_tts.rollout.groups import to_fields
from verl_tts.types import CodecRollout, Conditioning, PromptRow, Score, Waveform

LONG_FRAMES = 200
LORA = (f"{MODEL}.lora_rank=16", f"{MODEL}.lora_alpha=32")
CHECKPOINTING = f"{MODEL}.enable_gradient_checkpointing="
ATTENTION = f"{MODEL}.override_config.attn_implementation="
LEARNING_RATE = f"{ACTOR}.optim.lr=3e-4"
MODES = {"full": (), "backbone": ("tts.trainable=backbone",), "lora": LORA}


def peak_gib() -> float:
    return round(get_torch_device().max_memory_allocated() / 2**30, 2)


def steps_once(model: Path, platform: str, rung: str) -> dict[str, Any]:
    """BF16 compute over FP32 parameters: log-probs against the FP32 policy, then one optimizer step."""
    rows, logits = make_batch(model)
    worker, config = actor(Case(rung, 1, (platform, LEARNING_RATE, *MODES[rung])), model)
    index = support_index(worker.actor.engine.model_config.hf_config)
    differences = []
    for row, logits_TV, found in zip(rows, logits, log_probs(worker, rows), strict=True):
        own_T = logits_TV.log_softmax(-1).gather(-1, index[row["responses"]][:, None])[:, 0]
        differences += (own_T - torch.tensor(found["gate_log_probs"])).abs().tolist()
    before, trained = parameters(worker), trained_names(worker)
    metrics = update(worker, config, rows)
    after = parameters(worker)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    return {
        "logprob_mean_abs": float(np.mean(differences)),
        "logprob_max_abs": max(differences),
        "grad_norm": metrics["grad_norm"],
        "trained_tensors": len(trained),
        # A LoRA B of zeros hides its A from the first gradient.
        "trained_and_unchanged": sorted(name for name in {*trained} - {*changed} if ".lora_A." not in name),
        "frozen_and_changed": sorted({*changed} - {*trained}),
        "parameter_dtypes": sorted({str(tensor.dtype) for tensor in before.values()}),
        "actor_peak_gib": peak_gib(),
    }


def trained_names(worker: Any) -> list[str]:
    return [name for name, parameter in worker.actor.engine.module.named_parameters() if parameter.requires_grad]


def attention(model: Path, platform: str, _: str) -> dict[str, Any]:
    """sdpa and eager, in FP32: what is left between them is rounding."""
    rows, _logits = make_batch(model)
    found, implementations = [], []
    for name in ("sdpa", "eager"):
        worker, _config = actor(Case(name, 1, (platform, *FP32, ATTENTION + name)), model)
        found.append(np.concatenate([row["gate_log_probs"] for row in log_probs(worker, rows)]))
        implementations.append(worker.actor.engine.module.talker.model.config._attn_implementation)
    return {
        "implementations": implementations,
        "max_abs": float(np.abs(found[0] - found[1]).max()),
        "actor_peak_gib": peak_gib(),
    }


def checkpointing(model: Path, platform: str, _: str) -> dict[str, Any]:
    """Long rows all at once, without and with it: the same gradient, and no more memory."""
    rows, found = long_rows(model), {}
    batch = f"{ACTOR}.ppo_micro_batch_size_per_gpu={ROWS}"
    for on in ("false", "true"):
        worker, config = actor(Case(on, 1, (platform, LEARNING_RATE, batch, CHECKPOINTING + on)), model)
        get_torch_device().reset_peak_memory_stats()
        found[on] = {"grad_norm": update(worker, config, rows)["grad_norm"], "gib": peak_gib()}
        del worker
        get_torch_device().empty_cache()
    return {"without": found["false"], "with": found["true"]}


def long_rows(model: Path) -> list[dict[str, Any]]:
    """As many as a batch, of random codes."""
    config, random = json.loads((model / "config.json").read_text()), np.random.default_rng(0)
    given = Conditioning(
        text_ids=AutoTokenizer.from_pretrained(model)(prompts.assistant_text("A few words."))["input_ids"],
        speaker_H=random.normal(size=config["talker_config"]["hidden_size"]).astype(np.float32),
        language="Auto",
        language_id=None,
    )
    rows = []
    for index in range(ROWS):
        codes_FQ = random.integers(1, prompts.TokenIds.of(config).codes, (LONG_FRAMES, prompts.NUM_CODEBOOKS))
        tokens_T = np.append(codes_FQ[:, 0], 1)
        rollout = CodecRollout(tokens_T, codes_FQ, np.zeros(len(tokens_T), np.float32), "length", seed=0)
        row = PromptRow(f"row-{index}", "A few words.", "train", index, "test", "A few words.")
        nothing = Waveform(np.zeros(0, np.float32), prompts.SAMPLE_RATE_HZ)
        rows.append(with_learning(to_fields(Sample(row, given, rollout, nothing, Score(0.0), None), "group"), random))
    return rows


def with_learning(fields: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    """The columns that a step adds before the update, made up."""
    zeros_T = torch.zeros(len(fields["responses"]))
    advantage = float(random.normal())
    return fields | {"old_log_probs": zeros_T - 5, "ref_log_prob": zeros_T - 5, "advantages": zeros_T + advantage}


RUNGS = {**dict.fromkeys(MODES, steps_once), "attention": attention, "checkpointing": checkpointing}


def as_one_rank(meeting: str) -> None:
    """What Ray sets for a worker; verl and torch read it."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DIST_INIT_METHOD": f"file://{meeting}/store"}


def main(model: str, out: str, platform: str, rung: str) -> None:
    with tempfile.TemporaryDirectory() as meeting:
        as_one_rank(meeting)
        found = RUNGS[rung](Path(model), f"tts.platform={platform}", rung)
        dist.destroy_process_group()
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
