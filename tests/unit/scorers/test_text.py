"""Text normalisation: punctuation and case go, everything that is spoken stays."""

import unicodedata

import hypothesis.strategies as st
import jiwer
import pytest
from hypothesis import example, given

from verl_tts.scorers.text import NORMALISERS, indic, nfc_punct

DEVANAGARI = st.text(st.sampled_from("कखगजझटडतदनमणञङपबड़ज़क़ािीुेोैंँः़्ऽ०५९12₹,.।…-? \u200c\u200d\ufeff"), max_size=16)


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


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param("क्\u200dया हुआ", "क्या हुआ", id="zero width joiner"),
        pytest.param("श्री\u200cमान", "श्रीमान", id="zero width non-joiner"),
        pytest.param("\ufeffनमस्ते", "नमस्ते", id="byte order mark"),
        pytest.param("स\u0921\u093cक", "स\u095cक", id="nukta composed"),
        pytest.param("\u095bरा \u0958लम", "ज\u093cरा क\u093cलम", id="nukta composed, other letters"),
        pytest.param("\u0929", "न\u093c", id="nukta that NFC composes"),
        pytest.param("हिन्दी", "हिंदी", id="dental nasal"),
        pytest.param("सम्बन्ध", "संबंध", id="labial and dental nasal"),
        pytest.param("अङ्क", "अंक", id="velar nasal"),
        pytest.param("पञ्चायत", "पंचायत", id="palatal nasal"),
        pytest.param("ठण्डा", "ठंडा", id="retroflex nasal"),
        pytest.param("चाँद", "चांद", id="chandrabindu"),
        pytest.param("चाँद", "चान्द", id="chandrabindu and dental nasal"),
        pytest.param("सन् १९४७", "सन् 1947", id="digits"),
        pytest.param("रुको… फिर चलो", "रुको... फिर चलो", id="ellipsis"),
        pytest.param("रुको…फिर चलो", "रुको फिर चलो", id="ellipsis without a space"),
        pytest.param("कीमत ₹१०० है", "कीमत 100 रुपये है", id="rupee sign"),
        pytest.param("₹ 5 लाख मिले", "5 लाख रुपये मिले", id="rupee sign before a scale"),
        pytest.param("₹1,500.", "1,500 रुपये", id="rupee sign at the end"),
        pytest.param("क्या? हाँ!", "क्या हां", id="punctuation"),
    ],
)
def test_spellings_of_the_same_words_have_no_error_under_indic(one, other):
    assert one != other
    assert jiwer.cer(indic(one), indic(other)) == 0


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param("कि", "की", id="another matra"),
        pytest.param("कल", "काल", id="a matra too many"),
        pytest.param("मोर", "मर", id="a matra lost"),
        pytest.param("बात", "भात", id="another consonant"),
        pytest.param("कर्म", "करम", id="a virama lost"),
        pytest.param("सज़ा", "सजा", id="a nukta lost"),
        pytest.param("हंस", "हस", id="a nasal lost"),
        pytest.param("अन्न", "अंत", id="a nasal that is no anusvara"),
        pytest.param("10 रुपये", "10", id="a word lost"),
        pytest.param("१२", "२१", id="other digits"),
    ],
)
def test_a_real_error_keeps_its_rate_under_indic(right, wrong):
    assert jiwer.cer(indic(right), indic(wrong)) == jiwer.cer(nfc_punct(right), nfc_punct(wrong)) > 0


@pytest.mark.parametrize("normalise", NORMALISERS.values(), ids=NORMALISERS.keys())
@given(DEVANAGARI | st.text(max_size=16))
@example("İ")
@example("न\u200d्द")
@example("₹₹1₹")
def test_normalising_twice_changes_nothing(normalise, text):
    assert normalise(normalise(text)) == normalise(text)


@given(DEVANAGARI)
def test_matras_survive_indic(text):
    def matras(chars):
        return [char for char in chars if char in "ािीुेोैः"]

    assert matras(indic(text.replace("₹", ""))) == matras(text)


@given(st.text(st.characters(), max_size=16))
def test_indic_takes_any_text_and_leaves_no_space_around_it(text):
    normalised = indic(text)
    assert normalised == " ".join(normalised.split())
    assert unicodedata.is_normalized("NFC", normalised)


@pytest.mark.parametrize("text", ["", " ", "\ufeff\u200d", "…?!।"])
def test_what_has_nothing_to_say_stays_empty(text):
    assert indic(text) == ""
