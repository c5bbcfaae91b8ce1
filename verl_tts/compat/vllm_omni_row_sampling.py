"""vLLM-Omni draws the residual codes of seeded requests row by row.

vllm-omni 0.24's code predictor (model_executor/models/common/qwen3_code_predictor.py) calls ``torch.multinomial``
once for each row and each of the 15 residual codebooks where rows have generators of their own, as ours all have:
480 calls a frame with 32 requests, a quarter of the talker's time. Here each row's generator gives one uniform
number, and one inversion of the cumulative distribution serves all rows: the same distribution, still one stream
per request, whatever shares its batch. Needed until vLLM-Omni draws them together.
"""

from collections.abc import Sequence

import torch


def draw(
    probs_BV: torch.Tensor,
    generator: torch.Generator | None,
    generators: Sequence[torch.Generator | None] | None,
) -> torch.Tensor:
    """One index per row, (B, 1), distributed as ``probs_BV`` (rows sum to 1); stands in for ``_multinomial``."""
    if generators is None:  # a request alone in its batch comes this way, and has to draw the same numbers
        uniform_B1 = torch.rand(len(probs_BV), 1, generator=generator, device=probs_BV.device)
    else:
        uniform_B1 = torch.cat([torch.rand(1, 1, generator=row, device=probs_BV.device) for row in generators])
    cumulative_BV = probs_BV.cumsum(dim=-1)
    # Right of every entry that is not above the draw: an index of probability 0 is never chosen.
    index_B1 = torch.searchsorted(cumulative_BV, uniform_B1 * cumulative_BV[:, -1:], right=True)
    last_B1 = torch.searchsorted(cumulative_BV, cumulative_BV[:, -1:].contiguous())
    return torch.minimum(index_B1, last_B1)


def apply() -> None:
    from vllm_omni.model_executor.models.common.qwen3_code_predictor import CodePredictorWrapper

    CodePredictorWrapper._multinomial = staticmethod(draw)
