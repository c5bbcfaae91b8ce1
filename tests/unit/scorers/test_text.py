"""Text normalisation: punctuation and case go, everything that is spoken stays."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from verl_tts.scorers.text import nfc_punct


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("Hello,  World!", "hello world"),
        ("It’s  a “test” — really?", "it s a test really"),
        ("नमस्ते। आप कैसे हैं॥", "नमस्ते आप कैसे हैं"),
        ("किताब\tकी\nदुकान", "किताब की दुकान"),  # vowel signs and viramas stay
        ("e\u0301", "é"),
        ("$5 … ₹10", "$5 … ₹10"),  # as in the published run
        ("?!", ""),
        ("", ""),
    ],
)
def test_nfc_punct(text, normalised):
    assert nfc_punct(text) == normalised


@given(st.text(st.sampled_from("aÉ́े ्क।-?\t"), max_size=12))
def test_normalising_twice_changes_nothing(text):
    assert nfc_punct(nfc_punct(text)) == nfc_punct(text)
