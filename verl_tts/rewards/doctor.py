"""Is the order of a scorer's scores sane? Seven clips that anybody can rank, before a GPU is booked.

    right          a sentence, spoken as it is written
    truncated      its first half
    repeated       the sentence twice
    wrong_text     the same audio, asked about another sentence
    right_silence  the sentence and then ``SILENCE_S`` of nothing
    noise          white noise, as long and as loud
    silence        nothing, as long

The order is sane if the right clip is above each of the others: a policy is paid for whatever is not below it. With
our guards a clip that strikes one is below every score, so what a scorer does not see (no recogniser sees silence
after the words) may still be sane in training. Legend: ``S`` audio sample.
"""

import importlib.resources
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import soundfile

from verl_tts.config.reward import ClientConfig, GuardConfig
from verl_tts.errors import ConfigError, ScorerError, ScorerProtocolError
from verl_tts.rewards.client import ScorerClient
from verl_tts.rewards.guards import TRANSCRIPT, check_guards, check_transcript
from verl_tts.rewards.protocol import LATENCY_NOTE, ScorerInfo
from verl_tts.types import Scalar, Score, Waveform

RIGHT = "right"
SILENCE_S = 15.0
CLIP = "clips/river.flac"
TEXT = "The children walked slowly to the river."
WRONG_TEXT = "Seventeen green lamps were sold before noon."


@dataclass(frozen=True)
class Case:
    name: str
    waveform: Waveform
    prompt: str


@dataclass(frozen=True)
class Finding:
    """What became of one case: a score or an error of the scorer, and the guard that it strikes, if any."""

    name: str
    score: Score | None
    error: ScorerError | None
    violation: str | None

    @property
    def shown(self) -> str:
        return f"{self.score.total:.3f}" if self.score is not None else "an error"


@dataclass(frozen=True)
class Diagnosis:
    scorer: ScorerInfo
    findings: Sequence[Finding]

    @property
    def sane(self) -> bool:
        """With the guards, as in training."""
        return not self.objections(guarded=True)

    def objections(self, *, guarded: bool) -> list[str]:
        """What is wrong with the order, one line each; nothing where it is sane."""
        right = next(finding for finding in self.findings if finding.name == RIGHT)
        if right.score is None:
            return [f"{RIGHT} gets an error: {right.error}"]
        if guarded and right.violation is not None:
            return [f"{RIGHT} is a violation, {right.violation}"]
        objections = []
        for finding in self.findings:
            if finding is right or (guarded and finding.violation is not None):
                continue
            if finding.score is None:
                objections.append(f"{finding.name} gets an error, which ends a run: {finding.error}")
            elif finding.score.total >= right.score.total:
                objections.append(f"{finding.name} gets {finding.shown}, {RIGHT} gets {right.shown}")
        return objections


def bundled_clip() -> Waveform:
    """The sentence ``TEXT``, spoken; clips/README.md says by whom."""
    with (importlib.resources.files(__package__) / CLIP).open("rb") as file:
        return _read(file, CLIP)


def read_clip(path: str) -> Waveform:
    """A clip of the user's; ConfigError where it is not mono audio that can be read."""
    try:
        with open(path, "rb") as file:
            return _read(file, path)
    except OSError as error:
        raise ConfigError(f"--audio {path}: {error.strerror}; give a WAV or FLAC file") from error


def _read(file: object, name: str) -> Waveform:
    try:
        samples_S, sample_rate_hz = soundfile.read(file, dtype="float32")
    except soundfile.LibsndfileError as error:
        raise ConfigError(f"--audio {name}: {error}; give a WAV or FLAC file") from error
    if samples_S.ndim != 1 or len(samples_S) == 0:
        raise ConfigError(f"--audio {name}: shape {samples_S.shape}; one channel with at least one sample is needed")
    return Waveform(samples_S, sample_rate_hz)


