"""What the tests of the reward room start from."""

import numpy as np
import pytest

from tests.scorer_rig import OK, SPEECH, drip, http, raw, reset, rigged, silence
from verl_tts.types import CodecRollout, PromptRow, Waveform


class Rig:
    """What a test needs, in one fixture, since conftest files are not there to be imported."""

    http, raw, drip, OK = staticmethod(http), staticmethod(raw), staticmethod(drip), staticmethod(OK)
    reset, silence, serve = staticmethod(reset), staticmethod(silence), staticmethod(rigged)


@pytest.fixture(scope="session")
def rig() -> type[Rig]:
    return Rig


@pytest.fixture(autouse=True)
def _no_token_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCORER_TOKEN", raising=False)


@pytest.fixture(scope="session")
def speech() -> Waveform:
    """A second of noise, loud enough to be taken for speech by a guard."""
    return SPEECH


@pytest.fixture(scope="session")
def row() -> PromptRow:
    return PromptRow(
        id="en-1",
        text="Good morning.",
        split="train",
        index=3,
        data_source="test",
        ground_truth="Good morning.",
        speaker="anna",
        extra={"target_seconds": 2.0},
    )


@pytest.fixture(scope="session")
def rollout() -> CodecRollout:
    """Twelve frames and an EOS."""
    return CodecRollout(
        tokens_T=np.zeros(13, np.int64),
        codes_FQ=np.zeros((12, 16), np.int64),
        logprobs_T=np.zeros(13, np.float32),
        stop_reason="eos",
        seed=0,
    )
