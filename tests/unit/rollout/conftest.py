"""What the tests of samples and groups start from."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from verl_tts.types import CodecRollout, Conditioning, PromptRow, Score, Waveform


def make_row(index: int = 0, **values) -> PromptRow:
    defaults = {
        "id": f"row-{index}",
        "text": "Hello.",
        "split": "train",
        "data_source": "test",
        "ground_truth": "Hello.",
    }
    return PromptRow(**(defaults | {"index": index, "extra": {"target_seconds": 1.0}} | values))


def make_rollout(frames: int = 3, stop_reason: str = "eos", seed: int = 0) -> CodecRollout:
    random = np.random.default_rng(seed)
    codes_FQ = random.integers(1, 2048, (frames, 16))
    tokens_T = np.array([*codes_FQ[:, 0], 2150 if stop_reason == "eos" else 7])
    return CodecRollout(tokens_T, codes_FQ, -random.random(frames + 1).astype(np.float32), stop_reason, seed)


def make_waveform(frames: int = 3) -> Waveform:
    samples_S = np.random.default_rng(0).normal(0, 0.1, frames * 1920).astype(np.float32)
    return Waveform(samples_S, 24_000)


class Make:
    """Builders, in one fixture, since conftest files are not there to be imported."""

    row, rollout, waveform = staticmethod(make_row), staticmethod(make_rollout), staticmethod(make_waveform)

    @staticmethod
    def sample(
        index: int = 0,
        total: float = 0.5,
        frames: int = 3,
        parts: dict | None = None,
        language_id: int | None = None,
        **kw,
    ):
        from verl_tts.rollout.agent_loop import Sample

        given = Conditioning([1, 2, 3, 4], np.full(8, 0.5, np.float32), "Auto", language_id)
        score = Score(total, parts or {})
        return Sample(make_row(index), given, make_rollout(frames, **kw), make_waveform(frames), score, weights_step=6)

    @staticmethod
    def group(index: int, totals: Sequence[float] = (0.0, 1.0), failure: Exception | None = None):
        from verl_tts.rollout.agent_loop import Group

        if failure is not None:
            return Group(make_row(index), (), failure)
        return Group(make_row(index), [Make.sample(index, total, frames=2 + k) for k, total in enumerate(totals)])


@pytest.fixture(scope="session")
def make() -> Callable:
    return Make
