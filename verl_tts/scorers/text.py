"""Text normalisation before text is compared. A profile has a name, which is part of a scorer's fingerprint."""

import string
import unicodedata
from collections.abc import Callable

# ASCII without the dollar sign, dandas, acute accent, curly quotes, dashes. Other signs stay, among them the
# ellipsis and the rupee sign: published Hindi figures were made with exactly this set, and compare only with it.
_NFC_PUNCT = str.maketrans(dict.fromkeys(string.punctuation.replace("$", "") + "।॥´’‘“”–—", " "))


def nfc_punct(text: str) -> str:
    """NFC, punctuation to space, lower case, white space to single spaces: "Hello,  World!" -> "hello world"."""
    return " ".join(unicodedata.normalize("NFC", text).translate(_NFC_PUNCT).lower().split())


NORMALISERS: dict[str, Callable[[str], str]] = {"nfc_punct": nfc_punct}
