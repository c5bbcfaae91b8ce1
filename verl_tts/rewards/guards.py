"""Bad audio gets a low score by a rule, and this is the one place where such rules are written.

A guard looks at what is certain from the outside: is there sound at all, is it long enough, did it end by
itself. A clip that violates one is not sent to the scorer; it gets ``tts.reward.violation_score``. A clip
that cannot be audio (NaN, two channels) is no bad clip but a fault of ours, and raises.

    name          violated when                                      limit
    no_audio      no frame was sampled, or no sample was decoded     1 sample
    silence       root mean square about the mean is below it        guards.min_rms
    too_short     the clip is shorter                                guards.min_seconds
    truncated     the frame limit cut it off; counts as a            guards.penalise_truncation
                  violation only if the setting says so

Every guard is a part of every score, ``guard/<name>``: 1 if it struck, else 0. Their order is the order of
the table: the first violation is the reason that is noted.
Legend: ``S`` audio sample, ``F`` codec frame.
"""

from dataclasses import dataclass

import numpy as np

from verl_tts.config.reward import GuardConfig
from verl_tts.errors import RolloutError
from verl_tts.types import CodecRollout, Waveform


@dataclass(frozen=True)
class GuardVerdict:
    """What one guard says about one clip."""

    name: str
    struck: bool
    is_violation: bool  # struck, and the settings count it
    reason: str

    @property
    def part(self) -> str:
        return f"guard/{self.name}"


def check_guards(config: GuardConfig, waveform: Waveform, rollout: CodecRollout, sample_id: str) -> list[GuardVerdict]:
    """One verdict a guard, in the order of the table above.

    Raises RolloutError for a waveform that is not mono, not floating point, not finite or has no rate.
    """
    samples_S = np.asarray(waveform.samples_S)
    if samples_S.ndim != 1 or samples_S.dtype.kind != "f":
        raise RolloutError(
            f"sample {sample_id!r}: the waveform has shape {samples_S.shape} and type {samples_S.dtype}; "
            "mono floating point samples (S,) are expected"
        )
    if waveform.sample_rate_hz <= 0:
        raise RolloutError(f"sample {sample_id!r}: sample rate {waveform.sample_rate_hz} Hz must be above 0")
    if not np.isfinite(samples_S).all():
        broken = int((~np.isfinite(samples_S)).sum())
        raise RolloutError(f"sample {sample_id!r}: {broken} of {len(samples_S)} samples are NaN or infinite")

    frames = len(rollout.codes_FQ)
    # About the mean, since an offset cannot be heard; in double precision, since long clips lose digits.
    rms = float(samples_S.std(dtype=np.float64)) if len(samples_S) else 0.0

    def verdict(name: str, struck: bool, reason: str, counts: bool = True) -> GuardVerdict:
        return GuardVerdict(name, struck, struck and counts, reason)

    return [
        verdict("no_audio", frames == 0 or len(samples_S) == 0, f"{frames} frames, {len(samples_S)} samples"),
        verdict("silence", rms < config.min_rms, f"RMS {rms:.2e}, limit {config.min_rms:.2e}"),
        verdict(
            "too_short",
            waveform.seconds < config.min_seconds,
            f"{waveform.seconds:.2f} s, limit {config.min_seconds:g} s",
        ),
        verdict(
            "truncated",
            rollout.stop_reason == "length",
            f"cut off after {frames} frames",
            config.penalise_truncation,
        ),
    ]
