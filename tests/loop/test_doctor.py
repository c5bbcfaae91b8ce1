"""The doctor's looks at the engine: one start of it a policy, without Ray, in a process of its own."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from omegaconf import DictConfig

from verl_tts.config.compose import compose
from verl_tts.doctor.inputs import prompt_rows
from verl_tts.doctor.listening import agreement, synthesis
from verl_tts.doctor.sampling import sample
from verl_tts.models.qwen3_tts_prompt import TokenIds
from verl_tts.rollout.alone import Clip

from .conftest import write_moss_rows
from .runs import FP32, FP32_LIMIT, Inputs

pytestmark = pytest.mark.loop


@pytest.fixture(scope="module", params=["qwen3_tts", "moss"])
def config(
    request: pytest.FixtureRequest, inputs: Inputs, tiny_moss: Path, tmp_path_factory: pytest.TempPathFactory
) -> DictConfig:
    """Of a run on the tiny checkpoint; every second row of MOSS has a recording."""
    if request.param == "moss":
        data = tmp_path_factory.mktemp("doctor")
        write_moss_rows(data)
        inputs = Inputs(tiny_moss, data / "train.parquet", data / "val.parquet", data / "no-speaker")
    return compose([
        "tts.platform=cpu", f"actor_rollout_ref.model.path={inputs.model}", f"data.train_files={inputs.train}",
        f"data.val_files={inputs.val}", f"tts.speaker_path={inputs.speaker}", "data.max_prompt_length=640",
        "data.max_response_length=48", f"tts.reference_dir={inputs.train.parent}", *FP32,
    ])  # fmt: skip


@pytest.fixture(scope="module")
def clips(config: DictConfig) -> Sequence[Clip]:
    return sample(config, prompt_rows(config)[:8])


def test_a_sound_stack_speaks_and_ends(config: DictConfig, clips: Sequence[Clip]) -> None:
    (finding,) = synthesis(config, clips)
    assert finding.state == "ok", finding
    assert [clip.row.id for clip in clips] == [row.id for row in prompt_rows(config)[:8]]


def test_a_sound_stack_agrees_with_the_actor(config: DictConfig, clips: Sequence[Clip]) -> None:
    (finding,) = agreement(config, clips)
    assert finding.state == "ok", finding
    largest = float(finding.said.removeprefix("engine and actor differ by ").split()[0])
    assert largest < FP32_LIMIT


@pytest.mark.parametrize("config", ["qwen3_tts"], indirect=True)
def test_an_actor_with_another_mask_than_the_engines_is_found(
    config: DictConfig, clips: Sequence[Clip], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids that the engine never samples in the actor's distribution: every log-prob is a little too low."""
    monkeypatch.setattr(TokenIds, "support", property(lambda ids: [*range(ids.codec_vocab)]))
    (finding,) = agreement(config, clips)
    assert finding.state == "fail", finding
    assert "tts.gates.logprob_mean_abs=0.02" in finding.said
