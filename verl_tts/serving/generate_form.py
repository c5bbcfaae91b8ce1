"""The published ``POST /generate`` form, for clients that were written for MOSS's SGLang server.

    {"text": "${instruction:Speak softly.}Good morning.", "audio_data": "anna/1.wav",
     "sampling_params": {"temperature": 1.0, "top_p": 0.8, "top_k": 50, "repetition_penalty": 1.1,
                         "max_new_tokens": 4096}}
    -> {"text": BASE64 OF A WAV FILE, "meta_info": {"id", "finish_reason", "completion_tokens"}}

``text`` begins with tags, in this order and each at most once: ``${token:N}``, ``${instruction:...}``,
``${ambient_sound:...}``; what follows is spoken as it is. ``audio_data`` is the path of one recording below the folder
that the server was started with, and nothing else: no address, no data, no way out of it.

MOSS takes the repetition penalty without effect: its talker here draws codes without one.

Differs from the published server: a text is not rewritten; ``stream``, several texts in a request and the tags token
and ambient_sound are refused; an error is {"error": {"message"}} with a status that says whose it is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_tts.config.validate import MAX_FRAMES
from verl_tts.errors import ConfigError, DataError
from verl_tts.serving.speech import Sampling, Speech, check_seed

TAGS = ("token", "instruction", "ambient_sound")
TAG = re.compile(r"\$\{(" + "|".join(TAGS) + r"):([^}]*)\}")
FIELDS = ("text", "audio_data", "sampling_params", "stream")
# As published; max_new_tokens counts frames here.
PUBLISHED = {"temperature": 1.0, "top_p": 0.8, "top_k": 50, "repetition_penalty": 1.1, "max_new_tokens": 4096}
ADDRESS = re.compile(r"data:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)
LARGEST_NUMBER = 10**40  # a larger one says nothing, at length
MAX_BODY_BYTES = 1 << 20  # a request holds a text and a path


@dataclass(frozen=True)
class Request:
    speech: Speech
    sampling: Sampling
    seed: int | None  # None: another one for each request


def parse(body: Any, references: Path | None, max_frames: int = MAX_FRAMES) -> Request:
    """The body of a request, checked. Raises ``DataError`` or ``ConfigError``: one line for the client.

    ``max_frames`` is what the engine has room for; a request may ask for more and is cut off there.
    """
    if not isinstance(body, Mapping):
        raise DataError('the body has to be a JSON object with the key "text"')
    for key in body:
        if key not in FIELDS:
            raise DataError(f"unknown key {str(key)[:40]!r}; there are: {', '.join(FIELDS)}")
    if body.get("stream"):
        raise DataError("stream=true: an answer is one WAV file; leave it out")
    if "text" not in body:
        raise DataError('"text", what is to be spoken, is missing')
    text = body["text"]
    if not isinstance(text, str):
        raise DataError(f'"text" has to be one text, but is {str(text)[:40]!r}')
    tags, spoken = read_tags(text)
    for name in ("token", "ambient_sound"):
        if name in tags:
            raise DataError(f"the tag ${{{name}:...}} has no meaning for a policy here; leave it out")
    sampling, seed = read_sampling(body.get("sampling_params"), max_frames)
    reference = read_audio_data(body.get("audio_data"), references)
    return Request(Speech(spoken, reference, instruction=tags.get("instruction")), sampling, seed)


def read_tags(text: str) -> tuple[dict[str, str], str]:
    """``read_tags("${instruction:Softly.}Hello.") == ({"instruction": "Softly."}, "Hello.")``

    A tag that is not at the beginning, or not in its order, is text, as it was on the published server.
    """
    tags: dict[str, str] = {}
    place = 0
    for name in TAGS:
        found = TAG.match(text, place)
        if found and found[1] == name:
            tags[name], place = found[2], found.end()
    return tags, text[place:]


def read_sampling(node: Any, max_frames: int) -> tuple[Sampling, int | None]:
    if node is None:
        node = {}
    if not isinstance(node, Mapping):
        raise DataError('"sampling_params" has to be an object')
    known = {**PUBLISHED, "seed": None}
    for key, value in node.items():
        if key not in known:
            raise DataError(f"unknown key {str(key)[:40]!r} of sampling_params; there are: {', '.join(known)}")
        whole = key in ("top_k", "max_new_tokens", "seed")
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise DataError(f"sampling_params.{key}={value!r:.40} has to be a {'whole ' if whole else ''}number")
        if abs(value) > LARGEST_NUMBER:
            raise DataError(f"sampling_params.{key} is beyond every limit: it has to be at most {LARGEST_NUMBER}")
    given = known | dict(node)
    seed = given["seed"]
    frames = given["max_new_tokens"]
    if frames < 1:
        raise ConfigError(f"sampling_params.max_new_tokens={frames} has to be 1 or more")
    sampling = Sampling(
        temperature=given["temperature"],
        top_p=given["top_p"],
        top_k=given["top_k"],
        repetition_penalty=given["repetition_penalty"],
        max_frames=min(frames, max_frames),
    )
    return sampling, None if seed is None else check_seed(seed)


def read_audio_data(value: Any, references: Path | None, field: str = "audio_data") -> Path | None:
    """The recording that a client names in ``field``. Raises ``DataError`` for all that is no file below
    ``references``."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise DataError(f'"{field}" has to be the path of one recording, but is {str(value)[:40]!r}')
    if references is None:
        raise DataError(f'"{field}": this server was started without --references, so it reads no recording')
    if ADDRESS.match(value):
        raise DataError(
            f'"{field}": no address is fetched and a request brings no audio; '
            "name the path of a recording below the folder of references"
        )
    shown = value if len(value) <= 80 else f"{value[:77]}..."
    root = references.resolve()
    try:
        path = (root / value).resolve()
        allowed = path.is_relative_to(root) and path.is_file()
    except (OSError, ValueError, RuntimeError):  # a name that is too long, holds a NUL, a circle of links
        allowed = False
    if not allowed:
        # One answer for what is not there and what is not allowed: it says nothing about other folders.
        raise DataError(f'"{field}": there is no recording {shown!r} below the folder of references')
    return path
