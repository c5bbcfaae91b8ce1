"""Several scorers over the same clips, in one server.

    score                       the first scorer's
    <name>.score, <name>.<key>  what each scorer answered

The answer holds raw components: weights, gates and statistics are the trainer's. A clip that one scorer refuses is
refused; one that a scorer fails on is an error. Audio is resampled once per rate for all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from verl_tts.scorers.audio import SharedWaveform
from verl_tts.scorers.base import Clip, Scorer, ScoreRange, fingerprint_of, info_of
from verl_tts.types import Scalar


class SeveralScorers:
    """``scorers`` by the names that their values get; the first one's score is the score."""

    version = "1"
    model: str | None = None
    revision: str | None = None

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = dict(scorers)
        self.name = "+".join(self._scorers)
        self.score_range: ScoreRange = next(iter(self._scorers.values())).score_range
        self.part_names: tuple[str, ...] = tuple(
            f"{name}.{part}" for name, scorer in self._scorers.items() for part in ("score", *scorer.part_names)
        )
        self.details: Mapping[str, object] = {
            "scorers": {name: info_of(scorer) for name, scorer in self._scorers.items()}
        }

    def fingerprint(self) -> str:
        return fingerprint_of(
            version=self.version, scorers=[[name, scorer.fingerprint()] for name, scorer in self._scorers.items()]
        )

    def check(self, clip: Clip) -> None:
        for scorer in self._scorers.values():
            scorer.check(clip)

    def score_batch(self, clips: Sequence[Clip]) -> list[dict[str, Scalar]]:
        shared = [
            replace(clip, waveform=SharedWaveform(clip.waveform.samples_S, clip.waveform.sample_rate_hz))
            for clip in clips
        ]
        by_scorer = {name: scorer.score_batch(shared) for name, scorer in self._scorers.items()}
        return [self._together(answers) for answers in zip(*by_scorer.values(), strict=True)]

    def _together(self, answers: Sequence[Mapping[str, Scalar]]) -> dict[str, Scalar]:
        named = {
            f"{name}.{key}": value
            for name, answer in zip(self._scorers, answers, strict=True)
            for key, value in answer.items()
        }
        return {"score": answers[0]["score"], **named}
