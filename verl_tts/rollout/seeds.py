"""Where the randomness of a rollout comes from.

One seed per sample, a hash of what identifies the sample; from it one stream per sampler. In training the
global step takes part; in validation it does not, so that the same prompt is drawn with the same noise at every
validation. Arrival order, batch size and the number of replicas play no part.
"""

import hashlib
from typing import Literal

SEED_BITS = 48  # below 2**53: JSON readers that hold numbers as doubles keep it exact


def _hash(*parts: object) -> int:
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def sample_seed(run_seed: int, split: str, row_id: str, sample: int, step: int | None) -> int:
    """The seed of one sample, in [0, 2**48). ``step`` is None in validation."""
    return _hash("sample", run_seed, split, row_id, sample, "" if step is None else step)


def stream_seed(seed: int, stream: Literal["codebook0", "residual"]) -> int:
    """The seed of one sampler of that sample, in [0, 2**48)."""
    return _hash("stream", seed, stream)


def reference_seed(run_seed: int, row_id: str, step: int, of: Literal["cluster", "utterance"]) -> int:
    """Chooses the voice of a row in one training step, in [0, 2**48). No sample number: a group shares its voice."""
    return _hash("reference", run_seed, row_id, step, of)
