"""The small rollout that the tests of requests and of the server start from."""

from verl_tts.rollout.spec import RolloutSpec

SPEC = RolloutSpec(
    model="qwen3_tts",
    model_path="model",
    external_lib=(),
    dtype="float32",
    max_prompt_tokens=100,
    max_response_tokens=60,
    max_num_seqs=5,
    max_num_batched_tokens=64,
    gpu_memory_utilization=0.2,
    enforce_eager=True,
    logprobs_mode="raw_logprobs",
    prompt_layout="non_streaming",
    seed=7,
    rpc_timeout_s=10,
    startup_timeout_s=10,
    frees_memory=False,
    executor="uni",
    stages_side_by_side=True,
    attention_backend=None,
)
