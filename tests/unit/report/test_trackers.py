"""Trackers: which there are, and which of them play a clip."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from verl_tts.report.trackers import CLIPS, Heard, is_installed, log_audio, prepare_tensorboard


@pytest.fixture
def clips(tmp_path: Path) -> list[Heard]:
    paths = [tmp_path / f"hi-{index}_0.flac" for index in range(CLIPS + 2)]
    for path in paths:
        soundfile.write(path, np.full(2400, 0.5, np.float32), 24_000)
    return [Heard(f"hi-{index}#0", path, "नमस्ते", 0.25) for index, path in enumerate(paths)]


def test_the_default_trackers_are_there_and_one_without_its_package_is_not():
    assert all(is_installed(name) for name in ("console", "tensorboard", "file"))
    assert not is_installed("clearml")


def test_tensorboard_plays_the_first_clips_of_a_validation(tmp_path, clips):
    logger = SimpleNamespace(writer=SummaryWriter(str(tmp_path / "tensorboard")))
    log_audio({"console": object(), "tensorboard": logger}, clips, step=20)
    logger.writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert len(events.Tags()["audio"]) == CLIPS
    (clip,) = events.Audio("validation/hi-0#0")
    assert (clip.step, clip.sample_rate, clip.length_frames) == (20, 24_000, 2400)


@pytest.mark.parametrize("package", ["wandb", "swanlab"])
def test_trackers_with_an_audio_type_get_the_clip_with_its_text_and_score(monkeypatch, clips, package):
    logged: list[tuple[dict[str, Any], int]] = []
    tracker = SimpleNamespace(log=lambda data, step: logged.append((data, step)))
    audio = SimpleNamespace(Audio=lambda samples_S, sample_rate, caption: (len(samples_S), sample_rate, caption))
    monkeypatch.setitem(sys.modules, package, audio)
    log_audio({package: tracker}, clips[:1], step=20)
    assert logged == [({"validation/hi-0#0": (2400, 24_000, "नमस्ते (0.250)")}, 20)]


def test_a_resume_takes_back_the_points_of_later_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", "")
    directory = tmp_path / "tensorboard"
    for steps in ((1, 2, 3), (3, 4)):
        prepare_tensorboard(directory, step=steps[0] - 1)
        writer = SummaryWriter(str(directory))
        for step in steps:
            writer.add_scalar("reward/mean", float(step), step)
        writer.close()
    events = EventAccumulator(str(directory)).Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3, 4]
