"""Answers of listeners, counted: who won, do they agree, does the order matter, and does the scorer agree with them.

A listener answers each pair with the first clip, the second, or no difference. The unit is the pair: votes of several
listeners on one pair are not independent, so the win rate is that of pairs, each decided by the majority of its
votes, with the exact interval of Clopper and Pearson (Biometrika 26, 1934). Beside it stands each listener alone.

Agreement is Krippendorff's alpha for nominal data (Computing Krippendorff's Alpha-Reliability, 2011): 1 for
agreement, 0 for chance, and answers that are missing do no harm. The correlation with an automatic score is Kendall's
tau-b between its difference and the mean vote over pairs, with the interval of Fieller, Hartley and Pearson
(Biometrika 44, 1957): atanh(tau) has a variance of about 0.437 / (pairs - 4).

Shapes: ``P`` pair.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import binomtest, kendalltau, norm

from verl_tts.errors import ConfigError
from verl_tts.report.listening import FORMAT, Key, KeyPair

CHOICES = ("first", "second", "none")
LEVEL = 0.95
FEWEST_PAIRS = 6  # for a correlation with an interval


@dataclass(frozen=True)
class Ballot:
    """One listener's answers: pair id -> first, second or none."""

    listener: str
    choices: Mapping[str, str]


@dataclass(frozen=True)
class Rate:
    """``wins`` of ``decided``, with the exact interval; NaN limits where nothing was decided."""

    wins: int
    decided: int

    @property
    def share(self) -> float:
        return self.wins / self.decided if self.decided else math.nan

    @property
    def limits(self) -> tuple[float, float]:
        if not self.decided:
            return math.nan, math.nan
        interval = binomtest(self.wins, self.decided).proportion_ci(LEVEL, method="exact")
        return float(interval.low), float(interval.high)


@dataclass(frozen=True)
class Correlation:
    tau: float
    low: float
    high: float
    pairs: int


@dataclass(frozen=True)
class Tally:
    pairs: Rate  # won by step b, of those that have a majority
    undecided: int  # pairs with answers and no majority
    listeners: Mapping[str, Rate]  # votes for step b, of those for either
    none: Mapping[str, int]  # listener -> answers "no difference"
    alpha: float | None  # None: one listener, or no answer differs from another
    first: Rate  # votes for the clip that came first, of those for either
    correlations: Mapping[str, Correlation]


# ---------------------------------------------------------------- files


def read_key(file: Path) -> Key:
    """Raises ConfigError for a file that is no key of ours."""
    data = _json(file, "a key")
    try:
        pairs = [KeyPair(**pair) for pair in data["pairs"]]
        key = Key(**{**data, "pairs": pairs})
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a key that verl-tts listen has written: {error}") from error
    if key.format != FORMAT:
        raise ConfigError(f"{file} has format {key.format}, this version reads {FORMAT}")
    return key


def read_ballots(files: Sequence[Path], key: Key) -> list[Ballot]:
    """Raises ConfigError: an answer of another page, one that answers nothing here, two of one listener."""
    ballots: dict[str, Path] = {}
    read = []
    for file in files:
        ballot = _ballot(file, key)
        if ballot.listener in ballots:
            raise ConfigError(
                f"{file}: {ballot.listener!r} has answered in {ballots[ballot.listener]} already; give one"
            )
        ballots[ballot.listener] = file
        read.append(ballot)
    return read


def _ballot(file: Path, key: Key) -> Ballot:
    data = _json(file, "a file of answers")
    if data.get("page") != key.page:
        raise ConfigError(f"{file} answers page {data.get('page')!r}, the key is that of page {key.page!r}")
    listener, answers = data.get("listener"), data.get("answers")
    if not isinstance(listener, str) or not listener.strip() or not isinstance(answers, list):
        raise ConfigError(f"{file} is not a file of answers: it needs a listener and a list of answers")
    known = {pair.id for pair in key.pairs}
    choices: dict[str, str] = {}
    for answer in answers:
        pair, choice = (answer.get("pair"), answer.get("choice")) if isinstance(answer, dict) else (None, None)
        if not isinstance(pair, str) or pair not in known or choice not in CHOICES:
            raise ConfigError(
                f"{file}: pair {pair!r} with choice {choice!r} is no answer; choices: {', '.join(CHOICES)}"
            )
        if pair in choices:
            raise ConfigError(f"{file}: pair {pair!r} is answered twice")
        choices[pair] = choice
    return Ballot(listener.strip(), choices)


def _json(file: Path, what: str) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not {what}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} is not {what}: it holds no JSON object")
    return data


# ---------------------------------------------------------------- counting


