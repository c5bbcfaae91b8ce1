"""What Qwen3-TTS-12Hz "Base" is told before it speaks, without torch: ids, chat template, prompt layouts.

Every position of the talker's input is the sum of a text part, ``T(id) = text_projection(text_embedding(id))``,
and a codec part. A prompt is a list of named slots; a layout is declared once, below, and both the rollout
(how long is a prompt?) and the actor (what is at each position?) read it here.

    slot        rows               text part          codec part
    role        3                  <|im_start|>...    none
    tags        3, or 4 with a     tts_pad            nothink, think_bos, think_eos, or
                named language                        think, think_bos, language, think_eos
    speaker     1                  tts_pad            the speaker embedding
    text_start  1                  tts_bos            codec_pad
  non_streaming
    words       one a word         the words          codec_pad
    text_end    1                  tts_eos            codec_pad
    start       1                  tts_pad            codec_bos
  streaming
    start       1                  the first word     codec_bos

A frame that is fed back is one more position: its codec part is the sum of the embeddings of its 16 codes,
its text part is tts_pad (non_streaming), or the next word, then tts_eos, then tts_pad (streaming).
"Word" means text token. The logits at ``start`` predict the first codebook-0 token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal, get_args

from verl_tts.errors import ConfigError, DataError
from verl_tts.models.plain_text import Encode

MODEL_TYPE = "qwen3_tts"
NUM_CODEBOOKS = 16
SAMPLE_RATE_HZ = 24000
SAMPLES_PER_FRAME = 1920

Layout = Literal["non_streaming", "streaming"]


# ---------------------------------------------------------------------------------------------------- config


@dataclass(frozen=True)
class TokenIds:
    """The special ids of a checkpoint; ``codes`` is the size of a codebook."""

    im_start: int
    im_end: int
    tts_pad: int
    tts_bos: int
    tts_eos: int
    codec_pad: int
    codec_bos: int
    codec_eos: int
    think: int
    nothink: int
    think_bos: int
    think_eos: int
    codes: int
    codec_vocab: int
    languages: Mapping[str, int]

    @classmethod
    def of(cls, config: Any) -> "TokenIds":
        """From a ``Qwen3TTSConfig`` or from the dictionary in ``config.json``."""
        talker = _get(config, "talker_config")
        return cls(
            im_start=_get(config, "im_start_token_id"),
            im_end=_get(config, "im_end_token_id"),
            tts_pad=_get(config, "tts_pad_token_id"),
            tts_bos=_get(config, "tts_bos_token_id"),
            tts_eos=_get(config, "tts_eos_token_id"),
            codec_pad=_get(talker, "codec_pad_id"),
            codec_bos=_get(talker, "codec_bos_id"),
            codec_eos=_get(talker, "codec_eos_token_id"),
            think=_get(talker, "codec_think_id"),
            nothink=_get(talker, "codec_nothink_id"),
            think_bos=_get(talker, "codec_think_bos_id"),
            think_eos=_get(talker, "codec_think_eos_id"),
            codes=_get(_get(talker, "code_predictor_config"), "vocab_size"),
            codec_vocab=_get(talker, "vocab_size"),
            languages=_get(talker, "codec_language_id"),
        )

    @property
    def support(self) -> list[int]:
        """The codebook-0 ids that the rollout engine can sample, ascending: 1 to 2047 and EOS.

        vLLM-Omni never samples id 0, qwen-tts does; both sides' log-probs are over this set.
        """
        return [*range(1, self.codes), self.codec_eos]


def _get(config: Any, name: str) -> Any:
    return config[name] if isinstance(config, Mapping) else getattr(config, name)


def language_id(config: Any, name: str) -> int | None:
    """The codec id of a language, any case; None for "Auto", which leaves the language to the model.

    Raises ``ConfigError`` for a language that the checkpoint does not have.
    """
    if name.lower() == "auto":
        return None
    languages = TokenIds.of(config).languages
    if name.lower() not in languages:
        raise ConfigError(f"Unknown language {name!r}: this checkpoint knows {', '.join(['Auto', *sorted(languages)])}")
    return languages[name.lower()]


# ---------------------------------------------------------------------------------------------------- prompt


def assistant_text(text: str) -> str:
    """The chat template as it is published; its token ids are the ``text_ids`` of everything below."""
    return f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n"


def text_ids_of(ids: TokenIds, encode: Encode, text: str) -> list[int]:
    """The token ids of ``assistant_text(text)``; what is spelt in ``text`` is text, see plain_text.py."""
    said = [ids.im_start, *encode(f"assistant\n{text}"), ids.im_end]
    return [*said, *encode("\n"), ids.im_start, *encode("assistant\n")]


ROLE_TOKENS = 3  # <|im_start|> assistant \n
CLOSING_TOKENS = 5  # <|im_end|> \n <|im_start|> assistant \n


class Text(Enum):
    """The text part of a slot."""

    ROLE = auto()
    WORDS = auto()
    FIRST_WORD = auto()
    PAD = auto()
    BOS = auto()
    EOS = auto()


class Codec(Enum):
    """The codec part of a slot."""

    NONE = auto()
    TAGS = auto()
    SPEAKER = auto()
    PAD = auto()
    BOS = auto()


@dataclass(frozen=True)
class Slot:
    """As many rows as its longer part has ids; the other part is repeated."""

    name: str
    text: Text
    codec: Codec


PREFIX = (
    Slot("role", Text.ROLE, Codec.NONE),
    Slot("tags", Text.PAD, Codec.TAGS),
    Slot("speaker", Text.PAD, Codec.SPEAKER),
    Slot("text_start", Text.BOS, Codec.PAD),
)
SLOTS: dict[Layout, tuple[Slot, ...]] = {
    "non_streaming": (
        *PREFIX,
        Slot("words", Text.WORDS, Codec.PAD),
        Slot("text_end", Text.EOS, Codec.PAD),
        Slot("start", Text.PAD, Codec.BOS),
    ),
    "streaming": (*PREFIX, Slot("start", Text.FIRST_WORD, Codec.BOS)),
}

# In the codec part of a row: an id, or one of these.
NO_CODEC = -1
SPEAKER = -2


@dataclass(frozen=True)
class Prompt:
    """One prompt, row by row: ``text_P`` and ``codec_P`` are ids, ``frames_text`` goes with the frames fed back."""

    text_P: Sequence[int]
    codec_P: Sequence[int]
    frames_text: Sequence[int]
    tts_pad: int

    def __len__(self) -> int:
        return len(self.text_P)

    def text_of_frames(self, frames: int) -> list[int]:
        """The text ids of the first ``frames`` frames: what is left of the text, then tts_pad."""
        head = self.frames_text[:frames]
        return [*head, *[self.tts_pad] * (frames - len(head))]


def build_prompt(ids: TokenIds, layout: str, text_ids: Sequence[int], language: int | None) -> Prompt:
    """Fills the slots of ``layout`` for one text.

    ``text_ids`` are the token ids of ``assistant_text(text)``, ``language`` is an id or None for "Auto".
    Raises ``DataError`` if the text has no token of its own.
    """
    words = text_ids[ROLE_TOKENS:-CLOSING_TOKENS]
    if len(words) == 0:
        raise DataError(
            f"The text of a prompt is empty: {len(text_ids)} token ids, {ROLE_TOKENS + CLOSING_TOKENS} of them template"
        )
    if language is None:
        tags = [ids.nothink, ids.think_bos, ids.think_eos]
    else:
        tags = [ids.think, ids.think_bos, language, ids.think_eos]
    text = {
        Text.ROLE: text_ids[:ROLE_TOKENS],
        Text.WORDS: words,
        Text.FIRST_WORD: words[:1],
        Text.PAD: [ids.tts_pad],
        Text.BOS: [ids.tts_bos],
        Text.EOS: [ids.tts_eos],
    }
    codec = {
        Codec.NONE: [NO_CODEC],
        Codec.TAGS: tags,
        Codec.SPEAKER: [SPEAKER],
        Codec.PAD: [ids.codec_pad],
        Codec.BOS: [ids.codec_bos],
    }
    text_P: list[int] = []
    codec_P: list[int] = []
    for slot in slots(layout):
        slot_text, slot_codec = text[slot.text], codec[slot.codec]
        rows = max(len(slot_text), len(slot_codec))
        text_P.extend(slot_text if len(slot_text) == rows else [*slot_text] * rows)
        codec_P.extend(slot_codec if len(slot_codec) == rows else slot_codec * rows)
    frames_text = [*words[1:], ids.tts_eos] if layout == "streaming" else []
    return Prompt(text_P, codec_P, frames_text, ids.tts_pad)


def slots(layout: str) -> tuple[Slot, ...]:
    for known in get_args(Layout):
        if layout == known:
            return SLOTS[known]
    raise ConfigError(f"Unknown prompt layout {layout!r}: choose one of {', '.join(get_args(Layout))}")


def prompt_length(config: Any, layout: str, text_ids: Sequence[int], language: int | None) -> int:
    """Rows of a prompt: the number of placeholder ids that the rollout engine is given for it."""
    return len(build_prompt(TokenIds.of(config), layout, text_ids, language))
