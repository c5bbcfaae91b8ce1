"""What MOSS-VoiceGenerator is told and what it may answer, without torch: ids, prompts, the delay pattern.

A position of the input has one text token and one code of each of Q codebooks; its embedding is the sum of all
1 + Q. Codebook q of a frame stands q positions below codebook 0 of the same frame, and what stands nowhere is the
pad code, which has an embedding like any other:

    position   text          codebook 0   1     2      (three codebooks, two frames)
    0          audio_start   pad          pad   pad
    1          gen           a0           pad   pad
    2          delay         b0           a1    pad
    3          delay         pad          b1    a2
    4          delay         pad          pad   b2
    5          audio_end     pad          pad   pad

``Cursor`` says for each position which text tokens may stand there and which codebooks have a code; it follows the
model's published generation loop, and both the rollout engine, which samples by it, and the actor, which replays by
it, ask no one else. In a prompt the first delay token of a clip comes one position later (``audio_block``): that is
how the model was trained to read, and the loop above is how it writes.

Shapes: ``P`` position of a prompt, ``T`` position of an answer, ``F`` codec frame, ``Q`` codebook, ``C`` channel:
the text, then the Q codebooks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, get_args

import numpy as np

from verl_tts.errors import ConfigError, DataError
from verl_tts.models.plain_text import Encode

MODEL_TYPE = "moss_tts_delay"
SAMPLE_RATE_HZ = 24000
SAMPLES_PER_FRAME = 1920

ReferenceFormat = Literal["in_context", "single_turn"]


@dataclass(frozen=True)
class TokenIds:
    """The ids of a checkpoint. Codes are 0 to ``codes`` - 1; ``pad_code`` is ``codes``."""

    text_pad: int
    im_start: int
    im_end: int
    audio_start: int
    audio_end: int
    user_slot: int
    gen_slot: int
    delay_slot: int
    text_vocab: int
    codebooks: int
    codes: int
    pad_code: int

    @classmethod
    def of(cls, config: Any) -> "TokenIds":
        """From a configuration object or from the dictionary in ``config.json``."""
        return cls(
            text_pad=_get(config, "pad_token_id"),
            im_start=_get(config, "im_start_token_id"),
            im_end=_get(config, "im_end_token_id"),
            audio_start=_get(config, "audio_start_token_id"),
            audio_end=_get(config, "audio_end_token_id"),
            user_slot=_get(config, "audio_user_slot_token_id"),
            gen_slot=_get(config, "audio_assistant_gen_slot_token_id"),
            delay_slot=_get(config, "audio_assistant_delay_slot_token_id"),
            text_vocab=_get(_get(config, "language_config"), "vocab_size"),
            codebooks=_get(config, "n_vq"),
            codes=_get(config, "audio_vocab_size"),
            pad_code=_get(config, "audio_pad_code"),
        )


def _get(config: Any, name: str) -> Any:
    return config[name] if isinstance(config, Mapping) else getattr(config, name)


# ------------------------------------------------------------------------------------------- the delay pattern


def delay(codes_FQ: np.ndarray, pad_code: int) -> np.ndarray:
    """(F + Q - 1, Q): codebook q is q rows further down, what is left is ``pad_code``. No rows for no frames.

    >>> delay(np.array([[1, 2], [3, 4]]), 9).tolist()
    [[1, 9], [3, 2], [9, 4]]
    """
    frames, books = codes_FQ.shape
    rows_RQ = np.full((frames + books - 1 if frames else 0, books), pad_code, np.int64)
    for book in range(books):
        rows_RQ[book : book + frames, book] = codes_FQ[:, book]
    return rows_RQ


def undelay(rows_RQ: np.ndarray) -> np.ndarray:
    """The frames of which every codebook is there, (F, Q); the inverse of ``delay``."""
    books = rows_RQ.shape[1]
    frames = max(0, len(rows_RQ) - books + 1)
    return np.stack([rows_RQ[book : book + frames, book] for book in range(books)], axis=1)


class Text(IntEnum):
    """How the text token of a position comes about."""

    FORCED = 0  # no choice: the rest of the delay tokens, and audio_end
    IN_CLIP = 1  # one more frame, or the first delay token
    FREE = 2  # outside a clip: any token but those that belong into one


@dataclass
class Cursor:
    """The state of an answer before its next position. ``Cursor()`` is that of an empty one."""

    position: int = 0
    opened: int = 0  # positions since audio_start, itself included: codebook q < opened has begun
    flushed: int | None = None  # delay tokens so far: codebook q < flushed has ended; None: none yet
    in_clip: bool = False

    def active(self, ids: TokenIds) -> range:
        """The codebooks that have a code at this position."""
        return range(self.flushed or 0, min(self.opened, ids.codebooks))

    def forced(self, ids: TokenIds) -> int | None:
        """The text token of this position, if there is no choice."""
        if self.flushed is None:
            return None
        return ids.delay_slot if self.flushed < ids.codebooks else ids.audio_end

    def kind(self, ids: TokenIds) -> Text:
        if self.flushed is not None:
            return Text.FORCED
        return Text.IN_CLIP if self.in_clip else Text.FREE

    def banned(self, ids: TokenIds) -> list[int]:
        """The tokens that a ``FREE`` position may not have. Nothing ends before a clip could have."""
        never = [ids.text_pad, ids.gen_slot, ids.delay_slot, ids.audio_end]
        return [*never, ids.im_end] if self.position <= ids.codebooks else never

    def allows(self, token: int, ids: TokenIds) -> bool:
        match self.kind(ids):
            case Text.FORCED:
                return token == self.forced(ids)
            case Text.IN_CLIP:
                return token in (ids.gen_slot, ids.delay_slot)
            case _:
                return 0 <= token < ids.text_vocab and token not in self.banned(ids)

    def advance(self, token: int, ids: TokenIds) -> None:
        """Moves on by one position, whose text token is ``token``."""
        self.position += 1
        if token == ids.audio_end:
            self.opened, self.in_clip = 0, False
        elif token in (ids.audio_start, ids.gen_slot, ids.delay_slot):
            self.opened += 1
            self.in_clip = self.in_clip or token == ids.audio_start
        if self.flushed is not None or token == ids.delay_slot:
            self.flushed = (self.flushed or 0) + 1
            if self.flushed > ids.codebooks:
                self.flushed = None


@dataclass(frozen=True)
class Plan:
    """What each position of an answer was free to choose.

    ``kind_T`` are ``Text`` values; ``active_TQ`` says which codebooks have a code; ``banned_end_T`` whether a FREE
    position came too early for im_end.
    """

    kind_T: np.ndarray
    active_TQ: np.ndarray
    banned_end_T: np.ndarray

    @property
    def sampled_TC(self) -> np.ndarray:
        """Which channels were sampled: the text, then the codebooks."""
        return np.concatenate([(self.kind_T != Text.FORCED)[:, None], self.active_TQ], axis=1)


def plan(ids: TokenIds, tokens_T: Iterable[int]) -> Plan:
    """The plan behind the text tokens of an answer, which decide it. ``DataError`` for one that cannot be sampled."""
    tokens = [int(token) for token in tokens_T]
    cursor, kinds, too_early = Cursor(), [], []
    active_TQ = np.zeros((len(tokens), ids.codebooks), bool)
    for position, token in enumerate(tokens):
        if not cursor.allows(token, ids):
            raise DataError(f"text token {token} cannot stand at position {position} of an answer: {cursor}")
        kinds.append(cursor.kind(ids))
        too_early.append(cursor.position <= ids.codebooks)
        books = cursor.active(ids)
        active_TQ[position, books.start : books.stop] = True
        cursor.advance(token, ids)
    return Plan(np.array(kinds, np.int64), active_TQ, np.array(too_early, bool))


def frames_of(ids: TokenIds, tokens_T: Iterable[int], codes_TQ: np.ndarray) -> np.ndarray:
    """The whole frames of an answer, (F, Q), clip after clip. ``DataError`` where codes are not as the text says."""
    planned = plan(ids, tokens_T)
    if codes_TQ.shape != planned.active_TQ.shape:
        raise DataError(f"codes have shape {codes_TQ.shape}, their text asks for {planned.active_TQ.shape}")
    inside_TQ = (codes_TQ >= 0) & (codes_TQ < ids.codes)
    if (wrong := np.argwhere(np.where(planned.active_TQ, ~inside_TQ, codes_TQ != ids.pad_code))).size:
        position, book = wrong[0]
        raise DataError(f"position {position}, codebook {book} has the code {codes_TQ[position, book]}")
    return frames_of_codes(codes_TQ, ids.pad_code)


def frames_of_codes(codes_TQ: np.ndarray, pad_code: int) -> np.ndarray:
    """The whole frames in the codes of an answer, (F, Q), clip after clip; what a limit cut off is left out."""
    # Neither audio_start nor audio_end has codes, so two clips never touch.
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (codes_TQ != pad_code).any(axis=1), [0]])))
    clips = [undelay(codes_TQ[first:end]) for first, end in zip(edges[::2], edges[1::2], strict=True)]
    return np.concatenate([np.zeros((0, codes_TQ.shape[1]), np.int64), *clips])


# ---------------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True)
class Prompt:
    """``text_P`` and ``codes_PQ``, row by row: what both the rollout engine and the actor embed."""

    text_P: Sequence[int]
    codes_PQ: np.ndarray


# The fields of a user's turn, in this order; one that is not given reads None.
FIELDS = (
    "Reference(s)",
    "Instruction",
    "Tokens",
    "Quality",
    "Sound Event",
    "Ambient Sound",
    "Language",
    "Text",
)
REFERENCE_LABEL = "[S1]:\n"


def build_prompt(
    ids: TokenIds,
    encode: Encode,
    text: str,
    *,
    instruction: str | None = None,
    language: str | None = None,
    reference_FQ: np.ndarray | None = None,
    reference_format: str = "in_context",
) -> Prompt:
    """The conversation up to where the model's answer begins; ``encode`` is that of plain_text.py.

    Without a reference one user's turn. With one, ``single_turn`` puts the clip into that turn's field of
    references; ``in_context`` puts an empty user's turn and the clip as the model's answer before it, so that the
    answer to come is the fourth message. Raises ``ConfigError`` and ``DataError``.
    """
    known = get_args(ReferenceFormat)
    if reference_format not in known:
        raise ConfigError(f"Unknown reference format {reference_format!r}: choose one of {', '.join(known)}")
    said = {"Text": text, "Instruction": instruction, "Language": language}
    builder = _Builder(ids, encode)
    if reference_FQ is None:
        builder.user(said)
    elif reference_format == "single_turn":
        builder.user(said, reference_FQ)
    else:
        builder.user({})
        builder.open("assistant\n")
        builder.clip(reference_FQ, ids.gen_slot, ids.delay_slot)
        builder.close()
        builder.user(said)
    builder.open("assistant\n")
    return builder.finish()


class _Builder:
    def __init__(self, ids: TokenIds, encode: Encode) -> None:
        self.ids, self.encode = ids, encode
        self._text: list[int] = []
        self._codes: list[np.ndarray] = []
        self._pending = ""

    def write(self, text: str) -> None:
        self._pending += text  # tokenised in one piece: a tokenizer merges across calls

    def open(self, role: str) -> None:
        self._flush()
        self._append([self.ids.im_start])
        self.write(role)

    def close(self) -> None:
        self._flush()
        self._append([self.ids.im_end])
        self.write("\n")

    def user(self, said: Mapping[str, str | None], reference_FQ: np.ndarray | None = None) -> None:
        self.open("user\n<user_inst>")
        for field in FIELDS:
            self.write(f"\n- {field}:\n")
            if field == FIELDS[0] and reference_FQ is not None:
                self.write(REFERENCE_LABEL)
                self.clip(reference_FQ, self.ids.user_slot, self.ids.user_slot)
            else:
                self.write(said.get(field) or "None")
        self.write("\n</user_inst>")
        self.close()

    def clip(self, codes_FQ: np.ndarray, slot: int, delay_slot: int) -> None:
        """As the model was trained to read a clip: a slot for each frame, then the delay slots, between the marks."""
        ids = self.ids
        if codes_FQ.ndim != 2 or codes_FQ.shape[1] != ids.codebooks or len(codes_FQ) == 0:
            raise DataError(f"a reference clip has codes of shape {codes_FQ.shape}, not (frames, {ids.codebooks})")
        self._flush()
        rows_RQ = delay(codes_FQ, ids.pad_code)
        slots = [slot] * len(codes_FQ) + [delay_slot] * (ids.codebooks - 1)
        self._append([ids.audio_start])
        self._append(slots, rows_RQ)
        self._append([ids.audio_end])

    def finish(self) -> Prompt:
        self._flush()
        return Prompt(self._text, np.concatenate(self._codes))

    def _flush(self) -> None:
        self._append(self.encode(self._pending))
        self._pending = ""

    def _append(self, text: Sequence[int], codes_RQ: np.ndarray | None = None) -> None:
        self._text += [int(token) for token in text]
        pad_RQ = np.full((len(text), self.ids.codebooks), self.ids.pad_code, np.int64)
        self._codes.append(pad_RQ if codes_RQ is None else codes_RQ)
