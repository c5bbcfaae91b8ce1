"""The receiving end of a weight sync, inside the process of stage 0.

vLLM mixes this class into the stage's worker (``worker_extension_cls``). An exception here comes back to the
caller as an answer that says so; ``verl_tts.rollout.server`` raises it.
"""

import time
from pathlib import Path
from typing import Any

import torch

from verl_tts import stacks
from verl_tts.errors import WeightSyncError
from verl_tts.rollout import qwen3_tts_talker
from verl_tts.rollout.weights import digest, read_shapes

stacks.register("talker")
qwen3_tts_talker.register()  # vLLM loads this module in the talker's process, before the model, and nobody else does

# Which of a decoder layer's linear layers vLLM holds in one parameter, and in which order.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class WeightReceiver:
    """Mixed into the stage's worker, which has ``model_runner``."""

    model_runner: Any

    def verl_tts_load_weights(self, path: str) -> dict[str, Any]:
        """Loads the safetensors file at ``path``, all of it or nothing, and proves that it arrived.

        Returns ``{"tensors": int, "digest": int, "proof_s": float}``, the digest taken from the engine's own
        parameters, and how long it took to look at them.
        Raises ``WeightSyncError`` before the first write when a name or a shape is not the model's.
        """
        from safetensors.torch import load_file
        from vllm.model_executor.models.utils import AutoWeightsLoader

        model = self.model_runner.get_model()
        sent = load_file(path)
        known = read_shapes(Path(self.model_runner.model_config.model))
        for name, tensor in sent.items():
            if known.get(name) != tuple(tensor.shape):
                raise WeightSyncError(
                    f"tensor {name} of shape {tuple(tensor.shape)} is not in the model: it has "
                    f"{known.get(name, 'no such name')}; nothing was loaded"
                )
        AutoWeightsLoader(model).load_weights(iter(sent.items()), mapper=model.hf_to_vllm_mapper)
        model.rebuild_caches()
        began = time.perf_counter()
        held = self.verl_tts_read_weights(sorted(sent))
        for name, tensor in sent.items():
            if not torch.equal(held[name].cpu(), tensor.to(held[name].dtype)):
                raise WeightSyncError(f"tensor {name} differs from what was sent after it was loaded")
        return {"tensors": len(held), "digest": digest(held), "proof_s": time.perf_counter() - began}

    def verl_tts_read_weights(self, names: list[str]) -> dict[str, torch.Tensor]:
        """The engine's live parameters under their published names; fused ones are cut apart."""
        model = self.model_runner.get_model()
        parameters = dict(model.named_parameters())
        mapped = dict(zip(names, model.hf_to_vllm_mapper.apply_list(names), strict=True))
        return {name: _read(parameters, mapped[name]) for name in names}

    def verl_tts_save_weights(self, path: str, names: list[str]) -> None:
        """Writes them to a safetensors file: an answer over the RPC would arrive as nested lists."""
        from safetensors.torch import save_file

        held = self.verl_tts_read_weights(names)
        save_file({name: tensor.cpu().contiguous() for name, tensor in held.items()}, path)


def _read(parameters: dict[str, torch.nn.Parameter], name: str) -> torch.Tensor:
    if name in parameters:
        return parameters[name].detach()
    for fused, parts in FUSED.items():
        for index, part in enumerate(parts):
            if f".{part}." in name:
                parameter = parameters[name.replace(f".{part}.", f".{fused}.")]
                return _slice(parameters, name, fused, parameter, index)
    raise WeightSyncError(f"the engine has no parameter for {name}")


def _slice(
    parameters: dict[str, torch.nn.Parameter], name: str, fused: str, parameter: torch.nn.Parameter, index: int
) -> torch.Tensor:
    rows = parameter.shape[0]
    if fused == "gate_up_proj":
        sizes = [rows // 2] * 2
    else:
        output = parameters[name.rsplit(".", 2)[0] + ".o_proj.weight"]
        query = output.shape[1]
        sizes = [query, (rows - query) // 2, (rows - query) // 2]
    return parameter.detach().split(sizes)[index]
