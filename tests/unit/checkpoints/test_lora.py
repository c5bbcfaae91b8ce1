"""PEFT adapters are written by PEFT itself, MLX ones in the formats of mlx-audio-train and of mlx-lm."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from verl_tts.checkpoints import export as export_module
from verl_tts.checkpoints import lora
from verl_tts.checkpoints.lora import Scaling, merge, read_pins
from verl_tts.checkpoints.tiny import build_tiny_qwen3_tts
from verl_tts.commands import main
from verl_tts.commands.merge_lora import LAYOUTS
from verl_tts.errors import CheckpointError, ConfigError, TTSError
from verl_tts.files import sha256_of
from verl_tts.models.qwen3_tts import LORA_PARENTS, Qwen3TTSForConditionalGeneration

RANK, ALPHA = 8, 16
LAYERS = {"talker.model": 2, "talker.code_predictor.model": 2}
Q_PROJ = "talker.model.layers.0.self_attn.q_proj"  # square, 64 x 64
GIVEN = Scaling(rank=RANK, alpha=ALPHA)
Tensors = dict[str, Tensor]


def modules_of_adapter() -> list[str]:
    return [
        f"{stack}.layers.{layer}.{parent}.{leaf}"
        for stack, layers in LAYERS.items()
        for layer in range(layers)
        for leaf, parent in LORA_PARENTS.items()
    ]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """As published: bfloat16."""
    directory = tmp_path_factory.mktemp("base") / "model"
    build_tiny_qwen3_tts(directory)
    file = directory / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def halves(base) -> dict[str, tuple[Tensor, Tensor]]:
    """A (R, I) and B (O, R) of every module of the published topology, scaled down."""
    torch.manual_seed(7)
    weights = load_file(base / "model.safetensors")
    pairs = {}
    for module in modules_of_adapter():
        out, into = weights[f"{module}.weight"].shape
        pairs[module] = (torch.randn(RANK, into) / into**0.5, torch.randn(out, RANK) * 0.1)
    return pairs


def write_mlx(folder: Path, halves, layout: str, change: Callable[[Tensors], object] = lambda _: None) -> Path:
    tensors: Tensors = {}
    for module, (a, b) in halves.items():
        tensors[f"{module}.lora_a"] = (a if layout == "rank-in" else a.T).clone(memory_format=torch.contiguous_format)
        tensors[f"{module}.lora_b"] = (b if layout == "rank-in" else b.T).clone(memory_format=torch.contiguous_format)
    change(tensors)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapters.safetensors")
    return folder / "adapters.safetensors"


def write_peft(folder: Path, base: Path, halves, **settings) -> Path:
    """Saved by PEFT; the weights of the base are not touched."""
    model = Qwen3TTSForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
    targets = rf"({'|'.join(LAYERS)})\.layers\.\d+\.(self_attn|mlp)\.({'|'.join(LORA_PARENTS)})"
    peft = get_peft_model(model, LoraConfig(target_modules=targets, **{"r": RANK, "lora_alpha": ALPHA} | settings))
    state = peft.state_dict()
    for module, (a, b) in halves.items():
        state[f"base_model.model.{module}.lora_A.default.weight"].copy_(a)
        state[f"base_model.model.{module}.lora_B.default.weight"].copy_(b)
    peft.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def peft_adapter(tmp_path_factory, base, halves) -> Path:
    return write_peft(tmp_path_factory.mktemp("peft") / "adapter", base, halves)


@pytest.fixture(scope="module")
def merged(tmp_path_factory, base, peft_adapter) -> Path:
    out = tmp_path_factory.mktemp("merged") / "out"
    merge(base, peft_adapter, out)
    return out


def pins_file(folder: Path, base: Path, adapter: Path, **changes) -> Path:
    """Pins of a synthetic adapter, in the form of the Hindi ones."""
    files = [path for path in base.rglob("*") if path.is_file()]
    pins = json.loads(lora.HINDI_PINS.read_text()) | {
        "base_files_sha256": {str(path.relative_to(base)): sha256_of(path) for path in files},
        "adapter_sha256": sha256_of(adapter),
        "adapter_tensors": 2 * len(modules_of_adapter()),
        "adapter_layers": LAYERS,
    }
    (folder / "pins.json").write_text(json.dumps(pins | changes))
    return folder / "pins.json"


# ---------------------------------------------------------------- what comes out


def test_the_merge_is_the_base_plus_scale_b_a_rounded_to_the_dtype_of_the_base(merged, base, halves):
    before, after = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        a, b = halves.get(name.removesuffix(".weight"), (None, None))
        expected = weight if a is None else (weight.float() + ALPHA / RANK * (b @ a)).bfloat16()
        assert torch.equal(after[name], expected), name
    assert sum(not torch.equal(before[name], after[name]) for name in before) == len(halves)


def test_everything_but_the_weights_comes_from_the_base(merged, base):
    files = {path.relative_to(base) for path in base.rglob("*") if path.is_file()}
    assert {path.relative_to(merged) for path in merged.rglob("*") if path.is_file()} == files | {Path(lora.RECORD)}
    for name in files - {Path("model.safetensors")}:
        assert (merged / name).read_bytes() == (base / name).read_bytes(), name


@pytest.mark.parametrize("layout", ["rank-in", "in-rank"])
@pytest.mark.parametrize("said", [None, "same"])
def test_both_mlx_layouts_are_told_apart_by_shape_and_equal_the_peft_merge(
    layout, said, base, halves, merged, tmp_path
):
    adapter = write_mlx(tmp_path / "mlx", halves, layout)
    record = merge(base, adapter, tmp_path / "out", given=GIVEN, layout=layout if said else None)
    assert record["layouts"] == {layout: len(halves)}
    weights = "model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (merged / weights).read_bytes()


@given(into=st.integers(1, 6), out=st.integers(1, 6), rank=st.integers(1, 6), layout=st.sampled_from(LAYOUTS))
def test_a_layout_is_found_by_shape_unless_rank_and_both_sides_are_one_number(into, out, rank, layout):
    a, b = {"rank-in": ((rank, into), (out, rank)), "in-rank": ((into, rank), (rank, out))}[layout]
    if rank == into == out:
        with pytest.raises(ConfigError, match="is square"):
            lora._layout("q", a, b, (out, into), rank, None)
        assert lora._layout("q", a, b, (out, into), rank, layout) == layout
    else:
        assert lora._layout("q", a, b, (out, into), rank, None) == layout


def test_what_mlx_lm_writes_beside_its_adapter_is_read(base, halves, merged, tmp_path):
    write_mlx(tmp_path / "mlx", halves, "in-rank")
    settings = {"fine_tune_type": "lora", "lora_parameters": {"rank": RANK, "scale": ALPHA / RANK, "dropout": 0.0}}
    (tmp_path / "mlx" / "adapter_config.json").write_text(json.dumps(settings))
    record = merge(base, tmp_path / "mlx", tmp_path / "out")
    assert (record["kind"], record["rank"], record["alpha"], record["scale"]) == ("MLX", RANK, ALPHA, ALPHA / RANK)
    assert load_file(tmp_path / "out/model.safetensors")[f"{Q_PROJ}.weight"].equal(
        load_file(merged / "model.safetensors")[f"{Q_PROJ}.weight"]
    )


def test_logits_of_base_and_adapter_in_peft_are_those_of_the_merge_reloaded_in_qwen_tts(
    tiny_checkpoint, halves, tmp_path
):
    """In float32, where nothing is rounded away."""
    adapter = write_peft(tmp_path / "adapter", tiny_checkpoint, halves)
    merge(tiny_checkpoint, adapter, tmp_path / "out")
    load = Qwen3TTSForConditionalGeneration.from_pretrained
    base, reloaded = (load(path, dtype=torch.float32) for path in (tiny_checkpoint, tmp_path / "out"))
    embeds = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(3))

    def logits(model):
        with torch.no_grad():
            residual = model.talker.code_predictor(inputs_embeds=embeds, use_cache=False).logits
            return model.talker(inputs_embeds=embeds, use_cache=False).logits, residual

    without = logits(base)
    with_adapter = logits(PeftModel.from_pretrained(base, adapter).base_model.model)
    for plain, expected, merged in zip(without, with_adapter, logits(reloaded), strict=True):
        assert torch.allclose(merged, expected, atol=1e-4)
        assert not torch.allclose(merged, plain, atol=0.05)


def test_the_record_says_what_was_merged_and_what_the_proof_measured(merged, base, peft_adapter):
    record = json.loads((merged / lora.RECORD).read_text())
    assert record["base_weights_sha256"] == {"model.safetensors": sha256_of(base / "model.safetensors")}
    assert record["adapter_sha256"] == sha256_of(peft_adapter / "adapter_model.safetensors")
    assert (record["kind"], record["rank"], record["alpha"], record["scale"]) == ("PEFT", RANK, ALPHA, 2.0)
    assert record["dtypes"] == ["bfloat16"]
    assert record["modules"] == sorted(modules_of_adapter())
    proof = record["proof"]
    assert proof["float32_max_abs"] <= lora.PROOF_LIMIT * proof["max_abs_logit"]
    assert proof["float32_max_abs"] < proof["written_max_abs"] < proof["adapter_max_abs"] / 4


def test_rank_stabilised_adapters_keep_their_scale(base, halves, tmp_path):
    adapter = write_peft(tmp_path / "adapter", base, halves, use_rslora=True)
    assert merge(base, adapter, tmp_path / "out")["scale"] == pytest.approx(ALPHA / RANK**0.5)


def test_an_adapter_of_some_layers_leaves_the_others_alone(base, halves, tmp_path):
    adapter = write_mlx(tmp_path / "mlx", {Q_PROJ: halves[Q_PROJ]}, "rank-in")
    assert merge(base, adapter, tmp_path / "out", given=GIVEN)["modules"] == [Q_PROJ]


def test_the_command_merges_what_is_pinned_and_says_how_well(base, halves, tmp_path, capfd):
    adapter = write_mlx(tmp_path / "mlx", halves, "rank-in")
    words = ["--base", str(base), "--adapter", str(adapter), "--out", str(tmp_path / "out")]
    assert main(["merge-lora", *words, "--expect", str(pins_file(tmp_path, base, adapter))]) == 0
    said = capfd.readouterr().out
    assert f"merged {len(halves)} modules" in said
    assert "bfloat16" in said
    record = json.loads((tmp_path / "out" / lora.RECORD).read_text())
    assert record["expected"]["adapter"].startswith("akashicmarga/qwen3-tts-hindi-lora@a8718cac")


def test_the_pins_of_the_hindi_adapter_are_those_of_the_published_one():
    pins = read_pins("hindi")
    assert pins.adapter_tensors == 462 == 2 * len(LORA_PARENTS) * sum(pins.adapter_layers.values())
    assert (pins.adapter_rank, pins.adapter_alpha, pins.adapter_layout) == (8, 16, "rank-in")
    assert len(pins.base_files_sha256) == 11


# ---------------------------------------------------------------- what is refused


def refused(kind: type[TTSError], reason: str, tmp_path: Path, base: Path, adapter: Path, **options) -> None:
    """In one line, with nothing written."""
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(kind, match=reason) as error:
        merge(base, adapter, tmp_path / "out", **{"given": GIVEN} | options)
    assert "\n" not in str(error.value)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop(f"{Q_PROJ}.lora_b"), r"has .*q_proj\.lora_a without its lora_b"),
        (lambda t: t.pop(f"{Q_PROJ}.lora_a"), r"has .*q_proj\.lora_b without its lora_a"),
        (lambda t: t.update({"talker.codec_head.bias": torch.zeros(1)}), r"has talker\.codec_head\.bias, which is no"),
        (lambda t: t.update({f"{Q_PROJ}x.lora_{half}": t.pop(f"{Q_PROJ}.lora_{half}") for half in "ab"}),
         "an adapter of .*q_projx, which .* has not"),
        (lambda t: t[f"{Q_PROJ}.lora_a"][0].fill_(torch.nan), r"q_proj\.lora_a of .* no finite numbers"),
        (lambda t: (t[f"{Q_PROJ}.lora_a"].fill_(10), t[f"{Q_PROJ}.lora_b"].fill_(1e38)),
         r"q_proj\.weight merged is not finite in bfloat16"),
        (lambda t: t.update({f"{Q_PROJ}.lora_a": torch.zeros(4, 64)}), r"lora_a \(4, 64\) and .* for rank 8"),
        (lambda t: t.clear(), "holds no tensors"),
    ],
)  # fmt: skip
def test_an_adapter_with_a_wrong_tensor_is_refused(change, reason, base, halves, tmp_path):
    adapter = write_mlx(tmp_path / "mlx", halves, "rank-in", change)
    refused(CheckpointError, reason, tmp_path, base, adapter)


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"given": Scaling(rank=4, alpha=16)}, CheckpointError, "have to be .* for rank 4"),
        ({"given": Scaling(alpha=16)}, ConfigError, "does not say its rank; add --rank"),
        ({"given": Scaling(rank=8)}, ConfigError, "does not say its scale; add --alpha or --scale"),
        ({"given": Scaling(rank=0, alpha=16)}, ConfigError, "rank=0 has to be 1 or more"),
        ({"given": Scaling(rank=8, alpha=0)}, ConfigError, "scale=0.0 has to be a finite number other than 0"),
        ({"layout": "in-rank"}, CheckpointError, r"lora_a \(8, 64\) .* have to be \(64, 8\) and .*\(in-rank\)"),
    ],
)
def test_rank_scale_and_layout_are_said_and_are_right(options, kind, reason, base, halves, tmp_path):
    refused(kind, reason, tmp_path, base, write_mlx(tmp_path / "mlx", halves, "rank-in"), **options)


def test_a_square_adapter_of_a_square_module_needs_its_layout(base, tmp_path):
    """A and B are 64 x 64 like the module: nothing tells one layout from the other."""
    generator = torch.Generator().manual_seed(1)
    square = {Q_PROJ: tuple(torch.randn(64, 64, generator=generator) * 0.02 for _ in range(2))}
    given = Scaling(rank=64, scale=1.0)
    adapter = write_mlx(tmp_path / "mlx", square, "in-rank")
    refused(ConfigError, r"q_proj is square, 64 x 64 at rank 64, .*add --layout", tmp_path, base, adapter, given=given)

    merge(base, adapter, tmp_path / "out", given=given, layout="in-rank")
    a, b = square[Q_PROJ]
    before = load_file(base / "model.safetensors")[f"{Q_PROJ}.weight"].float()
    assert load_file(tmp_path / "out/model.safetensors")[f"{Q_PROJ}.weight"].equal((before + b @ a).bfloat16())


def test_peft_settings_and_the_command_line_agree(base, peft_adapter, tmp_path):
    refused(ConfigError, r"the rank is 8 by .*adapter_config.json, 4 by the command line", tmp_path, base, peft_adapter,
            given=Scaling(rank=4))  # fmt: skip
    refused(ConfigError, "the scale is 2 by .*, 1 by the command line", tmp_path, base, peft_adapter,
            given=Scaling(scale=1.0))  # fmt: skip
    refused(ConfigError, "--layout in-rank: .* is a PEFT adapter", tmp_path, base, peft_adapter, layout="in-rank")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"use_dora": True}, "has use_dora=True; only plain LoRA"),
        ({"bias": "all"}, "has bias=all; only plain LoRA"),
        ({"rank_pattern": {"q_proj": 4}}, "has rank_pattern=.*; only plain LoRA"),
        ({"r": "8"}, r"adapter_config\.json: r='8' has to be a number"),
        ({"lora_parameters": {"rank": [8]}}, r"lora_parameters\.rank=\[8\] has to be a number"),
    ],
)
def test_adapters_that_are_more_than_plain_lora_are_refused(setting, reason, base, peft_adapter, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for file in peft_adapter.iterdir():
        (adapter / file.name).write_bytes(file.read_bytes())
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | setting))
    refused(CheckpointError, reason, tmp_path, base, adapter)


@pytest.mark.parametrize(
    ("module", "into", "out", "reason"),
    [
        ("speaker_encoder.fc", 96, 64, "has a weight of shape (64, 96, 1); only linear modules are merged"),
        ("talker.model.codec_embedding", 64, 3072, "is no linear module of the talker, so its merge cannot be proved"),
    ],
)
def test_an_adapter_of_what_is_no_linear_module_is_refused(module, into, out, reason, base, tmp_path):
    adapter = write_mlx(tmp_path / "mlx", {module: (torch.ones(8, into), torch.ones(out, 8))}, "rank-in")
    refused(CheckpointError, re.escape(f"{module} {reason}"), tmp_path, base, adapter)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"adapter_sha256": "0" * 64}, r"adapters\.safetensors has SHA-256 \w+, expected is 0{64}"),
        ({"base_files_sha256": {"vocab.json": "0" * 64}}, r"vocab\.json has SHA-256 \w+, expected is 0{64}"),
        ({"base_files_sha256": {"gone.json": "0" * 64}}, r"gone\.json is missing; Qwen/Qwen3-TTS-12Hz-0\.6B-Base"),
        ({"base_files_sha256": {}}, r"model\.safetensors is not part of Qwen/Qwen3"),
        ({"adapter_tensors": 462}, "the adapter has 56 tensors, expected are 462"),
        ({"adapter_layers": {"talker.model": 4}}, "the adapter should have none of talker.code_predictor"),
        ({"adapter_layers": LAYERS | {"talker.model": 3}}, "the adapter lacks an adapter of .*layers.2"),
        ({"adapter_dtype": "bfloat16"}, "lora_a is float32, expected is bfloat16"),
        ({"base_dtype": "float32"}, "weight in the base is bfloat16, expected is float32"),
        ({"adapter_layout": "in-rank"}, "layout is rank-in, expected is in-rank"),
    ],
)
def test_what_differs_from_the_pins_is_refused(changes, reason, base, halves, tmp_path):
    adapter = write_mlx(tmp_path / "mlx", halves, "rank-in")
    pins = read_pins(str(pins_file(tmp_path, base, adapter, **changes)))
    refused(CheckpointError, reason, tmp_path, base, adapter, pins=pins, given=Scaling())


def test_pins_and_the_command_line_agree(base, halves, tmp_path):
    adapter = write_mlx(tmp_path / "mlx", halves, "rank-in")
    pins = read_pins(str(pins_file(tmp_path, base, adapter)))
    refused(ConfigError, "the scale is 4 by the command line, 2 by --expect", tmp_path, base, adapter, pins=pins,
            given=Scaling(alpha=32))  # fmt: skip


@pytest.mark.parametrize("content", [None, "{", '{"base_model": "x"}'])
def test_pins_that_cannot_be_read_are_refused(content, tmp_path):
    if content:
        (tmp_path / "pins.json").write_text(content)
    with pytest.raises(ConfigError, match=r"--expect .*pins\.json (is neither|lacks)"):
        read_pins(str(tmp_path / "pins.json"))


def test_an_existing_directory_and_one_inside_the_base_are_not_written(base, peft_adapter, tmp_path):
    (tmp_path / "out").mkdir()
    for out, reason in ((tmp_path / "out", "exists already"), (base / "out", "lies inside")):
        with pytest.raises(ConfigError, match=reason):
            merge(base, peft_adapter, out)
    assert list((tmp_path / "out").iterdir()) == []
    assert not (base / "out").exists()


@pytest.mark.parametrize(("name", "reason"), [("gone", "does not exist"), ("empty", "has neither of")])
def test_a_missing_adapter_is_refused(name, reason, base, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(CheckpointError, reason, tmp_path, base, tmp_path / name)


@pytest.mark.parametrize("which", ["adapter", "base"])
def test_a_file_that_is_cut_off_is_refused(which, base, halves, tmp_path):
    adapter = write_mlx(tmp_path / "mlx", halves, "rank-in")
    shutil.copytree(base, tmp_path / "base")
    file = {"adapter": adapter, "base": tmp_path / "base" / "model.safetensors"}[which]
    file.write_bytes(file.read_bytes()[:-100])
    refused(
        CheckpointError, rf"{file}( cannot be read as safetensors| has \d+ bytes)", tmp_path, tmp_path / "base", adapter
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("talker.codec_head.weight"), r"lacks 1 tensors, talker\.codec_head\.weight among them"),
        (
            lambda t: t.update({"talker.codec_head.weight": torch.zeros(2, 64)}),
            r"does not fit its config\.json: .*\(?2, 64",
        ),
    ],
)
def test_a_base_that_is_not_whole_or_no_floats_is_refused(change, reason, base, peft_adapter, tmp_path):
    shutil.copytree(base, tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "base/model.safetensors")
    refused(CheckpointError, reason, tmp_path, tmp_path / "base", peft_adapter)


# ---------------------------------------------------------------- what goes wrong on the way


def test_a_merge_ended_by_a_signal_leaves_nothing(base, peft_adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "save_file", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        main(["merge-lora", "--base", str(base), "--adapter", str(peft_adapter), "--out", str(tmp_path / "out")])
    assert ended.value.code == 143
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_changes_a_weight_fails_the_proof_and_leaves_nothing(base, peft_adapter, tmp_path, monkeypatch):
    def spoiled(tensors: Tensors, *arguments, **options):
        tensors[f"{Q_PROJ}.weight"][0] += 1
        save_file(tensors, *arguments, **options)

    monkeypatch.setattr(export_module, "save_file", spoiled)
    refused(CheckpointError, "logits of what was written differ", tmp_path, base, peft_adapter)


def test_a_merge_of_another_scale_fails_the_proof(base, peft_adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(lora, "merged_weight", lambda weight, a, b, scale: weight.float() + 1.01 * scale * (b @ a))
    refused(CheckpointError, "logits of base . adapter and of the merge differ by", tmp_path, base, peft_adapter)
