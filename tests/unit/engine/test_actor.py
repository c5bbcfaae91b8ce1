"""The actor engine, as verl's workers run it, on the tiny checkpoint: see engine_job.py.

Shapes: ``T`` sampled token, ``V`` the support.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import LORA_ALPHA, LORA_RANK, TEMPERATURE

from verl_tts.models.qwen3_tts_prompt import TokenIds

Found = dict[str, Any]
LORA_CASES = ("lora", "lora_checkpointing", "two_lora")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Iterator[Path]:
    """What the job found; its rows reach every case alike."""
    out = tmp_path_factory.mktemp("engine")
    job = [sys.executable, Path(__file__).with_name("engine_job.py"), tiny_checkpoint, out]
    environment = os.environ | {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        job, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-4000:]
    yield out
    shutil.rmtree(out)  # half a GB


@pytest.fixture(scope="module")
def found(out: Path) -> Callable[[str], Found]:
    return lambda name: torch.load(out / f"{name}.pt", weights_only=False, mmap=True)


@pytest.fixture(scope="module")
def batch(out: Path) -> Found:
    return torch.load(out / "batch.pt", weights_only=False)


@pytest.fixture(scope="module")
def support(tiny_checkpoint: Path) -> list[int]:
    return TokenIds.of(json.loads((tiny_checkpoint / "config.json").read_text())).support


def sampled(batch: Found, support: list[int]):
    """Logits (T, V) of a policy that sees one sample alone, and the columns of what was sampled, sample by sample."""
    for row, logits_TV in zip(batch["rows"], batch["logits"], strict=True):
        yield logits_TV.double(), torch.tensor([support.index(token) for token in row["responses"].tolist()])


def picked(logprobs_TV: torch.Tensor, columns_T: torch.Tensor) -> torch.Tensor:
    return logprobs_TV[torch.arange(len(columns_T)), columns_T]


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    assert one.keys() == other.keys()
    return {name: float((one[name].float() - other[name].float()).abs().max()) for name in one}


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ------------------------------------------------------------------------------------------------ log-probs


@pytest.mark.parametrize("case", ["one", "two", "dynamic", "checkpointing", "lora", "two_lora"])
def test_log_probs_are_those_of_a_policy_that_sees_each_sample_alone(found, batch, support, case):
    """In the order of the rows, whatever the micro-batches; EOS at once and one-token samples included."""
    for columns, (logits_TV, columns_T) in zip(found(case)["log_probs"], sampled(batch, support), strict=True):
        tempered_TV = (logits_TV / TEMPERATURE).log_softmax(-1)
        expected = {
            "log_probs": picked(tempered_TV, columns_T),
            "entropy": -(tempered_TV.exp() * tempered_TV).sum(-1),
            "gate_log_probs": picked(logits_TV.log_softmax(-1), columns_T),  # raw: before temperature
        }
        for name, values_T in expected.items():
            torch.testing.assert_close(torch.tensor(columns[name]).double(), values_T, atol=2e-5, rtol=0)


def truncated_reference(logits_V: torch.Tensor, top_k: int, top_p: float) -> dict[int, float]:
    """Column -> log-prob of the tokens that may be drawn, by the book and one token at a time."""
    ranked = sorted(enumerate((logits_V / TEMPERATURE).tolist()), key=lambda item: -item[1])[:top_k]
    weights = torch.tensor([value for _, value in ranked], dtype=torch.float64).softmax(0).tolist()
    kept, mass = [], 0.0
    for (column, _), weight in zip(ranked, weights, strict=True):
        if mass >= top_p:
            break
        kept.append((column, weight))
        mass += weight
    return {column: float(torch.tensor(weight / mass, dtype=torch.float64).log()) for column, weight in kept}


def test_a_truncated_loss_and_its_gate_see_top_k_then_top_p(found, batch, support):
    inside = outside = 0
    for columns, (logits_TV, columns_T) in zip(found("truncated")["log_probs"], sampled(batch, support), strict=True):
        for t, column in enumerate(columns_T.tolist()):
            drawable = truncated_reference(logits_TV[t], top_k=50, top_p=0.95)
            full = (logits_TV[t] / TEMPERATURE).log_softmax(-1)[column].item()
            loss, gate = columns["log_probs"][t], columns["gate_log_probs"][t]
            if column in drawable:
                inside += 1
                assert loss == pytest.approx(drawable[column], abs=2e-5)
                assert gate == pytest.approx(drawable[column], abs=2e-5)
            else:
                outside += 1
                assert loss == pytest.approx(full, abs=2e-5), "a token outside counts by its full log-prob, never -inf"
                assert gate == float("-inf"), "the gate counts it"
            entropy = -sum(logprob * 2.718281828459045**logprob for logprob in drawable.values())
            assert columns["entropy"][t] == pytest.approx(entropy, abs=1e-4)
    assert inside > 5, "the batch has tokens of both kinds"
    assert outside > 5, "the batch has tokens of both kinds"


def test_a_truncated_loss_with_an_entropy_bonus_has_a_finite_gradient(found):
    update = found("truncated")["update"]
    assert 0 < update["grad_norm"] < 1e4
    assert update["loss"] == pytest.approx(update["loss"])  # no NaN


# ------------------------------------------------------------------------------------------------ one update


@pytest.mark.parametrize(
    ("case", "same_as", "what"),
    [
        ("two", "one", "sharded over two workers"),
        ("dynamic", "one", "micro-batches by tokens"),
        ("uneven", "one", "micro-batches of a size that does not divide the rows"),
        ("checkpointing", "one", "activations computed again"),
        ("lora_checkpointing", "lora", "activations computed again, under LoRA"),
        ("two_lora", "lora", "adapters on two workers"),
        ("two_backbone_checkpointing", "backbone", "two workers, embeddings frozen, activations computed again"),
    ],
)
def test_how_the_work_is_cut_does_not_change_the_update(found, case, same_as, what):
    one, other = found(same_as)["update"], found(case)["update"]
    for name in ("loss", "grad_norm"):
        assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), what


def expected_to_train(case: str, name: str) -> bool:
    if "lora" in case:
        return ".lora_" in name
    if "backbone" in case:
        return re.fullmatch(r"talker\.(model\.(layers|norm)\..*|codec_head\.weight)", name) is not None
    return name.startswith(("talker.model.", "talker.codec_head."))


@pytest.mark.parametrize("case", ["one", "two", "backbone", "two_backbone_checkpointing", "lora", "two_lora", "bf16"])
def test_an_update_moves_the_policy_and_not_one_bit_of_anything_else(found, case):
    result = found(case)
    moved = differences(result["before"], result["after"])
    for name in moved:
        assert (name in result["trained"]) == expected_to_train(case, name), name
        if name not in result["trained"]:
            assert torch.equal(result["before"][name], result["after"][name]), name
    still = [name for name in result["trained"] if moved[name] == 0.0]
    # LoRA starts with B = 0, where the gradient of A is 0.
    assert all(".lora_A." in name for name in still) if "lora" in case else not still, still
    assert {name.rsplit("/", 1)[0] for name in result["optimizer"]} == set(result["trained"])


def test_bf16_compute_keeps_parameters_and_optimizer_in_fp32(found):
    result = found("bf16")
    floats = [tensor for tensor in (*result["after"].values(), *result["optimizer"].values())]
    assert {tensor.dtype for tensor in floats} == {torch.float32}
    fp32 = found("one")
    assert result["update"]["loss"] == pytest.approx(fp32["update"]["loss"], rel=0.05)
    assert result["update"] != fp32["update"], "it was computed in BF16"


def test_a_loss_or_a_gradient_that_is_not_finite_stops_before_the_optimizer_steps(found):
    for case in ("one", "two"):
        result = found(case)
        assert result["nan"] == "the loss is nan; the optimizer has not stepped, nothing was changed"
        assert "gradient's norm is nan; the optimizer has not stepped" in result["nan_gradient"]
        for before, after in zip(result["loaded"][:2], result["after_nan"][:2], strict=True):
            assert is_equal(before, after)
        assert result["after_nan"][2] == result["loaded"][2]


@pytest.mark.parametrize("case", ["one", "two", "uneven", "lora", "checkpointing"])
def test_the_first_ratio_is_the_largest_over_all_tokens_before_the_optimizer_steps(found, batch, support, case):
    """The old log-probs of the batch are the policy's own and noise."""
    ratios = []
    for row, (logits_TV, columns_T) in zip(batch["rows"], sampled(batch, support), strict=True):
        own_T = picked((logits_TV / TEMPERATURE).log_softmax(-1), columns_T)
        ratios.append((own_T - row["old_log_probs"]).exp())
    expected = float((torch.cat(ratios) - 1).abs().max())
    assert found(case)["update"]["gate_first_ratio_max"] == pytest.approx(expected, rel=1e-3)


