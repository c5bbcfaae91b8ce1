"""What is said of the engine's clips. That the engine makes them, and agrees with the actor, is in tests/loop."""

from dataclasses import replace

import numpy as np
import pytest

from verl_tts.config.compose import compose
from verl_tts.doctor.listening import synthesis
from verl_tts.rollout.alone import Clip
from verl_tts.types import CodecRollout, Conditioning, PromptRow, Waveform

ROW = PromptRow("a", "Hi.", "train", 0, "demo", "Hi.")


def clip(frames=3, stop="eos", loudness=0.1):
    codes_FQ = np.ones((frames, 16), np.int64)
    tokens_T = np.ones(frames + 1, np.int64)
    waveform = Waveform(np.random.default_rng(0).normal(0, loudness, 1920 * frames).astype(np.float32), 24000)
    rollout = CodecRollout(tokens_T, codes_FQ, np.zeros(frames + 1, np.float32), stop, 0)
    return Clip(ROW, 0, Conditioning([1], np.zeros(4), "Auto", None), rollout, waveform, None)


@pytest.fixture(scope="module")
def config():
    return compose(["tts.platform=cpu", "data.max_response_length=48"])


@pytest.mark.parametrize(
    ("clips", "state", "said"),
    [
        ([clip(), clip()], "ok", "2 of 2 clips ended by themselves"),
        ([clip(loudness=1e-6, frames=48, stop="length")], "fail", "RMS 1e-06"),  # loads, and is near-silent to the cap
        ([clip(frames=48, stop="length")] * 4, "fail", "0 of 4"),
        ([clip(), *[clip(frames=48, stop="length")] * 3], "warn", "1 of 4"),
        ([clip(frames=0)] * 2, "fail", "no clip has a frame"),
        ([clip(), replace(clip(loudness=0.0))], "ok", "RMS 0 to 0.1"),
    ],
)
def test_clips_are_judged_by_their_loudness_and_their_ends(config, clips, state, said):
    (finding,) = synthesis(config, clips)
    assert finding.state == state
    assert said in finding.said
