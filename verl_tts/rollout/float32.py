"""From the last norm to the logits in float32, whatever the dtype of the engine: as the actor computes them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod


class Float32RMSNorm(RMSNorm):
    """The residual stream in the engine's dtype, as the actor has it; what comes out is float32."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = x + residual
        exact = residual.float()
        scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return exact * scale * self.weight.float(), residual


class Float32Head(UnquantizedEmbeddingMethod):
    """Float32 hidden states to float32 logits, whatever the dtype of the weight."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing is packed: a weight sync writes into the weight that ``apply`` reads."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x.float(), layer.get_parameter("weight").float(), bias)
