"""Text normalisation before text is compared. A profile has a name, which is part of a scorer's fingerprint.

    nfc_punct   what published Hindi runs used: figures compare only with exactly this
    indic       the same word in two spellings is the same word; for Hindi and its neighbours in Devanagari

Vowel signs (matras), viramas and nuktas are letters to both: another one is an error.
"""

import re
import string
import unicodedata
from collections.abc import Callable

# ASCII without the dollar sign, dandas, acute accent, curly quotes, dashes. Other signs stay, among them the
# ellipsis and the rupee sign: published Hindi figures were made with exactly this set, and compare only with it.
_NFC_PUNCT = str.maketrans(dict.fromkeys(string.punctuation.replace("$", "") + "।॥´’‘“”–—", " "))

# A nasal consonant before a stop of its own place of articulation is written as the anusvara, too: हिन्दी, हिंदी.
_VARGAS = {"ङ": "कखगघ", "ञ": "चछजझ", "ण": "टठडढ", "न": "तथदध", "म": "पफबभ"}
_HOMORGANIC_NASAL = re.compile("|".join(f"{nasal}्(?=[{stops}])" for nasal, stops in _VARGAS.items()))
_ANUSVARA, _CHANDRABINDU = "ं", "ँ"

# The sign stands before the number, the word is spoken after it: ₹5 लाख, 5 लाख रुपये.
_RUPEES = "रुपये"
_SCALES = unicodedata.normalize("NFC", "सौ|हज़ार|हजार|लाख|करोड़|अरब")
_AMOUNT_IN_RUPEES = re.compile(rf"₹\s*(\d(?:[\d,.]*\d)?(?:\s+(?:{_SCALES})(?!\w))?)")


def nfc_punct(text: str) -> str:
    """NFC, punctuation to space, lower case, white space to single spaces: "Hello,  World!" -> "hello world"."""
    return " ".join(unicodedata.normalize("NFC", text).translate(_NFC_PUNCT).lower().split())


def indic(text: str) -> str:
    """``nfc_punct``, and one spelling for what is spelt in several ways: "₹५ … हिन्दी" -> "5 रुपये हिंदी".

    Joiners, byte order marks and other invisible characters go; nuktas are in NFC's form; chandrabindu and a nasal
    consonant before a stop of its own class become the anusvara (Devanagari only); digits of every script
    become ASCII; the rupee sign becomes its word; every Unicode punctuation mark is a space.
    """
    visible = "".join(char for char in text if unicodedata.category(char) != "Cf")
    one_form = unicodedata.normalize("NFC", visible).lower()
    digits = "".join(str(unicodedata.decimal(char, char)) for char in one_form)
    nasals = _HOMORGANIC_NASAL.sub(_ANUSVARA, digits.replace(_CHANDRABINDU, _ANUSVARA))
    rupees = _AMOUNT_IN_RUPEES.sub(rf"\1 {_RUPEES} ", nasals).replace("₹", f" {_RUPEES} ")
    spoken = "".join(" " if unicodedata.category(char)[0] == "P" else char for char in rupees.translate(_NFC_PUNCT))
    return " ".join(unicodedata.normalize("NFC", spoken).split())


NORMALISERS: dict[str, Callable[[str], str]] = {"nfc_punct": nfc_punct, "indic": indic}
