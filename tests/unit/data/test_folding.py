import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tts.data.folding import fold


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("नमस्ते, दुनिया।", "नमस्ते दुनिया"),
        ("ज़रूर", "ज\u093cरूर"),  # a letter with its dot, in one code point and in two
        ("क\u094d\u200dष", "क\u094dष"),  # a joiner between
        ("\ufeffहाँ…", "हाँ"),
        ("१२ रुपये", "12 रुपये"),
        ("“Hello”\u00a0—  WORLD", "hello world"),
    ],
)
def test_texts_that_a_reader_takes_for_the_same_fold_to_the_same(one, other):
    assert fold(one) == fold(other) != ""


@pytest.mark.parametrize(("one", "other"), [("हिन्दी", "हिंदी"), ("कल", "काल"), ("12", "21"), ("re-read", "reread")])
def test_texts_that_differ_in_a_letter_or_a_vowel_sign_stay_apart(one, other):
    assert fold(one) != fold(other)


def test_what_cannot_be_spoken_folds_to_nothing():
    assert fold(" …!?\u200d। ₹ ") == ""


@given(st.text())
def test_folding_twice_changes_nothing_and_the_unicode_form_does_not_matter(text):
    assert fold(fold(text)) == fold(text) == fold(unicodedata.normalize("NFD", text))
