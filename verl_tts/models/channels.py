"""One log-prob for a position that has several sampled channels: how the parts are weighed. Without torch.

The action of a delay-pattern policy is one position: a text token and up to Q codes, drawn independently of each
other from one hidden state. Its log-prob is a weighted sum of the channels' log-probs, and what the weights are is
``tts.channel_reduction``; docs/moss.md says what each does to the ratio and to the KL estimate.

Shapes: ``T`` position, ``C`` channel: the text, then the codebooks.
"""

import numpy as np

from verl_tts.config.tts import REDUCTIONS, parse_weights
from verl_tts.errors import ConfigError


def channel_weights(reduction: str, weights: str, sampled_TC: np.ndarray) -> np.ndarray:
    """(T, C) float32: the log-prob of position t is the sum over c of its weights and the channels' log-probs.

    A channel that was not sampled has weight 0, and a position of which none was is no action.

        sum         1 each: the log-prob of the joint action
        mean        1 / number of sampled channels
        weighted    w_c / sum of the sampled channels' w; w of a codebook is the second number divided by Q
        codebook0   1 for the text and for codebook 0, 0 for the others
    """
    sampled_TC = np.asarray(sampled_TC, bool)
    if reduction not in REDUCTIONS:
        raise ConfigError(f"tts.channel_reduction={reduction} is unknown; it has to be one of {', '.join(REDUCTIONS)}")
    share_C = np.ones(sampled_TC.shape[1])
    if reduction == "weighted":
        text, codes = parse_weights(weights)
        share_C[:] = codes / (sampled_TC.shape[1] - 1)
        share_C[0] = text
    if reduction == "codebook0":
        share_C[2:] = 0
    weights_TC = sampled_TC * share_C
    if reduction in ("mean", "weighted"):
        total_T1 = weights_TC.sum(axis=1, keepdims=True)
        weights_TC = np.divide(weights_TC, total_T1, out=np.zeros_like(weights_TC), where=total_T1 > 0)
    return weights_TC.astype(np.float32)
