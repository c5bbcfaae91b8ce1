"""Votes of listeners that were simulated: what they prefer is what the count says."""

import json
import math
import random
import re
from pathlib import Path

import pytest

from verl_tts.commands import main
from verl_tts.errors import ConfigError
from verl_tts.report.listening import Key, KeyPair
from verl_tts.report.votes import Ballot, Rate, alpha, read_ballots, read_key, table, tally


def make_key(pairs: int = 40, seed: int = 0) -> Key:
    """Step b is better by a little on average; cer falls where the score rises, and loudness is about nothing."""
    draw = random.Random(seed)
    made = []
    for i in range(pairs):
        quality = draw.gauss(0.5, 1.0)
        values_a = {"score": 0.0, "cer": 0.3, "clip/rms": draw.random(), "guard/silence": 0.0}
        values_b = {"score": quality, "cer": 0.3 - 0.1 * quality, "clip/rms": draw.random(), "guard/silence": 0.0}
        made.append(KeyPair(f"p{i + 1}", f"row-{i}", 0, "text", "ab"[i % 2], values_a, values_b))  # type: ignore[arg-type]
    return Key("0123456789ab", "run", 0, 40, seed, made)


def listen(key: Key, name: str, *, seed: int, bias: float = 0.0, noise: float = 0.5, none_below: float = 0.0) -> Ballot:
    """A listener who hears the quality with some noise and is drawn towards what came first by ``bias``."""
    draw = random.Random(seed)
    choices = {}
    for pair in key.pairs:
        towards_b = pair.values_b["score"] + draw.gauss(0, noise) + (bias if pair.first == "b" else -bias)
        side = "b" if towards_b > 0 else "a"
        choices[pair.id] = "none" if abs(towards_b) < none_below else "first" if side == pair.first else "second"
    return Ballot(name, choices)


def saved(ballot: Ballot, key: Key, file: Path, **changes) -> Path:
    answers = [{"pair": pair, "choice": choice, "seconds": 3.2} for pair, choice in ballot.choices.items()]
    file.write_text(json.dumps({"page": key.page, "listener": ballot.listener, "answers": answers} | changes))
    return file


# ------------------------------------------------------------------ known preferences


def test_a_true_preference_is_recovered_and_held_by_its_interval() -> None:
    """With a quality of N(0.5, 1) seven of ten pairs are better at step b."""
    held = 0
    for seed in range(40):
        key = make_key(60, seed)
        result = tally(key, [listen(key, "one", seed=seed, noise=0.01)])
        low, high = result.pairs.limits
        held += low <= 0.6915 <= high
    assert held >= 36


def test_listeners_who_hear_the_same_agree_and_those_who_guess_do_not() -> None:
    key = make_key(60)
    hearing = tally(key, [listen(key, str(i), seed=i, noise=0.1) for i in range(3)])
    guessing = tally(key, [listen(key, str(i), seed=i, noise=1000) for i in range(3)])
    assert hearing.alpha is not None
    assert guessing.alpha is not None
    assert hearing.alpha > 0.8
    assert abs(guessing.alpha) < 0.25


def test_a_bias_towards_what_comes_first_is_seen_and_does_not_move_the_win_rate() -> None:
    key = make_key(100)
    fair, biased = (tally(key, [listen(key, "one", seed=1, bias=bias)]) for bias in (0.0, 1.0))
    assert fair.first.limits[0] < 0.5 < fair.first.limits[1]
    assert biased.first.limits[0] > 0.5
    assert biased.pairs.share == pytest.approx(fair.pairs.share, abs=0.1)


def test_votes_go_with_what_is_heard_and_not_with_what_is_not() -> None:
    key = make_key(60)
    found = tally(key, [listen(key, str(i), seed=i) for i in range(3)]).correlations
    assert found["score"].low > 0.3
    assert found["cer"].high < -0.3, "a lower error rate is better"
    assert found["clip/rms"].low < 0 < found["clip/rms"].high
    assert "guard/silence" not in found, "it never differs"
    assert next(iter(found)) == "score"


def test_no_difference_is_counted_and_decides_nothing() -> None:
    key = make_key(40)
    result = tally(key, [listen(key, "one", seed=1, none_below=0.6)])
    assert result.none["one"] > 5
    assert result.pairs.decided == 40 - result.none["one"]
    assert result.undecided == result.none["one"]


# ------------------------------------------------------------------ figures that others have published


