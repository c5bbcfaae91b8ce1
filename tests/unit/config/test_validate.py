from copy import deepcopy

import pytest
from omegaconf import OmegaConf

from verl_tts.config.compose import compose
from verl_tts.config.validate import MAX_FRAMES, validate
from verl_tts.errors import ConfigError

ROLLOUT, ACTOR, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model"
FUNCTION = "reward.custom_reward_function.path"
IS = "algorithm.rollout_correction"
URL = "tts.reward.scorer_url"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A configuration that passes: its paths exist, and nothing but that is asked of them here."""
    place = str(tmp_path_factory.mktemp("inputs"))
    return compose([
        "tts.platform=cpu", f"{MODEL}.path={place}", f"data.train_files={place}", f"data.val_files=[{place},{place}]",
        f"tts.speaker_path={place}", f"{URL}=http://127.0.0.1:18080/score",
    ])  # fmt: skip


def with_settings(base, settings):
    config = deepcopy(base)
    for key, value in settings.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"data.train_batch_size": 8, f"{ACTOR}.ppo_mini_batch_size": 4},
        {"trainer.n_gpus_per_node": 4, "trainer.nnodes": 2, URL: "http://scorer/score"},
        {f"{MODEL}.lora_rank": 8, "tts.trainable": "lora"},
        {f"{ROLLOUT}.logprobs_mode": "processed_logprobs", f"{ROLLOUT}.top_p": 0.95, f"{ROLLOUT}.top_k": 50},
        {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_micro_batch_size_per_gpu": None},
        {URL: None, FUNCTION: "pkg://verl_tts.rewards.functions"},
        {"algorithm.use_kl_in_reward": True, f"{ACTOR}.use_kl_loss": False},
        {"trainer.total_training_steps": None},
        {"data.max_response_length": MAX_FRAMES},
        {"algorithm.adv_estimator": "reinforce_plus_plus", f"{ROLLOUT}.n": 1},
        # A module of the user's may register names that nobody here knows.
        {f"{MODEL}.external_lib": ["verl_tts.plugin", "json"], "algorithm.adv_estimator": "mine"},
        {"tts.sync_every": 5, f"{IS}.rollout_is": "token"},
        {"tts.engine.rollout_gpus": 6},
        {"tts.engine.rollout_gpus": 4, "trainer.n_gpus_per_node": 2},
        {f"{ACTOR}.optim.lr_scheduler_type": "linear", f"{ACTOR}.optim.min_lr_ratio": 0.1},
    ],
)
def test_what_can_work_is_let_through(base, settings):
    validate(with_settings(base, settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({f"{ROLLOUT}.temperature": 1e-38}, "rollout.temperature=1e-38: logits over it"),
        ({f"{ROLLOUT}.val_kwargs.temperature": 1e-3}, "use 0.01 or more"),
        ({f"{IS}.rollout_is_threshold": -1}, "rollout_is_threshold=-1 has to be above 0"),
        *(
            (
                {f"{MODEL}.lora_rank": 8, "tts.trainable": "lora", f"{MODEL}.target_modules": wrong},
                "write all-linear or a",
            )
            for wrong in (float("nan"), -1, "", [])
        ),
        ({"trainer.v1.trainer_mode": "colocate_async"}, "only the V1 trainer in mode sync"),
        ({"data.seed": -1}, "data.seed=-1 has to be 0 or more"),
        ({"data.max_prompt_length": 0}, "has to be 1 or more"),
        ({f"{ACTOR}.optim.lr": -1e-6}, "has to be 0 or more"),
        ({f"{ACTOR}.clip_ratio": 0.0}, "has to be above 0"),
        ({f"{ROLLOUT}.gpu_memory_utilization": -1}, "has to be above 0"),
        ({f"{ROLLOUT}.val_kwargs.n": 0}, "has to be 1 or more"),
        ({f"{ROLLOUT}.val_kwargs.top_p": 1.5}, "at most 1"),
        ({"trainer.test_freq": 0}, "or -1 for never"),
        ({f"{ACTOR}.kl_loss_type": "abc"}, "low_var_kl"),
        ({f"{ACTOR}.loss_agg_mode": "abc"}, "token-mean"),
        ({f"{ROLLOUT}.name": "vllm"}, "only vllm_omni"),
        ({"algorithm.adv_estimator": "gae"}, "use grpo"),
        ({"algorithm.adv_estimator": "remax"}, "use grpo"),
        ({"algorithm.adv_estimator": "grpoo"}, "adv_estimator=grpoo is unknown; the nearest is grpo"),
        ({f"{ACTOR}.policy_loss.loss_mode": "vanila"}, "the nearest is vanilla"),
        ({"trainer.logger": ["console", "wandbb"]}, "trainer.logger=wandbb is unknown; the nearest is wandb"),
        ({f"{ROLLOUT}.load_format": "safetensor"}, "the nearest is safetensors"),
        ({f"{MODEL}.override_config.attn_implementation": "flash_attn"}, "sdpa, eager, flash_attention_2"),
        ({f"{ACTOR}.optim.lr_scheduler_type": "cosin"}, "the nearest is cosine"),
        ({f"{ROLLOUT}.agent.default_agent_loop": "qwen3"}, "default_agent_loop=qwen3 is unknown"),
        ({f"{MODEL}.external_lib": "verl_tts.plugins"}, "external_lib=verl_tts.plugins: there is no module"),
        ({f"{MODEL}.external_lib": ["verl_tts.plugin", "nowhere.mine"]}, "external_lib=nowhere.mine: there is no"),
        ({"algorithm.adv_estimator": "gdpo"}, "hands the estimator no components"),
        ({"reward.reward_model.enable": True}, "tts.reward.scorer_url"),
        ({f"{ROLLOUT}.multi_turn.enable": True}, "one clip"),
        ({f"{ACTOR}.strategy": "megatron"}, "use fsdp2"),
        ({f"{MODEL}.trust_remote_code": True}, "never run"),
        ({f"{MODEL}.use_remove_padding": True}, "leave it false"),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 2}, "use 1"),
        ({"tts.trainable": "lora"}, "needs a rank above 0"),
        ({"tts.trainable": "backbone", f"{MODEL}.lora_rank": 8}, "a rank of 0"),
        ({"tts.trainable": "lora", f"{MODEL}.lora_rank": 8, f"{MODEL}.lora.merge": False}, "would not see"),
        ({f"{ROLLOUT}.repetition_penalty": 1.05}, "repetition_penalty=1.05"),
        ({f"{ROLLOUT}.enable_prefix_caching": True}, "placeholder ids"),
        ({f"{ROLLOUT}.calculate_log_probs": False}, "use true"),
        ({f"{ROLLOUT}.logprobs_mode": "raw_logits"}, "not logits"),
        ({f"{ROLLOUT}.temperature": 0.0}, "a temperature above 0"),
        ({f"{ROLLOUT}.top_p": 0.0}, "above 0 and at most 1"),
        ({f"{ROLLOUT}.n": 1}, "2 or more"),
        ({f"{ROLLOUT}.n": 1, "algorithm.adv_estimator": "rloo"}, "rloo compares the clips of a group"),
        ({"data.train_batch_size": 6, f"{ACTOR}.ppo_mini_batch_size": 4}, "not a multiple"),
        ({"data.train_batch_size": 2, f"{ACTOR}.ppo_mini_batch_size": 4}, "not a multiple"),
        ({"trainer.n_gpus_per_node": 3}, "32 rows, which 3 workers cannot share"),
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": 0}, "has to be 1 or more"),
        ({"actor_rollout_ref.rollout.dtype": "half"}, "has to be one of bfloat16, float32"),
        ({"actor_rollout_ref.rollout.tensor_model_parallel_size": 2}, "one device here"),
        ({"trainer.n_gpus_per_node": 0}, "n_gpus_per_node=0 has to be 1 or more"),
        ({"trainer.nnodes": 0}, "nnodes=0 has to be 1 or more"),
        ({"data.train_batch_size": 0}, "train_batch_size=0 has to be 1 or more"),
        ({"algorithm.use_kl_in_reward": True}, "paid twice"),
        ({"data.max_response_length": MAX_FRAMES + 1}, f"between 1 and {MAX_FRAMES}"),
        ({"data.max_response_length": 0}, f"between 1 and {MAX_FRAMES}"),
        ({"trainer.total_training_steps": 0}, "the number of the last step"),
        ({"trainer.resume_mode": "always"}, "auto, disable or resume_path"),
        ({"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "gone"}, "gone does not exist"),
        ({"trainer.logger": "clearml"}, "needs the package clearml"),
        ({URL: None}, "no scorer"),
        ({FUNCTION: "pkg://verl_tts.rewards.functions"}, "two scorers"),
        ({URL: None, FUNCTION: "gone.py"}, "gone.py does not exist"),
        ({"trainer.nnodes": 2}, "the address that all of them can reach"),
        (
            {
                "trainer.nnodes": 2,
                URL: "http://scorer/score",
                "tts.reward.probes": {"quality": "http://localhost/score"},
            },
            "http://localhost/score is another machine",
        ),
        ({f"{MODEL}.path": "gone"}, f"{MODEL}.path=gone does not exist"),
        ({"data.train_files": None}, "data.train_files is not set"),
        ({"data.val_files": ["gone"]}, "data.val_files=gone does not exist"),
        ({"tts.speaker_path": None}, "tts.speaker_path is not set"),
        ({"tts.references": "gone"}, "tts.references=gone does not exist"),
        ({"tts.sync_every": 5}, "up to 4 updates lie between"),
        ({f"{IS}.bypass_mode": True}, "leave it false"),
        ({f"{IS}.rollout_is": "sample"}, "has to be token, sequence or null"),
        ({"tts.engine.rollout_gpus": 3, "trainer.n_gpus_per_node": 2}, "not a multiple of the 2 actor workers"),
        ({"tts.engine.rollout_gpus": 2, "tts.engine.starts_early": False}, "set it to 3, or tts.engine.starts_early"),
        ({"tts.engine.rollout_gpus": 2, "trainer.nnodes": 2}, "weights reach servers of the same machine"),
        ({"tts.engine.rollout_gpus": 2, f"{ROLLOUT}.free_cache_engine": True}, "nobody to free memory for"),
        ({f"{ACTOR}.optim.lr_scheduler_type": "step"}, "one of constant, cosine, linear"),
        ({f"{ACTOR}.optim.min_lr_ratio": 1.5}, "is a share of the learning rate"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_with_the_remedy(base, settings, message):
    with pytest.raises(ConfigError) as refused:
        validate(with_settings(base, settings))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
