"""The receiving end of a weight sync, over a model that holds its weights as vLLM does: fused, loaded by vLLM's loader.

Shapes of the model: hidden 8, 4 query heads and 2 key/value heads of size 3, so that query, key and value differ.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from verl_tts.errors import WeightSyncError
from verl_tts.rollout.weights import digest
from verl_tts.rollout.worker_extension import FUSED, WeightReceiver, _read

HIDDEN, QUERY, KEY_VALUE, INNER, LAYERS = 8, 12, 6, 10, 2
LAYER = "talker.model.layers.{}."
SHAPES = {
    "talker.codec_head.weight": (20, HIDDEN),
    "talker.model.norm.weight": (HIDDEN,),
    "talker.model.codec_embedding.weight": (20, HIDDEN),
} | {
    LAYER.format(layer) + name: shape
    for layer in range(LAYERS)
    for name, shape in {
        "self_attn.q_proj.weight": (QUERY, HIDDEN),
        "self_attn.k_proj.weight": (KEY_VALUE, HIDDEN),
        "self_attn.v_proj.weight": (KEY_VALUE, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, QUERY),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "input_layernorm.weight": (HIDDEN,),
    }.items()
}


def linear(rows: int, columns: int) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(rows, columns), requires_grad=False)
    return module


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.norm = linear(20, HIDDEN), nn.RMSNorm(HIDDEN)
        self.layers = nn.ModuleList()
        for _ in range(LAYERS):
            layer = nn.Module()
            layer.self_attn, layer.mlp, layer.input_layernorm = nn.Module(), nn.Module(), nn.RMSNorm(HIDDEN)
            layer.self_attn.qkv_proj = linear(QUERY + 2 * KEY_VALUE, HIDDEN)
            layer.self_attn.o_proj = linear(HIDDEN, QUERY)
            layer.mlp.gate_up_proj, layer.mlp.down_proj = linear(2 * INNER, HIDDEN), linear(HIDDEN, INNER)
            self.layers.append(layer)

    def load_weights(self, weights) -> set[str]:
        """As vLLM's Qwen3 does it: a part has its place in the fused parameter."""
        parameters, loaded = dict(self.named_parameters()), set()
        starts = {"q_proj": 0, "k_proj": QUERY, "v_proj": QUERY + KEY_VALUE, "gate_proj": 0, "up_proj": INNER}
        for name, tensor in weights:
            part = next((part for part in starts if f".{part}." in name), None)
            fused = next((fused for fused, parts in FUSED.items() if part in parts), None)
            target = parameters[name.replace(f".{part}.", f".{fused}.") if fused else name]
            target.data[starts.get(part, 0) :][: len(tensor)].copy_(tensor)
            loaded.add(name)
        return loaded


class Talker(nn.Module):
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.model.": "model.",
            "talker.codec_head.": "lm_head.",
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = Backbone(), linear(20, HIDDEN)
        self.rebuilt: list[str] = []

    def rebuild_caches(self) -> None:
        self.rebuilt.append(f"from head {self.lm_head.weight.sum():.3f}")


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.fixture
def talker() -> Talker:
    model = Talker()
    AutoWeightsLoader(model).load_weights(iter(weights(0).items()), mapper=Talker.hf_to_vllm_mapper)
    return model


@pytest.fixture
def worker(talker, tmp_path) -> WeightReceiver:
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    save_file(weights(0) | {"speaker_encoder.weight": torch.zeros(3)}, checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text(json.dumps({}))
    receiver = WeightReceiver()
    receiver.model_runner = SimpleNamespace(
        get_model=lambda: talker, model_config=SimpleNamespace(model=str(checkpoint)), dtype=torch.float32
    )
    return receiver


def send(worker: WeightReceiver, tensors: dict[str, torch.Tensor], tmp_path) -> dict:
    path = tmp_path / "sent.safetensors"
    save_file(tensors, path)
    return worker.verl_tts_load_weights(str(path))


def held(worker: WeightReceiver) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.verl_tts_read_weights(sorted(SHAPES)).items()}


