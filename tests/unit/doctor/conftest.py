"""A configuration that is healthy, for mistakes to be planted in."""

import shutil
from pathlib import Path

import pytest

from verl_tts.data.quickstart import write_quickstart

JUDGE = Path(__file__).with_name("judge.py")


@pytest.fixture
def model(tiny_checkpoint, tmp_path):
    """A copy of the tiny checkpoint, to be damaged."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "model")


@pytest.fixture
def words(tiny_checkpoint, tmp_path):
    """Overrides of a run on the tiny checkpoint, with a scorer that knows speech from noise."""
    write_quickstart(tmp_path / "data", tiny_checkpoint)
    return [
        "tts.platform=cpu",
        f"actor_rollout_ref.model.path={tiny_checkpoint}",
        f"data.train_files={tmp_path}/data/train.parquet",
        f"data.val_files={tmp_path}/data/val.parquet",
        f"tts.speaker_path={tmp_path}/data/speaker.json",
        f"tts.output_dir={tmp_path}/run",
        f"reward.custom_reward_function.path={JUDGE}",
        "reward.custom_reward_function.name=score",
        "data.max_prompt_length=256",
        "data.max_response_length=48",
        "trainer.total_training_steps=4",
        "trainer.max_actor_ckpt_to_keep=1",
    ]
