"""What a run will need, counted from its settings: compared with the tiny checkpoint, with PEFT, with autograd."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tensors import kept_by_autograd, numel
from verl_tts.config.compose import compose
from verl_tts.config.model_dir import read_model_config
from verl_tts.config.plan import CHECKPOINTING, FREE_ENGINE, GIB, Machine, Plan, Sizes, activation_bytes, answer
from verl_tts.config.plan_shown import codec_config, published_sizes, shown, table
from verl_tts.errors import ConfigError
from verl_tts.models.facts import facts_of
from verl_tts.models.qwen3_tts_facts import lora_targets

ROOT = Path(__file__).parents[3]
LEAVES = "[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
LORA = ("actor_rollout_ref.model.lora_rank=8", f"actor_rollout_ref.model.target_modules={LEAVES}")


def settings(*overrides):
    return compose(["tts.platform=cuda", "tts.model=qwen3_tts", *overrides])


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint):
    return read_model_config(str(tiny_checkpoint))


@pytest.fixture(scope="module")
def policies(tiny_checkpoint):
    """By the bytes of a parameter."""
    from verl_tts.models.qwen3_tts import Qwen3TTSPolicy

    dtypes = {2: torch.bfloat16, 4: torch.float32}
    return {
        size: Qwen3TTSPolicy.from_pretrained(tiny_checkpoint, dtype=dtype, attn_implementation="sdpa")
        for size, dtype in dtypes.items()
    }


@pytest.fixture(scope="module")
def policy(policies):
    return policies[4]


def plan_of(model_config, *overrides, gib=80.0, gpus=1, scorer="own", prompts=None, val=None):
    config = settings(f"trainer.n_gpus_per_node={gpus}", *overrides)
    return Plan(config, Machine(gpus, 1, gib, scorer), model_config, prompts, val)


def test_parameters_of_the_tiny_checkpoint_are_counted_exactly(tiny, tiny_checkpoint, policy):
    sizes = Sizes.of(tiny, settings())
    assert sizes.file == numel(tiny_checkpoint / "model.safetensors")
    assert sizes.loaded == sum(parameter.numel() for parameter in policy.parameters())


@pytest.mark.parametrize("mode", ["full", "backbone"])
def test_trained_parameters_are_those_that_the_policy_says(tiny, policy, mode):
    from verl_tts.models.qwen3_tts import is_trainable

    trained = sum(p.numel() for name, p in policy.named_parameters() if is_trainable(name, mode))
    sizes = Sizes.of(tiny, settings(f"tts.trainable={mode}"))
    assert (sizes.trained, sizes.exported) == (trained, trained)


def test_adapters_are_counted_as_peft_makes_them(tiny, policy):
    from peft import LoraConfig, get_peft_model

    sizes, whole = Sizes.of(tiny, settings(*LORA)), Sizes.of(tiny, settings())
    with torch.device("meta"):
        twin = type(policy)(policy.config)
        twin._drop_generation_only()
    adapted = get_peft_model(twin, LoraConfig(r=8, target_modules=lora_targets("all-linear")))
    adapters = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    assert sizes.trained == adapters == sizes.loaded - whole.loaded
    targets = re.compile(lora_targets("all-linear") + r"\.weight")
    assert sizes.exported == sum(p.numel() for name, p in policy.named_parameters() if targets.fullmatch(name))


def test_the_published_model_has_its_published_number_of_parameters():
    sizes = Sizes.of(published_sizes("qwen3_tts")["0.6"], settings())
    assert sizes.file == 914_643_008


def test_units_are_those_that_verl_shards(tiny, policy):
    from verl.utils.fsdp_utils import _select_fsdp2_wrap_targets

    wrapped = _select_fsdp2_wrap_targets(policy, policy._no_split_modules)
    of = {"layers": [], "embeddings": []}
    for module in wrapped:
        kind = "embeddings" if isinstance(module, torch.nn.Embedding) else "layers"
        of[kind].append(sum(parameter.numel() for parameter in module.parameters()))
    sizes = Sizes.of(tiny, settings())
    assert {sizes.layer} == set(of["layers"])
    assert sizes.embeddings == sum(of["embeddings"])
    assert sizes.root == sizes.loaded - sum(of["layers"]) - sum(of["embeddings"])


def test_the_codec_is_counted_exactly_where_its_config_is_there(tiny, tiny_checkpoint):
    plan = Plan(settings(), Machine(1), tiny, None, None, codec_config(str(tiny_checkpoint), tiny, None))
    codec = numel(tiny_checkpoint / "speech_tokenizer" / "model.safetensors")
    assert plan.engine_weights == 2 * plan.sizes.file + 4 * codec


@pytest.mark.parametrize("param_bytes", [2, 4])
@pytest.mark.parametrize(("rows", "words", "frames"), [(2, 20, 60), (4, 60, 20)])
def test_activations_are_what_autograd_keeps(tiny, policies, rows, words, frames, param_bytes):
    """Within a sixth, for the whole model: layers by their number, and all else."""
    policy = policies[param_bytes]
    hidden = tiny["talker_config"]["hidden_size"]
    with kept_by_autograd(policy) as kept:
        (logits_NV,) = policy(
            text_ids=[torch.arange(8 + words)] * rows,
            codes=[torch.ones(frames, 16, dtype=torch.long)] * rows,
            speakers=[torch.zeros(hidden)] * rows,
            language_ids=[None] * rows,
            layout="non_streaming",
        )
        logits_NV.log_softmax(-1)[:, 0].sum()
    heads = facts_of(tiny).heads(tiny)
    layer, rest = activation_bytes(tiny["talker_config"], heads, rows, words + 10 + frames, frames + 1, param_bytes)
    counted = 2 * layer + rest
    assert counted == pytest.approx(sum(size for size, _ in kept.values()), rel=1 / 6)


def test_a_checkpoint_is_parameters_and_two_moments():
    plan = plan_of(published_sizes("qwen3_tts")["0.6"])
    assert plan.checkpoint == 4 * plan.sizes.loaded + 8 * plan.sizes.trained


@pytest.mark.parametrize(
    ("keep", "save", "steps", "kept"), [(3, 20, 500, 5), (3, 20, 40, 2), (3, -1, 500, 0), ("null", 100, 500, 5)]
)
def test_the_newest_the_best_and_the_one_being_written_take_room(keep, save, steps, kept):
    words = (f"trainer.max_actor_ckpt_to_keep={keep}", f"trainer.save_freq={save}")
    assert (
        plan_of(published_sizes("qwen3_tts")["0.6"], *words, f"trainer.total_training_steps={steps}").checkpoints_kept
        == kept
    )


def test_steps_end_with_the_epochs_or_the_last_step_whichever_comes_first():
    size = published_sizes("qwen3_tts")["0.6"]
    words = ("data.train_batch_size=8", "trainer.total_epochs=2")
    assert plan_of(size, *words, prompts=43).steps == 10
    assert plan_of(size, *words, "trainer.total_training_steps=7", prompts=43).steps == 7
    with pytest.raises(ConfigError, match=r"data.train_files or trainer.total_training_steps"):
        plan_of(size, *words, "trainer.total_training_steps=null").steps  # noqa: B018


def test_more_workers_need_less_of_each_card_and_a_scorer_on_it_more():
    size = published_sizes("qwen3_tts")["0.6"]
    one, four, shared = plan_of(size), plan_of(size, gpus=4), plan_of(size, scorer="shared")
    assert four.peak < one.peak < shared.peak
    assert (one.optimizer, four.optimizer) == (8 * one.sizes.trained, 2 * one.sizes.trained)


def test_a_remedy_is_the_fewest_settings_with_which_it_fits():
    plan = plan_of(published_sizes("qwen3_tts")["0.6"], f"{CHECKPOINTING}=false", gib=24.0)
    changes = answer(plan).changes
    assert changes
    assert not plan.fits
    for left_out in changes:
        fewer = {key: value for key, value in changes.items() if key != left_out}
        words = [f"{key}={value}" for key, value in {CHECKPOINTING: "false", **fewer}.items()]
        assert not plan_of(published_sizes("qwen3_tts")["0.6"], *words, gib=24.0).fits
    words = [f"{key}={value}" for key, value in {CHECKPOINTING: "false", **changes}.items()]
    assert plan_of(published_sizes("qwen3_tts")["0.6"], *words, gib=24.0).fits


def test_what_no_setting_makes_fit_is_said_to_need_other_cards():
    lines = shown(plan_of(published_sizes("qwen3_tts")["1.7"], gib=4.0))
    assert lines[-1].endswith("more GPUs, or larger ones")


def test_an_engine_that_gives_its_memory_back_is_not_beside_the_update():
    size = published_sizes("qwen3_tts")["0.6"]
    kept, freed = plan_of(size), plan_of(size, f"{FREE_ENGINE}=true")
    assert kept.phases["update"] - freed.phases["update"] == pytest.approx(kept.engine)
    assert kept.phases["sampling"] == freed.phases["sampling"]


def test_hours_are_a_range_that_grows_with_the_steps():
    size = published_sizes("qwen3_tts")["0.6"]
    (fast, slow), (twice, _) = (
        plan_of(size, f"trainer.total_training_steps={steps}", "trainer.save_freq=-1").hours() for steps in (100, 200)
    )
    assert 0 < fast < slow
    assert twice == pytest.approx(2 * fast)


# ------------------------------------------------------------------ the command


def dry(*words, options=()):
    command = [sys.executable, *options, "-m", "verl_tts.main_omni", "--dry-run", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def processor_seconds(*words):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert dry(*words).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.fixture(scope="module")
def config_alone(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    (place / "config.json").write_text(json.dumps(published_sizes("qwen3_tts")["0.6"]))
    return f"actor_rollout_ref.model.path={place}"


def test_a_machine_that_is_not_there_is_planned_from_config_json_alone_and_without_torch(config_alone):
    done = dry("--gpus", "4", "--gpu-gib", "80", config_alone, options=("-X", "importtime"))
    assert done.returncode == 0, done.stderr[-500:]
    assert "# plan for 1 x 4 GPUs of 80 GiB, scorer: own" in done.stdout
    assert "\n# fits " in done.stdout
    assert not re.search(r"\| +(torch|transformers|verl|vllm|ray)$", done.stderr, flags=re.MULTILINE)


def test_a_plan_takes_less_than_two_seconds(config_alone):
    """Of the processor, since a wall clock would measure the neighbours; and they slow a processor down, too: once in
    eight. Alone it takes 1.1 s."""
    assert any(processor_seconds("--gpus", "4", "--gpu-gib", "80", config_alone) < 2 for _ in range(8))


def test_what_does_not_fit_is_exit_code_2_and_names_the_key(config_alone):
    done = dry("--gpus", "1", "--gpu-gib", "24", "--scorer", "shared", config_alone)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == f"#               {FREE_ENGINE}=true"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "3"), "which 3 workers cannot share"),
        (("--gpus", "1", "--gpu-gib", "0"), "--gpu-gib 0.0 has to be above 0"),
        (("--gpus", "1", "data.train_batch_sise=4"), "the nearest are data.train_batch_size"),
    ],
)
def test_a_mistake_in_a_plan_is_one_line(config_alone, words, message):
    done = dry(*words, config_alone)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("tts.platform")]
    assert message in line


@pytest.mark.parametrize("lacks", ["hidden_size", "code_predictor_config"])
def test_a_config_json_that_lacks_a_size_is_said_to(tmp_path, lacks):
    content = published_sizes("qwen3_tts")["0.6"]
    del content["talker_config"][lacks]
    (tmp_path / "config.json").write_text(json.dumps(content))
    done = dry("--gpus", "1", f"actor_rollout_ref.model.path={tmp_path}")
    assert done.returncode == 2
    assert done.stderr == f"verl_tts: config.json of type qwen3_tts has no {lacks}, which it has to have\n"


def test_a_plan_without_a_model_says_what_it_needs():
    assert "needs the config.json of a model" in dry("--gpus", "1").stderr


def test_the_table_in_the_readme_is_made_by_the_plan():
    assert table() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tables_gib_are_of_one_gpu():
    assert plan_of(published_sizes("qwen3_tts")["0.6"]).peak / GIB < 80
