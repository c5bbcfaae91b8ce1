"""The configuration of a run on GPUs, as far as it can be seen without one."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from verl_tts.config.compose import compose, worker_environment
from verl_tts.config.validate import validate
from verl_tts.errors import ConfigError
from verl_tts.rollout import qwen3_tts
from verl_tts.rollout.spec import RolloutSpec
from verl_tts.rollout.stages import DECODER_KV_BYTES, talker_kv_bytes

ROLLOUT = "actor_rollout_ref.rollout"
BACKEND = f"{ROLLOUT}.engine_kwargs.vllm_omni.attention_config.backend"
SCORER = "http://scorer.example:18080/score"
NODES = ("trainer.nnodes=2", "trainer.n_gpus_per_node=8")  # what the launcher makes of NNODES=2 NUM_GPUS=8


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[str, ...]:
    """Paths that exist; nothing more is asked of them here."""
    keys = ("actor_rollout_ref.model.path", "data.train_files", "data.val_files", "tts.speaker_path")
    return tuple(f"{key}='{tmp_path}'" for key in keys)


def on_gpus(*overrides: str, scorer: str = SCORER) -> DictConfig:
    return compose(["tts.platform=cuda", f"tts.reward.scorer_url={scorer}", *overrides])


def stages(checkpoint: Path, *overrides: str) -> list[dict[str, Any]]:
    """The two stages, as vLLM-Omni is told of them."""
    config = on_gpus(f"actor_rollout_ref.model.path='{checkpoint}'", *overrides)
    model_json = json.loads((checkpoint / "config.json").read_text())
    return qwen3_tts.topology(RolloutSpec.from_config(config), model_json)["stages"]


# ------------------------------------------------------------------ several nodes


def test_two_nodes_of_eight_gpus_join_the_cluster_that_ray_address_names(inputs, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    config = on_gpus(*NODES, *inputs)
    validate(config)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 8)
    assert not {"num_cpus", "num_gpus", "object_store_memory"} & set(config.ray_kwargs.ray_init)


def test_the_environment_of_gpu_workers_travels_with_the_job():
    environment = on_gpus(*NODES).ray_kwargs.ray_init.runtime_env.env_vars
    assert environment == worker_environment(on_gpus())
    assert environment.VERL_PLATFORM == "nvidia"
    # Ray gives each actor worker its device, and the rollout server beside it is told which.
    assert "CUDA_VISIBLE_DEVICES" not in environment


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0"])
def test_more_than_one_node_cannot_reach_a_scorer_on_the_loopback(inputs, host):
    url = f"'http://{host}:18080/score'"
    validate(on_gpus("trainer.n_gpus_per_node=8", *inputs, scorer=url))
    with pytest.raises(ConfigError, match="the address that all of them can reach"):
        validate(on_gpus(*NODES, *inputs, scorer=url))


def test_rows_of_a_step_that_sixteen_gpus_cannot_share_are_refused(inputs):
    with pytest.raises(ConfigError, match="which 16 workers cannot share"):
        validate(on_gpus(*NODES, *inputs, "data.train_batch_size=3", f"{ROLLOUT}.n=8"))


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("share", [0.2, 0.35])
def test_both_stages_are_told_their_share_of_the_card(tiny_checkpoint, share):
    found = stages(tiny_checkpoint, f"{ROLLOUT}.gpu_memory_utilization={share}")
    assert [stage["gpu_memory_utilization"] for stage in found] == [share, share]


def test_the_caches_are_given_in_bytes_so_that_no_stage_measures_what_the_other_takes(tiny_checkpoint):
    talker, code2wav = stages(tiny_checkpoint)
    more, _ = stages(tiny_checkpoint, f"{ROLLOUT}.max_num_seqs=64")
    assert more["kv_cache_memory_bytes"] > 1.9 * talker["kv_cache_memory_bytes"]
    assert code2wav["kv_cache_memory_bytes"] == DECODER_KV_BYTES


def test_the_engine_of_a_real_model_holds_every_request_at_its_longest():
    """0.6 B: 28 layers of 8 heads of 128, BF16: 112 KiB a token."""
    spec = RolloutSpec.from_config(on_gpus())
    talker = {"num_hidden_layers": 28, "num_key_value_heads": 8, "head_dim": 128}
    tokens = spec.max_prompt_tokens + spec.max_response_tokens
    needed = spec.max_num_seqs * tokens * 112 * 1024
    assert needed <= talker_kv_bytes(spec, talker, tokens) < 1.2 * needed


# ------------------------------------------------------------------ the engine


def test_vllm_chooses_its_attention_unless_a_backend_is_named(tiny_checkpoint):
    talker, code2wav = stages(tiny_checkpoint)
    assert "attention_config" not in talker
    talker, code2wav = stages(tiny_checkpoint, f"{BACKEND}=FLASH_ATTN")
    assert talker["attention_config"] == {"backend": "FLASH_ATTN"}
    assert "attention_config" not in code2wav  # it has no attention of vLLM's


@pytest.mark.parametrize("sleeps", [True, False])
def test_sleep_mode_reaches_both_stages_or_none(tiny_checkpoint, sleeps):
    found = stages(tiny_checkpoint, f"{ROLLOUT}.free_cache_engine={str(sleeps).lower()}")
    assert ["enable_sleep_mode" in stage for stage in found] == [sleeps, sleeps]


def test_a_stage_sees_one_device_and_vllm_chooses_its_executor(tiny_checkpoint):
    spec = RolloutSpec.from_config(on_gpus())
    assert (spec.executor, spec.stages_side_by_side) == (None, False)
    assert {stage["devices"] for stage in stages(tiny_checkpoint)} == {"0"}


@pytest.mark.parametrize(("eager", "expected"), [("true", [True, True]), ("false", [False, False])])
def test_cuda_graphs_are_a_setting(tiny_checkpoint, eager, expected):
    assert [stage["enforce_eager"] for stage in stages(tiny_checkpoint, f"{ROLLOUT}.enforce_eager={eager}")] == expected


# ------------------------------------------------------------------ the actor


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2"])
def test_the_attention_of_the_actor_is_a_setting(name):
    config = on_gpus(f"actor_rollout_ref.model.override_config.attn_implementation={name}")
    assert config.actor_rollout_ref.model.override_config.attn_implementation == name


def test_actor_state_can_wait_in_host_memory():
    keys = ("param_offload", "optimizer_offload")
    config = on_gpus(*(f"actor_rollout_ref.actor.fsdp_config.{key}=true" for key in keys))
    assert all(config.actor_rollout_ref.actor.fsdp_config[key] for key in keys)
