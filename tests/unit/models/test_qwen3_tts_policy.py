"""The policy: logits as qwen-tts computes them, one row a sampled token, gradients where they belong."""

import hashlib
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForTextToWaveform, AutoTokenizer

from verl_tts.errors import CheckpointError, ConfigError
from verl_tts.models.qwen3_tts import (
    LORA_PARENTS,
    Qwen3TTSConfig,
    Qwen3TTSPolicy,
    Qwen3TTSPreTrainedModel,
    is_trainable,
    lora_targets,
    register,
    support,
    support_index,
)
from verl_tts.models.qwen3_tts_prompt import assistant_text, language_id

VECTORS = Path(__file__).parents[2] / "vectors" / "qwen3_tts.npz"
LAYOUTS = ("non_streaming", "streaming")
TEXTS = ("Hi.", "नमस्ते", "A longer sentence, to be padded.")
FRAMES = (6, 0, 11)  # the second one is an immediate EOS


@pytest.fixture(scope="module")
def policy(tiny_checkpoint: Path) -> Qwen3TTSPolicy:
    return load(tiny_checkpoint)


def load(checkpoint: Path, dtype: torch.dtype = torch.float32) -> Qwen3TTSPolicy:
    return Qwen3TTSPolicy.from_pretrained(checkpoint, dtype=dtype)


