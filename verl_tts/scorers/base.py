"""What a scorer is, and how it says who it is.

A scorer is synchronous and lives in one worker thread of the server (``app.py``). It keeps nothing
between clips: the score of a clip never depends on what was scored before, nor on its batch.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import orjson

from verl_tts.files import sha256_of
from verl_tts.rewards.protocol import BadRequestError, Clip, ScoreRange
from verl_tts.types import Scalar

__all__ = ["BadRequestError", "Clip", "ScoreRange", "Scorer", "fingerprint_of", "info_of", "sha256_of_files"]


class Scorer(Protocol):
    name: str
    version: str  # of the scorer's own code; raised when equal clips get another score
    model: str | None
    revision: str | None
    score_range: ScoreRange
    part_names: tuple[str, ...]  # the numbers that every answer holds beside ``score``
    details: Mapping[str, object]  # what else ``/info`` shows: settings, hashes of files; JSON

    def fingerprint(self) -> str:
        """SHA-256 over everything that changes a score (``fingerprint_of``)."""

    def check(self, clip: Clip) -> None:
        """Raise BadRequestError for a clip that cannot be scored, before it joins a batch."""

    def score_batch(self, clips: Sequence[Clip]) -> list[dict[str, Scalar]]:
        """One answer a clip, in order: ``score``, the ``part_names``, and texts that are worth a line in a log."""


def fingerprint_of(**settings: object) -> str:
    """SHA-256 over name, version, hashes of model files, normaliser and settings; never host, port or time."""
    return hashlib.sha256(orjson.dumps(settings, option=orjson.OPT_SORT_KEYS)).hexdigest()


def info_of(scorer: Scorer) -> dict[str, object]:
    """What ``/info`` says of a scorer."""
    return {
        "name": scorer.name,
        "version": scorer.version,
        "model": scorer.model,
        "revision": scorer.revision,
        "score_range": list(scorer.score_range),
        "fingerprint": scorer.fingerprint(),
        "part_names": list(scorer.part_names),
        **scorer.details,
    }


def sha256_of_files(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below ``folder``, by relative path."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            hashes[path.relative_to(folder).as_posix()] = sha256_of(path)
    return hashes
