"""What engine_job.py runs, for tests that do not want to import what it imports."""

from dataclasses import dataclass

ROWS = 8
TEMPERATURE = 0.9
LORA_RANK, LORA_ALPHA = 4, 6
ACTOR, MODEL, ROLLOUT = ("actor_rollout_ref." + name for name in ("actor", "model", "rollout"))

FP32 = (f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp32",)
COMMON = (
    "tts.platform=cpu",
    "data.train_batch_size=4",
    f"{ROLLOUT}.n=2",
    f"{ROLLOUT}.temperature={TEMPERATURE}",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
    f"{ACTOR}.optim.lr=1e-2",
    f"{ACTOR}.optim.lr_warmup_steps=0",
    f"{ACTOR}.optim.total_training_steps=10",
    "trainer.resume_mode=disable",
)
LORA = (f"{MODEL}.lora_rank={LORA_RANK}", f"{MODEL}.lora_alpha={LORA_ALPHA}")
TRUNCATED = (
    f"{ROLLOUT}.top_k=50",
    f"{ROLLOUT}.top_p=0.95",
    f"{ROLLOUT}.logprobs_mode=processed_logprobs",
    "tts.logprob_support=truncated",
    f"{ACTOR}.entropy_coeff=0.01",
)


@dataclass(frozen=True)
class Case:
    """One actor: its log-probs of the batch, then one update."""

    name: str
    ranks: int
    overrides: tuple[str, ...] = FP32
    reloads: bool = False  # saves a checkpoint and loads it into a new actor, which then meets a NaN


CASES = (
    Case("one", 1, reloads=True),
    Case("dynamic", 1, (*FP32, f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=48")),
    Case("uneven", 1, (*FP32, f"{ACTOR}.ppo_micro_batch_size_per_gpu=3")),  # does not divide the rows
    Case("checkpointing", 1, (*FP32, f"{MODEL}.enable_gradient_checkpointing=true")),
    Case("backbone", 1, (*FP32, "tts.trainable=backbone")),
    Case("truncated", 1, (*FP32, *TRUNCATED)),
    Case("lora", 1, (*FP32, *LORA)),
    Case("lora_checkpointing", 1, (*FP32, *LORA, f"{MODEL}.enable_gradient_checkpointing=true")),
    Case("bf16", 1, ()),
    Case("two", 2, reloads=True),
    Case("two_lora", 2, (*FP32, *LORA)),
    Case(
        "two_backbone_checkpointing",
        2,
        (*FP32, "tts.trainable=backbone", f"{MODEL}.enable_gradient_checkpointing=true"),
    ),
)