def cases(right: Waveform, text: str, wrong_text: str) -> list[Case]:
    """The seven clips, all made of ``right``."""
    samples_S, rate_hz = right.samples_S, right.sample_rate_hz
    nothing_S = np.zeros(round(SILENCE_S * rate_hz), np.float32)
    loudness = samples_S.std(dtype=np.float64)
    noise_S = np.random.default_rng(0).normal(0.0, loudness, len(samples_S)).clip(-1, 1).astype(np.float32)
    return [
        Case(RIGHT, right, text),
        Case("truncated", Waveform(samples_S[: max(1, len(samples_S) // 2)], rate_hz), text),
        Case("repeated", Waveform(np.tile(samples_S, 2), rate_hz), text),
        Case("wrong_text", right, wrong_text),
        Case("right_silence", Waveform(np.concatenate([samples_S, nothing_S]), rate_hz), text),
        Case("noise", Waveform(noise_S, rate_hz), text),
        Case("silence", Waveform(np.zeros_like(samples_S), rate_hz), text),
    ]


async def examine(
    client: ClientConfig,
    guards: GuardConfig,
    right: Waveform,
    text: str,
    wrong_text: str,
    metadata: Mapping[str, Scalar],
) -> Diagnosis:
    """Sends the seven clips, one at a time, guards or not. ``metadata.target_seconds`` is the length of ``right``.

    Raises ConfigError where the scorer cannot be reached, or refuses even the right clip.
    """
    async with ScorerClient(client) as scorer:
        try:
            info = await scorer.probe()
            findings = [
                await _examine(scorer.score, guards, case, {"target_seconds": right.seconds, **metadata})
                for case in cases(right, text, wrong_text)
            ]
        except ScorerError as error:
            raise ConfigError(f"the scorer cannot be examined: {error}") from error
    return Diagnosis(info, findings)


async def _examine(ask: Callable, guards: GuardConfig, case: Case, metadata: Mapping[str, Scalar]) -> Finding:
    _, verdicts = check_guards(guards, case.waveform, None, case.prompt, case.name)
    score, error = None, None
    try:
        score = await ask(case.waveform, case.prompt, {**metadata, "id": case.name})
        heard = check_transcript(guards, score.notes)
        verdicts += [heard] if heard is not None else []
    except ScorerError as failure:
        if case.name == RIGHT and not isinstance(failure, ScorerProtocolError):
            raise
        error = failure
    violation = next((f"{v.name}: {v.reason}" for v in verdicts if v.is_violation), None)
    return Finding(case.name, score, error, violation)


def table(diagnosis: Diagnosis) -> str:
    """For a terminal: who scores, a line a clip, latency, and the two verdicts."""
    info, low_high = diagnosis.scorer, diagnosis.scorer.score_range
    fingerprint = f", fingerprint {info.fingerprint[:12]}" if info.fingerprint else ""
    lines = [f"scorer {info.name or 'without /info'}{fingerprint}, range {list(low_high)}", ""]
    lines.append(f"{'clip':14}{'score':>10}{'latency':>10}  {'our guards':48}parts")
    for finding in diagnosis.findings:
        latency = f"{finding.score.notes[LATENCY_NOTE]:.2f} s" if finding.score else "-"
        numbers = f"{finding.shown:>10}{latency:>10}"
        lines.append(f"{finding.name:14}{numbers}  {finding.violation or '-':48}{_parts(finding)}".rstrip())
    seconds = [float(f.score.notes[LATENCY_NOTE] or 0) for f in diagnosis.findings if f.score]
    lines.append("")
    if seconds:
        lines.append(f"latency, one clip at a time: p50 {np.median(seconds):.2f} s, max {max(seconds):.2f} s")
    for guarded in (False, True):
        objections = diagnosis.objections(guarded=guarded)
        lines.append(f"order {'with' if guarded else 'without'} our guards: {'not sane' if objections else 'sane'}")
        lines += [f"  {objection}" for objection in objections]
    return "\n".join(lines)


def _parts(finding: Finding) -> str:
    if finding.score is None:
        return ""
    numbers = [f"{name} {value:.3g}" for name, value in finding.score.parts.items()]
    transcripts = [
        f'{name} "{text}"' for name, text in finding.score.notes.items() if name.rpartition(".")[2] == TRANSCRIPT
    ]
    return "  ".join([*numbers, *transcripts])
