"""Real training checkpoints for the export's tests: ``python fsdp_job.py BASE OUT``.

Writes ``OUT/<case>/checkpoints/global_step_7/actor`` with verl's FSDPCheckpointManager from processes joined by
gloo; ``expected.safetensors`` beside it, the same weights as they were before FSDP cut them up, adapters merged
by PEFT; and ``logits.safetensors``, what the talker with these weights answers to some input. The heavy imports
are paid once, here; the ranks are forked.
"""

import multiprocessing
import os
import sys
import tempfile
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp_cases import CASES, LOGITS, LORA_ALPHA, LORA_RANK, STEP, Case
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import apply_fsdp2, fsdp2_load_full_state_dict, get_fsdp_wrap_policy
from verl.workers.engine.fsdp.utils import create_device_mesh

from verl_tts.models.qwen3_tts import Qwen3TTSPolicy, is_trainable, lora_targets


def trained_policy(base: Path, lora: bool) -> nn.Module:
    """The policy in float32 with every trainable tensor moved, by what its name says, as training would."""
    policy: nn.Module = Qwen3TTSPolicy.from_pretrained(base, dtype=torch.float32)
    if lora:
        targets = lora_targets("all-linear")
        torch.manual_seed(0)  # PEFT draws A
        policy = get_peft_model(policy, LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=targets))
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(is_trainable(name, "lora" if lora else "full"))
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    return policy


def save(rank: int, case: Case, base: Path, out: Path, meeting_point: str) -> None:
    # What a launcher sets; FSDP and verl read it.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(case.ranks), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=case.ranks)
    policy = trained_policy(base, case.lora)
    if rank == 0:
        whole = trained_policy(base, case.lora)
        plain = whole.merge_and_unload() if isinstance(whole, PeftModel) else whole
        save_file(plain.state_dict(), out / "expected.safetensors")
        embeds_BTH = torch.randn(
            2, 12, plain.config.talker_config.hidden_size, generator=torch.Generator().manual_seed(1)
        )
        with torch.no_grad():
            logits_BTV = plain.talker(inputs_embeds=embeds_BTH, use_cache=False).logits
        save_file({"inputs_embeds": embeds_BTH, "logits": logits_BTV}, out / LOGITS)
    mesh = create_device_mesh(case.ranks, case.fsdp_size)
    if case.fsdp1:
        layers, cpu = get_fsdp_wrap_policy(policy), torch.device("cpu")
        policy = FullyShardedDataParallel(
            policy, device_mesh=mesh, auto_wrap_policy=layers, use_orig_params=True, device_id=cpu
        )
    else:
        full = policy.state_dict()
        apply_fsdp2(policy, {"mesh": mesh}, {})
        fsdp2_load_full_state_dict(policy, full, mesh)
    optimizer = torch.optim.AdamW(parameter for parameter in policy.parameters() if parameter.requires_grad)
    contents = {"save_contents": ["model", "optimizer", "extra"], "save_lora_only": case.only_adapters}
    manager = FSDPCheckpointManager(policy, optimizer, checkpoint_config=contents)
    manager.save_checkpoint(str(out / "checkpoints" / f"global_step_{STEP}" / "actor"), global_step=STEP)
    dist.destroy_process_group()


def main(base: Path, out: Path) -> None:
    fork = multiprocessing.get_context("fork")
    for case in CASES:
        (out / case.name).mkdir(parents=True)
        with tempfile.TemporaryDirectory() as meeting:
            arguments = (case, base, out / case.name, f"{meeting}/store")
            ranks = [fork.Process(target=save, args=(rank, *arguments)) for rank in range(case.ranks)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"{case.name}: exit codes {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
