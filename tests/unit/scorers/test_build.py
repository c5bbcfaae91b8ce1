"""Scorers by name: what is there, which options it takes, and that docs/scorers.md says the same."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import verl_tts
from verl_tts.errors import ConfigError
from verl_tts.scorers import SCORERS, build_scorer

DOCUMENT = (Path(__file__).parents[3] / "docs/scorers.md").read_text(encoding="utf-8")


def options_of(name: str) -> dict[str, object]:
    """Option to its default; a required one has None, as one without a value does."""
    module, class_name = SCORERS[name].split(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), class_name)).parameters.values()
    return {p.name: None if p.default is p.empty else p.default for p in parameters}


def rows_below(heading: str) -> list[list[str]]:
    table = DOCUMENT.split(heading)[1].split("\n\n")[0].strip()
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()[1:]]


def test_every_scorer_is_in_the_document():
    measures = rows_below("| scorer | measures | score | parts beside it |")
    assert sorted(name for row in measures for name in re.findall(r"`(\w+)`", row[0])) == sorted(SCORERS)


def test_the_document_has_every_option_with_its_default():
    listed = {}
    for names, options in rows_below("| scorer | options, with their defaults |"):
        for name in re.findall(r"`(\w+)`", names):
            pairs = [yaml.safe_load(option) for option in re.findall(r"`([^`]+)`", options)]
            listed[name] = {
                k: v for pair in pairs for k, v in (pair if isinstance(pair, dict) else {pair: None}).items()
            }
    assert listed == {name: options_of(name) for name in SCORERS if options_of(name)}


@pytest.mark.parametrize("name", SCORERS)
def test_an_option_that_nobody_reads_is_refused(name):
    with pytest.raises(ConfigError, match=f"scorer {name} has no option 'volume'; it has: "):
        build_scorer(name, {"volume": 11})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("quality", {"measure": 1}, "scorer quality: measure=1 must be str, not int"),
        ("whisper_cer", {"device": 0}, "scorer whisper_cer: device=0 must be str, not int"),
        ("whisper_cer", {"allow_download": "no"}, "allow_download='no' must be bool, not str"),
        ("clap", {"model": "/", "text": 5}, r"text=5 must be str \| None, not int"),
        ("constant", {"value": "high"}, "value='high' must be float, not str"),
        ("speaker_similarity", {}, "scorer speaker_similarity needs the option references"),
    ],
)
def test_an_option_of_another_type_or_missing_is_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_scorer(name, options)


def test_the_list_of_scorers_costs_no_heavy_import():
    code = (
        "import sys, verl_tts.scorers; print(*({'torch', 'librosa', 'faster_whisper', 'speechmos'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_a_scorer_imports_only_what_it_needs():
    code = "import sys, verl_tts.scorers.app, verl_tts.scorers.quality; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer_says_under_which_licence_it_and_its_weights_are(name):
    module = importlib.import_module(SCORERS[name].split(":")[0])
    assert re.search(r"\bMIT\b|Apache-2\.0|CC-BY-4\.0|licence", module.__doc__ or "")


def test_nothing_but_the_command_that_starts_a_server_imports_a_scorer():
    """The trainer runs without what they need; ``scorers`` is an extra of its own."""
    package = Path(verl_tts.__file__).parent
    importing = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if path.parent.name != "scorers" and re.search(r"^\s*(from|import) verl_tts\.scorers", path.read_text(), re.M)
    }
    assert importing == {"commands/score.py"}
