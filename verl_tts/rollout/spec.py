"""What a rollout server has to know, taken from the configuration in one place."""

from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf


@dataclass(frozen=True)
class RolloutSpec:
    """Everything that decides how the engine of one replica is started; it crosses to the server's process."""

    model: str  # name of the policy, and of its file in this folder
    model_path: str
    external_lib: tuple[str, ...]  # modules that the server imports first, as verl's workers do
    dtype: str
    max_prompt_tokens: int
    max_response_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    enforce_eager: bool
    logprobs_mode: str
    prompt_layout: str
    seed: int
    rpc_timeout_s: float
    startup_timeout_s: float
    frees_memory: bool  # sleep and wake around training
    executor: str | None  # None: vLLM's own choice
    stages_side_by_side: bool
    attention_backend: str | None
    codec_path: str | None = None  # tts.codec_path
    channel_reduction: str = "weighted"
    channel_weights: str = "1,32"
    text_temperature: float = 1.0
    servers: int | None = None  # on GPUs of their own; None: one on the GPU of each actor worker
    actor_workers: int = 1

    @classmethod
    def from_config(cls, config: DictConfig) -> "RolloutSpec":
        model, rollout, tts = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, config.tts
        library = OmegaConf.to_container(OmegaConf.create({"lib": model.external_lib}))["lib"]  # type: ignore[index,call-overload]
        engine: dict[str, Any] = OmegaConf.to_container(rollout.engine_kwargs).get("vllm_omni") or {}  # type: ignore[union-attr]
        return cls(
            model=model.model_type,
            model_path=model.path,
            external_lib=tuple([library] if isinstance(library, str) else library or ()),
            dtype=rollout.dtype,
            max_prompt_tokens=config.data.max_prompt_length,
            max_response_tokens=config.data.max_response_length,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
            logprobs_mode=rollout.logprobs_mode,
            prompt_layout=tts.prompt_layout,
            seed=rollout.seed if rollout.get("seed") is not None else 0,
            rpc_timeout_s=tts.rpc_timeout_s,
            startup_timeout_s=tts.engine.startup_timeout_s,
            frees_memory=rollout.free_cache_engine,
            executor=tts.engine.executor,
            stages_side_by_side=tts.engine.stages_side_by_side,
            servers=tts.engine.rollout_gpus or None,
            actor_workers=config.trainer.nnodes * config.trainer.n_gpus_per_node,
            attention_backend=(engine.get("attention_config") or {}).get("backend"),
            codec_path=tts.codec_path,
            channel_reduction=tts.channel_reduction,
            channel_weights=tts.channel_weights,
            text_temperature=tts.text_temperature,
        )


def sampling_settings(rollout: DictConfig, split: Literal["train", "val"]) -> dict[str, Any]:
    """temperature, top_p and top_k of the node ``actor_rollout_ref.rollout``; a validation has its own."""
    source = rollout if split == "train" else rollout.val_kwargs
    if not source.get("do_sample", True):
        return {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    return {"temperature": source.temperature, "top_p": source.top_p, "top_k": source.top_k}
