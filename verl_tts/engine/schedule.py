"""The learning rate over a run: verl's schedules, constant and cosine, and a linear one that verl's FSDP has not.

All of them rise from 0 over ``lr_warmup_steps`` first; cosine and linear then fall to ``min_lr_ratio`` times the
learning rate at the last step.
"""

from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from verl.workers.config import FSDPOptimizerConfig

LINEAR = "linear"


@dataclass
class PolicyOptimizerConfig(FSDPOptimizerConfig):
    """Selected by ``actor_rollout_ref.actor.optim._target_``; verl's class with one more schedule."""

    lr_scheduler_type: str = "constant"

    def __post_init__(self) -> None:
        is_linear = self.lr_scheduler_type == LINEAR
        if is_linear:
            self.lr_scheduler_type = "constant"  # verl's own check knows its own
        super().__post_init__()
        if is_linear:
            self.lr_scheduler_type = LINEAR


def linear_share(step: int, warmup: int, total: int, floor: float) -> float:
    """Of the learning rate at an optimizer step, from 0: ``linear_share(5, 0, 10, 0.2) == 0.6``."""
    if step < warmup:
        return step / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - (1.0 - floor) * done


def linear_schedule(optimizer: Optimizer, config: FSDPOptimizerConfig) -> LambdaLR:
    total = config.total_training_steps
    warmup = config.lr_warmup_steps or 0
    if warmup <= 0:
        warmup = int(config.lr_warmup_steps_ratio * total)
    floor = config.min_lr_ratio or 0.0
    return LambdaLR(optimizer, lambda step: linear_share(step, warmup, total, floor))
