"""verl's model configuration with the settings that the actor engine needs from ``tts:``."""

from dataclasses import dataclass, field

from verl.workers.config import HFModelConfig


@dataclass
class PolicySettings:
    """Filled by interpolation in ``omni_trainer.yaml``; the documented settings are in ``verl_tts/config/tts.py``."""

    trainable: str = "full"
    prompt_layout: str = "non_streaming"
    logprob_support: str = "full"
    logprobs_mode: str = "raw_logprobs"
    top_k: int = -1
    top_p: float = 1.0
    channel_reduction: str = "weighted"
    channel_weights: str = "1,32"
    text_temperature: float = 1.0


@dataclass
class PolicyModelConfig(HFModelConfig):
    """Selected by ``actor_rollout_ref.model._target_``."""

    policy: PolicySettings = field(default_factory=PolicySettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.policy, PolicySettings):
            object.__setattr__(self, "policy", PolicySettings(**self.policy))
