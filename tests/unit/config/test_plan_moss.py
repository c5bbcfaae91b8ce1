"""The plan of a MOSS run: compared with the tiny checkpoint, with PEFT, with autograd; and GPUs in two pools."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tensors import kept_by_autograd, numel
from verl_tts.config.compose import compose
from verl_tts.config.model_dir import read_model_config
from verl_tts.config.plan import GIB, MAX_NUM_SEQS, SAMPLES, TRAINS, Machine, Plan, Sizes, activation_bytes, answer
from verl_tts.config.plan_shown import (
    MOSS_LAUNCHER,
    MOSS_PLACEMENTS,
    MOSS_WAYS,
    codec_config,
    moss_table,
    published_sizes,
    shown,
)
from verl_tts.config.validate import validate_settings
from verl_tts.errors import CheckpointError
from verl_tts.models import moss_prompt
from verl_tts.models.base import POLICIES
from verl_tts.models.facts import facts_of, get_facts

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "moss_voice_generator" / "README.md"
LORA = MOSS_WAYS["LoRA, rank 8"]
PUBLISHED = published_sizes("moss_tts_delay")["MOSS-VoiceGenerator"]


def settings(*overrides):
    return compose(["tts.platform=cuda", "tts.model=moss", *overrides])


def plan_of(*overrides, gib=80.0, gpus=1, scorer="own"):
    config = settings(f"trainer.n_gpus_per_node={gpus}", *overrides)
    return Plan(config, Machine(gpus, 1, gib, scorer), PUBLISHED, None, None)


@pytest.fixture(scope="module")
def tiny(tiny_moss):
    return read_model_config(str(tiny_moss))


@pytest.fixture(scope="module")
def policies(tiny_moss):
    """By the bytes of a parameter."""
    from verl_tts.models.moss import MossPolicy

    dtypes = {2: torch.bfloat16, 4: torch.float32}
    return {size: MossPolicy.from_pretrained(tiny_moss, dtype=dtype) for size, dtype in dtypes.items()}


@pytest.fixture(scope="module")
def policy(policies):
    return policies[4]


# ------------------------------------------------------------------ counts


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_declares_what_its_adapter_says(name):
    from verl_tts.models.base import get_policy

    adapter = get_policy(name)
    facts = get_facts(name)
    for field in ("model_type", "sample_rate_hz", "samples_per_frame", "is_trainable", "lora_targets"):
        assert getattr(facts, field) == getattr(adapter, field)


def test_parameters_of_the_tiny_checkpoint_are_counted_exactly(tiny, tiny_moss, policy):
    sizes = Sizes.of(tiny, settings())
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    assert sizes.file == numel(tiny_moss / "model.safetensors") == parameters
    assert sizes.loaded == sizes.trained == parameters


def test_trained_parameters_are_those_that_the_policy_says(tiny, policy):
    from verl_tts.models.moss import is_trainable

    trained = sum(p.numel() for name, p in policy.named_parameters() if is_trainable(name, "backbone"))
    sizes = Sizes.of(tiny, settings("tts.trainable=backbone"))
    assert (sizes.trained, sizes.exported) == (trained, trained)


def test_adapters_are_those_of_the_language_model_as_peft_makes_them(tiny, policy):
    from peft import LoraConfig, get_peft_model

    from verl_tts.models.moss import MossPolicy, lora_targets

    sizes, whole = Sizes.of(tiny, settings(*LORA)), Sizes.of(tiny, settings())
    with torch.device("meta"):
        twin = MossPolicy(policy.config)
    adapted = get_peft_model(twin, LoraConfig(r=8, target_modules=lora_targets("all-linear")))
    adapters = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    assert sizes.trained == adapters == sizes.loaded - whole.loaded
    linear = [m for m in policy.language_model.modules() if isinstance(m, torch.nn.Linear)]
    assert sizes.exported == sum(module.weight.numel() for module in linear)


def test_the_published_adapter_has_its_published_size():
    """The model card's adapter is 34.9 MB of FP32."""
    assert 4 * Sizes.of(PUBLISHED, settings(*LORA)).trained / 1e6 == pytest.approx(34.9, abs=0.05)


