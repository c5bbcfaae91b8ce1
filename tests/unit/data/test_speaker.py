import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from verl_tts.data.speaker import read_speaker, read_speakers, speaker_file, write_speaker
from verl_tts.errors import DataError


@pytest.mark.parametrize("content", [[1, 2.5, -3], {"embedding": [1, 2.5, -3], "model": "ecapa"}])
def test_an_embedding_is_a_list_or_has_one(tmp_path, content):
    (tmp_path / "a.json").write_text(json.dumps(content))
    speaker_H = read_speaker(tmp_path / "a.json", 3)
    assert speaker_H.dtype == np.float32
    assert speaker_H.tolist() == [1.0, 2.5, -3.0]


@given(arrays(np.float32, st.integers(1, 8), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_an_embedding_that_was_written_is_read_bit_for_bit(tmp_path_factory, speaker_H):
    """In half precision, or averaged in it, it would be the voice of somebody else."""
    file = tmp_path_factory.mktemp("speakers") / "asha.json"
    write_speaker(file, speaker_H, audio="asha.flac", seconds=2.5)
    read_H = read_speaker(file, len(speaker_H))
    assert read_H.dtype == np.float32
    assert read_H.tobytes() == speaker_H.tobytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "has 2 values, but the model's speaker embedding has 3"),
        ("[1, NaN, 2]", "has nan at index 1"),
        ("[1, 2, 1e39]", "has inf at index 2"),  # finite as a double only
        ("[[1, 2, 3]]", "a list of numbers"),
        ('[1, "2", 3]', "a list of numbers"),
        ("[1, true, 3]", "a list of numbers"),
        ('{"vector": [1, 2, 3]}', "a list of numbers"),
        ("[1, 2,", "cannot be read as JSON"),
    ],
)
def test_a_bad_embedding_is_refused_with_the_number_that_is_wrong(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read_speaker(tmp_path / "a.json", 3)


def test_rows_may_name_speakers_of_a_folder(tmp_path):
    for name, value in {"asha": 1.0, "ravi": 2.0}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps([value]))
    assert {name: float(v[0]) for name, v in read_speakers(tmp_path, {"asha", "ravi"}, 1).items()} == {
        "asha": 1.0,
        "ravi": 2.0,
    }
    with pytest.raises(DataError, match=r"meera\.json does not exist"):
        read_speakers(tmp_path, {"meera"}, 1)
    with pytest.raises(DataError, match=r"is a folder, so extra_info\.speaker has to name"):
        read_speakers(tmp_path, {None}, 1)


@pytest.mark.parametrize("name", ["../asha", "/etc/asha", "a/b", ""])
def test_a_speaker_name_does_not_lead_out_of_its_folder(tmp_path, name):
    with pytest.raises(DataError, match="plain name"):
        speaker_file(tmp_path, name)
