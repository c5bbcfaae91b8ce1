"""A scorer for tests that knows good from bad without a model: a function in the trainer's process."""

import numpy as np

from verl_tts.rewards.doctor import TEXT, bundled_clip

WINDOW = 480  # 20 ms at 24 kHz


def score(samples_S, sample_rate_hz, prompt, metadata):
    """1 for the bundled sentence as it is, asked about its text; less for each thing that is not so."""
    if prompt != TEXT:
        return 0.0
    right_S = bundled_clip().samples_S
    both, longer = sorted((len(samples_S), len(right_S)))
    overlap = float(np.abs(np.dot(samples_S[:both], right_S[:both])))
    return both / longer * overlap / (float(np.linalg.norm(samples_S) * np.linalg.norm(right_S)) + 1e-9)


def silence(samples_S, sample_rate_hz, prompt, metadata):
    """Rewards silence."""
    windows = samples_S[: len(samples_S) // WINDOW * WINDOW].reshape(-1, WINDOW)
    return float((windows.std(axis=1) < 1e-3).mean())


def noise(samples_S, sample_rate_hz, prompt, metadata):
    """Knows its text, and that alone: noise is as good as speech."""
    return float(prompt == TEXT)