def tally(key: Key, ballots: Sequence[Ballot]) -> Tally:
    votes_P = {
        pair.id: [_vote(pair, ballot.choices[pair.id]) for ballot in ballots if pair.id in ballot.choices]
        for pair in key.pairs
    }
    sums_P = [sum(votes) for votes in votes_P.values() if votes]
    listeners = {
        ballot.listener: _rate(_vote(pair, ballot.choices.get(pair.id, "none")) for pair in key.pairs)
        for ballot in ballots
    }
    choices = Counter(choice for ballot in ballots for choice in ballot.choices.values())
    return Tally(
        pairs=_rate(sums_P),
        undecided=sum(total == 0 for total in sums_P),
        listeners=listeners,
        none={ballot.listener: Counter(ballot.choices.values())["none"] for ballot in ballots},
        alpha=alpha([votes for votes in votes_P.values()]),
        first=Rate(choices["first"], choices["first"] + choices["second"]),
        correlations=_correlations(key, {pair: sum(votes) / len(votes) for pair, votes in votes_P.items() if votes}),
    )


def _vote(pair: KeyPair, choice: str) -> int:
    """1 for step b, -1 for step a, 0 for neither."""
    if choice == "none":
        return 0
    return 1 if (choice == "first") == (pair.first == "b") else -1


def _rate(votes: Any) -> Rate:
    counted = [vote for vote in votes if vote]
    return Rate(sum(vote > 0 for vote in counted), len(counted))


def alpha(units: Sequence[Sequence[int]]) -> float | None:
    """Krippendorff's alpha of nominal values; ``units`` are the pairs, each with the votes it got.

    1 - (n - 1) * disagreeing / expected, from the coincidence matrix: each ordered pair of votes on one unit of m
    counts 1 / (m - 1). A unit with one vote can neither agree nor disagree and is left out.
    """
    coincidences: Counter[tuple[int, int]] = Counter()
    for votes in units:
        if len(votes) > 1:
            for i, one in enumerate(votes):
                for j, other in enumerate(votes):
                    if i != j:
                        coincidences[one, other] += 1 / (len(votes) - 1)  # type: ignore[assignment]
    totals: Counter[int] = Counter()
    for (one, _), count in coincidences.items():
        totals[one] += count
    n = sum(totals.values())
    expected = sum(totals[one] * totals[other] for one in totals for other in totals if one != other)
    if not expected:
        return None
    observed = sum(count for (one, other), count in coincidences.items() if one != other)
    return 1 - (n - 1) * observed / expected


def _correlations(key: Key, mean_votes: Mapping[str, float]) -> dict[str, Correlation]:
    """Of the score and of each part that every answered pair has; those that never differ have none."""
    pairs = [pair for pair in key.pairs if pair.id in mean_votes]
    names = {name for pair in pairs for name in pair.values_a.keys() & pair.values_b.keys()}
    found = {}
    for name in sorted(names, key=lambda name: (name != "score", name)):
        having = [pair for pair in pairs if name in pair.values_a and name in pair.values_b]
        votes = [mean_votes[pair.id] for pair in having]
        differences = [pair.values_b[name] - pair.values_a[name] for pair in having]
        if len(having) >= FEWEST_PAIRS and len(set(votes)) > 1 and len(set(differences)) > 1:
            found[name] = _kendall(differences, votes)
    return found


def _kendall(differences: Sequence[float], votes: Sequence[float]) -> Correlation:
    tau = float(kendalltau(differences, votes).statistic)
    inside = max(-1 + 1e-9, min(1 - 1e-9, tau))
    reach = float(norm.ppf(0.5 + LEVEL / 2)) * math.sqrt(0.437 / (len(votes) - 4))
    low, high = math.tanh(math.atanh(inside) - reach), math.tanh(math.atanh(inside) + reach)
    return Correlation(tau, low, high, len(votes))


# ---------------------------------------------------------------- the table


def table(key: Key, result: Tally) -> str:
    """What the command prints."""
    lines = [f"page {key.page}, run {key.run}: step {key.b} against step {key.a}, {len(key.pairs)} pairs", ""]
    lines += [f"{'pairs won by step ' + str(key.b):<34}{_rate_text(result.pairs)}"]
    if result.undecided:
        lines.append(f"{'pairs without a majority':<34}{result.undecided}")
    for listener, rate in result.listeners.items():
        none = f", no difference {result.none[listener]}" if result.none[listener] else ""
        lines.append(f"  {listener:<32}{_rate_text(rate)}{none}")
    lines.append(
        f"{'agreement, Krippendorff alpha':<34}{'not defined' if result.alpha is None else f'{result.alpha:.2f}'}"
    )
    lines.append(f"{'position bias, first clip chosen':<34}{_rate_text(result.first)}")
    lines += ["", "votes and automatic scores, Kendall tau over pairs [95 %]"]
    for name, correlation in result.correlations.items():
        limits = f"[{correlation.low:+.2f}, {correlation.high:+.2f}]"
        lines.append(f"  {name:<32}{correlation.tau:+.2f} {limits}, {correlation.pairs} pairs")
    if not result.correlations:
        lines.append(f"  none: fewer than {FEWEST_PAIRS} answered pairs, or votes or scores that never differ")
    return "\n".join(lines)


def _rate_text(rate: Rate) -> str:
    if not rate.decided:
        return "no vote for either"
    low, high = rate.limits
    return f"{rate.wins} of {rate.decided}, {rate.share:.2f} [{low:.2f}, {high:.2f}]"
