"""Distributions as the rollout engine draws from them.

Shapes: ``N`` token, ``V`` the support.
"""

import torch


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
