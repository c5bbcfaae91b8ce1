"""Audio inside a page."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.report.simulated import RATE_HZ, voice
from verl_tts.report.clips import Shelf, encode


def written(path: Path, samples_S: np.ndarray, rate: int = RATE_HZ) -> Path:
    soundfile.write(path, samples_S, rate, format="FLAC", subtype="PCM_16")
    return path


def decoded(data_uri: str) -> tuple[np.ndarray, int]:
    return soundfile.read(io.BytesIO(base64.b64decode(data_uri.partition(",")[2])))


def test_a_clip_is_a_third_of_its_flac_and_sounds_the_same(tmp_path: Path) -> None:
    file = written(tmp_path / "a.flac", voice(0))
    sound = encode(file)
    assert sound is not None
    assert len(sound.data_uri) * 3 / 4 < file.stat().st_size / 2
    back_S, rate = decoded(sound.data_uri)
    assert (rate, len(back_S)) == (RATE_HZ, len(voice(0)))
    assert np.corrcoef(back_S, voice(0))[0, 1] > 0.98


def test_a_rate_that_mp3_does_not_have_keeps_its_flac(tmp_path: Path) -> None:
    sound = encode(written(tmp_path / "a.flac", voice(1)[:5000], 23_456))
    assert sound is not None
    assert sound.data_uri.startswith("data:audio/flac;base64,")
    assert decoded(sound.data_uri)[1] == 23_456


@pytest.mark.parametrize("samples", [1, 100, 1920])
def test_the_shortest_clips_can_be_heard(tmp_path: Path, samples: int) -> None:
    sound = encode(written(tmp_path / "a.flac", voice(2)[:samples]))
    assert sound is not None
    assert len(decoded(sound.data_uri)[0]) == samples


@pytest.mark.parametrize("content", [b"", b"fLaC", b"no audio at all" * 10])
def test_a_file_that_is_no_audio_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.flac").write_bytes(content)
    assert encode(tmp_path / "a.flac") is None


def test_what_is_in_the_page_does_not_tell_the_file(tmp_path: Path) -> None:
    first, second = (encode(written(tmp_path / f"{name}.flac", voice(3))) for name in ("step_0", "step_40"))
    assert first == second


def test_a_clip_that_is_shown_twice_is_kept_once_and_a_full_shelf_takes_no_more(tmp_path: Path) -> None:
    files = [written(tmp_path / f"{i}.flac", voice(i)[:9600]) for i in range(4)]
    size = len(encode(files[0]).data_uri)  # type: ignore[union-attr]
    shelf = Shelf(limit_bytes=int(2.5 * size))
    assert [shelf.put(file) for file in (files[0], files[0], *files[1:])][:2] == ["c0", "c0"]
    assert shelf.used_bytes <= shelf.limit_bytes
    assert len(shelf.sounds) + shelf.left_out == 4
    assert shelf.put(None) is None
    assert shelf.put(tmp_path / "gone.flac") is None
    assert shelf.missing == 1


@given(st.integers(1, 400), st.floats(0, 1))
def test_an_outline_stays_in_its_box(samples: int, loudness: float) -> None:
    from verl_tts.report.clips import outline

    path = outline(np.full(samples, loudness, np.float32))
    assert path.count("M") == min(samples, 56)
    for stroke in path.split("M")[1:]:
        top, height = (float(number) for number in stroke.split(" ")[1].split("v"))
        assert 0 <= top <= 10
        assert 0 < height <= 20
