"""A reward in the process that writes down what it was asked, so that a test can do its sums again."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

AGAIN = 0.01  # what a clip scores more when it is scored a second time


def seconds(samples_S: np.ndarray, sample_rate_hz: int, prompt: str, metadata: Mapping, notes: str) -> dict:
    """The clip's length, and the same as a part. ``notes``: the file that gets a JSON line for each call."""
    place, length = Path(notes), len(samples_S) / sample_rate_hz
    clip = {"prompt": prompt, "seconds": length, "bits": hash(samples_S.tobytes())}
    again = place.exists() and any(json.loads(line)["bits"] == clip["bits"] for line in place.read_text().splitlines())
    score = length + AGAIN * again
    with place.open("a") as file:
        file.write(json.dumps(clip | {"score": score, "again": again}) + "\n")
    return {"score": score, "length": length}