def test_an_update_that_follows_another_without_an_inference_has_no_first_ratio(found):
    assert all("gate_first_ratio_max" not in update for update in found("one")["second"][:1])


# ------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("case", ["one", "two"])
def test_a_loaded_checkpoint_is_the_saved_actor_bit_for_bit_and_trains_on_as_it_would_have(found, case):
    result = found(case)
    parameters, optimizer, scheduler = result["loaded"]
    assert is_equal(parameters, result["after_export"])
    assert is_equal(optimizer, result["optimizer"])
    assert scheduler == result["scheduler"]
    unbroken, resumed = result["second"]
    assert unbroken == resumed
    assert is_equal(*result["after_second"])


# ------------------------------------------------------------------------------------------------ the reference


@pytest.mark.parametrize("case", LORA_CASES)
def test_the_reference_under_lora_stays_the_model_without_the_adapter(found, case):
    """Bit for bit what it was before the update, which the adapter has moved away from; a new adapter adds nothing."""
    result = found(case)
    assert result["reference"] == result["log_probs"]
    assert result["adapted"] != result["reference"]


# ------------------------------------------------------------------------------------------------ export


def test_the_export_is_the_trained_tensors_under_their_published_names(found):
    for case in ("one", "two", "backbone", "two_backbone_checkpointing"):
        result = found(case)
        assert is_equal(result["exported"], {name: result["after"][name] for name in result["trained"]})


