"""A real server of a scorer that a test writes, and a clip of real speech."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests import scorer_rig
from verl_tts.rewards.protocol import Clip
from verl_tts.scorers.app import ServerSettings, create_app
from verl_tts.scorers.base import Scorer
from verl_tts.types import Waveform


class ScriptedScorer:
    """Scores with the function that a test gives it, and remembers the sizes of its batches."""

    name, version, model, revision = "scripted", "1", None, None
    score_range = (0.0, 1.0)
    part_names = ()
    details: dict[str, object] = {}

    def __init__(self, score: Callable[[Clip], float] = lambda _: 0.5) -> None:
        self.score = score
        self.batches: list[int] = []

    def fingerprint(self) -> str:
        return "f" * 64

    def check(self, clip: Clip) -> None:
        pass

    def score_batch(self, clips: Sequence[Clip]) -> list[dict]:
        self.batches.append(len(clips))
        return [{"score": self.score(clip)} for clip in clips]


def running(scorer: Scorer, **settings) -> AbstractContextManager[str]:
    """The origin of a server in a thread of its own."""
    return scorer_rig.running(create_app(scorer, ServerSettings(**settings)))


@pytest.fixture(scope="session")
def scripted() -> type[ScriptedScorer]:
    return ScriptedScorer


@pytest.fixture(scope="session")
def serving() -> Callable:
    return running


@pytest.fixture(scope="session")
def noise() -> Waveform:
    return Waveform(np.random.default_rng(0).normal(0, 0.1, 2_400).astype(np.float32), 24_000)


@pytest.fixture(scope="session")
def spoken() -> Clip:
    """``espeak-ng -v en-gb -s 140 -w a.wav "Please open the window and close the door."``, as FLAC."""
    samples_S, sample_rate_hz = soundfile.read(Path(__file__).parent / "data/open_the_window.flac", dtype="float32")
    prompt = "Please open the window and close the door."
    return Clip(Waveform(samples_S, sample_rate_hz), prompt, {"id": "en-1"})
