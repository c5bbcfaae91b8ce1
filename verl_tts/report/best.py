"""The best step of a run: the highest validation score among those that got nothing worse that must not.

A score that rises while the error rate of a recogniser rises with it says that the policy has learned to please its
scorer. So a step counts only if no part of the validation that is named as a constraint, such as ``cer``, is above its
value in the first validation of the run.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

SCORE = "reward"


def validation_means(line: Mapping[str, Any]) -> dict[str, float]:
    """Part name -> its mean over the data sources, of a line of metrics.jsonl; ``reward`` is the score.

    verl's names are ``val-core/SOURCE/reward/mean@4`` and ``val-aux/SOURCE/whisper/cer/mean@4``.
    """
    found: dict[str, list[float]] = {}
    for name, value in line.items():
        place, _, statistic = name.rpartition("/")
        if name.startswith(("val-core/", "val-aux/")) and statistic.startswith("mean@") and value is not None:
            found.setdefault(place.rsplit("/", 1)[-1].lower(), []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def best_step(
    lines: Iterable[Mapping[str, Any]], not_above_start: Collection[str], among: Collection[int] | None = None
) -> int | None:
    """The step with the highest score whose constraints hold, of those ``among``; None without any. Ties: the earliest.

    A constraint that no validation reports is none.
    """
    validated = [(line["step"], means) for line in lines if SCORE in (means := validation_means(line))]
    if not validated:
        return None
    first = validated[0][1]
    allowed = [
        (means[SCORE], -step)
        for step, means in validated
        if (among is None or step in among)
        and all(means[name] <= first[name] for name in not_above_start if name in first and name in means)
    ]
    return -max(allowed)[1] if allowed else None