def merged_by_hand(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    merged = {}
    for name, base in parameters.items():
        if ".base_layer.weight" in name:
            module = name.removesuffix(".base_layer.weight")
            a, b = (parameters[f"{module}.lora_{letter}.default.weight"].double() for letter in "AB")
            merged[f"{module.removeprefix('base_model.model.')}.weight"] = base + LORA_ALPHA / LORA_RANK * (b @ a)
    return merged


@pytest.mark.parametrize("case", LORA_CASES)
def test_exported_lora_weights_are_merged_in_fp32_after_the_generator_has_ended(found, case):
    result = found(case)
    exported, merged = result["exported"], merged_by_hand(result["after"])
    assert exported.keys() == merged.keys()
    assert all(re.fullmatch(r"talker\.model\.layers\.\d+\.(self_attn|mlp)\.\w+\.weight", name) for name in exported)
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor.double(), merged[name].double(), atol=1e-6, rtol=0)
        base = result["after"][f"base_model.model.{name.removesuffix('.weight')}.base_layer.weight"]
        assert (tensor - base).abs().max() > 1e-4, "the adapter is in it"


@pytest.mark.parametrize("case", LORA_CASES)
def test_merging_for_the_export_leaves_the_actor_as_it_was(found, case):
    assert is_equal(found(case)["after"], found(case)["after_export"])


def test_an_export_without_a_copy_would_send_the_base_weights(found):
    """Of one rank a gathered tensor is the live parameter, which is the base again once the merge is undone."""
    result = found("lora")
    for name in result["exported"]:
        base = result["after"][f"base_model.model.{name.removesuffix('.weight')}.base_layer.weight"]
        assert torch.equal(result["uncopied"][name], base), name


def test_verls_own_merged_export_still_rounds_to_bf16(found):
    """Once it does not, and copies, ``PolicyEngine._merged_lora_per_tensor_param`` is no longer needed."""
    result = found("lora")
    assert {result["verl_export"][name].dtype for name in result["exported"]} == {torch.bfloat16}


def test_a_shard_that_the_disk_does_not_take_ends_the_run_with_its_place(tmp_path, monkeypatch):
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    import verl_tts.plugin  # noqa: F401
    from verl_tts.engine.actor import PolicyEngine
    from verl_tts.errors import RunStopped

    def save(self, local_path, **kwargs):
        torch.save({"weight": torch.zeros(4)}, Path(local_path) / "model_world_size_1_rank_0.pt")

    monkeypatch.setattr(FSDPEngineWithLMHead, "save_checkpoint", save)
    engine = object.__new__(PolicyEngine)
    engine.save_checkpoint(str(tmp_path), global_step=2)
    (tmp_path / "model_world_size_1_rank_0.pt").unlink()
    (tmp_path / "model_world_size_1_rank_0.pt").symlink_to("/dev/full")
    with pytest.raises(RunStopped, match=f"^cannot write {tmp_path}: torch says .*; free space on its disk and resume"):
        engine.save_checkpoint(str(tmp_path), global_step=2)
