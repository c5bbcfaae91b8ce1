"""The columns of a prompt file, once.

    data_source   where the row comes from, a name
    prompt        [{"role": "user", "content": TEXT}], exactly one turn: the text to be spoken
    reward_model  {"style": NAME, "ground_truth": TEXT}, what the scorer compares with
    extra_info    {"id", "split", "index", ...}, see ``OPTIONAL_INFO``; further scalars reach the scorer

Any other column is left alone. Nothing is rewritten: a row's text is the text that the model reads.
"""

import math
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from verl_tts.errors import DataError
from verl_tts.types import PromptRow, Scalar

COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")
OPTIONAL_INFO: Mapping[str, type] = {
    "language": str,  # a tag of the model's own list, or Auto
    "speaker": str,  # NAME of a file NAME.json in the folder tts.speaker_path
    "target_seconds": float,  # length of the clip, for the duration scorer
    "emotion": str,
    "instruction": str,
    "ref_audio": str,
}


def to_prompt_row(columns: Mapping[str, Any]) -> PromptRow:
    """A row of a prompt file, checked.

    ``to_prompt_row({"data_source": "demo", "prompt": [{"role": "user", "content": "Hi."}],
    "reward_model": {"style": "rule", "ground_truth": "Hi."},
    "extra_info": {"id": "en-1", "split": "train", "index": 0}}).text == "Hi."``

    Raises ``DataError``, whose message does not know the file and the row: whoever reads the file adds them.
    """
    text = _text(columns["prompt"])
    reward_model = _mapping("reward_model", columns["reward_model"])
    _require("reward_model.style", reward_model.get("style"), str)
    info = _mapping("extra_info", columns["extra_info"])
    extra: dict[str, Any] = {
        name: _scalar(f"extra_info.{name}", value) for name, value in info.items() if value is not None
    }
    for name, kind in OPTIONAL_INFO.items():
        if name in extra:
            _require(f"extra_info.{name}", extra[name], kind)
    if "target_seconds" in extra and not extra["target_seconds"] > 0:
        raise DataError(f"extra_info.target_seconds={extra['target_seconds']} has to be above 0")
    return PromptRow(
        id=_require("extra_info.id", extra.pop("id", None), str),
        text=text,
        split=_require("extra_info.split", extra.pop("split", None), str),
        index=_require("extra_info.index", extra.pop("index", None), int),
        data_source=_require("data_source", columns["data_source"], str),
        ground_truth=_require("reward_model.ground_truth", reward_model.get("ground_truth"), str),
        language=extra.pop("language", None),
        speaker=extra.pop("speaker", None),
        extra=extra,
    )


def row_from_verl(kwargs: Mapping[str, Any]) -> PromptRow:
    """The row behind the columns that verl hands to an agent loop, where ``prompt`` is called ``raw_prompt``."""
    return to_prompt_row({**kwargs, "prompt": kwargs["raw_prompt"]})


def to_columns(row: PromptRow, style: str = "model") -> dict[str, Any]:
    """The inverse of ``to_prompt_row``; ``style`` is the one field that a ``PromptRow`` does not keep."""
    info = {"id": row.id, "split": row.split, "index": row.index, "language": row.language, "speaker": row.speaker}
    return {
        "data_source": row.data_source,
        "prompt": [{"role": "user", "content": row.text}],
        "reward_model": {"style": style, "ground_truth": row.ground_truth},
        "extra_info": {name: value for name, value in (info | dict(row.extra)).items() if value is not None},
    }


def is_speakable(text: str) -> bool:
    """Whether anything is left to be spoken: a letter or a digit, of any script."""
    return any(character.isalnum() for character in unicodedata.normalize("NFC", text))


def _text(prompt: Any) -> str:
    turns = list(prompt) if isinstance(prompt, Iterable) else []  # verl hands over a list or an array
    if len(turns) != 1 or not isinstance(turns[0], Mapping) or turns[0].get("role") != "user":
        raise DataError(f"prompt has to be one user turn, [{{role: user, content: TEXT}}], but is {_short(prompt)}")
    text = _require("prompt[0].content", turns[0].get("content"), str)
    if not is_speakable(text):
        raise DataError(f"the text {text!r} has no letter or digit to be spoken")
    return text


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"{name} has to be a struct, but is {_short(value)}")
    return value


def _scalar(name: str, value: Any) -> Scalar:
    if not isinstance(value, str | int | float | bool):
        raise DataError(f"{name} has to be a text, a number or a bool, but is {_short(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{name}={value} is not finite")
    return value


def _require(name: str, value: Any, kind: type) -> Any:
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or isinstance(value, bool):
        names = {str: "a text", int: "a whole number", float: "a number"}
        raise DataError(f"{name} has to be {names[kind]}, but is {_short(value)}")
    if kind is str and not value:
        raise DataError(f"{name} is empty")
    return value


def _short(value: Any) -> str:
    if value is None:
        return "missing"
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
