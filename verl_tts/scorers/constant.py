"""The same score for every clip. For tests, load, and runs that should not learn.

Range [value, value]. No model, no licence but this project's own.
"""

import math
from collections.abc import Sequence

from verl_tts.errors import ConfigError
from verl_tts.scorers.base import Clip, fingerprint_of
from verl_tts.types import Scalar


class ConstantScorer:
    name = "constant"
    version = "1"
    model = None
    revision = None
    part_names = ()
    details: dict[str, object] = {}

    def __init__(self, *, value: float = 0.5) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"scorer constant: value={value!r} must be a finite number")
        self._value = float(value)
        self.score_range = (self._value, self._value)

    def fingerprint(self) -> str:
        return fingerprint_of(name=self.name, version=self.version, value=self._value)

    def check(self, clip: Clip) -> None:
        """Any clip will do."""

    def score_batch(self, clips: Sequence[Clip]) -> list[dict[str, Scalar]]:
        return [{"score": self._value} for _ in clips]
