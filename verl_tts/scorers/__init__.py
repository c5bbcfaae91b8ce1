"""Scorer servers. The trainer never imports this package; its dependencies are the extra ``scorers``.

``SCORERS`` is the list of what ``verl-tts score --scorer NAME`` can start.
"""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from verl_tts.errors import ConfigError

if TYPE_CHECKING:
    from verl_tts.scorers.base import Scorer

SCORERS = {
    "clap": "verl_tts.scorers.clap:ClapScorer",
    "constant": "verl_tts.scorers.constant:ConstantScorer",
    "duration": "verl_tts.scorers.duration:DurationScorer",
    "parakeet_wer": "verl_tts.scorers.parakeet_wer:ParakeetWERScorer",
    "predictor": "verl_tts.scorers.predictor:PredictorScorer",
    "quality": "verl_tts.scorers.quality:QualityScorer",
    "speaker_similarity": "verl_tts.scorers.speaker_similarity:SpeakerSimilarityScorer",
    "whisper_cer": "verl_tts.scorers.whisper:WhisperCERScorer",
    "whisper_wer": "verl_tts.scorers.whisper:WhisperWERScorer",
}


def build_scorer(name: str, options: Mapping[str, object]) -> "Scorer":
    """A scorer that is ready to score; ConfigError for an unknown name or option."""
    if name not in SCORERS:
        raise ConfigError(f"unknown scorer {name!r}; there are: {', '.join(SCORERS)}")
    module_name, class_name = SCORERS[name].split(":")
    try:
        scorer_class = getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"scorer {name} needs {error.name}, which is not installed; install verl_tts[scorers]"
        ) from error
    known = inspect.signature(scorer_class).parameters
    for option, value in options.items():
        if option not in known:
            raise ConfigError(f"scorer {name} has no option {option!r}; it has: {', '.join(known) or 'none'}")
        expected = known[option].annotation
        if not isinstance(value, (int, float) if expected is float else expected):
            shown = getattr(expected, "__name__", expected)
            raise ConfigError(f"scorer {name}: {option}={value!r} must be {shown}, not {type(value).__name__}")
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in options:
            raise ConfigError(f"scorer {name} needs the option {option}")
    return scorer_class(**options)


def build_scorers(entries: Sequence[Mapping]) -> "Scorer":
    """One scorer of several ``{"scorer": ..., "options": {...}, "name": ...}``; without a name it is the scorer's."""
    from verl_tts.scorers.several import SeveralScorers

    names = [entry.get("name", entry["scorer"]) for entry in entries]
    for name in names:
        if not name.isidentifier():
            raise ConfigError(f"scorers: name={name!r} must be letters, digits and underscores")
        if names.count(name) > 1:
            raise ConfigError(f"scorers: {name!r} comes {names.count(name)} times; give each a name of its own")
    return SeveralScorers(
        {name: build_scorer(entry["scorer"], entry["options"]) for name, entry in zip(names, entries, strict=True)}
    )
