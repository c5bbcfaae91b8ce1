import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tts.data.voices import (
    References,
    draw_reference,
    list_clusters,
    read_references,
    reference_file,
    with_reference,
)
from verl_tts.errors import DataError
from verl_tts.types import PromptRow

CLUSTERS = {"anna": ["1.wav", "2.wav"], "bo": [f"{n}.wav" for n in range(40)], "cy": ["x.flac"]}
REFERENCES = References(train=CLUSTERS, validation={"dee": ["1.wav"]})
ROW = PromptRow("r-1", "Hi.", "train", 0, "demo", "Hi.", extra={"ref_audio": "dee/1.wav", "emotion": "relief"})


def test_a_step_and_a_row_always_get_the_same_voice():
    assert draw_reference(CLUSTERS, 42, "r-1", 3) == draw_reference(dict(reversed(CLUSTERS.items())), 42, "r-1", 3)
    assert with_reference(ROW, REFERENCES, 42, 3) == with_reference(ROW, REFERENCES, 42, 3)


def test_other_steps_rows_and_seeds_draw_anew():
    draws = [draw_reference(CLUSTERS, seed, row, step) for seed in (1, 2) for row in "ab" for step in range(20)]
    assert len(set(draws)) > 10


def test_a_cluster_of_many_utterances_is_no_likelier_than_one_of_few():
    counts = Counter(draw_reference(CLUSTERS, 42, "r", step).split("/")[0] for step in range(3000))
    assert all(900 < counts[cluster] < 1100 for cluster in CLUSTERS)
    utterances = Counter(draw_reference(CLUSTERS, 42, "r", step) for step in range(3000))
    assert 400 < utterances["anna/1.wav"] < 600


@given(st.integers(0, 2**32), st.text(max_size=20), st.integers(0, 10**6))
def test_what_is_drawn_is_in_the_list(seed, row, step):
    cluster, utterance = draw_reference(CLUSTERS, seed, row, step).split("/")
    assert utterance in CLUSTERS[cluster]


def test_training_never_hears_a_validation_voice_and_validation_keeps_its_own():
    assert with_reference(ROW, REFERENCES, 42, None) is ROW
    drawn = {with_reference(ROW, REFERENCES, 42, step).extra["ref_audio"].split("/")[0] for step in range(50)}
    assert drawn == set(CLUSTERS)
    changed = with_reference(ROW, REFERENCES, 42, 1)
    assert changed.extra["emotion"] == "relief"
    assert (changed.id, changed.text) == (ROW.id, ROW.text)


def test_clusters_are_folders_with_recordings_in_them(tmp_path):
    for name in ("b/2.wav", "b/1.FLAC", "a/x.mp3", "a/x.json", "none/readme.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list_clusters(tmp_path) == {"a": ["x.mp3"], "b": ["1.FLAC", "2.wav"]}


def written(tmp_path, content):
    path = tmp_path / "references.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_list_is_read_back_sorted(tmp_path):
    path = written(tmp_path, {"train": {"b": ["2", "1"], "a": ["x"]}, "validation": {"c": ["y"]}})
    assert read_references(path) == References({"a": ["x"], "b": ["1", "2"]}, {"c": ["y"]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ([], "has to be"),
        ({"train": {"a": ["x"]}}, "has to be"),
        ({"train": {}, "validation": {"c": ["y"]}}, "has to be"),
        ({"train": {"a": []}, "validation": {"c": ["y"]}}, "train.a has to be a list of one recording"),
        ({"train": {"a": ["../x"]}, "validation": {"c": ["y"]}}, "'../x', which is no plain file name"),
        ({"train": {"..": ["x"]}, "validation": {"c": ["y"]}}, "'..', which is no plain file name"),
        ({"train": {"a": [1]}, "validation": {"c": ["y"]}}, "1, which is no plain file name"),
        ({"train": {"a": ["x"]}, "validation": {"a": ["y"]}}, "the cluster a is in train and in validation"),
    ],
)
def test_a_list_of_another_form_is_refused(tmp_path, content, message):
    with pytest.raises(DataError) as refused:
        read_references(written(tmp_path, content))
    assert message in str(refused.value)


def test_a_list_or_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_references(tmp_path / "gone.json")
    with pytest.raises(DataError, match="are no folder"):
        list_clusters(tmp_path / "gone")
    with pytest.raises(DataError, match="no CLUSTER/UTTERANCE"):
        list_clusters(tmp_path)


@pytest.mark.parametrize("name", ["../secret.wav", "/etc/passwd", "ann/../../secret.wav", "ann/link.wav"])
def test_a_row_names_no_recording_outside_the_folder(tmp_path, name):
    folder = tmp_path / "voices"
    (folder / "ann").mkdir(parents=True)
    (tmp_path / "secret.wav").touch()
    (folder / "ann" / "link.wav").symlink_to(tmp_path / "secret.wav")
    with pytest.raises(DataError, match="leads out of"):
        reference_file(folder, name)
    assert reference_file(folder, "ann/1.wav") == folder / "ann" / "1.wav"


def test_the_folder_of_voices_may_itself_be_a_link(tmp_path):
    (tmp_path / "disk" / "ann").mkdir(parents=True)
    (tmp_path / "voices").symlink_to(tmp_path / "disk")
    assert reference_file(tmp_path / "voices", "ann/1.wav") == tmp_path / "voices" / "ann" / "1.wav"
