"""Refuses, before anything heavy is imported, what cannot work: one function a subject, one line a mistake."""

from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_tts.config.compose import nearest, tts_config
from verl_tts.errors import ConfigError
from verl_tts.models.base import lora_leaves
from verl_tts.report.trackers import PACKAGES, is_installed

PLUGIN = "verl_tts.plugin"
# Advantages that compare the clips of a group, and those that do not; verl's, less what a check below refuses.
GROUP_ESTIMATORS = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)
ESTIMATORS = (*GROUP_ESTIMATORS, "reinforce_plus_plus")
POLICY_LOSSES = (
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "cispo",
    "bypass_mode",
)
LOAD_FORMATS = ("safetensors", "auto", "dummy")  # ours reads the model's safetensors, whichever of them it is
AGENT_LOOPS = ("qwen3_tts",)
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
SCHEDULES = ("constant", "cosine", "linear")
# Five minutes of speech at 12.5 frames a second. The codec's stage is sized for the longest clip.
MAX_FRAMES = 4096
ROLLOUT_DTYPES = ("bfloat16", "float32")
LOSS_AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")  # verl's; with a + for its straight-through form
# The smallest value that works; what is above it is the user's business.
AT_LEAST = {
    "data.seed": 0,
    "data.max_prompt_length": 1,
    "data.train_batch_size": 1,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
    "actor_rollout_ref.actor.optim.lr": 0,
    "actor_rollout_ref.actor.kl_loss_coef": 0,
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.rollout.max_num_seqs": 1,
    "actor_rollout_ref.rollout.max_num_batched_tokens": 1,
    "actor_rollout_ref.rollout.val_kwargs.n": 1,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 0,
    "trainer.total_epochs": 1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
}
ABOVE_ZERO = (
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.model.lora_alpha",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
)
COLDEST = 0.01  # temperature; far below, logits over it are beyond float32, and no distribution is left
ROLLOUT_IS = (None, "token", "sequence")
OPTIONAL_PATHS = ("tts.codec_path", "tts.reference_dir", "actor_rollout_ref.model.lora_adapter_path")
LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


def validate(config: DictConfig) -> None:
    """Checks combinations of settings, and that what they name exists. Raises ``ConfigError`` for the first mistake."""
    for check in (*SETTINGS, _reward, _paths):
        check(config)


def validate_settings(config: DictConfig) -> None:
    """Checks the settings alone, whatever they name. Raises ``ConfigError``."""
    for check in SETTINGS:
        check(config)


def problems(config: DictConfig) -> list[str]:
    """What ``validate`` would refuse, one line for each subject."""
    found = []
    for check in (*SETTINGS, _reward, _paths):
        try:
            check(config)
        except ConfigError as error:
            found.append(str(error))
    return found


def validate_rollout(config: DictConfig) -> None:
    """The checks of an evaluation: it samples and scores, and does not train. Raises ``ConfigError``."""
    for check in (_ranges, _sampling, _engine, _length, _reward):
        check(config)


def data_files(value: str | ListConfig | None) -> list[str]:
    """``data.train_files`` and ``data.val_files`` are one path or a list of them."""
    return [str(path) for path in value] if isinstance(value, ListConfig) else [str(value)] if value else []


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)


def _names(config: DictConfig) -> None:
    """Names that are looked up somewhere: verl would look for them after everything has been started."""
    for module in external_modules(config):
        if not _is_module(module):
            _refuse(f"actor_rollout_ref.model.external_lib={module}: there is no module of this name to import")
    known: tuple[str, ...]
    own_modules = set(external_modules(config)) - {PLUGIN}  # they may register names of their own
    for key, known in (
        ("algorithm.adv_estimator", ESTIMATORS),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", POLICY_LOSSES),
    ):
        if not own_modules and OmegaConf.select(config, key) not in known:
            _unknown_name(key, OmegaConf.select(config, key), known)
    for key, known in (
        ("actor_rollout_ref.rollout.load_format", LOAD_FORMATS),
        ("actor_rollout_ref.model.override_config.attn_implementation", ATTENTIONS),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type", SCHEDULES),
        ("actor_rollout_ref.rollout.agent.default_agent_loop", AGENT_LOOPS),
    ):
        if (value := OmegaConf.select(config, key)) is not None and value not in known:
            _unknown_name(key, value, known)


