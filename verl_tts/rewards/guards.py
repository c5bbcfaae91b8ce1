"""Bad audio gets a low score by a rule, and this is the one place where such rules are written.

A guard looks at what is certain from the outside: is there sound at all, is it about as long as the text, did it
end by itself. A clip that violates one is not sent to the scorer; it gets ``tts.reward.violation_score``. A clip
that cannot be audio (NaN, two channels) is no bad clip but a fault of ours, and raises.

    guard               violated when                                       limit, guards.
    no_audio            no frame was sampled, or no sample was decoded      1 sample, always
    silence             root mean square about the mean is below it         min_rms
    too_short           the clip is shorter                                 min_seconds
    truncated           the frame limit cut it off                          penalise_truncation
    mostly_silent       more of its windows are silent                      max_silence_share
    trailing_silence    it ends in more silence                             max_trailing_silence_s
    clipping            more of its samples are at full scale               max_clipping_share
    too_fast, too_slow  it is too short or too long for its text            min_, max_seconds_per_letter
    code_run            one code of codebook 0 is repeated more often       max_code_run
    repeated_codes      more 4-grams of codebook 0 are repetitions          max_repeated_share
    empty_transcript    the scorer heard no word (after its answer)         penalise_empty_transcript

What a guard looks at is measured for every clip, ``clip/<quantity>``, whether its limit is on or off. A guard whose
limit is on is a part ``guard/<name>``: 1 if it struck, else 0; ``truncated`` always is. The first violation, in the
order of the table, is the reason that is noted.

How long a text takes is counted in letters. One of an alphabet counts 1, a sign that stands for a syllable or a word
counts what that is in letters of an alphabet: ``LETTERS_OF``. With about 14 letters a second in English, 5 syllables
in Mandarin, 6 in Korean and 8 in Japanese (syllable rates: Pellegrino, Coupe and Marsico, Language 87, 2011) these
are ratios of speaking rates, rounded; the limits are meant to be far enough away for that to be enough.
Legend: ``S`` audio sample, ``W`` window of 20 ms, ``F`` codec frame.
"""

import math
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from verl_tts.config.reward import GuardConfig
from verl_tts.errors import RolloutError
from verl_tts.types import CodecRollout, Scalar, Waveform

WINDOW_S = 0.02
SILENT_BELOW_LOUDEST = 1e-2  # amplitude ratio, -40 dB
FULL_SCALE = 0.999  # a sample of 16-bit audio at its end is 0.99997
PAUSES_S = 2.0  # what a slow clip may have beside its letters
NGRAM = 4
LETTERS_OF = {"CJK": 3.0, "HANGUL": 2.5, "HIRAGANA": 2.0, "KATAKANA": 2.0, "DIGIT": 4.0}
TRANSCRIPT = "asr_text"


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


def check_guards(
    config: GuardConfig, waveform: Waveform, rollout: CodecRollout | None, text: str, sample_id: str
) -> tuple[dict[str, float], list[GuardVerdict]]:
    """What was measured, ``clip/<quantity>``, and one verdict a guard that is on, in the order of the table above.

    Without a rollout, audio that nobody sampled, codes and stop reason are not looked at; their quantities are NaN.
    Raises RolloutError for a waveform that is not mono, not floating point, not finite or has no rate.
    """
    _require_audio(waveform, sample_id)
    frames = None if rollout is None else len(rollout.codes_FQ)
    clip = measure(waveform, rollout, text)
    seconds, letters = waveform.seconds, letters_in(text)

    def verdict(name: str, struck: bool, reason: str, counts: bool = True) -> GuardVerdict:
        return GuardVerdict(name, struck, struck and counts, reason)

    def above(name: str, quantity: str, limit: float | None, unit: str = "") -> Iterator[GuardVerdict]:
        if limit is not None:
            value = clip[quantity]
            yield verdict(name, value > limit, f"{value:.3g}{unit}, limit {limit:g}{unit}", config.enforce)

    verdicts = [
        verdict("no_audio", frames == 0 or len(waveform.samples_S) == 0, f"{len(waveform.samples_S)} samples"),
        verdict(
            "silence",
            clip["clip/rms"] < config.min_rms,
            f"RMS {clip['clip/rms']:.2e}, limit {config.min_rms:.2e}",
            config.enforce,
        ),
        verdict(
            "too_short",
            seconds < config.min_seconds,
            f"{seconds:.2f} s, limit {config.min_seconds:g} s",
            config.enforce,
        ),
        verdict(
            "truncated",
            rollout is not None and rollout.stop_reason == "length",
            f"cut off after {frames} frames",
            config.enforce and config.penalise_truncation,
        ),
        *above("mostly_silent", "clip/silence_share", config.max_silence_share),
        *above("trailing_silence", "clip/trailing_silence_s", config.max_trailing_silence_s, " s"),
        *above("clipping", "clip/clipping_share", config.max_clipping_share),
    ]
    if (fastest := config.min_seconds_per_letter) is not None:
        reason = f"{seconds:.2f} s for {letters:g} letters, limit {fastest * letters:.2f} s"
        verdicts.append(verdict("too_fast", seconds < fastest * letters, reason, config.enforce))
    if (slowest := config.max_seconds_per_letter) is not None:
        limit_s = PAUSES_S + slowest * letters
        reason = f"{seconds:.2f} s for {letters:g} letters, limit {limit_s:.2f} s"
        verdicts.append(verdict("too_slow", seconds > limit_s, reason, config.enforce))
    verdicts += above("code_run", "clip/code_run", config.max_code_run, " frames")
    verdicts += above("repeated_codes", "clip/repeated_share", config.max_repeated_share)
    return clip, verdicts


