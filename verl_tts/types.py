"""What crosses from one room to the next.

Shapes: ``T`` sampled token, ``F`` codec frame, ``Q`` codebook, ``S`` audio sample, ``H`` hidden, ``P`` prompt
position, ``C`` channel: the text, then the codebooks. Of a policy whose action is the codebook-0 token ``T = F + 1``
always: the last sampled token, an EOS or the one cut off by the limit, has no residual codes and no audio.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

Scalar = str | int | float | bool | None
StopReason = Literal["eos", "length"]


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a parquet file, checked.

    ``PromptRow(id="hi-00000007", text="नमस्ते", split="train", index=7, data_source="indicvoices_r",
    ground_truth="नमस्ते", language="Auto")``
    """

    id: str
    text: str
    split: str
    index: int
    data_source: str
    ground_truth: str
    language: str | None = None  # None: the run's own, ``tts.language``
    speaker: str | None = None  # None: the run's own, ``tts.speaker_path``
    extra: Mapping[str, Scalar] = field(default_factory=dict)  # scalars of extra_info, handed to the scorer


class Given(Protocol):
    """What a policy is given for one row, in tokens: the same for the rollout engine and for the actor."""

    @property
    def text_ids(self) -> Sequence[int]: ...

    @property
    def language(self) -> str: ...

    def columns(self) -> Mapping[str, np.ndarray]:
        """What the actor's replay needs beside the ids, as columns of the transfer queue."""

    def request(self) -> Mapping[str, Any]:
        """The arguments of the rollout adapter's ``request`` beside the ids."""


@dataclass(frozen=True)
class Conditioning:
    """A text, a speaker and a language."""

    text_ids: Sequence[int]  # the text inside its chat template
    speaker_H: np.ndarray  # float32
    language: str
    language_id: int | None  # None: the model chooses

    def columns(self) -> Mapping[str, np.ndarray]:
        """``tts_speaker`` (H,) float32, ``tts_language`` (1,): the codec id, -1 for Auto."""
        language = -1 if self.language_id is None else self.language_id
        return {"tts_speaker": self.speaker_H, "tts_language": np.array([language])}

    def request(self) -> Mapping[str, Any]:
        return {"speaker": self.speaker_H, "language": self.language}


@dataclass(frozen=True)
class PromptGrid:
    """A prompt with codes beside its text."""

    text_ids: Sequence[int]
    codes_PQ: np.ndarray  # int64; the pad code where there is none
    language: str

    def columns(self) -> Mapping[str, np.ndarray]:
        """``tts_prompt_codes`` (P, Q)."""
        return {"tts_prompt_codes": self.codes_PQ}

    def request(self) -> Mapping[str, Any]:
        return {"codes": self.codes_PQ}


@dataclass(frozen=True)
class CodecRollout:
    """What the policy sampled for one prompt.

    Three frames and an EOS: ``tokens_T`` has 4 ids, ``codes_FQ`` is (3, 16) with
    ``codes_FQ[:, 0] == tokens_T[:-1]``, ``logprobs_T`` has 4 values, ``stop_reason`` is "eos".
    An immediate EOS is a valid rollout: T = 1, F = 0.
    """

    tokens_T: np.ndarray  # int64
    codes_FQ: np.ndarray  # int64
    logprobs_T: np.ndarray  # float32, before temperature, penalties and truncation
    stop_reason: StopReason
    seed: int

    def columns(self) -> Mapping[str, np.ndarray]:
        """``tts_codes`` (T, Q): row t belongs to token t; the last, which is never fed back, is zero behind it."""
        last_1Q = np.zeros((1, self.codes_FQ.shape[1]), np.int64)
        last_1Q[0, 0] = self.tokens_T[-1]
        return {"tts_codes": np.concatenate([self.codes_FQ, last_1Q])}

    @property
    def is_action_T(self) -> np.ndarray:
        """Which tokens were chosen, and are trained."""
        return np.ones(len(self.tokens_T), bool)


@dataclass(frozen=True)
class GridRollout(CodecRollout):
    """What a policy sampled whose action is a position: ``tokens_T`` is its text, ``grid_TQ`` has its codes.

    ``codes_FQ`` are the frames that were decoded, ``logprobs_T`` the channels' log-probs weighed into one.
    """

    grid_TQ: np.ndarray  # int64, with the pad code where a codebook is not under way
    channel_logprobs_TC: np.ndarray  # float32, 0 where nothing was sampled
    weights_TC: np.ndarray  # float32

    def columns(self) -> Mapping[str, np.ndarray]:
        return {"tts_codes": self.grid_TQ}

    @property
    def is_action_T(self) -> np.ndarray:
        return np.asarray(self.weights_TC.any(axis=1))


@dataclass(frozen=True)
class Waveform:
    """Mono audio: ``samples_S`` is finite float32, nominally in [-1, 1]."""

    samples_S: np.ndarray
    sample_rate_hz: int

    @property
    def seconds(self) -> float:
        return len(self.samples_S) / self.sample_rate_hz


@dataclass(frozen=True)
class Score:
    """``total`` is the reward; ``parts`` are numbers that are logged; ``notes`` are texts such as a transcript."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Scalar] = field(default_factory=dict)