def external_modules(config: DictConfig) -> list[str]:
    """``actor_rollout_ref.model.external_lib`` is one module or a list of them."""
    value = config.actor_rollout_ref.model.external_lib
    return [str(module) for module in value] if isinstance(value, ListConfig) else [str(value)] if value else []


def _is_module(name: str) -> bool:
    """Without importing it; only the packages that it lies in are."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _unknown_name(key: str, value: object, known: tuple[str, ...]) -> NoReturn:
    close = nearest(str(value), known)
    meant = f"; the nearest is {close[0]}" if close else ""
    _refuse(f"{key}={value} is unknown{meant}; it has to be one of {', '.join(known)}")


def _host(config: DictConfig) -> None:
    """verl has more trainers and engines than our parts fit into."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if not trainer.use_v1 or trainer.v1.trainer_mode != "sync":
        _refuse(
            f"trainer.use_v1={trainer.use_v1} with trainer.v1.trainer_mode={trainer.v1.trainer_mode}: "
            "only the V1 trainer in mode sync is there"
        )
    if rollout.name != "vllm_omni" or rollout.mode != "async":
        _refuse(
            f"actor_rollout_ref.rollout.name={rollout.name}, mode={rollout.mode}: only vllm_omni, async makes speech"
        )
    if config.algorithm.adv_estimator == "remax":
        _refuse("algorithm.adv_estimator=remax: its greedy baseline is rolled out by nobody here; use grpo")
    if config.algorithm.adv_estimator == "gae":
        _refuse("algorithm.adv_estimator=gae needs a critic, which there is none of for codec tokens; use grpo")
    if config.algorithm.adv_estimator == "gdpo":
        _refuse(
            "algorithm.adv_estimator=gdpo: verl 0.9.1 has it and its gdpo_reward_keys, but its V1 trainer hands the "
            "estimator no components; use grpo, with running_z in tts.reward.compose"
        )
    if config.reward.reward_model.enable:
        _refuse("reward.reward_model.enable=true: a reward model is a scorer here, reached by tts.reward.scorer_url")
    if config.actor_rollout_ref.rollout.multi_turn.enable:
        _refuse("actor_rollout_ref.rollout.multi_turn.enable=true: a prompt is one text and its answer one clip")


def _policy(config: DictConfig) -> None:
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    if actor.strategy not in ("fsdp", "fsdp2"):
        _refuse(f"actor_rollout_ref.actor.strategy={actor.strategy} has no engine here; use fsdp2")
    if model.trust_remote_code or config.data.trust_remote_code:
        _refuse("trust_remote_code=true: code from a checkpoint is never run; the policies are part of verl_tts")
    if model.use_remove_padding:
        _refuse(
            "actor_rollout_ref.model.use_remove_padding=true: the replay lays out its own rows and makes no logits "
            "for padding; leave it false"
        )
    for owner in ("actor", "ref"):
        size = config.actor_rollout_ref[owner].ulysses_sequence_parallel_size
        if size != 1:
            _refuse(f"actor_rollout_ref.{owner}.ulysses_sequence_parallel_size={size}: sequences are not split; use 1")


def _ranges(config: DictConfig) -> None:
    for key, lowest in AT_LEAST.items():
        if (value := OmegaConf.select(config, key)) is not None and value < lowest:
            _refuse(f"{key}={value} has to be {lowest} or more")
    for key in ABOVE_ZERO:
        if (value := OmegaConf.select(config, key)) is not None and value <= 0:
            _refuse(f"{key}={value} has to be above 0")
    for key in ("trainer.test_freq", "trainer.save_freq"):
        if (value := OmegaConf.select(config, key)) == 0:
            _refuse(f"{key}={value} has to be a number of steps, or -1 for never")


