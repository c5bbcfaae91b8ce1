import pytest

from verl_tts.data.emotions import ALIASES, PHRASES, canonical, instruction, phrase
from verl_tts.errors import DataError


def test_there_are_forty_emotions_each_with_words_of_its_own():
    assert len(PHRASES) == len(set(PHRASES.values())) == 40
    assert set(ALIASES.values()) <= set(PHRASES)
    for name, words in PHRASES.items():
        assert canonical(name) == name
        assert words in instruction(name)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Jealousy_&_Envy", "jealousy_envy"),
        ("jealousy and envy", "jealousy_envy"),
        ("Hope_Optimism", "hope_enthusiasm_optimism"),
        ("Intoxication_Altered_States", "intoxication_altered_states_of_consciousness"),
        ("Impatience_and_Irritability", "impatience_irritability"),
        (" RELIEF ", "relief"),
        ("hunger", None),
        ("", None),
    ],
)
def test_a_name_is_known_in_each_of_its_spellings(written, name):
    assert canonical(written) == name


def test_an_unknown_emotion_is_answered_with_all_that_there_are():
    with pytest.raises(DataError, match=r"'hunger' is unknown; there are: affection, .*triumph"):
        phrase("hunger")