@pytest.fixture(scope="module")
def batch(tiny_checkpoint: Path) -> dict[str, Any]:
    """Three samples of unequal length: Auto and named languages, frames and none."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    generator = torch.Generator().manual_seed(0)
    return {
        "text_ids": [torch.tensor(tokenizer(assistant_text(text))["input_ids"]) for text in TEXTS],
        "codes": [torch.randint(1, 2048, (frames, 16), generator=generator) for frames in FRAMES],
        "speakers": [torch.randn(64, generator=generator) for _ in TEXTS],
        "language_ids": [None, 2050, 2055],
    }


def one_of(batch: dict[str, Any], i: int) -> dict[str, Any]:
    return {key: values[i : i + 1] for key, values in batch.items()}


def logits(policy: Any, batch: dict[str, Any], layout: str = "non_streaming") -> Tensor:
    (logits_NV,) = policy(**batch, layout=layout)
    return logits_NV


def gradients(policy: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    policy.zero_grad()
    logits(policy, batch).float().log_softmax(-1)[:, 7].sum().backward()
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters() if parameter.grad is not None}


# ------------------------------------------------------------------------------------- equal to qwen-tts on 4.57


@pytest.fixture(scope="module")
def vectors() -> dict[str, np.ndarray]:
    return dict(np.load(VECTORS))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_those_of_qwen_tts_generating_step_by_step(
    policy: Qwen3TTSPolicy, vectors: dict[str, np.ndarray], layout: str
) -> None:
    samples = range(len(vectors["languages"]))
    of = {key: [torch.from_numpy(vectors[f"{layout}/{i}/{key}"]).long() for i in samples] for key in KEYS}
    with torch.no_grad():
        logits_NV = logits(
            policy,
            {
                "text_ids": of["text_ids_P"],
                "codes": of["codes_FQ"],
                "speakers": [*torch.from_numpy(vectors["speakers_BH"])],
                "language_ids": [language_id(policy.config, name) for name in vectors["languages"]],
            },
            layout,
        )
    columns = support_index(policy.config)[torch.from_numpy(vectors["columns_C"]).long()]
    expected_NC = np.concatenate([vectors[f"{layout}/{i}/logits_TC"] for i in samples])
    expected_N = np.concatenate([vectors[f"{layout}/{i}/logsumexp_T"] for i in samples])
    np.testing.assert_allclose(logits_NV[:, columns].numpy(), expected_NC, atol=1e-5, rtol=0)
    np.testing.assert_allclose(logits_NV.logsumexp(-1).numpy(), expected_N, atol=1e-5, rtol=0)


KEYS = ("text_ids_P", "codes_FQ")


def test_vectors_belong_to_the_tiny_checkpoint_and_its_tokenizer(
    tiny_checkpoint: Path, vectors: dict[str, np.ndarray]
) -> None:
    weights = hashlib.sha256((tiny_checkpoint / "model.safetensors").read_bytes()).hexdigest()
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    assert weights == vectors["weights_sha256"]
    for i, text in enumerate(vectors["texts"]):
        assert tokenizer(assistant_text(str(text)))["input_ids"] == vectors[f"streaming/{i}/text_ids_P"].tolist()


def test_vectors_hold_ended_and_cut_samples_of_either_layout(vectors: dict[str, np.ndarray]) -> None:
    for layout in LAYOUTS:
        frames = [len(vectors[f"{layout}/{i}/codes_FQ"]) for i in range(3)]
        assert min(frames) < max(frames) == 15
    assert VECTORS.stat().st_size <= 200_000


# ------------------------------------------------------------------------------------------------- rows and rules


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_padded_batch_equals_its_samples_one_by_one(
    policy: Qwen3TTSPolicy, batch: dict[str, Any], layout: str
) -> None:
    with torch.no_grad():
        together = logits(policy, batch, layout)
        alone = torch.cat([logits(policy, one_of(batch, i), layout) for i in range(len(TEXTS))])
    assert together.shape == (sum(FRAMES) + len(FRAMES), 2048)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("codebook", [0, 1, 15])
def test_row_k_predicts_token_k_from_the_frames_before_it(
    policy: Qwen3TTSPolicy, batch: dict[str, Any], codebook: int
) -> None:
    sample = one_of(batch, 0)
    other = sample["codes"][0].clone()
    other[2, codebook] = 1 + other[2, codebook] % 2047
    with torch.no_grad():
        before, after = logits(policy, sample), logits(policy, {**sample, "codes": [other]})
    changed_T = (before - after).abs().amax(-1) > 1e-6
    assert changed_T.tolist() == [False, False, False, True, True, True, True]


@pytest.mark.parametrize("key", ["text_ids", "speakers", "language_ids"])
def test_text_speaker_and_language_all_matter(policy: Qwen3TTSPolicy, batch: dict[str, Any], key: str) -> None:
    sample = one_of(batch, 0)
    with torch.no_grad():
        difference = logits(policy, sample) - logits(policy, {**sample, key: batch[key][2:]})
    assert difference.abs().amax(-1).min() > 0.01


def test_immediate_eos_has_one_row(policy: Qwen3TTSPolicy, batch: dict[str, Any]) -> None:
    assert logits(policy, one_of(batch, 1)).shape == (1, 2048)


def test_support_and_its_index_are_inverse(policy: Qwen3TTSPolicy) -> None:
    ids_V, column = support(policy.config), support_index(policy.config)
    assert column.shape == (3072,)
    assert torch.equal(column[ids_V], torch.arange(2048))
    assert sorted(set(range(3072)) - set(ids_V.tolist())) == (column == -1).nonzero()[:, 0].tolist()
    assert column[0] == -1
    assert column[2150] == 2047


def test_the_head_sees_the_rows_that_are_read_and_no_padding(policy: Qwen3TTSPolicy, batch: dict[str, Any]) -> None:
    rows: list[int] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default and args[1].shape[1] == len(support(policy.config)):
                rows.append(args[0].shape[0])
            return func(*args, **(kwargs or {}))

    with Products():
        logits(policy, batch)
    assert rows == [sum(FRAMES) + len(FRAMES)]


@pytest.mark.parametrize("samples", [[1], [0, 1, 2]])
def test_every_module_is_called_once_whatever_the_data(
    policy: Qwen3TTSPolicy, batch: dict[str, Any], samples: list[int]
) -> None:
    calls: Counter[str] = Counter()
    names = [
        name
        for name, module in policy.named_modules()
        # The head belongs to the root, whose weights are there for the whole forward.
        if next(module.parameters(recurse=False), None) is not None and name != "talker.codec_head"
    ]
    hooks = [
        policy.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.update([name])) for name in names
    ]
    logits(policy, {key: [values[i] for i in samples] for key, values in batch.items()})
    for hook in hooks:
        hook.remove()
    assert calls == Counter(names)


# ------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("full", ("talker.model.", "talker.codec_head.")),
        ("backbone", ("talker.model.layers.", "talker.model.norm.", "talker.codec_head.")),
    ],
)
def test_gradients_reach_every_trainable_tensor_and_no_other(
    tiny_checkpoint: Path, batch: dict[str, Any], mode: str, expected: tuple[str, ...]
) -> None:
    policy = load(tiny_checkpoint)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(is_trainable(name, mode))
    grads = gradients(policy, batch)
    assert set(grads) == {name for name, _ in policy.named_parameters() if name.startswith(expected)}
    assert all(grad.abs().max() > 0 for grad in grads.values())


def test_unknown_trainable_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'everything'.*full, backbone, lora"):
        is_trainable("talker.model.norm.weight", "everything")


def test_gradient_checkpointing_recomputes_the_layers_and_changes_no_gradient(
    tiny_checkpoint: Path, batch: dict[str, Any]
) -> None:
    policy = load(tiny_checkpoint).train()
    plain = gradients(policy, batch)
    policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    runs: list[int] = []
    policy.talker.model.layers[0].self_attn.register_forward_hook(lambda *_: runs.append(1))
    checkpointed = gradients(policy, batch)
    assert len(runs) == 2
    assert plain.keys() == checkpointed.keys()
    for name, grad in plain.items():
        torch.testing.assert_close(checkpointed[name], grad, atol=1e-6, rtol=1e-5)


def test_bfloat16_policy_stays_near_float32_and_keeps_exact_positions(
    tiny_checkpoint: Path, policy: Qwen3TTSPolicy, batch: dict[str, Any]
) -> None:
    half = load(tiny_checkpoint, torch.bfloat16)
    assert half.talker.model.rotary_emb.inv_freq.dtype == torch.float32
    with torch.no_grad():
        rounded = logits(half, batch)
        difference = rounded.float().log_softmax(-1) - logits(policy, batch).log_softmax(-1)
    assert half.talker.codec_head.weight.dtype == torch.bfloat16
    assert rounded.dtype == torch.float32
    assert difference.abs().mean() < 0.05


@pytest.fixture(scope="module")
def lora_policy(tiny_checkpoint: Path) -> Any:
    policy = load(tiny_checkpoint)
    policy.enable_input_require_grads()  # as verl does
    return get_peft_model(
        policy, LoraConfig(r=4, lora_alpha=8, target_modules=lora_targets([*LORA_PARENTS]), task_type="CAUSAL_LM")
    )


def test_lora_sits_on_the_seven_projections_of_every_talker_layer_and_nowhere_else(lora_policy: Any) -> None:
    trained = {name for name, parameter in lora_policy.named_parameters() if parameter.requires_grad}
    layers = lora_policy.config.talker_config.num_hidden_layers
    assert len(trained) == 2 * 7 * layers
    assert all(".talker.model.layers." in name for name in trained)
    assert trained == {name for name, _ in lora_policy.named_parameters() if is_trainable(name, "lora")}


def test_lora_begins_as_the_base_policy_and_learns_in_the_adapter_alone(
    lora_policy: Any, policy: Qwen3TTSPolicy, batch: dict[str, Any]
) -> None:
    assert torch.equal(logits(lora_policy, batch), logits(policy, batch))
    grads = gradients(lora_policy, batch)
    assert len(grads) == 2 * 7 * 2
    assert all(is_trainable(name, "lora") for name in grads)
    assert any(grad.abs().max() > 0 for grad in grads.values())


@pytest.mark.parametrize("names", ["all-linear", [*LORA_PARENTS]])
def test_published_target_names_mean_the_talker(names: Any) -> None:
    assert lora_targets(names) == lora_targets([*LORA_PARENTS])


@pytest.mark.parametrize("names", ["q_proj", [], ["q_proj", "lm_head"]])
def test_other_target_names_are_refused_with_the_choices(names: Any) -> None:
    with pytest.raises(ConfigError, match="q_proj, k_proj"):
        lora_targets(names)


# ------------------------------------------------------------------------------------------------------- loading


def test_only_what_training_needs_is_kept(tiny_checkpoint: Path, policy: Qwen3TTSPolicy) -> None:
    kept, in_file = policy.state_dict(), load_file(tiny_checkpoint / "model.safetensors")
    assert all(torch.equal(value, in_file[name]) for name, value in kept.items())
    left_out = in_file.keys() - kept.keys()
    assert {name.split(".")[0] for name in left_out} == {"speaker_encoder", "talker"}
    assert all("code_predictor" in name or "speaker_encoder" in name for name in left_out)
    assert sum("code_predictor.model.codec_embedding" in name for name in kept) == 15
    assert policy.speech_tokenizer is None


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        load(tmp_path / "Qwen3-TTS-12Hz-0.6B-Base")


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tiny_checkpoint, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    del tensors["talker.codec_head.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors.*talker\.codec_head\.weight"):
        load(broken)


def test_weights_that_did_not_survive_loading_are_refused(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Qwen3TTSPreTrainedModel, "is_remote_code", classmethod(lambda cls: False))
    with pytest.raises(CheckpointError, match="in memory differs"):
        load(tiny_checkpoint)


def test_rope_that_did_not_survive_loading_is_refused(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "verl_tts.compat.qwen_tts_transformers5.restore_rope",
        lambda model: model.talker.model.rotary_emb.inv_freq.zero_(),
    )
    with pytest.raises(CheckpointError, match="rotary"):
        load(tiny_checkpoint)


def test_both_auto_classes_know_the_model_after_registering_twice(tiny_checkpoint: Path) -> None:
    register()
    register()
    config = AutoConfig.from_pretrained(tiny_checkpoint)
    assert type(config) is Qwen3TTSConfig
    policy = AutoModelForTextToWaveform.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    assert type(policy) is Qwen3TTSPolicy
