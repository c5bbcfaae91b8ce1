"""The audio scorer protocol, version 1, as bytes: one JSON request per clip, one JSON answer.

Client and servers share this file, so that a rule exists once. Legend: ``S`` audio sample.

    encode_request   Clip  -> bytes         client
    decode_request   bytes -> Clip          server    BadRequestError: what the 400 says
    encode_answer    dict  -> bytes         server
    decode_answer    bytes -> Score         client    ScorerProtocolError, ScorerRejected
    read_answer      dict  -> Score         a scoring function in place of a server obeys the same rules

What these raise says what is wrong with the body; the client puts URL, sample and attempts in front.
"""

import binascii
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import orjson
import pybase64

from verl_tts.errors import DataError, ScorerProtocolError, ScorerRejected
from verl_tts.types import Scalar, Score, Waveform

PROTOCOL_VERSION = "1"
EXCERPT_CHARS = 200  # of an answer, in a message
MAX_RATE_HZ = 10_000_000  # far beyond sound; at 10**18 Hz a resampler designs its filter for ever
MAX_CLIP_S = 3600.0  # resampled to what a model hears, a megabyte at 1 Hz would be all memory of a server

# Keys of an answer that mean something; every other one is a scalar that is logged under its name.
_RESERVED_KEYS = frozenset({"score", "error", "id", "num_samples"})

# What the client notes of each answer; an answer's own would be taken for it.
LATENCY_NOTE, RETRIES_NOTE, WAITING_NOTE = "scorer_latency_s", "scorer_retries", "scorer_waiting_s"

ScoreRange = tuple[float | None, float | None]
UNBOUNDED: ScoreRange = (None, None)


@dataclass(frozen=True)
class Clip:
    """What a scorer is asked about: the audio, the text that should be heard, the row's scalars."""

    waveform: Waveform
    prompt: str
    metadata: Mapping[str, Scalar]

    @property
    def id(self) -> str:
        return str(self.metadata.get("id", ""))


class BadRequestError(ValueError):
    """A request that breaks the protocol; the message is what the server answers with its 400."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")


def excerpt(text: object) -> str:
    """One line of at most ``EXCERPT_CHARS`` characters, none of which a terminal would obey."""
    line = " ".join(str(text).split())
    line = "".join(char if char.isprintable() else "\ufffd" for char in line[: EXCERPT_CHARS + 1])
    return line if len(line) <= EXCERPT_CHARS else line[: EXCERPT_CHARS - 1] + "…"


def _is_number(value: object) -> bool:
    """A finite JSON number. ``true`` is an int to Python and no number here."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


# --- request ---------------------------------------------------------------------------------------------------------


def encode_request(clip: Clip) -> bytes:
    """The body of one request.

    Raises DataError if the metadata hold anything but scalars: JSON has no NaN, and turning one into
    null would hide a hole in the data from the scorer.
    """
    for key, value in clip.metadata.items():
        if not (value is None or isinstance(value, (str, bool)) or _is_number(value)):
            raise DataError(
                f"row {clip.id!r}: extra_info.{key}={excerpt(repr(value))} cannot be sent to a scorer; "
                "only text, finite numbers, true, false and null can"
            )
    samples_S = np.ascontiguousarray(clip.waveform.samples_S, dtype="<f4")
    request = {
        "protocol_version": PROTOCOL_VERSION,
        "waveform_f32_base64": pybase64.b64encode_as_string(samples_S.tobytes()),
        "num_samples": len(samples_S),
        "sample_rate": clip.waveform.sample_rate_hz,
        "prompt": clip.prompt,
        "metadata": dict(clip.metadata),
    }
    try:
        return orjson.dumps(request)
    except orjson.JSONEncodeError as error:  # half a surrogate pair, an integer of more than 64 bits
        raise DataError(f"row {clip.id!r} cannot be sent to a scorer: {error}") from error


def decode_request(body: bytes) -> Clip:
    """The clip of one request; raises BadRequestError, which names the field."""
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequestError("body", f"not JSON ({error})") from error
    if not isinstance(request, dict):
        raise BadRequestError("body", f"a JSON object is expected, not {_json_type(request)}")
    if request.get("protocol_version") != PROTOCOL_VERSION:
        raise BadRequestError(
            "protocol_version", f'"{PROTOCOL_VERSION}" is expected, not {_shown(request, "protocol_version")}'
        )

    samples_S = _decode_samples(request)
    sample_rate_hz = request.get("sample_rate")
    if type(sample_rate_hz) is not int or not 0 < sample_rate_hz <= MAX_RATE_HZ:
        given = _shown(request, "sample_rate")
        raise BadRequestError("sample_rate", f"an integer above 0, at most {MAX_RATE_HZ}, is expected, not {given}")
    if (seconds := len(samples_S) / sample_rate_hz) > MAX_CLIP_S:
        raise BadRequestError(
            "sample_rate", f"the clip lasts {seconds:.0f} s at {sample_rate_hz} Hz, limit {MAX_CLIP_S:g} s"
        )
    prompt = request.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadRequestError("prompt", f"a text that is not empty is expected, not {_shown(request, 'prompt')}")
    metadata = request.get("metadata")
    if not isinstance(metadata, dict):
        raise BadRequestError("metadata", f"an object is expected, not {_shown(request, 'metadata')}")
    for key, value in metadata.items():
        if isinstance(value, (dict, list)):
            raise BadRequestError(f"metadata.{excerpt(key)}", f"a scalar is expected, not {_json_type(value)}")
    return Clip(Waveform(samples_S, sample_rate_hz), prompt, metadata)