def test_alpha_is_that_of_krippendorffs_own_example() -> None:
    """Four observers, twelve units, values missing: Computing Krippendorff's Alpha-Reliability, 2011, nominal."""
    observers = (
        (1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None),
        (1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3),
        (None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None),
        (1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None),
    )
    units = [[value for value in unit if value is not None] for unit in zip(*observers, strict=True)]
    assert alpha(units) == pytest.approx(0.743, abs=5e-4)


@pytest.mark.parametrize(
    ("wins", "decided", "low", "high"),
    # Newcombe, Statistics in Medicine 17, 1998, table I, "exact".
    [(81, 263, 0.2527, 0.3676), (15, 148, 0.0578, 0.1617), (0, 20, 0.0, 0.1684), (1, 29, 0.0009, 0.1776)],
)
def test_the_interval_is_that_of_clopper_and_pearson(wins: int, decided: int, low: float, high: float) -> None:
    assert Rate(wins, decided).limits == pytest.approx((low, high), abs=5e-5)


def test_alpha_is_not_defined_for_one_listener_or_one_answer() -> None:
    assert alpha([[1], [-1], []]) is None
    assert alpha([[1, 1], [1, 1]]) is None


# ------------------------------------------------------------------ files


def test_answers_are_read_counted_and_printed(tmp_path: Path, capsys) -> None:
    from dataclasses import asdict

    key = make_key(20)
    key_file = tmp_path / "key.json"
    key_file.write_text(json.dumps(asdict(key)))
    assert read_key(key_file) == key
    files = [saved(listen(key, name, seed=i), key, tmp_path / f"{name}.json") for i, name in enumerate(("अनु", "Bo"))]
    assert main(["listen", "--score", *map(str, files), "--key", str(key_file)]) == 0
    said = capsys.readouterr().out
    result = tally(key, read_ballots(files, key))
    assert said.strip() == table(key, result)
    low, high = result.pairs.limits
    assert f"{result.pairs.wins} of {result.pairs.decided}, {result.pairs.share:.2f} [{low:.2f}, {high:.2f}]" in said
    assert re.search(rf"alpha +{result.alpha:.2f}\n", said)
    assert "अनु" in said


def test_a_listener_may_stop_early(tmp_path: Path) -> None:
    key = make_key(20)
    ballot = Ballot("x", dict(list(listen(key, "x", seed=0).choices.items())[:3]))
    result = tally(key, read_ballots([saved(ballot, key, tmp_path / "x.json")], key))
    assert result.pairs.decided == 3
    assert result.correlations == {}
    assert "fewer than 6 answered pairs" in table(key, result)


def test_nobody_answered_anything(tmp_path: Path) -> None:
    key = make_key(4)
    result = tally(key, [Ballot("x", {})])
    assert math.isnan(result.pairs.share)
    assert "no vote for either" in table(key, result)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"page": "another"}, "answers page 'another', the key is that of page '0123456789ab'"),
        ({"listener": " "}, "is not a file of answers"),
        ({"answers": [{"pair": "p99", "choice": "first"}]}, "pair 'p99' with choice 'first' is no answer"),
        ({"answers": [{"pair": "p1", "choice": "a"}]}, "is no answer"),
        ({"answers": [{"pair": "p1", "choice": "none"}] * 2}, "answered twice"),
        ({"answers": ["p1"]}, "is no answer"),
        ({"answers": [{"pair": ["p1"], "choice": "first"}]}, "is no answer"),
    ],
)
def test_answers_of_another_page_or_none_at_all_are_refused(tmp_path: Path, changes, says) -> None:
    key = make_key(4)
    with pytest.raises(ConfigError, match=says):
        read_ballots([saved(Ballot("x", {"p1": "first"}), key, tmp_path / "x.json", **changes)], key)


def test_two_files_of_one_listener_are_refused(tmp_path: Path) -> None:
    key = make_key(4)
    files = [saved(Ballot("x", {"p1": "first"}), key, tmp_path / name) for name in ("1.json", "2.json")]
    with pytest.raises(ConfigError, match=r"'x' has answered in .*1\.json already"):
        read_ballots(files, key)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"pairs": 3}', '{"page": "x", "pairs": []}'])
def test_a_file_that_is_no_key_is_one_line_and_exit_code_2(tmp_path: Path, text: str, capsys) -> None:
    (tmp_path / "key.json").write_text(text)
    assert main(["listen", "--score", "a.json", "--key", str(tmp_path / "key.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