def check_transcript(config: GuardConfig, notes: Mapping[str, Scalar]) -> GuardVerdict | None:
    """The guard after the answer: every transcript in it, ``asr_text`` or ``<scorer>.asr_text``, must hold a word.

    None where the answer has no transcript, or where the guard is off.
    """
    transcripts = {key: text for key, text in notes.items() if key.rpartition(".")[2] == TRANSCRIPT}
    if not transcripts or not config.penalise_empty_transcript:
        return None
    empty = [key for key, text in transcripts.items() if not any(map(str.isalnum, str(text or "")))]
    return GuardVerdict(
        "empty_transcript", bool(empty), bool(empty) and config.enforce, f"{', '.join(empty)} has no word in it"
    )


def measure(waveform: Waveform, rollout: CodecRollout | None, text: str) -> dict[str, float]:
    """Every quantity that a guard looks at.

    ``clip/seconds``, ``clip/rms`` (about the mean, full scale = 1), ``clip/silence_share`` and
    ``clip/clipping_share`` in [0, 1], ``clip/trailing_silence_s``, ``clip/seconds_per_letter`` (NaN for a text without
    letters), ``clip/code_run`` in frames, ``clip/repeated_share`` in [0, 1]; the last two are NaN without a rollout.
    """
    samples_S = waveform.samples_S
    silent_W = _silent_windows(waveform)
    letters = letters_in(text)
    spoken = np.flatnonzero(~silent_W)
    trailing = len(silent_W) - (spoken[-1] + 1 if len(spoken) else 0)
    codes_F = None if rollout is None else rollout.codes_FQ[:, 0]
    return {
        "clip/seconds": waveform.seconds,
        # About the mean, since an offset cannot be heard; in double precision, since long clips lose digits.
        "clip/rms": float(samples_S.std(dtype=np.float64)) if len(samples_S) else 0.0,
        "clip/silence_share": float(silent_W.mean()) if len(silent_W) else 1.0,
        "clip/trailing_silence_s": float(trailing * WINDOW_S),
        "clip/clipping_share": float((np.abs(samples_S) >= FULL_SCALE).mean()) if len(samples_S) else 0.0,
        "clip/seconds_per_letter": waveform.seconds / letters if letters else math.nan,
        "clip/code_run": math.nan if codes_F is None else float(longest_run(codes_F)),
        "clip/repeated_share": math.nan if codes_F is None else repeated_share(codes_F),
    }


def letters_in(text: str) -> float:
    """How many letters of an alphabet take as long to say; marks that change a letter count as letters."""
    return math.fsum(_letters_of(character) for character in text)


def _letters_of(character: str) -> float:
    kind = unicodedata.category(character)
    if kind[0] not in "LMN":
        return 0.0
    if kind[0] == "N":
        return LETTERS_OF["DIGIT"]
    return LETTERS_OF.get(unicodedata.name(character, "").partition(" ")[0], 1.0)


def longest_run(codes_F: np.ndarray) -> int:
    """Length of the longest run of one code: [7, 7, 7, 2] has 3, no code has 0."""
    if len(codes_F) == 0:
        return 0
    changes = np.flatnonzero(np.diff(codes_F)) + 1
    return int(np.diff(np.concatenate([[0], changes, [len(codes_F)]])).max())


def repeated_share(codes_F: np.ndarray) -> float:
    """Share of the n-grams (``NGRAM``) that occurred earlier in the clip; 0 for a clip that is shorter than two."""
    ngrams = [tuple(codes_F[start : start + NGRAM]) for start in range(len(codes_F) - NGRAM + 1)]
    return 1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _silent_windows(waveform: Waveform) -> np.ndarray:
    """Whether each whole window is silent, bool (W,): far below the loudest, or below anything at all."""
    size = max(1, round(WINDOW_S * waveform.sample_rate_hz))
    windows = len(waveform.samples_S) // size
    if windows == 0:
        return np.zeros(0, bool)
    windows_WS = waveform.samples_S[: windows * size].reshape(windows, size)
    rms_W = windows_WS.std(axis=1, dtype=np.float64)
    return rms_W <= SILENT_BELOW_LOUDEST * rms_W.max()


def _require_audio(waveform: Waveform, sample_id: str) -> None:
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
