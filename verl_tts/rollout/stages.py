"""The two stages of a codec policy in vLLM-Omni: one writes codes, the other decodes them.

What differs between policies is in their own file, ``rollout/qwen3_tts.py`` or ``rollout/moss.py``.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl_tts.errors import RolloutError
from verl_tts.rollout.spec import RolloutSpec

TALKER, DECODER = 0, 1
DECODER_KV_BYTES = 64 << 20  # a decoder has no KV cache of its own; vLLM wants a size
KV_BLOCK_TOKENS = 128
CONNECTOR = "between_stages"
PROMPT_MARGIN = 16  # slots of a prompt that are not text tokens, and a few to spare
RECEIVER = "verl_tts.rollout.worker_extension.WeightReceiver"


def two_stages(
    spec: RolloutSpec,
    pipeline: str,
    language_model: Mapping[str, Any],
    *,
    codebooks: int,
    receiver: str = RECEIVER,
    talker: Mapping[str, Any] | None = None,
    both: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The stage configuration as vLLM-Omni reads it from YAML.

    ``language_model`` has the sizes of the talker's, as config.json names them; ``receiver`` is what takes weights in
    its workers; ``talker`` and ``both`` are further settings of stage 0 and of each stage.
    """
    model_tokens = spec.max_prompt_tokens + PROMPT_MARGIN + spec.max_response_tokens
    decoder_tokens = codebooks * spec.max_response_tokens
    shared: dict[str, Any] = {
        "max_num_seqs": spec.max_num_seqs,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        "enforce_eager": spec.enforce_eager,
        "trust_remote_code": False,
        "async_scheduling": False,
        "devices": "0",
        "seed": spec.seed,
        **(both or {}),
    }
    if spec.frees_memory:
        shared["enable_sleep_mode"] = True
    writes = shared | {
        "stage_id": TALKER,
        "kv_cache_memory_bytes": talker_kv_bytes(spec, language_model, model_tokens),
        "max_model_len": model_tokens,
        "max_num_batched_tokens": max(spec.max_num_batched_tokens, model_tokens),
        "logprobs_mode": spec.logprobs_mode,
        "worker_extension_cls": receiver,
        "output_connectors": {"to_stage_1": CONNECTOR},
        "default_sampling_params": {"max_tokens": spec.max_response_tokens},
        **(talker or {}),
    }
    if spec.attention_backend:
        writes["attention_config"] = {"backend": spec.attention_backend}
    decodes = shared | {
        "stage_id": DECODER,
        # One clip at a time: decoded beside others its samples depend on them, in the last bit.
        "max_num_seqs": 1,
        "kv_cache_memory_bytes": DECODER_KV_BYTES,
        "max_model_len": decoder_tokens,
        # Room for each clip at its longest: one that is scheduled in part is decoded again for each part, whole.
        "max_num_batched_tokens": decoder_tokens,
        "input_connectors": {"from_stage_0": CONNECTOR},
        "default_sampling_params": {"max_tokens": decoder_tokens},
    }
    stages = {
        "pipeline": pipeline,
        "async_chunk": False,  # with chunks the client sees no codes
        "enable_chunked_prefill": False,  # a prompt's embeddings are built once, for the whole of it
        # The key of a cache entry is the prompt's ids: two speakers or two references would share one.
        "enable_prefix_caching": False,
        "dtype": spec.dtype,
        "connectors": {CONNECTOR: {"name": "SharedMemoryConnector", "extra": {"shm_threshold_bytes": 65536}}},
        "stages": [writes, decodes],
    }
    if spec.executor:
        stages["distributed_executor_backend"] = spec.executor
    return stages


def talker_kv_bytes(spec: RolloutSpec, language_model: Mapping[str, Any], model_tokens: int) -> int:
    """Room for every request at its longest, so that none is preempted: Qwen3-TTS's codes would be cut then."""
    bytes_per_value = 4 if spec.dtype in ("float32", "float") else 2
    heads, width = language_model["num_key_value_heads"], language_model["head_dim"]
    per_token = 2 * language_model["num_hidden_layers"] * heads * width * bytes_per_value
    blocks = spec.max_num_seqs * -(-model_tokens // KV_BLOCK_TOKENS) + 1
    return blocks * KV_BLOCK_TOKENS * per_token


def parts_of(completion: Any) -> Mapping[str, Any]:
    """What a stage hands out beside token ids: ``codes`` of the talker, ``audio`` of the decoder. May be empty."""
    return getattr(completion, "multimodal_output", None) or {}


def samples_of(parts: Mapping[str, Any], frames: int, samples_per_frame: int, sample_id: str) -> np.ndarray:
    """The decoder's samples (S,), float32. ``RolloutError``: not those of so many frames, or not finite."""
    audio = parts.get("audio")
    samples_S = np.zeros(0, np.float32) if audio is None else np.asarray(audio, np.float32).reshape(-1)
    expected = frames * samples_per_frame
    if len(samples_S) != expected:
        raise RolloutError(
            f"sample {sample_id}: {len(samples_S)} audio samples for {frames} frames, expected {expected}"
        )
    if not np.isfinite(samples_S).all():
        raise RolloutError(f"sample {sample_id}: the decoded waveform is not finite")
    return samples_S