def test_fused_parameters_are_read_under_their_published_names(worker):
    sizes = {name: tuple(tensor.shape) for name, tensor in held(worker).items()}
    assert sizes == SHAPES
    assert all(torch.equal(tensor, weights(0)[name]) for name, tensor in held(worker).items())


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 4), (4, 2), (8, 1), (16, 8)])
def test_query_key_and_value_are_told_apart_whatever_the_number_of_heads(query_heads, kv_heads):
    query, kv = 3 * query_heads, 3 * kv_heads
    parts = {
        "q_proj": torch.full((query, 5), 1.0),
        "k_proj": torch.full((kv, 5), 2.0),
        "v_proj": torch.full((kv, 5), 3.0),
    }
    parameters = {
        "layers.0.self_attn.qkv_proj.weight": nn.Parameter(torch.cat([*parts.values()])),
        "layers.0.self_attn.o_proj.weight": nn.Parameter(torch.zeros(5, query)),
    }
    for part, expected in parts.items():
        assert torch.equal(_read(parameters, f"layers.0.self_attn.{part}.weight"), expected)


def test_a_name_that_the_engine_does_not_have_is_named(worker):
    with pytest.raises(WeightSyncError, match=r"no parameter for model\.layers\.0\.mystery\.weight"):
        worker.verl_tts_read_weights(["talker.model.layers.0.mystery.weight"])


def test_all_weights_arrive_and_the_answer_proves_it(worker, talker, tmp_path):
    answer = send(worker, weights(1), tmp_path)
    assert answer.pop("proof_s") > 0
    assert answer == {"tensors": len(SHAPES), "digest": digest(weights(1))}
    assert all(torch.equal(tensor, weights(1)[name]) for name, tensor in held(worker).items())
    assert digest(weights(1)) != digest(weights(0))


def test_what_the_engine_derives_from_weights_is_derived_anew_afterwards(worker, talker, tmp_path):
    send(worker, weights(1), tmp_path)
    head = weights(1)["talker.codec_head.weight"].sum()
    assert talker.rebuilt == [f"from head {head:.3f}"]


def test_held_weights_can_be_written_to_a_file(worker, tmp_path):
    worker.verl_tts_save_weights(str(tmp_path / "held.safetensors"), sorted(SHAPES))
    written = load_file(tmp_path / "held.safetensors")
    assert all(torch.equal(written[name], weights(0)[name]) for name in SHAPES)


def test_a_part_of_the_weights_leaves_the_others_as_they_were(worker, tmp_path):
    before = held(worker)
    name = LAYER.format(1) + "self_attn.k_proj.weight"
    answer = send(worker, {name: weights(1)[name]}, tmp_path)
    assert (answer["tensors"], answer["digest"]) == (1, digest({name: weights(1)[name]}))
    after = held(worker)
    assert {other for other in SHAPES if not torch.equal(before[other], after[other])} == {name}


def broken(change: str) -> dict[str, torch.Tensor]:
    tensors, last = weights(1), LAYER.format(LAYERS - 1) + "self_attn.v_proj.weight"
    if change == "name":
        tensors["talker.model.layers.9.self_attn.v_proj.weight"] = tensors.pop(last)
    elif change == "shape":
        tensors[last] = torch.zeros(KEY_VALUE + 1, HIDDEN)
    else:
        tensors["model.norm.weight"] = tensors.pop("talker.model.norm.weight")  # the engine's name, not the published
    return tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("name", r"layers\.9\.self_attn\.v_proj\.weight of shape \(6, 8\) is not in the model: it has no such name"),
        ("shape", r"layers\.1\.self_attn\.v_proj\.weight of shape \(7, 8\) is not in the model: it has \(6, 8\)"),
        ("engine name", r"model\.norm\.weight of shape \(8,\) is not in the model"),
    ],
)
def test_a_wrong_name_or_shape_is_refused_before_anything_is_written(worker, talker, tmp_path, change, message):
    before = held(worker)
    with pytest.raises(WeightSyncError, match=message + r".*nothing was loaded"):
        send(worker, broken(change), tmp_path)
    after = held(worker)
    assert all(torch.equal(before[name], after[name]) for name in SHAPES)
    assert talker.rebuilt == []


def test_weights_that_a_loader_swallows_are_noticed(worker, talker, tmp_path, monkeypatch):
    """As the CPU backend's packed layers did: the load succeeds and nothing changes."""
    monkeypatch.setattr(Backbone, "load_weights", lambda self, tensors: {name for name, _ in tensors})
    with pytest.raises(WeightSyncError, match="differs from what was sent after it was loaded"):
        send(worker, weights(1), tmp_path)


def test_an_engine_in_bf16_holds_what_was_sent_in_bf16(worker, talker, tmp_path):
    talker.to(torch.bfloat16)
    sent = {name: tensor.bfloat16() for name, tensor in weights(1).items()}
    assert send(worker, sent, tmp_path)["digest"] == digest(sent)
