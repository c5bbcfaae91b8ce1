"""Recordings as codes: what is refused before the codec is loaded; tests/loop/test_moss_engine.py has a codec."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from verl_tts.errors import DataError
from verl_tts.rollout.reference import References


@pytest.fixture
def references(tmp_path) -> References:
    return References(tmp_path / "codec", tmp_path, codebooks=12, max_seconds=10.0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_recording_of_what_is_no_number_is_refused(references, value):
    samples_S = np.full(24_000, 0.1, np.float32)
    samples_S[7] = value
    soundfile.write(Path(references.folder, "a.wav"), samples_S, 24_000, subtype="FLOAT")
    with pytest.raises(DataError, match=r"a\.wav has samples that are not finite"):
        references.codes("a.wav")


def test_a_recording_that_is_not_there_is_said_to_be_so(references):
    with pytest.raises(DataError, match=r"the reference .*gone\.wav does not exist"):
        references.codes("gone.wav")
