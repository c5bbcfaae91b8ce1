"""Actors for the engine's tests: ``python engine_job.py CHECKPOINT OUT``.

Each case is verl's own actor worker, built from a composed configuration as in a run, in as many processes as it
has ranks, joined by gloo, without Ray. ``OUT/<case>.pt`` holds what the tests look at, ``OUT/batch.pt`` the rows
and an independent account of them. The heavy imports are paid once, here; the ranks are forked.

Shapes: ``T`` sampled token, ``Q`` codebook, ``V`` the support, ``H`` hidden.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from engine_cases import CASES, COMMON, ROWS, TEMPERATURE, Case
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer
from verl.utils import tensordict_utils as tu
from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import response_from_nested

from verl_tts.config.compose import compose
from verl_tts.errors import GateError
from verl_tts.models import qwen3_tts_prompt as prompts
from verl_tts.models.qwen3_tts import Qwen3TTSPolicy
from verl_tts.rollout.agent_loop import Sample
from verl_tts.rollout.groups import to_fields
from verl_tts.types import CodecRollout, Conditioning, PromptRow, Score, Waveform

LAYOUT = "non_streaming"
LENGTHS_T = (1, 6, 2, 9, 4, 1, 7, 3)  # immediate EOS twice


# ------------------------------------------------------------------------------------------------ the batch


@torch.no_grad()
def next_logits_V(policy: Qwen3TTSPolicy, given: Conditioning, codes_TQ: torch.Tensor) -> torch.Tensor:
    """One sample alone, without padding; the logits of the last position."""
    (logits_TV,) = policy(
        text_ids=[torch.tensor(given.text_ids)],
        codes=[codes_TQ],
        speakers=[torch.from_numpy(given.speaker_H)],
        language_ids=[given.language_id],
        layout=LAYOUT,
    )
    return logits_TV


def make_batch(checkpoint: Path) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Rows of the transfer queue, and for each the logits (T, V) of the policy that sees it alone.

    Two tokens of three are likely ones, so that some are inside top-k and top-p and some are not.
    """
    policy = Qwen3TTSPolicy.from_pretrained(checkpoint, dtype=torch.float32)
    config = json.loads((checkpoint / "config.json").read_text())
    ids, tokenizer = prompts.TokenIds.of(config), AutoTokenizer.from_pretrained(checkpoint)
    support_V, random = torch.tensor(ids.support), np.random.default_rng(0)
    rows, logits = [], []
    for index, length in enumerate(LENGTHS_T):
        text = " ".join(["word"] * (1 + index % 3))
        given = Conditioning(
            text_ids=tokenizer(prompts.assistant_text(text))["input_ids"],
            speaker_H=random.normal(size=config["talker_config"]["hidden_size"]).astype(np.float32),
            language="Auto" if index % 2 else "English",
            language_id=None if index % 2 else prompts.language_id(config, "English"),
        )
        codes_FQ = torch.zeros(0, prompts.NUM_CODEBOOKS, dtype=torch.int64)
        tokens: list[int] = []
        while len(tokens) < length:
            logits_TV = next_logits_V(policy, given, codes_FQ)
            likely = support_V[logits_TV[-1].topk(10).indices].tolist()
            choice = int(random.choice(likely if len(tokens) % 3 else ids.support))
            if len(tokens) < length - 1 and choice == ids.codec_eos:
                continue
            tokens.append(choice)
            if len(tokens) < length:
                residual = random.integers(0, ids.codes, prompts.NUM_CODEBOOKS - 1).tolist()
                codes_FQ = torch.cat([codes_FQ, torch.tensor([[choice, *residual]])])
        logits.append(logits_TV)
        rollout = CodecRollout(np.array(tokens), codes_FQ.numpy(), np.zeros(length, np.float32), "length", seed=0)
        row = PromptRow(f"row-{index}", text, "train", index, "test", text)
        waveform = Waveform(np.zeros(0, np.float32), prompts.SAMPLE_RATE_HZ)
        fields = to_fields(Sample(row, given, rollout, waveform, Score(0.0), None), uid=f"group-{index // 2}")
        # What a step would have added, far enough from the policy that ratio and KL matter.
        wide = torch.from_numpy(random.normal(scale=0.1, size=(2, length)).astype(np.float32))
        own_T = (logits_TV / TEMPERATURE).log_softmax(-1).gather(-1, column(ids, tokens)[:, None])[:, 0]
        fields |= {"old_log_probs": own_T + wide[0], "ref_log_prob": own_T + wide[1]}
        fields["advantages"] = torch.full((length,), float(random.normal()))
        rows.append(fields)
    return rows, logits


def column(ids: prompts.TokenIds, tokens: list[int]) -> torch.Tensor:
    return torch.tensor([ids.support.index(token) for token in tokens])


def to_batch(rows: list[dict[str, Any]], **settings: Any) -> TensorDict:
    """As the transfer queue hands it over: every column jagged."""
    columns = {
        name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged)
        for name, value in rows[0].items()
        if isinstance(value, torch.Tensor)
    }
    return tu.get_tensordict(columns, settings)


# ------------------------------------------------------------------------------------------------ one actor


def actor(case: Case, checkpoint: Path) -> tuple[ActorRolloutRefWorker, Any]:
    config = compose([*COMMON, *case.overrides, f"actor_rollout_ref.model.path={checkpoint}"])
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker, config


