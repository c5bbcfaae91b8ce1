"""Closeness of the clip's length to ``metadata.target_seconds``. For tests and first runs.

Range [0, 1]. No model, no licence but this project's own.
"""

from collections.abc import Sequence

from verl_tts.rewards.functions import duration, target_seconds_of
from verl_tts.scorers.base import BadRequestError, Clip, fingerprint_of
from verl_tts.types import Scalar


class DurationScorer:
    name = "duration"
    version = "1"
    model = None
    revision = None
    score_range = (0.0, 1.0)
    part_names = ("seconds", "target_seconds")
    details: dict[str, object] = {}

    def fingerprint(self) -> str:
        return fingerprint_of(name=self.name, version=self.version)

    def check(self, clip: Clip) -> None:
        try:
            target_seconds_of(clip.metadata)
        except ValueError as error:
            raise BadRequestError("metadata", str(error)) from error

    def score_batch(self, clips: Sequence[Clip]) -> list[dict[str, Scalar]]:
        return [duration(c.waveform.samples_S, c.waveform.sample_rate_hz, c.prompt, c.metadata) for c in clips]
