"""When are two texts the same prompt? After folding: Unicode forms, case, digits, invisible signs, punctuation."""

import unicodedata

_KEPT = ("L", "M", "N")  # letters, marks (vowel signs are marks), numbers: the first letter of a Unicode category
_INVISIBLE = "Cf"  # joiners, byte order marks, direction marks


def fold(text: str) -> str:
    """``fold("“Straße”,  No. १२") == "strasse no 12"``; "" if nothing can be spoken.

    NFKC, case folding, decimal digits of any script to ASCII, format characters dropped, everything but letters,
    marks and numbers to single spaces. Spellings of a word stay apart: हिन्दी and हिंदी are two.
    """
    folded = []
    for character in unicodedata.normalize("NFKC", text).casefold():
        category = unicodedata.category(character)
        if category == _INVISIBLE:
            continue
        digit = unicodedata.decimal(character, None)
        kept = character if category[0] in _KEPT else " "
        folded.append(kept if digit is None else str(digit))
    return " ".join(unicodedata.normalize("NFKC", "".join(folded)).split())