def _decode_samples(request: dict) -> np.ndarray:
    encoded = request.get("waveform_f32_base64")
    if not isinstance(encoded, str):
        raise BadRequestError("waveform_f32_base64", f"a text is expected, not {_json_type(encoded)}")
    try:
        raw = pybase64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequestError("waveform_f32_base64", f"not base64 ({error})") from error
    if len(raw) % 4:
        raise BadRequestError("waveform_f32_base64", f"{len(raw)} bytes are no whole number of float32 samples")
    samples_S = np.frombuffer(raw, dtype="<f4").astype(np.float32, copy=False)
    if len(samples_S) == 0:
        raise BadRequestError("waveform_f32_base64", "at least one sample is expected")
    if type(request.get("num_samples")) is not int or request["num_samples"] != len(samples_S):
        raise BadRequestError("num_samples", f"{_shown(request, 'num_samples')} given, {len(samples_S)} decoded")
    if not np.isfinite(samples_S).all():
        raise BadRequestError("waveform_f32_base64", "a sample is NaN or infinite")
    return samples_S


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(request: dict, field: str) -> str:
    return excerpt(repr(request[field])) if field in request else "nothing"


# --- answer ----------------------------------------------------------------------------------------------------------


def encode_answer(answer: Mapping[str, Scalar]) -> bytes:
    """The body of an answer; raises ValueError on a number that JSON does not have."""
    for key, value in answer.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} is {value}, which is no JSON number")
    return orjson.dumps(answer)


def decode_answer(body: bytes, clip: Clip, score_range: ScoreRange = UNBOUNDED) -> Score:
    """The score in the body of a 200; raises ScorerProtocolError or ScorerRejected."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ScorerProtocolError(
            f"the answer is not JSON ({error}): {excerpt(body.decode(errors='replace'))}"
        ) from error
    return read_answer(answer, clip, score_range)


def is_object(body: bytes) -> bool:
    """Whether ``body`` is a JSON object, as every answer with a 200 is."""
    try:
        return isinstance(orjson.loads(body), dict)
    except orjson.JSONDecodeError:
        return False


def read_answer(answer: object, clip: Clip, score_range: ScoreRange = UNBOUNDED) -> Score:
    """The score in an answer: numbers become ``parts``, texts and nulls ``notes``."""
    if not isinstance(answer, Mapping):
        raise ScorerProtocolError(f"the answer is not an object: {excerpt(repr(answer))}")
    if answer.get("error") is not None:
        raise ScorerRejected(f"the scorer reports an error: {excerpt(answer['error'])}")

    _check_echo(answer, "id", clip.metadata.get("id"))
    _check_echo(answer, "num_samples", len(clip.waveform.samples_S))
    if "score" not in answer:
        raise ScorerProtocolError(f"the answer has no score: {excerpt(dict(answer))}")
    total = answer["score"]
    if not _is_number(total):
        raise ScorerProtocolError(f"score={excerpt(repr(total))} is not a finite number")
    low, high = score_range
    if (low is not None and total < low) or (high is not None and total > high):
        raise ScorerProtocolError(f"score={total} is outside the scorer's own range [{low}, {high}]")

    parts: dict[str, float] = {}
    notes: dict[str, Scalar] = {}
    for key, value in answer.items():
        if key in _RESERVED_KEYS:
            continue
        if key in (LATENCY_NOTE, RETRIES_NOTE, WAITING_NOTE):
            raise ScorerProtocolError(
                f"the answer has the key {key!r}, under which the client notes its own; rename it"
            )
        if value is None or isinstance(value, str):
            notes[key] = value
        elif isinstance(value, bool) or _is_number(value):
            parts[key] = float(value)
        else:
            raise ScorerProtocolError(
                f"{excerpt(key)}={excerpt(repr(value))} is not a finite number, text, true, false or null"
            )
    return Score(total=float(total), parts=parts, notes=notes)


def _check_echo(answer: Mapping, key: str, sent: object) -> None:
    if key in answer and (answer[key] != sent or type(answer[key]) is not type(sent)):
        raise ScorerProtocolError(f"the answer is for another clip: {key}={excerpt(repr(answer[key]))}, sent {sent!r}")


# --- /info -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScorerInfo:
    """Who scores. Every field but the range is None for a scorer that has no ``/info``."""

    name: str | None = None
    version: str | None = None
    model: str | None = None
    revision: str | None = None
    score_range: ScoreRange = UNBOUNDED
    fingerprint: str | None = None
    part_names: tuple[str, ...] | None = None  # numbers that every answer holds beside the score; our addition


def decode_info(body: bytes) -> ScorerInfo:
    """The body of ``GET /info``; raises ScorerProtocolError."""
    try:
        info = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ScorerProtocolError(f"/info is not JSON ({error}): {excerpt(body.decode(errors='replace'))}") from error
    if not isinstance(info, dict):
        raise ScorerProtocolError(f"/info is not an object: {excerpt(repr(info))}")
    texts = {key: info.get(key) for key in ("name", "version", "model", "revision", "fingerprint")}
    for key, value in texts.items():
        if not (value is None or isinstance(value, str)):
            raise ScorerProtocolError(f"/info: {key}={excerpt(repr(value))} is not a text or null")
    ends = info.get("score_range", [None, None])
    if not isinstance(ends, list) or len(ends) != 2 or not all(end is None or _is_number(end) for end in ends):
        raise ScorerProtocolError(f"/info: score_range={excerpt(repr(ends))} is not [low, high] with numbers or null")
    low, high = ends
    if low is not None and high is not None and low > high:
        raise ScorerProtocolError(f"/info: score_range={ends} has its low end above its high end")
    names = info.get("part_names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return ScorerInfo(**texts, score_range=(low, high))
    return ScorerInfo(**texts, score_range=(low, high), part_names=tuple(names))
