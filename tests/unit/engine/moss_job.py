"""MOSS in verl's own actor worker, one process, without Ray: ``python moss_job.py CHECKPOINT ADAPTER OUT``.

Log-probs of a few answers, one update with LoRA that continues ADAPTER, and what would leave for the rollout engine.
"""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from engine_cases import COMMON, FP32, MODEL, TEMPERATURE
from engine_job import export, log_probs, parameters, update
from transformers import AutoTokenizer
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_tts.config.compose import compose
from verl_tts.models.channels import channel_weights
from verl_tts.models.moss_prompt import Cursor, TokenIds, build_prompt, frames_of, plan
from verl_tts.rollout.agent_loop import Sample
from verl_tts.rollout.groups import to_fields
from verl_tts.types import GridRollout, PromptGrid, PromptRow, Score, Waveform

FRAMES = (1, 4, 2, 6, 3, 1, 5, 2)  # of eight answers, the last of which is cut


def make_row(index: int, frames: int, checkpoint: Path, config) -> dict:
    """A row of the transfer queue with random codes; every third has a reference."""
    ids, random = TokenIds.of(config), np.random.default_rng(index)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    reference = random.integers(0, ids.codes, (3, ids.codebooks)) if index % 3 == 0 else None
    prompt = build_prompt(ids, lambda text: tokenizer(text)["input_ids"], "Hi.", reference_FQ=reference)
    cursor, tokens, rows = Cursor(), [], []
    wanted = [ids.audio_start, *[ids.gen_slot] * (frames - 1), ids.delay_slot, *[None] * ids.codebooks, ids.im_end]
    for choice in wanted[:-4] if index == len(FRAMES) - 1 else wanted:
        token = cursor.forced(ids) if choice is None else choice
        codes_Q = np.full(ids.codebooks, ids.pad_code)
        for book in cursor.active(ids):
            codes_Q[book] = random.integers(0, ids.codes)
        tokens.append(token)
        rows.append(codes_Q)
        cursor.advance(token, ids)
    grid_TQ, sampled_TC = np.stack(rows), plan(ids, tokens).sampled_TC
    rollout = GridRollout(
        np.array(tokens), frames_of(ids, tokens, grid_TQ), np.zeros(len(tokens), np.float32), "eos", 0,
        grid_TQ, np.zeros(sampled_TC.shape, np.float32), channel_weights("sum", "1,32", sampled_TC),
    )  # fmt: skip
    row = PromptRow(f"row-{index}", "Hi.", "train", index, "test", "Hi.")
    given = PromptGrid(prompt.text_P, prompt.codes_PQ, "Auto")
    waveform = Waveform(np.zeros(0, np.float32), 24000)
    fields = to_fields(Sample(row, given, rollout, waveform, Score(0.0), None), uid=f"group-{index // 2}")
    return fields | {
        "old_log_probs": torch.zeros(len(tokens)),
        "ref_log_prob": torch.zeros(len(tokens)),
        "advantages": torch.full((len(tokens),), float(random.normal())),
    }


def main(checkpoint: Path, adapter: Path, out: Path) -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as meeting:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DIST_INIT_METHOD": f"file://{meeting}/store"}
        config = compose(
            [
                *COMMON,
                *FP32,
                f"{MODEL}.path={checkpoint}",
                f"{MODEL}.lora_rank=4",
                f"{MODEL}.lora_alpha=8",
                f"{MODEL}.lora_adapter_path={adapter}",
                "tts.channel_reduction=sum",
                "actor_rollout_ref.actor.use_kl_loss=false",
            ]
        )
        worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor")
        worker.init_model()
        engine = worker.actor.engine
        rows = [make_row(i, frames, checkpoint, engine.model_config.hf_config) for i, frames in enumerate(FRAMES)]
        found = {"rows": rows, "before": parameters(worker), "log_probs": log_probs(worker, rows)}
        for row, said in zip(rows, found["log_probs"], strict=True):
            row["old_log_probs"] = torch.tensor(said["log_probs"])
        found["update"] = update(worker, config, rows)
        found["after"], found["exported"] = parameters(worker), export(worker)
        found["temperature"] = TEMPERATURE
        torch.save(found, out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
