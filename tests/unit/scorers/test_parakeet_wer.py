"""NeMo lives in an environment of its own. Here is what happens in one without it."""

import importlib.util

import pytest

from verl_tts.errors import ConfigError
from verl_tts.scorers import build_scorer


def test_without_nemo_nothing_takes_its_place(tmp_path):
    assert importlib.util.find_spec("nemo") is None
    file = tmp_path / "parakeet.nemo"
    file.write_bytes(b"weights")
    with pytest.raises(ConfigError, match=r"parakeet_wer: nemo is not installed; .* environment of its own"):
        build_scorer("parakeet_wer", {"model": str(file), "device": "cpu"})


def test_a_model_that_is_no_file_is_refused_by_its_path():
    with pytest.raises(ConfigError, match=r"model='nvidia/parakeet-tdt-0.6b-v2' is no file"):
        build_scorer("parakeet_wer", {"model": "nvidia/parakeet-tdt-0.6b-v2"})


def test_the_model_has_to_be_named():
    with pytest.raises(ConfigError, match="parakeet_wer needs the option model"):
        build_scorer("parakeet_wer", {})
