"""Teacher forcing in one pass against the published loop, one position after the other."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from verl_tts.checkpoints.tiny_moss import build_tiny_moss
from verl_tts.config.tts import REDUCTIONS
from verl_tts.engine.model_config import PolicySettings
from verl_tts.engine.sampling import Scoring, truncate
from verl_tts.errors import CheckpointError, ConfigError
from verl_tts.models.base import LORA_PARENTS
from verl_tts.models.channels import channel_weights
from verl_tts.models.moss import MossPolicy, is_trainable, lora_targets, replay_inputs, score_replay
from verl_tts.models.moss_prompt import Cursor, Prompt, Text, TokenIds, build_prompt, plan

TEMPERATURE, TOP_K, TOP_P, TEXT_TEMPERATURE = 0.8, 50, 0.9, 1.3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("moss") / "model"
    build_tiny_moss(out)
    return out


@pytest.fixture(scope="module")
def policy(checkpoint) -> MossPolicy:
    return MossPolicy.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa").eval()


def follow(policy: MossPolicy, prompt: Prompt, limit: int, seed: int) -> dict[str, torch.Tensor]:
    """One sample by the loop, and of each channel that was sampled its log-probs and entropy by their definitions.

    ``raw_TC`` are log-probs of plain logits, ``own_TC`` those at the temperatures, truncated; ``entropy_TC`` of them.
    """
    ids, generator = TokenIds.of(policy.config), torch.Generator().manual_seed(seed)
    cursor, past, rows = Cursor(), None, []
    embeds = policy._embed(torch.tensor(prompt.text_P), torch.tensor(prompt.codes_PQ))[None]
    while not rows or (len(rows) < limit and rows[-1][0] != ids.im_end):
        output = policy.language_model(inputs_embeds=embeds, past_key_values=past, use_cache=True)
        past, hidden_H = output.past_key_values, output.last_hidden_state[0, -1]
        raw_C, own_C, entropy_C = torch.zeros(3, 1 + ids.codebooks)
        text_V = policy.lm_heads[0](hidden_H)
        token = cursor.forced(ids)
        if token is None:
            allowed_V = torch.full_like(text_V, -torch.inf)
            if cursor.kind(ids) == Text.IN_CLIP:
                allowed_V[[ids.gen_slot, ids.delay_slot]] = 0
            else:
                allowed_V[:] = 0
                allowed_V[cursor.banned(ids)] = -torch.inf
            text_V = text_V + allowed_V
            probs_V = (text_V / TEXT_TEMPERATURE).softmax(-1)
            token = int(torch.multinomial(probs_V, 1, generator=generator))
            raw_C[0], own_C[0] = text_V.log_softmax(-1)[token], probs_V[token].log()
            entropy_C[0] = -(probs_V * probs_V.clamp_min(1e-30).log()).sum()
        codes_Q = torch.full((ids.codebooks,), ids.pad_code)
        for book in cursor.active(ids):
            logits_V = policy.lm_heads[book + 1](hidden_H)[: ids.codes]
            probs_V = truncate(logits_V / TEMPERATURE, TOP_K, TOP_P).softmax(-1)
            codes_Q[book] = torch.multinomial(probs_V, 1, generator=generator)[0]
            raw_C[book + 1] = logits_V.log_softmax(-1)[codes_Q[book]]
            own_C[book + 1] = probs_V[codes_Q[book]].log()
            entropy_C[book + 1] = -(probs_V * probs_V.clamp_min(1e-30).log()).sum()
        rows.append((token, codes_Q, raw_C, own_C, entropy_C))
        cursor.advance(token, ids)
        embeds = policy._embed(torch.tensor([token]), codes_Q[None])[None]
    tokens, *columns = zip(*rows, strict=True)
    names = ("codes_TQ", "raw_TC", "own_TC", "entropy_TC")
    return {"tokens_T": torch.tensor(tokens)} | {
        name: torch.stack(column) for name, column in zip(names, columns, strict=True)
    }


@pytest.fixture(scope="module")
def followed(checkpoint, policy) -> tuple[list[Prompt], list[dict[str, torch.Tensor]]]:
    """An instruction, a reference in context, one in the request; ended and cut, the shortest one position."""
    ids, tokenizer = TokenIds.of(policy.config), AutoTokenizer.from_pretrained(checkpoint)
    reference_FQ = np.random.default_rng(0).integers(0, ids.codes, (6, ids.codebooks))
    prompts = [
        build_prompt(ids, lambda text: tokenizer(text)["input_ids"], "Stop!", instruction="Softly.", **given)
        for given in (
            {},
            {"reference_FQ": reference_FQ},
            {"reference_FQ": reference_FQ, "reference_format": "single_turn"},
            {},
        )
    ]
    with torch.no_grad():
        samples = [
            follow(policy, prompt, limit, seed)
            for seed, (prompt, limit) in enumerate(zip(prompts, (48, 48, 30, 1), strict=True))
        ]
    return prompts, samples


def replay(policy, followed, reduction, **settings):
    prompts, samples = followed
    columns = {
        "prompts": [torch.tensor(prompt.text_P) for prompt in prompts],
        "tts_prompt_codes": [torch.tensor(prompt.codes_PQ) for prompt in prompts],
        "responses": [sample["tokens_T"] for sample in samples],
        "tts_codes": [sample["codes_TQ"] for sample in samples],
    }
    chosen = PolicySettings(channel_reduction=reduction, text_temperature=TEXT_TEMPERATURE, **settings)
    output = policy(**replay_inputs(policy.config, columns.__getitem__, "in_context"))
    scoring = Scoring(chosen, temperature=TEMPERATURE, entropy=True, gate=True)
    return score_replay(policy.config, output, columns.__getitem__, scoring)


def weighed(policy, followed, reduction, name):
    ids = TokenIds.of(policy.config)
    parts = []
    for sample in followed[1]:
        sampled_TC = plan(ids, sample["tokens_T"].tolist()).sampled_TC
        parts.append((torch.from_numpy(channel_weights(reduction, "1,32", sampled_TC)) * sample[name]).sum(-1))
    return torch.cat(parts)


@torch.no_grad()
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_pass_says_what_the_loop_said(policy, followed, reduction):
    scored = replay(policy, followed, reduction)
    assert torch.allclose(scored["gate"], weighed(policy, followed, reduction, "raw_TC"), atol=1e-4)
    truncated = {"logprob_support": "truncated", "logprobs_mode": "processed_logprobs", "top_k": TOP_K, "top_p": TOP_P}
    scored = replay(policy, followed, reduction, **truncated)
    own = weighed(policy, followed, reduction, "own_TC")
    assert torch.allclose(scored["gate"], own, atol=1e-4)
    assert torch.allclose(scored["log_probs"], own, atol=1e-4)
    assert torch.allclose(scored["entropy"], weighed(policy, followed, reduction, "entropy_TC"), atol=1e-3)


def test_the_loss_has_a_finite_gradient_and_reaches_every_part_that_was_sampled(policy, followed):
    truncated = {"logprob_support": "truncated", "top_k": TOP_K, "top_p": TOP_P}
    for settings in ({}, truncated):
        policy.zero_grad()
        scored = replay(policy, followed, "sum", **settings)
        (scored["log_probs"].sum() + scored["entropy"].sum()).backward()
        for name, parameter in policy.named_parameters():
            assert parameter.grad is not None, name
            assert bool(parameter.grad.isfinite().all()), name
            assert bool(parameter.grad.any()), name
    policy.zero_grad()


def test_parameters_have_their_published_names(policy):
    names = {name for name, _ in policy.named_parameters()}
    assert {"lm_heads.0.weight", "lm_heads.16.weight", "emb_ext.0.weight", "emb_ext.15.weight"} <= names
    assert {name.split(".")[0] for name in names} == {"language_model", "emb_ext", "lm_heads"}


def test_what_is_trained_in_each_mode(policy):
    names = [name for name, _ in policy.named_parameters()]
    assert all(is_trainable(name, "full") for name in names)
    frozen = {name.split(".weight")[0] for name in names if not is_trainable(name, "backbone")}
    assert frozen == {"language_model.embed_tokens", *(f"emb_ext.{book}" for book in range(16))}
    with pytest.raises(ConfigError, match="Unknown trainable mode 'head'"):
        is_trainable("lm_heads.0.weight", "head")


def test_lora_hits_the_seven_linear_modules_of_each_layer_alone(policy):
    from copy import deepcopy

    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(deepcopy(policy), LoraConfig(r=4, target_modules=lora_targets("all-linear")))
    modules = {name.split(".lora_A")[0] for name, _ in adapted.named_parameters() if ".lora_A" in name}
    assert len(modules) == 2 * len(LORA_PARENTS)
    assert all(".language_model.layers." in name for name in modules)
    with pytest.raises(ConfigError, match="Unknown LoRA target 'lm_head'"):
        lora_targets(["lm_head"])


def test_a_checkpoint_that_lacks_a_tensor_is_refused(checkpoint, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    del tensors["lm_heads.7.weight"]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors of a MOSS model, lm_heads\.7\.weight"):
        MossPolicy.from_pretrained(broken, dtype=torch.float32)
    with pytest.raises(CheckpointError, match="is not a directory"):
        MossPolicy.from_pretrained(tmp_path / "nowhere")
