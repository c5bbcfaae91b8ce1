"""The actor: verl's FSDP engine with the policy's own replay in place of a language model's forward.

Overridden are how the model is built and made trainable, what goes into its forward, what is read from its
logits, and which weights leave for the rollout engine. Sharding, precision, optimizer, loss, micro-batches and
checkpoints are verl's.

Shapes: ``T`` sampled token of one sample, ``N`` sampled token of all samples.
"""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name, offload_fsdp_model_to_cpu
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_tts import stacks
from verl_tts.checkpoints.export import PEFT_ROOT
from verl_tts.checkpoints.lora import Scaling, find_adapter, published_names, read_pairs, settle
from verl_tts.engine.model_config import PolicyModelConfig
from verl_tts.engine.sampling import GATE, Scoring
from verl_tts.engine.schedule import LINEAR, linear_schedule
from verl_tts.errors import CheckpointError, GateError
from verl_tts.files import writing
from verl_tts.gates import CLOCK, FIRST_RATIO, GATE_LOGPROBS, GATE_SECONDS
from verl_tts.models.base import POLICIES, get_policy


class PolicyEngine(FSDPEngineWithLMHead):
    """Actor and reference. The policy is the adapter that ``model_type`` names."""

    model_config: PolicyModelConfig
    _first_ratio: float | None = None
    """Largest ``|ratio - 1|`` of the first mini-batch after an inference; None in the others."""

    # ------------------------------------------------------------------ the module

    def _build_module(self) -> torch.nn.Module:
        stacks.register("actor")
        self.adapter = get_policy(self.model_config.model_type)
        config, trains = self.model_config.hf_config, not self.engine_config.forward_only
        module = self.adapter.policy.from_pretrained(
            self.model_config.local_path,
            dtype=PrecisionType.to_dtype(self.engine_config.model_dtype or "fp32"),
            config=config,
            # Said again for the parts: a configuration's own choice stays with its root.
            attn_implementation=config._attn_implementation,
        )
        mode = self.model_config.policy.trainable
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(trains and self.adapter.is_trainable(name, mode))
        if trains and self.model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module

    def _build_lora_module(self, module: torch.nn.Module) -> torch.nn.Module:
        # The published leaf names would hit the frozen code predictor too.
        targets = self.adapter.lora_targets(self.model_config.target_modules)
        object.__setattr__(self.model_config, "target_modules", targets)
        with torch.random.fork_rng(devices=[]):
            # PEFT draws A, and verl leaves the generator as the process found it: two runs of one seed would differ.
            torch.manual_seed(self.engine_config.seed)
            adapter = self.model_config.lora_adapter_path
            object.__setattr__(self.model_config, "lora_adapter_path", None)  # ours to load: verl's binds what it can
            module = super()._build_lora_module(module)
        if adapter is not None:
            continue_adapter(module, Path(adapter), self.model_config, self.adapter.lora_prefix)
        return module

    def _build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        if self.optimizer_config.lr_scheduler_type == LINEAR:
            return linear_schedule(optimizer, self.optimizer_config)
        return super()._build_lr_scheduler(optimizer)

    # ------------------------------------------------------------------ forward

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        layout = self.model_config.policy.prompt_layout
        return self.adapter.replay_inputs(self.model_config.hf_config, _rows_of(micro_batch), layout), {}

    def prepare_model_outputs(
        self,
        output: tuple[torch.Tensor, ...],
        output_args: dict[str, Any],
        micro_batch: TensorDict,
        logits_processor_func: Any,
    ) -> dict[str, torch.Tensor]:
        scoring = Scoring(
            self.model_config.policy,
            temperature=float(tu.unwrap_non_tensor_data(micro_batch["temperature"])),
            entropy=bool(tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)),
            gate=not torch.is_grad_enabled(),
        )
        rows = _rows_of(micro_batch)
        columns = self.adapter.score(self.model_config.hf_config, output, rows, scoring)
        if GATE in columns:
            columns[GATE_LOGPROBS] = columns.pop(GATE)
        elif self._first_ratio is not None and "old_log_probs" in micro_batch:
            with CLOCK.running(), torch.no_grad():
                change_N = (columns["log_probs"] - micro_batch["old_log_probs"].values()).expm1()
                self._first_ratio = max(self._first_ratio, float(change_N.abs().max()))
        responses = rows("responses")
        return {name: _at_input_positions(values_N, micro_batch, responses) for name, values_N in columns.items()}

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        """The first mini-batch after an inference says how far its ratios were from 1."""
        is_first = self._first_ratio is not None
        outputs = super().train_batch(data, loss_function)
        if is_first:
            # Lists, as of micro-batches: verl joins those of all ranks.
            outputs["metrics"] |= {FIRST_RATIO: [self._first_ratio], GATE_SECONDS: [CLOCK.take()]}
            self._first_ratio = None
        return outputs

    def infer_batch(self, data: TensorDict, loss_function: Callable[..., Any] | None = None) -> Any:
        self._first_ratio = 0.0
        return super().infer_batch(data, loss_function)

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        if not forward_only and not math.isfinite(output["loss"]):
            raise GateError(f"the loss is {output['loss']}; the optimizer has not stepped, nothing was changed")
        return loss, output

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        """verl wants micro-batches of equal size; after a dropped group the configured one may not divide the rows."""
        if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            largest = tu.get_non_tensor_data(data=data, key="micro_batch_size_per_gpu", default=1)
            size = next(size for size in range(min(largest, len(data)), 0, -1) if len(data) % size == 0)
            tu.assign_non_tensor(data, micro_batch_size_per_gpu=size)
        return super().forward_backward_batch(data, loss_function, forward_only)

    def optimizer_step(self) -> float:
        """verl skips an update whose gradient is not finite, with a line in a log; here it ends the run."""
        norm = super().optimizer_step()
        if not math.isfinite(norm):
            raise GateError(f"the gradient's norm is {float(norm)}; the optimizer has not stepped, nothing was changed")
        return norm

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Raises ``RunStopped`` with the path where the disk does not take it."""
        with writing(Path(local_path)):
            super().save_checkpoint(local_path, *args, **kwargs)

    # ------------------------------------------------------------------ weights for the rollout engine

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """The trained tensors under their published names; LoRA is merged, so there is no adapter to describe."""
        tensors, peft_config = super().get_per_tensor_param(**kwargs)
        assert peft_config is None, "an adapter would leave unmerged: actor_rollout_ref.model.lora.merge is off"
        # On one rank a gathered tensor is the live parameter itself: copied, it stays what it was when it left.
        return ((name, tensor.detach().clone()) for name, tensor in tensors if self._is_exported(name)), None

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As verl's, but in the precision of the parameters, and copied while they hold the merged weights.

        verl 0.9.1 casts to bfloat16 here, and without that cast hands out the live parameters, which hold the
        base weights again by the time that somebody reads them.
        """
        device = get_device_id()
        try:
            with merged_lora_context(self.module, backup_adapters=True):
                for name, tensor in normalize_peft_param_name(self.module.state_dict()).items():
                    if self._is_exported(name):
                        full = tensor.to(device).full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[attr-defined]
                        yield name, full.detach().clone()
        finally:
            if self._is_offload_param:
                offload_fsdp_model_to_cpu(self.module)

    def _is_exported(self, name: str) -> bool:
        if self._is_lora:
            return re.fullmatch(rf"{self.model_config.target_modules}\.weight", name) is not None
        return self.adapter.is_trainable(name, self.model_config.policy.trainable)


