"""Distributions as the rollout engine draws from them, and what is said of a token that was drawn.

Shapes: ``N`` token, ``V`` the support.
"""

from dataclasses import dataclass
from typing import Any

import torch

GATE = "gate"


@dataclass(frozen=True)
class Scoring:
    """What the actor is asked about sampled tokens."""

    settings: Any
    """``engine.model_config.PolicySettings``: of them ``logprob_support``, ``logprobs_mode``, ``top_k``, ``top_p``."""
    temperature: float
    entropy: bool = False
    gate: bool = False
    truncates: bool = True
    """Whether top-k and top-p apply to this channel."""

    def untruncated(self, temperature: float) -> "Scoring":
        """Of a channel that is drawn at a temperature of its own, from all of its support."""
        return Scoring(self.settings, temperature, self.entropy, self.gate, truncates=False)


def score(logits_NV: torch.Tensor, labels_N: torch.Tensor, scoring: Scoring) -> dict[str, torch.Tensor]:
    """``log_probs`` of the tokens at columns ``labels_N``, (N,) each, and where asked for ``entropy`` and ``gate``.

    ``gate`` is the log-prob as the engine reports it: raw_logprobs before temperature and truncation,
    processed_logprobs after both, then -inf outside.
    """
    settings, temperature = scoring.settings, scoring.temperature
    is_truncated = scoring.truncates and settings.logprob_support == "truncated"
    scaled_NV = logits_NV if temperature == 1.0 else logits_NV / temperature
    if is_truncated:
        scaled_NV = truncate(scaled_NV, settings.top_k, settings.top_p)
    logprobs_NV = scaled_NV.log_softmax(-1)
    columns = {"log_probs": _pick(logprobs_NV, labels_N)}
    if is_truncated:
        # Where rounding puts a sampled token just outside, its own log-prob over the full support stands in:
        # it is counted by the gate, and never -inf in the loss.
        full_N = _pick((logits_NV / temperature).log_softmax(-1), labels_N)
        columns["log_probs"] = torch.where(columns["log_probs"].isneginf(), full_N, columns["log_probs"])
    if scoring.entropy:
        # 0 log 0 is 0 here, and so is its gradient: -inf stays out of the product.
        columns["entropy"] = -(logprobs_NV.exp() * logprobs_NV.masked_fill(logprobs_NV.isneginf(), 0.0)).sum(-1)
    if scoring.gate:
        if settings.logprobs_mode == "processed_logprobs":
            logits_NV = logits_NV / temperature
            if scoring.truncates:
                logits_NV = truncate(logits_NV, settings.top_k, settings.top_p)
        columns[GATE] = _pick(logits_NV.log_softmax(-1), labels_N)
    return columns


def _pick(logprobs_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    return logprobs_NV.gather(-1, labels_N[:, None])[:, 0]


def truncate(logits_NV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Logits with everything outside top-k and then top-p at -inf, as vLLM 0.24 samples (v1/sample/ops).

    ``top_k`` below 1 and ``top_p`` 1 keep all. Top-p keeps the smallest set of most probable tokens whose
    probability, after top-k, reaches ``top_p``; ties at the k-th logit are all kept.
    """
    if 0 < top_k < logits_NV.shape[-1]:
        kth = logits_NV.topk(top_k, dim=-1).values[..., -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < kth, -torch.inf)
    if top_p < 1.0:
        ascending, order = logits_NV.sort(dim=-1)
        below = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        below[..., -1] = False  # the most probable token always stays
        logits_NV = logits_NV.masked_fill(below.scatter(-1, order, below), -torch.inf)
    return logits_NV
