"""What a person wrote, as token ids: text, whatever it spells.

A tokenizer takes the spelling of one of its special tokens, such as ``<|im_end|>``, for the token itself. Spelt by a
row or a request it would end the turn that it stands in, and the policy would be told something else than its text. So
a prompt builder sets the special tokens of its template by their ids, and whatever stands between two of them, the text
with what surrounds it, is encoded in one piece by ``encoder``. For a text that spells none the ids are those of the
whole template encoded at once: a tokenizer cuts at special tokens first, and joins nothing across them.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

Encode = Callable[[str], Sequence[int]]


def encoder(tokenizer: Any) -> Encode:
    """``tokenizer`` is one of Transformers'; what it adds to a text of its own accord is left out, too.

    It is copied without any token beyond its vocabulary: one that a policy's template uses need not be marked special,
    as Qwen's ``<|fim_pad|>``, whose id is MOSS's delay slot, is not.
    """
    copied = json.loads(tokenizer.backend_tokenizer.to_str()) | {"added_tokens": []}
    plain = Tokenizer.from_str(json.dumps(copied))
    return lambda text: plain.encode(text, add_special_tokens=False).ids