def test_units_are_those_that_verl_shards(tiny, policy):
    from verl.utils.fsdp_utils import _select_fsdp2_wrap_targets

    of = {"layers": [], "embeddings": []}
    for module in _select_fsdp2_wrap_targets(policy, policy._no_split_modules):
        kind = "embeddings" if isinstance(module, torch.nn.Embedding) else "layers"
        of[kind].append(sum(parameter.numel() for parameter in module.parameters()))
    sizes = Sizes.of(tiny, settings())
    assert {sizes.layer} == set(of["layers"])
    assert len(of["embeddings"]) == 1 + 16
    assert sizes.embeddings == sum(of["embeddings"])
    assert sizes.root == sizes.loaded - sum(of["layers"]) - sum(of["embeddings"])
    assert sizes.largest_trained_unit == sizes.root  # all heads


@pytest.mark.parametrize("named", [True, False])
def test_the_codec_is_counted_exactly_wherever_its_directory_is(tiny, tiny_moss, named):
    where = ("elsewhere", str(tiny_moss / "codec")) if named else (str(tiny_moss), None)
    plan = Plan(settings(), Machine(1), tiny, None, None, codec_config(where[0], tiny, where[1]))
    codec = numel(tiny_moss / "codec" / "model.safetensors")
    assert plan.engine_weights == 2 * plan.sizes.file + 4 * codec
    assert plan.codec_host == 4 * codec


def test_a_codec_that_is_not_there_is_taken_for_the_published_one(tiny, tmp_path):
    assert codec_config(str(tmp_path), tiny, None) is None
    plan = plan_of()
    assert plan.engine_weights == 2 * plan.sizes.file + 6 * GIB


def test_a_codec_of_another_kind_is_said_to_be_none(tiny):
    plan = Plan(settings(), Machine(1), tiny, None, None, {"model_type": "encodec"})
    with pytest.raises(CheckpointError, match=r"the codec's config.json has no encoder_kwargs"):
        shown(plan)


def answered(ids, frames):
    """An answer with one clip, as the policy writes it."""
    text = [
        ids.audio_start,
        *[ids.gen_slot] * (frames - 1),
        *[ids.delay_slot] * ids.codebooks,
        ids.audio_end,
        ids.im_end,
    ]
    codes_TQ = np.full((len(text), ids.codebooks), ids.pad_code)
    codes_TQ[1 : frames + ids.codebooks] = moss_prompt.delay(np.full((frames, ids.codebooks), 7), ids.pad_code)
    assert len(moss_prompt.frames_of(ids, text, codes_TQ)) == frames
    return torch.tensor(text), torch.from_numpy(codes_TQ)


@pytest.mark.parametrize("param_bytes", [2, 4])
@pytest.mark.parametrize(("rows", "words", "frames"), [(2, 20, 60), (4, 60, 20)])
def test_activations_are_what_autograd_keeps(tiny, policies, rows, words, frames, param_bytes):
    """Within a twentieth, for the whole model: layers by their number, and all else."""
    from verl_tts.models.moss import replay_inputs

    policy = policies[param_bytes]
    ids = moss_prompt.TokenIds.of(tiny)
    text, codes = answered(ids, frames)
    columns = {
        "prompts": [torch.arange(words)] * rows,
        "tts_prompt_codes": [torch.full((words, ids.codebooks), ids.pad_code)] * rows,
        "responses": [text] * rows,
        "tts_codes": [codes] * rows,
    }
    with kept_by_autograd(policy) as kept:
        for logits in policy(**replay_inputs(policy.config, columns.__getitem__, "non_streaming")):
            logits.log_softmax(-1)[..., 0].sum()
    heads, width = facts_of(tiny).heads(tiny), words + len(text) - 1
    layer, rest = activation_bytes(tiny["language_config"], heads, rows, width, len(text), param_bytes)
    assert 2 * layer + rest == pytest.approx(sum(size for size, _ in kept.values()), rel=1 / 20)


def test_frames_are_the_positions_that_the_delay_leaves(tiny):
    """As many as an answer of that many positions can have, and end by itself."""
    plan = Plan(settings("data.max_response_length=40"), Machine(1), tiny, None, None)
    text, _ = answered(moss_prompt.TokenIds.of(tiny), plan.frames)
    assert len(text) == 40
    assert "at most 22 frames a clip (1.8 s)" in "\n".join(shown(plan))


# ------------------------------------------------------------------ pools


def test_a_pool_takes_the_engine_off_the_cards_that_train():
    shared, pools = plan_of(*LORA), plan_of(*LORA, "tts.engine.rollout_gpus=6")
    context = shared.assumed.context_gib * GIB
    assert shared.phases["update"] - pools.phases["update"] == pytest.approx(shared.engine + 2 * context)
    assert pools.phases["sampling"] == pytest.approx(pools.engine + 2 * context)
    assert pools.peaks == {
        TRAINS: max(pools.phases["log-probs"], pools.phases["update"]),
        SAMPLES: pools.phases["sampling"],
    }


