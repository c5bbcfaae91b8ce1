"""MOSS in the real loop: the same launcher, trainer, gates and export as the other policy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from verl_tts.checkpoints.export import export
from verl_tts.rollout.seeds import sample_seed

from .runs import FP32_LIMIT, Run, explain, flat

pytestmark = pytest.mark.loop


def test_the_run_ends_well_and_leaves_nothing(moss: Run) -> None:
    assert moss.returncode == 0, explain(moss)
    assert not moss.leftovers
    assert not moss.shared_memory


def test_engine_and_actor_agree_before_and_after_an_update_and_its_sync(moss: Run) -> None:
    """With and without a reference, of the joint log-prob of up to 17 channels."""
    for step in (1, 2):
        assert moss.metrics[step]["gate/logprob_max_abs"] < FP32_LIMIT
        assert moss.metrics[step]["gate/logprob_correlation"] > 0.999
        assert np.isfinite(moss.metrics[step]["actor/entropy"])
    assert moss.metrics[2]["actor/kl_loss"] > 0, "and it is another policy than the one that it began as"


def test_clips_end_by_themselves_and_have_frames(moss: Run) -> None:
    lines = moss.samples(1)
    assert {line["stop_reason"] for line in lines} == {"eos", "length"}
    assert any(line["frames"] > 0 for line in lines)


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_one_seed_ends_in_the_same_parameters_bit_for_bit(moss: Run, moss_again: Run, kind: str) -> None:
    assert moss_again.returncode == 0, explain(moss_again)
    ours, theirs = (flat(run.tensors(2, kind)) for run in (moss_again, moss))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def measured(line: dict[str, Any]) -> dict[str, Any]:
    """Without the parts that have no value: which of them a function has is known from its first answer on, and which
    of the first clips that is depends on the machine."""
    parts = {name: value for name, value in line["parts"].items() if value is not None}
    return line | {"parts": parts, "non_finite": None}


def test_one_seed_samples_the_same_clips_with_the_same_scores(moss: Run, moss_again: Run) -> None:
    for step in (1, 2):
        for ours, theirs in zip(moss_again.samples(step), moss.samples(step), strict=True):
            assert measured(ours) == measured(theirs)
            if ours["path"]:
                clips = [(run.directory / ours["path"]).read_bytes() for run in (moss_again, moss)]
                assert clips[0] == clips[1]


def test_another_seed_would_have_drawn_others(moss: Run) -> None:
    """Each clip has the seed that follows from the run's, and clips of one prompt differ by their seed alone."""
    for step in (1, 2):
        lines = moss.samples(step)
        for line in lines:
            place = line["id"], line["sample"], step
            assert line["seed"] == sample_seed(42, "train", *place) != sample_seed(43, "train", *place)
        clips = [(moss.directory / line["path"]).read_bytes() for line in lines if line["path"]]
        assert len(set(clips)) == len(clips)


def test_lora_moves_the_backbones_linear_layers_alone(moss: Run, tmp_path: Path) -> None:
    base = load_file(next(moss_model(moss).glob("*.safetensors")))
    export(moss.checkpoint(2), tmp_path / "exported", dtype="float32")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == base.keys()
    changed = {name for name in base if not torch.equal(base[name], exported[name])}
    leaves = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert changed == {
        name for name in base if name.startswith("language_model.layers.") and name.split(".")[-2] in leaves
    }
    assert (tmp_path / "exported" / "codec" / "model.safetensors").is_file()


def moss_model(run: Run) -> Path:
    return Path(OmegaConf.load(run.directory / "config.yaml").actor_rollout_ref.model.path)
