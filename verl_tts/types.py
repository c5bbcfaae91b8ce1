"""What crosses from one room to the next.

Shapes: ``T`` sampled token, ``F`` codec frame, ``Q`` codebook, ``S`` audio sample, ``H`` hidden.
``T = F + 1`` always: the last sampled token, an EOS or the one cut off by the limit, has no residual
codes and no audio.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

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


@dataclass(frozen=True)
class Conditioning:
    """What the policy is given for one row, in tokens: the same for the rollout engine and for the actor."""

    text_ids: Sequence[int]  # the text inside its chat template
    speaker_H: np.ndarray  # float32
    language: str
    language_id: int | None  # None: the model chooses


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