def continue_adapter(module: torch.nn.Module, adapter: Path, model_config: PolicyModelConfig, prefix: str) -> None:
    """The adapter's tensors into a fresh one of the same rank and alpha, by name; every module that it names binds.

    Raises ``ConfigError`` for another rank or alpha, ``CheckpointError`` for a module or a shape that is not there.
    """
    file, settings = find_adapter(adapter)
    settle(settings, Scaling(rank=model_config.lora_rank, alpha=model_config.lora_alpha), None, file)
    _, pairs = read_pairs(file)
    fresh = dict(module.named_parameters())
    known = {name.removeprefix(PEFT_ROOT).replace(".lora_A.default.", ".") for name in fresh if ".lora_A." in name}
    for name, pair in published_names(pairs, known, prefix).items():
        for half, tensor in zip("AB", pair, strict=True):
            parameter = fresh.get(f"{PEFT_ROOT}{name}.lora_{half}.default.weight")
            if parameter is None or parameter.shape != tensor.shape:
                expected = "no LoRA there" if parameter is None else f"{tuple(parameter.shape)}"
                raise CheckpointError(f"{file}: lora_{half} of {name} is {tuple(tensor.shape)}, the run has {expected}")
            parameter.data.copy_(tensor)


def _rows_of(micro_batch: TensorDict) -> Callable[[str], list[torch.Tensor]]:
    """name of a column -> the samples' tensors."""
    return lambda name: _rows(micro_batch[name])


def _rows(column: torch.Tensor) -> list[torch.Tensor]:
    return list(column.unbind())


def _at_input_positions(values_N: torch.Tensor, micro_batch: TensorDict, responses: list[torch.Tensor]) -> torch.Tensor:
    """Values of sampled tokens where verl looks for them: one position before the token, in ``input_ids``' layout."""
    pieces, start = [], 0
    for prompt, response_T in zip(_rows(micro_batch["prompts"]), responses, strict=True):
        values_T = values_N[start : start + len(response_T)]
        pieces += [values_N.new_zeros(len(prompt) - 1), values_T, values_N.new_zeros(1)]
        start += len(response_T)
    return torch.nested.nested_tensor_from_jagged(torch.cat(pieces), micro_batch["input_ids"].offsets())


for _policy in POLICIES:
    EngineRegistry.register(model_type=_policy, backend=["fsdp", "fsdp2"], device=["cpu", "cuda"])(PolicyEngine)