def _trainable(config: DictConfig) -> None:
    trainable, rank = config.tts.trainable, config.actor_rollout_ref.model.lora_rank
    if (trainable == "lora") != (rank > 0):
        _refuse(
            f"tts.trainable={trainable} contradicts actor_rollout_ref.model.lora_rank={rank}: "
            "LoRA needs a rank above 0, anything else a rank of 0"
        )
    if rank == 0 and (adapter := config.actor_rollout_ref.model.lora_adapter_path):
        _refuse(f"actor_rollout_ref.model.lora_adapter_path={adapter} with lora_rank=0: give its rank and alpha too")
    if rank > 0:
        lora_leaves(config.actor_rollout_ref.model.target_modules)
    if rank > 0 and not config.actor_rollout_ref.model.lora.merge:
        _refuse("actor_rollout_ref.model.lora.merge=false: the rollout would not see the adapters; leave it true")


def _sampling(config: DictConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.repetition_penalty != 1:
        _refuse(
            f"actor_rollout_ref.rollout.repetition_penalty={rollout.repetition_penalty}: the actor's log-probs know "
            "of no penalty, so the policy would not be the one that sampled; use 1"
        )
    if rollout.enable_prefix_caching:
        _refuse(
            "actor_rollout_ref.rollout.enable_prefix_caching=true: prompts of different texts and speakers have equal "
            "placeholder ids, so one would be served with the cache of the other; use false"
        )
    if not rollout.calculate_log_probs:
        _refuse("actor_rollout_ref.rollout.calculate_log_probs=false: the log-prob gate needs them; use true")
    if rollout.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
        _refuse(
            f"actor_rollout_ref.rollout.logprobs_mode={rollout.logprobs_mode} has to be raw_logprobs or "
            "processed_logprobs: the gate compares log-probs, not logits"
        )
    if not rollout.do_sample or not rollout.temperature > 0:
        _refuse(
            f"actor_rollout_ref.rollout.temperature={rollout.temperature}, do_sample={rollout.do_sample}: "
            "without sampling all clips of a group are the same; use a temperature above 0"
        )
    for key in ("temperature", "val_kwargs.temperature"):
        if 0 < (value := OmegaConf.select(rollout, key)) < COLDEST:
            _refuse(
                f"actor_rollout_ref.rollout.{key}={value}: logits over it leave the range of float32; "
                f"use {COLDEST} or more"
            )
    for key in ("top_p", "val_kwargs.top_p"):
        if not 0 < (value := OmegaConf.select(rollout, key)) <= 1:
            _refuse(f"actor_rollout_ref.rollout.{key}={value} has to be above 0 and at most 1")


def _engine(config: DictConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.dtype not in ROLLOUT_DTYPES:
        _refuse(f"actor_rollout_ref.rollout.dtype={rollout.dtype} has to be one of {', '.join(ROLLOUT_DTYPES)}")
    for name in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        if rollout[name] != 1:
            _refuse(
                f"actor_rollout_ref.rollout.{name}={rollout[name]}: a rollout engine has one device here, and there is "
                "one engine for each; set it to 1"
            )


def _pools(config: DictConfig) -> None:
    gpus, workers = config.tts.engine.rollout_gpus, config.trainer.nnodes * config.trainer.n_gpus_per_node
    if gpus and config.trainer.nnodes != 1:
        _refuse(
            f"tts.engine.rollout_gpus={gpus} with trainer.nnodes={config.trainer.nnodes}: weights reach servers of the "
            "same machine; use one node, or 0"
        )
    if gpus and workers and gpus % workers:
        _refuse(
            f"tts.engine.rollout_gpus={gpus} is not a multiple of the {workers} actor workers "
            "(trainer.n_gpus_per_node), each of which sends its weights to as many servers"
        )
    told = config.ray_kwargs.ray_init.get("num_gpus")
    if gpus and told is not None and told < workers + gpus and not config.tts.engine.starts_early:
        _refuse(
            f"ray_kwargs.ray_init.num_gpus={told}: {workers} actor workers and tts.engine.rollout_gpus={gpus} servers "
            f"ask Ray for one each; set it to {workers + gpus}, or tts.engine.starts_early=true"
        )
    if gpus and config.actor_rollout_ref.rollout.free_cache_engine:
        _refuse(
            f"actor_rollout_ref.rollout.free_cache_engine=true with tts.engine.rollout_gpus={gpus}: servers on GPUs of "
            "their own have nobody to free memory for; set it to false"
        )


def _staleness(config: DictConfig) -> None:
    correction, every = config.algorithm.rollout_correction, config.tts.sync_every
    if correction.bypass_mode:
        _refuse(
            "algorithm.rollout_correction.bypass_mode=true: the log-prob gate compares the engine's log-probs with the "
            "actor's, which would not be computed; leave it false"
        )
    if correction.rollout_is not in ROLLOUT_IS:
        _refuse(f"algorithm.rollout_correction.rollout_is={correction.rollout_is} has to be token, sequence or null")
    threshold = correction.rollout_is_threshold
    if isinstance(threshold, int | float) and not threshold > 0:
        _refuse(f"algorithm.rollout_correction.rollout_is_threshold={threshold} has to be above 0")
    if every > 1 and correction.rollout_is is None:
        _refuse(
            f"tts.sync_every={every}: up to {every - 1} updates lie between the policy that sampled and the one that "
            "is trained; weigh it with algorithm.rollout_correction.rollout_is=token (or sequence), or use 1"
        )


def _schedule(config: DictConfig) -> None:
    optim = config.actor_rollout_ref.actor.optim
    if optim.min_lr_ratio is not None and not 0 <= optim.min_lr_ratio <= 1:
        _refuse(
            f"actor_rollout_ref.actor.optim.min_lr_ratio={optim.min_lr_ratio} is a share of the learning rate; "
            "it has to be between 0 and 1"
        )


def _group(config: DictConfig) -> None:
    n = config.actor_rollout_ref.rollout.n
    if config.algorithm.adv_estimator in GROUP_ESTIMATORS and n < 2:
        _refuse(
            f"actor_rollout_ref.rollout.n={n}: {config.algorithm.adv_estimator} compares the clips of a group, so a "
            "group needs 2 or more"
        )


def _batch(config: DictConfig) -> None:
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    prompts, mini, micro = config.data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu
    workers = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if min(prompts, mini, workers) < 1:
        return  # ``_ranges`` says so
    if prompts % mini:
        _refuse(
            f"data.train_batch_size={prompts} is not a multiple of actor_rollout_ref.actor.ppo_mini_batch_size={mini}, "
            "so the last mini-batch of a step would be filled with synthetic rows"
        )
    if mini * n % workers:
        _refuse(
            f"a mini-batch has {mini} prompts x {n} clips = {mini * n} rows, which {workers} workers cannot share "
            "equally; change actor_rollout_ref.actor.ppo_mini_batch_size or actor_rollout_ref.rollout.n"
        )
    if not actor.use_dynamic_bsz and (micro is None or micro < 1):
        _refuse(f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro} has to be 1 or more")


def _kl(config: DictConfig) -> None:
    if config.algorithm.use_kl_in_reward and config.actor_rollout_ref.actor.use_kl_loss:
        _refuse(
            "algorithm.use_kl_in_reward=true and actor_rollout_ref.actor.use_kl_loss=true: "
            "the distance to the reference would be paid twice; set one of them to false"
        )
    actor = config.actor_rollout_ref.actor
    for key, value, known in (
        ("kl_loss_type", str(actor.kl_loss_type).removesuffix("+"), KL_ESTIMATORS),
        ("loss_agg_mode", actor.loss_agg_mode, LOSS_AGGREGATIONS),
    ):
        if value not in known:
            _refuse(f"actor_rollout_ref.actor.{key}={actor[key]} has to be one of {', '.join(known)}")


def _length(config: DictConfig) -> None:
    frames = config.data.max_response_length
    if not 1 <= frames <= MAX_FRAMES:
        _refuse(
            f"data.max_response_length={frames} frames has to be between 1 and {MAX_FRAMES}: "
            "the stage that decodes a clip has to hold all of its codes at once"
        )


def _steps(config: DictConfig) -> None:
    trainer = config.trainer
    if trainer.total_training_steps is not None and trainer.total_training_steps < 1:
        _refuse(
            f"trainer.total_training_steps={trainer.total_training_steps} has to be 1 or more: "
            "it is the number of the last step, also after a resume"
        )
    if trainer.resume_mode not in ("auto", "disable", "resume_path"):
        _refuse(f"trainer.resume_mode={trainer.resume_mode} has to be auto, disable or resume_path")
    if trainer.resume_mode == "resume_path" and not Path(str(trainer.resume_from_path)).is_dir():
        _refuse(f"trainer.resume_from_path={trainer.resume_from_path} does not exist; it has to be a global_step_<n>")


def _trackers(config: DictConfig) -> None:
    loggers = config.trainer.logger
    for name in [loggers] if isinstance(loggers, str) else loggers:
        if name not in PACKAGES:
            _unknown_name("trainer.logger", name, tuple(PACKAGES))
        if not is_installed(name):
            _refuse(
                f"trainer.logger={name} needs the package {PACKAGES[name]}, which is not installed here: install it, "
                f"or leave {name} out of trainer.logger"
            )


def _reward(config: DictConfig) -> None:
    reward = tts_config(config).reward
    function, urls = config.reward.custom_reward_function.path, reward.urls
    if function is None and not urls:
        _refuse("no scorer: set tts.reward.scorer_url, or reward.custom_reward_function.path to a Python file")
    if not isinstance(function, str | None):
        _refuse(f"reward.custom_reward_function.path={function} has to be the path of a Python file")
    if function is not None and urls:
        _refuse(
            f"two scorers: tts.reward.scorer_url={','.join(urls)} and reward.custom_reward_function.path={function}; "
            "set one of them to null"
        )
    if function is not None and not str(function).startswith("pkg://") and not Path(function).is_file():
        _refuse(f"reward.custom_reward_function.path={function} does not exist")
    local = [url for url in (*urls, *reward.probes.values()) if urlsplit(url).hostname in LOOPBACK]
    if local and config.trainer.nnodes > 1:
        _refuse(
            f"tts.reward.scorer_url={local[0]} is another machine on each of trainer.nnodes={config.trainer.nnodes}; "
            "give the address that all of them can reach"
        )


def _paths(config: DictConfig) -> None:
    named = [("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path)]
    for key in ("data.train_files", "data.val_files"):
        named += [(key, path) for path in data_files(OmegaConf.select(config, key)) or [""]]
    if config.tts.model != "moss":
        named += [("tts.speaker_path", config.tts.speaker_path)]
    named += [(key, path) for key in OPTIONAL_PATHS if (path := OmegaConf.select(config, key))]
    if config.tts.references is not None:
        named += [("tts.references", config.tts.references)]
    for key, path in named:
        if not path:
            _refuse(f"{key} is not set")
        if not Path(str(path)).exists():
            _refuse(f"{key}={path} does not exist")


SETTINGS = (
    _host,
    _names,
    _policy,
    _ranges,
    _trainable,
    _sampling,
    _engine,
    _pools,
    _staleness,
    _schedule,
    _group,
    _batch,
    _kl,
    _length,
    _steps,
    _trackers,
)
