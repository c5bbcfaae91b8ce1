"""The checkpoints that fsdp_job.py makes, for tests that do not want to import what it imports."""

from dataclasses import dataclass

STEP = 7
LOGITS = "logits.safetensors"
LORA_RANK, LORA_ALPHA = 4, 6


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    fsdp_size: int = -1  # smaller than ranks: copies of the model, each sharded over fsdp_size ranks
    lora: bool = False
    only_adapters: bool = False
    fsdp1: bool = False


CASES = (
    Case("full_1", ranks=1),
    Case("full_2", ranks=2),
    Case("full_2_copies", ranks=2, fsdp_size=1),
    Case("full_2_fsdp1", ranks=2, fsdp1=True),
    Case("lora_1", ranks=1, lora=True),
    Case("lora_2", ranks=2, lora=True),
    Case("lora_2_only_adapters", ranks=2, lora=True, only_adapters=True),
)
