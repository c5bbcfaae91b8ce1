"""MOSS as verl's actor: one update with LoRA that goes on from a published adapter."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl_tts.checkpoints.lora import merge
from verl_tts.checkpoints.tiny_moss import LANGUAGE_CONFIG, build_tiny_moss
from verl_tts.engine.model_config import PolicySettings
from verl_tts.engine.sampling import Scoring
from verl_tts.models.base import LORA_PARENTS
from verl_tts.models.moss import MossPolicy, lora_targets, replay_inputs, score_replay

RANK, ALPHA = 4, 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("moss") / "model"
    build_tiny_moss(out)
    return out


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As PEFT writes one that was made of ``language_model`` alone."""
    weights, random = load_file(checkpoint / "model.safetensors"), torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(LANGUAGE_CONFIG["num_hidden_layers"]):
        for leaf, parent in LORA_PARENTS.items():
            name = f"layers.{layer}.{parent}.{leaf}"
            out, into = weights[f"language_model.{name}.weight"].shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, into, generator=random) * 0.05
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, RANK, generator=random) * 0.05
    folder = tmp_path_factory.mktemp("adapter")
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}))
    return folder


def job(checkpoint: Path, adapter: Path, out: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, Path(__file__).with_name("moss_job.py"), checkpoint, adapter, out]
    environment = os.environ | {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def found(checkpoint: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("job") / "found.pt"
    done = job(checkpoint, adapter, out)
    assert done.returncode == 0, done.stdout[-4000:]
    return torch.load(out, weights_only=False)


def test_the_adapter_is_continued_module_by_module(found, adapter):
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        ours = name.replace("base_model.model.", "base_model.model.language_model.").replace(
            ".weight", ".default.weight"
        )
        assert torch.equal(found["before"][ours], tensor), name


def test_log_probs_are_those_of_base_and_adapter_merged(found, checkpoint, adapter, tmp_path):
    """merge-lora takes the same adapter, proves its own merge, and is the same policy."""
    record = merge(checkpoint, adapter, tmp_path / "merged")
    assert len(record["modules"]) == 14
    policy = MossPolicy.from_pretrained(tmp_path / "merged", dtype=torch.float32, attn_implementation="sdpa")
    rows = found["rows"]
    scoring = Scoring(PolicySettings(channel_reduction="sum"), found["temperature"], entropy=True, gate=True)

    def column(name: str) -> list[torch.Tensor]:
        return [row[name] for row in rows]

    with torch.no_grad():
        output = policy(**replay_inputs(policy.config, column, ""))
        ours = score_replay(policy.config, output, column, scoring)
    for name, key in (("log_probs", "log_probs"), ("entropy", "entropy"), ("gate", "gate_log_probs")):
        said = torch.tensor([value for row in found["log_probs"] for value in row[key]])
        assert torch.allclose(said, ours[name], atol=1e-4), name


def test_a_forced_position_is_no_action(found):
    ends = [row["response_mask"].tolist().count(0) for row in found["rows"]]
    assert ends == [1] * 7 + [0], "audio_end, which the answer that was cut has not reached"
    for row, said in zip(found["rows"], found["log_probs"], strict=True):
        assert all(value == 0 for value, mask in zip(said["log_probs"], row["response_mask"], strict=True) if not mask)


def test_the_update_moves_adapters_alone_and_exports_the_merged_backbone(found, checkpoint):
    assert math.isfinite(found["update"]["loss"])
    assert found["update"]["grad_norm"] > 0
    moved = {name for name, tensor in found["before"].items() if not torch.equal(tensor, found["after"][name])}
    assert moved == {name for name in found["before"] if ".lora_" in name}
    assert all(re.fullmatch(rf"{lora_targets('all-linear')}\.weight", name) for name in found["exported"])
    assert len(found["exported"]) == 14
    base = load_file(checkpoint / "model.safetensors")
    for name, tensor in found["exported"].items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (found["after"][f"{module}.lora_{half}.default.weight"] for half in "AB")
        assert torch.allclose(tensor, base[name] + ALPHA / RANK * b @ a, atol=1e-5)


def test_an_adapter_that_does_not_bind_is_refused(checkpoint, adapter, tmp_path):
    tensors = load_file(adapter / "adapter_model.safetensors")
    for half in "AB":
        name = f"base_model.model.layers.1.mlp.up_proj.lora_{half}.weight"
        tensors[name.replace("layers.1", "layers.7")] = tensors.pop(name)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    done = job(checkpoint, tmp_path, tmp_path / "found.pt")
    assert done.returncode != 0
    assert "lora_A of layers.7.mlp.up_proj" in done.stdout
    assert "the run has no LoRA there" in done.stdout
