import json
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_tts.config.compose import NVIDIA_DEVICE, _keys, _load_defaults, compose, tts_config, worker_environment
from verl_tts.config.compose import _parse as parse
from verl_tts.config.tts import TTSConfig
from verl_tts.config.validate import problems
from verl_tts.errors import ConfigError, TTSError

HEADS = ("tts", "data", "actor_rollout_ref", "trainer", "algorithm", "reward")


@pytest.fixture(scope="module")
def cpu():
    return compose(["tts.platform=cpu"])


def test_parameters_are_fp32_and_compute_is_bf16(cpu):
    for owner in ("actor", "ref"):
        fsdp = cpu.actor_rollout_ref[owner].fsdp_config
        assert fsdp.model_dtype == "fp32"
        assert fsdp.mixed_precision == {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def test_every_seed_follows_the_seed_of_the_run():
    config = compose(["tts.platform=cpu", "data.seed=7"])
    roles = config.actor_rollout_ref
    seeds = (roles.rollout.seed, roles.actor.data_loader_seed, roles.actor.fsdp_config.seed, roles.ref.fsdp_config.seed)
    assert seeds == (7, 7, 7, 7)


def test_the_node_tts_has_the_defaults_of_its_dataclasses(cpu):
    tts = tts_config(cpu)
    assert (tts.platform, tts.trainable) == ("cpu", "full")  # auto, replaced
    assert (tts.gates, tts.reward, tts.keep) == (TTSConfig().gates, TTSConfig().reward, TTSConfig().keep)


@pytest.mark.parametrize("plus", ["", "+", "++"])
@pytest.mark.parametrize("key", ["data.train_batch_size", "actor_rollout_ref.model.override_config.new"])
def test_a_plus_is_neither_needed_nor_in_the_way(plus, key):
    config = compose(["tts.platform=cpu", f"{plus}{key}=8"])
    assert config.actor_rollout_ref.model.override_config.get("new", 8) == 8
    assert config.data.train_batch_size in (4, 8)


def test_the_last_of_two_overrides_wins():
    config = compose(["tts.platform=cpu", "data.train_batch_size=8", "++data.train_batch_size=16"])
    assert config.data.train_batch_size == 16


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("data.train_batch_sise=8", "data.train_batch_size"),
        ("actor_rollout_ref.rollout.temprature=1", "actor_rollout_ref.rollout.temperature"),
        ("actor_rollout_ref.rollout.lr=1e-6", "actor_rollout_ref.actor.optim.lr"),  # moved
        ("+trainer.total_steps=5", "trainer.total_training_steps"),
        ("tts.speakers_path=x", "tts.speaker_path"),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.vllm_omni.attention_backend=X",
            "actor_rollout_ref.rollout.engine_kwargs.vllm_omni.attention_config.backend",
        ),
        ("++tts.speakers_path=x", "tts.speaker_path"),  # nothing of ours is undeclared
        ("actor_rollout_ref.actor.fsdp_config={model_dtyp: bf16}", "actor_rollout_ref.actor.fsdp_config.model_dtype"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_ones(wrong, nearest):
    with pytest.raises(ConfigError, match=r"there is no setting .* the nearest are ") as refused:
        compose(["tts.platform=cpu", wrong])
    assert nearest in str(refused.value).partition("the nearest are ")[2].partition(" (++")[0].split(", ")


def test_two_plus_signs_add_a_key_that_verl_reads_without_declaring_it():
    config = compose(["tts.platform=cpu", "++actor_rollout_ref.rollout.limit_images=1"])
    assert config.actor_rollout_ref.rollout.limit_images == 1


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trainer.nnodes=1.5", "a whole number is needed"),
        ("trainer.nnodes=two", "a whole number is needed"),
        ("trainer.nnodes=true", "a whole number is needed"),
        ("trainer.use_v1=1", "true or false is needed"),
        ("tts.min_groups=half", "a number is needed"),
        ("trainer.project_name={a: 1}", "a text is needed"),
        ("actor_rollout_ref.rollout.val_kwargs=3", "it is a mapping"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=all", "a whole number is needed"),  # default: an interpolation
        ("actor_rollout_ref.actor.optim.lr=nan", "a finite number is needed"),
        ("actor_rollout_ref.actor.grad_clip=inf", "a finite number is needed"),
        ("algorithm=null", "it is a mapping"),
        ("data.seed=${data.nope}", "cannot be resolved"),
        ("data.seed=${data.seed}", "cannot be resolved"),
        ("tts.output_dir=${oc.env:VERL_TTS_UNSET}", "cannot be resolved"),
        ("data.train_batch_size=${tts.model}", "a whole number is needed"),
        ("tts.platform=tpu", "one of auto, cpu, cuda"),
        ("tts.trainable=head", "one of auto, full, backbone, lora"),
        ("tts.failed_group=ignore", "one of stop, drop"),
        ("tts.min_groups=1.5", "between 0 and 1"),
        ("tts.rpc_timeout_s=0", "above 0"),
        ("tts.sync_every=0", "1 or more"),
        ("tts.keep.val_samples_per_step=-2", "-1 (all), 0 or more"),
        ("tts.reward.scorer_url=scorer", "http://HOST:PORT/score"),
        ("trainer.default_local_dir=null", "has to be a directory"),
        ("tts.output_dir=''", "tts.output_dir= has to be a directory"),
        ("tts.codec_path=-1", "tts.codec_path=-1 has to be a path"),
        ("data.train_batch_size", "KEY=VALUE"),
        ("tts.output_dir=runs/lr=1", "KEY=VALUE"),
        ("trainer.logger=console,wandb", "a list is written [a,b]"),
        ("~data.seed", "set another value instead"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_that_names_it(word, message):
    with pytest.raises(ConfigError) as refused:
        compose([word])
    text = str(refused.value)
    assert message in text
    assert word.lstrip("~").partition("=")[0] in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("data.train_batch_size=8.0", ("data", "train_batch_size"), 8),
        ("tts.rpc_timeout_s=5", ("tts", "rpc_timeout_s"), 5.0),
        ("trainer.experiment_name=7", ("trainer", "experiment_name"), "7"),
        ("trainer.logger=console", ("trainer", "logger"), ["console"]),
        ("data.train_files=[a.parquet,b.parquet]", ("data", "train_files"), ["a.parquet", "b.parquet"]),
        ("tts.output_dir='runs/lr=1 (a)'", ("tts", "output_dir"), "runs/lr=1 (a)"),
        ("trainer.total_training_steps=null", ("trainer", "total_training_steps"), None),
    ],
)
def test_values_become_what_their_default_is(word, key, value):
    node = compose(["tts.platform=cpu", word])[key[0]][key[1]]
    assert node == value
    assert type(node) is type(value) or isinstance(value, list)


VALUES = ("null", "[]", "{}", "{a: 1}", "[1,2]", "-1", "0", "1.5", "1e400", "nan", "true", "''", "'a b'", "abc")
KEYS = sorted(key for key in _keys(_load_defaults("cpu")[1]) if key.partition(".")[0] in HEADS)


@settings(max_examples=60)
@given(st.sampled_from(KEYS), st.sampled_from(VALUES))
@example("actor_rollout_ref.model.path", "{a: 1}")
@example("actor_rollout_ref.rollout.agent.default_agent_loop", "{a: 1}")
@example("reward.custom_reward_function.path", "nan")
@example("tts.language", "null")
@example("tts.language", "[1,2]")
@example("tts.channel_weights", "[1,2]")
@example("tts.gates.steps_in_a_row", "null")
@example("tts.reward.scorer_url", "{a: 1}")
@example("tts.reward.preset", "[]")
@example("trainer.nnodes", "0")
def test_no_value_of_any_key_is_answered_with_a_traceback(key, value):
    with suppress(TTSError):
        problems(compose(["tts.platform=cpu", f"{key}={value}"]))


@given(st.text(st.characters(codec="utf-8", exclude_characters="'\\$\0", exclude_categories=["Cc", "Cs"]), min_size=1))
def test_a_quoted_path_arrives_as_it_was_written(path):
    assert parse(f"tts.speaker_path='{path}'") == ("tts.speaker_path", path, False)


def test_auto_is_the_platform_of_the_machine():
    assert compose([]).tts.platform == ("cuda" if NVIDIA_DEVICE.exists() else "cpu")


def test_a_preset_carries_the_whole_difference_between_platforms():
    cpu, cuda = compose(["tts.platform=cpu", "trainer.n_gpus_per_node=2"]), compose(["tts.platform=cuda"])
    assert cpu.ray_kwargs.ray_init.num_gpus == 2  # logical
    assert "num_gpus" not in cuda.ray_kwargs.ray_init
    assert (cpu.trainer.device, cuda.trainer.device) == ("cpu", "cuda")
    assert worker_environment(cpu)["VERL_PLATFORM"] == "cpu"
    assert worker_environment(cuda)["VERL_PLATFORM"] == "nvidia"


def test_an_override_wins_over_the_preset_and_so_does_an_exported_variable(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    config = compose(["tts.platform=cpu", "actor_rollout_ref.rollout.agent.num_workers=2"])
    assert config.actor_rollout_ref.rollout.agent.num_workers == 2
    assert worker_environment(config)["OMP_NUM_THREADS"] == "3"


def test_a_running_cluster_is_joined_without_what_only_a_new_one_takes(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    ray_init = compose(["tts.platform=cpu"]).ray_kwargs.ray_init
    assert not {"num_cpus", "num_gpus", "object_store_memory"} & set(ray_init)
    assert ray_init.runtime_env.env_vars.VERL_PLATFORM == "cpu"


@pytest.mark.parametrize(("checkpoints", "output_dir"), [("/runs/a/checkpoints", "/runs/a"), ("/runs/b", "/runs/b")])
def test_the_run_directory_follows_the_checkpoint_directory(checkpoints, output_dir):
    config = compose(["tts.platform=cpu", f"trainer.default_local_dir={checkpoints}"])
    assert config.tts.output_dir == output_dir
    assert config.trainer.default_local_dir == f"{output_dir}/checkpoints"


def test_the_model_directory_says_which_policy_it_is(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_tts"}))
    config = compose(["tts.platform=cpu", f"actor_rollout_ref.model.path={tmp_path}"])
    assert config.tts.model == config.actor_rollout_ref.model.model_type == "qwen3_tts"


def test_nothing_heavy_is_imported():
    heavy = ("torch", "transformers", "verl", "vllm", "ray", "datasets")
    program = (
        "import sys; from verl_tts.config.compose import compose; import verl_tts.main_omni; compose([])\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
