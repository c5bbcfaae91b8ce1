"""Fixtures shared by every test. Light: a test that needs torch imports it itself."""

from pathlib import Path

import hypothesis
import pytest

from verl_tts.checkpoints.tiny import build_tiny_qwen3_tts

# A busy machine is slow now and then; that says nothing about the code.
hypothesis.settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-machine")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny-random Qwen3-TTS checkpoint. Read only: every test shares it."""
    out = tmp_path_factory.mktemp("checkpoints") / "tiny"
    build_tiny_qwen3_tts(out)
    return out
