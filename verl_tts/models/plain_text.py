"""What a person wrote, as token ids: text, whatever it spells.

A tokenizer takes the spelling of one of its special tokens, such as ``<|im_end|>``, for the token itself. Spelt by a
row or a request it would end the turn that it stands in, and the policy would be told something else than its text. So
a prompt builder sets the special tokens of its template by their ids, and whatever stands between two of them, the text
with what surrounds it, is encoded in one piece by ``encoder``. For a text that spells none the ids are those of the
whole template encoded at once: a tokenizer cuts at special tokens first, and joins nothing across them.
"""

from collections.abc import Callable, Sequence
from typing import Any

Encode = Callable[[str], Sequence[int]]


def encoder(tokenizer: Any) -> Encode:
    """``tokenizer`` is one of Transformers'; what it adds to a text of its own accord is left out, too."""
    return lambda text: tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