def whole(tensors: Any) -> dict[str, torch.Tensor]:
    """Gathered copies: of one rank, a gathered tensor is the live one."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors
    }


def parameters(worker: ActorRolloutRefWorker) -> dict[str, torch.Tensor]:
    return whole(worker.actor.engine.module.named_parameters())


def optimizer_state(worker: ActorRolloutRefWorker) -> dict[str, torch.Tensor]:
    state = worker.actor.engine.optimizer.state
    names = {parameter: name for name, parameter in worker.actor.engine.module.named_parameters()}
    return whole((f"{names[p]}/{key}", value) for p, entry in state.items() for key, value in entry.items())


def scheduler_state(worker: ActorRolloutRefWorker) -> dict[str, Any]:
    state = worker.actor.engine.lr_scheduler.state_dict()
    return {name: value for name, value in state.items() if not callable(value) and name != "lr_lambdas"}


def share(rows: list[Any]) -> list[Any]:
    """This rank's part of a batch."""
    each = len(rows) // dist.get_world_size()
    return rows[each * dist.get_rank() :][:each]


def log_probs(
    worker: ActorRolloutRefWorker, rows: list[dict[str, Any]], **settings: Any
) -> list[dict[str, list[float]]]:
    batch = to_batch(rows, calculate_entropy=True, compute_loss=False, temperature=TEMPERATURE, **settings)
    output = worker.compute_log_prob(batch)
    names = [name for name in ("log_probs", "entropy", "gate_log_probs") if name in output]
    columns = {name: response_from_nested(output[name], batch["response_mask"]).unbind() for name in names}
    return [{name: values[i].float().tolist() for name, values in columns.items()} for i in range(len(rows))]


def update(worker: ActorRolloutRefWorker, config: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch = to_batch(
        rows,
        calculate_entropy=config.actor_rollout_ref.actor.entropy_coeff != 0,
        temperature=TEMPERATURE,
        global_batch_size=ROWS,
        mini_batch_size=ROWS,
        epochs=1,
        seed=0,
        dataloader_kwargs={"shuffle": False},
    )
    metrics = tu.get(worker.update_actor(batch), "metrics")
    return {name: float(np.mean(metrics[name])) for name in ("loss", "grad_norm", "lr")}


def export(worker: ActorRolloutRefWorker) -> dict[str, torch.Tensor]:
    """Collected first, looked at after the generator has ended: as a sender may do."""
    tensors, _ = worker.actor.engine.get_per_tensor_param()
    return dict(list(tensors))


def gathered(rows: list[Any]) -> list[Any]:
    """Those of all ranks, in the order of the batch."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, rows)
    return list(chain.from_iterable(parts))


def run(case: Case, checkpoint: Path, rows: list[dict[str, Any]], out: Path) -> None:
    worker, config = actor(case, checkpoint)
    engine, mine = worker.actor.engine, share(rows)
    trained = [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    found: dict[str, Any] = {"trained": trained, "before": parameters(worker)}
    found["log_probs"] = gathered(log_probs(worker, mine))
    found["update"] = update(worker, config, mine)
    found["after"] = parameters(worker)
    found["optimizer"] = optimizer_state(worker)
    found["exported"] = export(worker)
    found["after_export"] = parameters(worker)
    if engine._is_lora:
        # As verl's trainer asks for the reference of the KL.
        found["reference"] = gathered(log_probs(worker, mine, no_lora_adapter=True))
        found["adapted"] = gathered(log_probs(worker, mine))
        found["verl_export"] = dict(list(FSDPEngine._merged_lora_per_tensor_param(engine)))
        with merged_lora_context(engine.module, backup_adapters=True):
            found["uncopied"] = {
                name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                for name, tensor in normalize_peft_param_name(engine.module.state_dict()).items()
            }
        found["uncopied"] = {name: tensor.clone() for name, tensor in found["uncopied"].items()}
    if case.reloads:
        folder = str(out / case.name)
        worker.save_checkpoint(folder, None, 1)
        found["scheduler"] = scheduler_state(worker)
        other, _ = actor(case, checkpoint)
        other.load_checkpoint(folder)
        found["loaded"] = parameters(other), optimizer_state(other), scheduler_state(other)
        poisoned = [row | {"advantages": row["advantages"] * float("nan")} for row in mine[:1]] + mine[1:]
        try:
            update(other, config, poisoned)
            found["nan"] = None
        except GateError as error:
            found["nan"] = str(error)
        found["after_nan"] = parameters(other), optimizer_state(other), scheduler_state(other)
        found["second"] = update(worker, config, mine), update(other, config, mine)
        found["after_second"] = parameters(worker), parameters(other)
    if dist.get_rank() == 0:
        torch.save(found, out / f"{case.name}.pt")


def rank_of(rank: int, ranks: int, checkpoint: Path, rows: list[dict[str, Any]], out: Path, meeting: str) -> None:
    # What Ray sets for a worker; verl and torch read it.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DIST_INIT_METHOD": f"file://{meeting}"}
    for case in CASES:
        if case.ranks == ranks:
            run(case, checkpoint, rows, out)
    dist.destroy_process_group()


def main(checkpoint: Path, out: Path) -> None:
    torch.set_num_threads(1)  # nothing to fork but this thread
    rows, logits = make_batch(checkpoint)
    torch.save({"rows": rows, "logits": logits}, out / "batch.pt")
    fork = multiprocessing.get_context("fork")
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as meeting:
            arguments = (ranks, checkpoint, rows, out, f"{meeting}/store")
            processes = [fork.Process(target=rank_of, args=(rank, *arguments)) for rank in range(ranks)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"{ranks} ranks: exit codes {[process.exitcode for process in processes]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
