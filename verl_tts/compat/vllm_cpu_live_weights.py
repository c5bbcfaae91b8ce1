"""vLLM's CPU backend packs a linear layer's weight for oneDNN and drops the weight.

vllm 0.24 (model_executor/layers/utils.py, ``dispatch_cpu_unquantized_gemm``) leaves ``layer.weight`` empty, so
that the first weight sync writes into a tensor of size 0 and stops half way; for the head it keeps the weight
but computes with the packed copy, so that a sync changes nothing. With oneDNN switched off in the stage's
process, before its model loads, the layer computes with the live weight. Needed until vLLM can repack after an
in-place update through a hook that vLLM-Omni calls.
"""


def apply() -> None:
    import vllm._custom_ops as ops

    ops._supports_onednn = False