def test_each_kind_of_card_has_its_line():
    lines = shown(plan_of(*LORA, "tts.engine.rollout_gpus=6"))
    assert lines[0].startswith("plan for 1 x 1 GPUs that train and 6 that sample, of 80 GiB")
    (training,), (rollout,) = ([line for line in lines if f"{kind}: " in line] for kind in (TRAINS, SAMPLES))
    assert "optimizer" in training
    assert "cache" not in training
    assert "cache" in rollout
    assert "optimizer" not in rollout
    assert f"({TRAINS})" in lines[-1]
    assert f"({SAMPLES})" in lines[-1]


def test_gpu_hours_are_those_of_both_pools():
    pools = plan_of("tts.engine.rollout_gpus=6")
    fast, slow = pools.hours()
    assert f"{7 * fast:.1f} to {7 * slow:.1f} GPU hours" in "\n".join(shown(pools))


def test_more_servers_take_more_clips_at_once():
    (one, _), (four, _) = (plan_of(f"{MAX_NUM_SEQS}=8", f"tts.engine.rollout_gpus={n}").hours() for n in (1, 4))
    assert four < one


@pytest.mark.parametrize(("gib", "pool"), [(18.0, 0), (20.0, 0), (24.0, 0), (16.0, 2)])
def test_a_remedy_is_one_that_a_run_takes_and_fits_with(gib, pool):
    words = (*LORA, f"tts.engine.rollout_gpus={pool}", "data.max_response_length=600")
    changes = answer(plan_of(*words, gib=gib)).changes
    assert changes
    changed = plan_of(*words, *(f"{key}={value}" for key, value in changes.items()), gib=gib)
    validate_settings(changed.config)
    assert changed.fits


def test_a_full_rollout_card_is_mended_on_the_rollout_card():
    changes = answer(plan_of(*LORA, "tts.engine.rollout_gpus=2", "data.max_response_length=600", gib=16.0)).changes
    assert [*changes] == [MAX_NUM_SEQS]


# ------------------------------------------------------------------ what is printed


def test_the_command_plans_two_pools_from_config_json_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    words = ("--gpu-gib", "24", f"actor_rollout_ref.model.path={tmp_path}", "tts.engine.rollout_gpus=6", *LORA)
    command = [sys.executable, "-m", "verl_tts.main_omni", "--dry-run", "--gpus", "1", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-500:]
    assert "# plan for 1 x 1 GPUs that train and 6 that sample, of 24 GiB" in done.stdout
    assert "\n# fits " in done.stdout


def test_the_recipes_table_is_made_by_the_plan():
    assert moss_table() in RECIPE.read_text(encoding="utf-8")


def test_the_recipes_table_has_the_placements_of_the_readme():
    text = RECIPE.read_text(encoding="utf-8")
    for train, sample, score in MOSS_PLACEMENTS:
        assert f"| {train} + {sample} + {score} |" in text
    assert "TRAIN_GPUS=1 ROLLOUT_GPUS=2 SCORER_GPUS=1" in text
    assert "TRAIN_GPUS=1 ROLLOUT_GPUS=1 SCORER_GPUS=0" in text


def test_the_table_has_the_launchers_own_settings(tmp_path):
    launcher = ROOT / "examples" / "grpo_trainer" / "moss" / "run_moss_grpo.sh"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" != -m ] || {{ shift 2; printf "%s\\\\n" "$@" >{tmp_path}/words; }}\n')
    python.chmod(0o755)
    places = dict.fromkeys(("MVG_DIR", "CODEC_DIR", "EMOLIA_DIR"), "/m") | {"SCORER_URL": "http://far:1/score"}
    environment = {"PATH": "/usr/bin:/bin", "PYTHON_BIN": str(python), **places}
    subprocess.run(["bash", launcher], env=environment, check=True, timeout=60, cwd=tmp_path)
    launched = compose(["tts.platform=cuda", *(tmp_path / "words").read_text().splitlines()])
    table = settings(*MOSS_LAUNCHER, *LORA, "tts.engine.rollout_gpus=6")
    one, other = (shown(Plan(config, Machine(1, 1, 80.0), PUBLISHED, None, None)) for config in (launched, table))
    assert one == other
