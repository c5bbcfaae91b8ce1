"""A LoRA adapter and its base become one model directory.

    pins -> adapter read -> fitted to the base, module by module -> merged in float32 -> logits compared
         -> written beside -> read back, logits compared again -> renamed

Adapters come in two kinds, told apart by the names of their tensors:

    PEFT   base_model.model.MODULE.lora_A.weight (rank, in), lora_B.weight (out, rank); adapter_config.json
    MLX    MODULE.lora_a, MODULE.lora_b, in one of two layouts:
             rank-in   (rank, in), (out, rank)   mlx-audio-train, which saves neither rank nor alpha
             in-rank   (in, rank), (rank, out)   mlx-lm, whose adapter_config.json has rank and scale

Shapes: ``R`` rank, ``I`` and ``O`` features in and out, ``L`` position, ``H`` hidden.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from verl_tts.checkpoints.export import PEFT_ROOT, BaseWeights, copy_all_but_weights, merged_weight
from verl_tts.config.model_dir import policy_of, read_model_config
from verl_tts.errors import CheckpointError, ConfigError
from verl_tts.files import check_is_new, read_json_object, sha256_of, staged
from verl_tts.models.base import LORA_PARENTS, get_policy
from verl_tts.models.moss import MossConfig, MossPolicy
from verl_tts.models.qwen3_tts import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration

RECORD = "verl_tts_merge.json"  # written into the merged directory: what went into it
HINDI_PINS = Path(__file__).parents[1] / "config" / "hindi_pins.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapters.safetensors")
SETTINGS_FILE = "adapter_config.json"
# What a runtime would read beside the pinned files, and would read first.
RUNTIME_EXTRAS = ("*.safetensors", "*.safetensors.index.json", "tokenizer.json", "added_tokens.json")
# Settings of PEFT that make an adapter more than W + scale B A with one rank, and the values that do not.
PLAIN_PEFT: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layer_replication": (None,),
}
PROOF_POSITIONS = 12
# Largest difference between the logits of base + adapter and of the merge, over the largest logit. Both are float32
# sums of the same terms in another order: 2e-6 is seen. A transposed or a wrongly scaled adapter is off by percents.
PROOF_LIMIT = 1e-4

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Scaling:
    """``scale`` = alpha / rank multiplies B A. None: not said."""

    rank: int | None = None
    alpha: float | None = None
    scale: float | None = None


@dataclass(frozen=True)
class Pins:
    """What a merge has to be made of, bit for bit."""

    base_model: str
    base_revision: str
    base_files_sha256: Mapping[str, str]
    base_dtype: str  # of the weights that are merged
    adapter: str
    adapter_revision: str
    adapter_sha256: str
    adapter_tensors: int
    adapter_rank: int
    adapter_alpha: float
    adapter_dtype: str
    adapter_layout: str
    adapter_layers: Mapping[str, int]  # each has the seven linear modules of its attention and MLP


def read_pins(name: str) -> Pins:
    """``hindi``, or a JSON file with the fields of ``Pins``; others are left alone. Raises ``ConfigError``."""
    path = HINDI_PINS if name == "hindi" else Path(name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Pins(**{field.name: content[field.name] for field in fields(Pins)})
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--expect {name} is neither hindi nor a JSON file with pins: {error}") from error
    except KeyError as error:
        raise ConfigError(f"--expect {name} lacks the pin {error.args[0]}") from error


def merge(
    base: Path,
    adapter: Path,
    out: Path,
    *,
    given: Scaling = Scaling(),
    layout: str | None = None,
    pins: Pins | None = None,
) -> dict[str, Any]:
    """Writes ``out``, which appears whole or not at all, and returns the record that is written into it.

    ``given`` and ``layout`` are what the adapter does not say itself; where it does, they have to agree.

    ConfigError: ``out`` exists; rank or scale are unknown or contradict each other; a layout is ambiguous.
    CheckpointError: a hash, a tensor, a shape or a dtype is not what it has to be, or the proof failed.
    """
    check_is_new(out, base)
    config = read_model_config(str(base))
    file, settings = find_adapter(adapter)
    if pins:
        check_hashes(base, file, pins)
    weights = BaseWeights(base)
    kind, pairs = read_pairs(file)
    pairs = published_names(pairs, weights.names, get_policy(policy_of(config) or "").lora_prefix)
    rank, scale = settle(settings, given, pins, file)
    fitted, layouts = fit(pairs, weights, rank, layout, kind, file)
    if pins:
        check_topology(pairs, layouts, weights, pins)
    replaced = merge_weights(fitted, weights, scale)

    proof = Proof(config, weights, fitted, scale)
    proof.merge(replaced)
    with staged(out) as model:
        copy_all_but_weights(weights, model)
        weights.write(model, replaced, None)
        proof.reload(BaseWeights(model))
        record = {
            "base": str(base),
            "base_weights_sha256": {name: sha256_of(base / name) for name in weights.files},
            "adapter": str(file),
            "adapter_sha256": sha256_of(file),
            "kind": kind,
            "layouts": dict(Counter(layouts.values())),
            "rank": rank,
            "alpha": scale * rank,
            "scale": scale,
            "dtypes": sorted({_name(weights.read(name).dtype) for name in replaced}),
            "expected": {
                "base": f"{pins.base_model}@{pins.base_revision}",
                "adapter": f"{pins.adapter}@{pins.adapter_revision}",
            }
            if pins
            else None,
            "proof": proof.figures,
            "modules": sorted(fitted),
        }
        (model / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


# ------------------------------------------------------------------------------------------------- the adapter


def find_adapter(path: Path) -> tuple[Path, dict[str, Any]]:
    """The safetensors of an adapter and what ``adapter_config.json`` beside it says, {} without one."""
    if path.is_dir():
        there = [path / name for name in WEIGHT_FILES if (path / name).is_file()]
        if len(there) != 1:
            what = "both" if there else "neither"
            raise CheckpointError(f"{path} has {what} of {' and '.join(WEIGHT_FILES)}; name the file of the adapter")
        path = there[0]
    if not path.is_file():
        raise CheckpointError(f"the adapter {path} does not exist")
    settings_file = path.parent / SETTINGS_FILE
    if not settings_file.is_file():
        return path, {}
    return path, read_json_object(settings_file)


def read_pairs(file: Path) -> tuple[str, dict[str, Pair]]:
    """``"PEFT"`` or ``"MLX"``, and module -> its two tensors as they are stored. Raises ``CheckpointError``."""
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
    is_peft = any(".lora_A." in name for name in tensors)
    prefix, a_end, b_end = (PEFT_ROOT, ".lora_A.weight", ".lora_B.weight") if is_peft else (
        "", ".lora_a", ".lora_b"
    )  # fmt: skip
    halves: dict[str, dict[str, Tensor]] = {a_end: {}, b_end: {}}
    for name, tensor in sorted(tensors.items()):
        end = next((end for end in halves if name.endswith(end)), None)
        if end is None or not name.startswith(prefix):
            raise CheckpointError(f"{file} has {name}, which is no part of a LoRA adapter of linear modules")
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise CheckpointError(f"{name} of {file} has values that are no finite numbers")
        halves[end][name.removeprefix(prefix).removesuffix(end)] = tensor
    for here, there in ((a_end, b_end), (b_end, a_end)):
        if alone := sorted(halves[here].keys() - halves[there].keys()):
            raise CheckpointError(f"{file} has {alone[0]}{here} without its {there.strip('.')}")
    if not tensors:
        raise CheckpointError(f"{file} holds no tensors")
    return "PEFT" if is_peft else "MLX", {name: (a, halves[b_end][name]) for name, a in halves[a_end].items()}


def published_names(pairs: Mapping[str, Pair], known: set[str], prefix: str) -> dict[str, Pair]:
    """The same under the names of the whole model: PEFT on the stack ``prefix`` alone leaves that part out."""
    return {
        f"{prefix}.{module}"
        if f"{module}.weight" not in known and f"{prefix}.{module}.weight" in known
        else module: pair
        for module, pair in pairs.items()
    }


def settle(settings: Mapping[str, Any], given: Scaling, pins: Pins | None, file: Path) -> tuple[int, float]:
    """Rank and scale from all that say them, which have to agree. Raises ``ConfigError``, ``CheckpointError``."""
    said = {f"{file.parent / SETTINGS_FILE}": _of_settings(settings, file), "the command line": given}
    if pins:
        said["--expect"] = Scaling(rank=pins.adapter_rank, alpha=pins.adapter_alpha)
    rank = _agreed("rank", {who: scaling.rank for who, scaling in said.items()})
    if rank is None:
        raise ConfigError(f"{file} does not say its rank; add --rank")
    if rank < 1:
        raise ConfigError(f"rank={rank} has to be 1 or more")
    scale = _agreed("scale", {who: _scale(scaling, int(rank)) for who, scaling in said.items()})
    if scale is None:
        raise ConfigError(f"{file} does not say its scale; add --alpha or --scale, where scale = alpha / rank")
    if not math.isfinite(scale) or scale == 0:
        raise ConfigError(f"scale={scale} has to be a finite number other than 0")
    return int(rank), scale


def _of_settings(settings: Mapping[str, Any], file: Path) -> Scaling:
    if "lora_parameters" in settings:  # mlx-lm
        if settings.get("fine_tune_type", "lora") != "lora":
            raise CheckpointError(f"{file} has fine_tune_type={settings['fine_tune_type']}; only lora is merged")
        return Scaling(
            rank=_number(settings, "lora_parameters.rank", file), scale=_number(settings, "lora_parameters.scale", file)
        )
    for name, plain in PLAIN_PEFT.items():
        if settings.get(name, plain[0]) not in plain:
            raise CheckpointError(f"{file} has {name}={settings[name]}; only plain LoRA of one rank is merged")
    rank, alpha = _number(settings, "r", file), _number(settings, "lora_alpha", file)
    if settings.get("use_rslora") and rank and alpha:  # scale = alpha / sqrt(r), Kalajdzievski 2023
        return Scaling(rank=rank, scale=alpha / math.sqrt(rank))
    return Scaling(rank=rank, alpha=alpha)


def _number(settings: Mapping[str, Any], name: str, file: Path) -> Any:
    value: Any = settings
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if not (value is None or type(value) in (int, float)):
        raise CheckpointError(f"{file.parent / SETTINGS_FILE}: {name}={value!r} has to be a number")
    return value


def _scale(scaling: Scaling, rank: int) -> float | None:
    return scaling.alpha / rank if scaling.scale is None and scaling.alpha is not None else scaling.scale


def _agreed(name: str, said: Mapping[str, float | None]) -> float | None:
    values = {who: value for who, value in said.items() if value is not None}
    if len({*values.values()}) > 1:
        raise ConfigError(f"the {name} is " + ", ".join(f"{value:g} by {who}" for who, value in values.items()))
    return next(iter(values.values()), None)


# ------------------------------------------------------------------------------------------------- does it fit


def check_hashes(base: Path, adapter: Path, pins: Pins) -> None:
    """SHA-256 of every runtime file of the base and of the adapter. Raises ``CheckpointError``."""
    expected = {base / name: digest for name, digest in pins.base_files_sha256.items()}
    for path, digest in (expected | {adapter: pins.adapter_sha256}).items():
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; {pins.base_model} at {pins.base_revision} has it")
        if (found := sha256_of(path)) != digest:
            raise CheckpointError(f"{path} has SHA-256 {found}, expected is {digest}")
    for pattern in RUNTIME_EXTRAS:
        for path in sorted(base.rglob(pattern)):
            if path not in expected:
                raise CheckpointError(f"{path} is not part of {pins.base_model} at {pins.base_revision}; remove it")


def fit(
    pairs: Mapping[str, Pair], weights: BaseWeights, rank: int, layout: str | None, kind: str, file: Path
) -> tuple[dict[str, Pair], dict[str, str]]:
    """Each module's (A (R, I), B (O, R)), and the layout that it was found in.

    CheckpointError: no such module, or shapes that fit no layout. ConfigError: shapes that fit both.
    """
    if kind == "PEFT":
        if layout == "in-rank":
            raise ConfigError(f"--layout in-rank: {file} is a PEFT adapter, whose lora_A is always (rank, in)")
        layout = "rank-in"
    fitted, layouts = {}, {}
    for module, (a, b) in pairs.items():
        if f"{module}.weight" not in weights.names:
            raise CheckpointError(f"{file} has an adapter of {module}, which {weights.directory} has not")
        weight = weights.read(f"{module}.weight")
        if not weight.is_floating_point():
            raise CheckpointError(
                f"{module} of {weights.directory} is quantised, {_name(weight.dtype)}; merge into floats"
            )
        shape = tuple(weight.shape)
        found = _layout(module, tuple(a.shape), tuple(b.shape), shape, rank, layout)
        fitted[module] = (a, b) if found == "rank-in" else (a.T, b.T)
        layouts[module] = found
    return fitted, layouts


def _layout(
    module: str, a: tuple[int, ...], b: tuple[int, ...], weight: tuple[int, ...], rank: int, layout: str | None
) -> str:
    if len(weight) != 2:
        raise CheckpointError(f"{module} has a weight of shape {weight}; only linear modules are merged")
    out, into = weight
    by_layout = {"rank-in": ((rank, into), (out, rank)), "in-rank": ((into, rank), (rank, out))}
    asked = [layout] if layout else [*by_layout]
    found = [name for name in asked if by_layout[name] == (a, b)]
    if not found:
        expected = " or ".join(f"{by_layout[name][0]} and {by_layout[name][1]} ({name})" for name in asked)
        raise CheckpointError(f"{module}: lora_a {a} and lora_b {b} have to be {expected} for rank {rank}")
    if len(found) > 1:
        raise ConfigError(f"{module} is square, {out} x {into} at rank {rank}, and fits both layouts; add --layout")
    return found[0]


def check_topology(pairs: Mapping[str, Pair], layouts: Mapping[str, str], weights: BaseWeights, pins: Pins) -> None:
    """Which modules, how many tensors, which dtypes. Raises ``CheckpointError``."""
    if 2 * len(pairs) != pins.adapter_tensors:
        raise CheckpointError(f"the adapter has {2 * len(pairs)} tensors, expected are {pins.adapter_tensors}")
    expected = {
        f"{stack}.layers.{layer}.{parent}.{leaf}"
        for stack, layers in pins.adapter_layers.items()
        for layer in range(layers)
        for leaf, parent in LORA_PARENTS.items()
    }
    if wrong := sorted(expected ^ pairs.keys()):
        where = "lacks an adapter of" if wrong[0] in expected else "should have none of"
        raise CheckpointError(f"the adapter {where} {wrong[0]}")
    for module, (a, b) in pairs.items():
        original = weights.read(f"{module}.weight")
        for what, found, pinned in (
            ("lora_a", _name(a.dtype), pins.adapter_dtype),
            ("lora_b", _name(b.dtype), pins.adapter_dtype),
            ("layout", layouts[module], pins.adapter_layout),
            ("weight in the base", _name(original.dtype), pins.base_dtype),
        ):
            if found != pinned:
                raise CheckpointError(f"{module}: {what} is {found}, expected is {pinned}")


def merge_weights(fitted: Mapping[str, Pair], weights: BaseWeights, scale: float) -> dict[str, Tensor]:
    """The merged weights in float32. CheckpointError: one that is not finite in the base's dtype."""
    replaced = {}
    for module, (a_RI, b_OR) in fitted.items():
        name = f"{module}.weight"
        original = weights.read(name)
        replaced[name] = merged_weight(original, a_RI, b_OR, scale)
        if not replaced[name].to(original.dtype).isfinite().all():
            raise CheckpointError(f"{name} merged is not finite in {_name(original.dtype)}")
    return replaced


# ------------------------------------------------------------------------------------------------- the proof


class Proof:
    """Logits of every head, in float32, on a few positions, three times.

    The base with the adapter beside it, y = W x + scale B (A x); the merge, within ``PROOF_LIMIT``; what was written,
    read back, bit for bit as the merge rounded to its dtype. ``figures`` is what was measured.
    """

    def __init__(self, config: Mapping[str, Any], weights: BaseWeights, fitted: Mapping[str, Pair], scale: float):
        self._config, self._weights = config, weights
        self._load, self._logits = PROVED_WITH[policy_of(dict(config)) or ""]
        self._model = self._load(config, weights)
        base = self._logits(self._model)
        with adapter_beside(self._model, fitted, scale) as called:
            self._expected = self._logits(self._model)
        if idle := sorted(fitted.keys() - called):
            raise CheckpointError(f"{idle[0]} is no linear module of the talker, so its merge cannot be proved")
        self.figures = {
            "positions": PROOF_POSITIONS,
            "max_abs_logit": float(self._expected.abs().max()),
            "adapter_max_abs": float((self._expected - base).abs().max()),
        }

    def merge(self, replaced: Mapping[str, Tensor]) -> None:
        parameters = dict(self._model.named_parameters())
        for name, weight in replaced.items():
            parameters[name].data.copy_(weight)
        difference = float((self._logits(self._model) - self._expected).abs().max())
        limit = PROOF_LIMIT * self.figures["max_abs_logit"]
        if not difference <= limit:
            raise CheckpointError(
                f"the logits of base + adapter and of the merge differ by {difference:.3g}, the limit is {limit:.3g}"
            )
        self.figures["float32_max_abs"] = difference
        for name, weight in replaced.items():
            parameters[name].data.copy_(weight.to(self._weights.read(name).dtype))
        self._rounded = self._logits(self._model)
        del self._model  # 4 GB of a 0.6 B model

    def reload(self, written: BaseWeights) -> None:
        reloaded = self._logits(self._load(self._config, written))
        if not torch.equal(self._rounded, reloaded):
            difference = float((self._rounded - reloaded).abs().max())
            raise CheckpointError(f"the logits of what was written differ from those of the merge by {difference:.3g}")
        self.figures["written_max_abs"] = float((reloaded - self._expected).abs().max())


def load_qwen3_tts(config: Mapping[str, Any], weights: BaseWeights) -> nn.Module:
    """Talker and code predictor in float32 on the CPU."""
    model_config = Qwen3TTSConfig(**config)
    model_config.tts_model_type = "custom_voice"  # leaves the speaker encoder out
    with torch.device("meta"):  # no weight is drawn only to be replaced
        model = Qwen3TTSForConditionalGeneration(model_config).eval()
    _fill(model, weights, "talker.")
    for stack in (model.talker.model, model.talker.code_predictor.model):
        stack.rotary_emb = type(stack.rotary_emb)(stack.config)  # its frequencies are computed, not loaded
    return model


@torch.inference_mode()
def qwen3_tts_logits(model: Any) -> Tensor:
    """Logits at ``PROOF_POSITIONS`` positions that mix text and codes: the talker's, then each residual head's."""
    talker = model.talker
    text_L = torch.arange(PROOF_POSITIONS) * (talker.config.text_vocab_size // PROOF_POSITIONS)
    codec_L = torch.arange(PROOF_POSITIONS) * (talker.config.vocab_size // PROOF_POSITIONS)
    text_LH = talker.text_projection(talker.model.text_embedding(text_L))
    embeds_BLH = (text_LH + talker.model.codec_embedding(codec_L)).unsqueeze(0)
    hidden_BLH = talker.model(inputs_embeds=embeds_BLH, use_cache=False).last_hidden_state
    predictor = talker.code_predictor
    residual_BLH = predictor.model(
        inputs_embeds=predictor.small_to_mtp_projection(hidden_BLH), use_cache=False
    ).last_hidden_state
    heads = [talker.codec_head(hidden_BLH), *(head(residual_BLH) for head in predictor.lm_head)]
    return torch.cat(heads, dim=-1)


def load_moss(config: Mapping[str, Any], weights: BaseWeights) -> nn.Module:
    with torch.device("meta"):
        model = MossPolicy(MossConfig(**config)).eval()
    _fill(model, weights, "")
    stack = model.language_model
    stack.rotary_emb = type(stack.rotary_emb)(stack.config)
    return model


@torch.inference_mode()
def moss_logits(model: Any) -> Tensor:
    """Logits at ``PROOF_POSITIONS`` positions that mix text and codes: the text's, then each codebook's."""
    place_L = torch.arange(PROOF_POSITIONS)
    text_L = place_L * (model.config.language_config.vocab_size // PROOF_POSITIONS)
    codes_L = place_L * (model.config.audio_vocab_size // PROOF_POSITIONS)
    embeds_BLH = model._embed(text_L, codes_L[:, None].expand(-1, model.config.n_vq)).unsqueeze(0)
    hidden_BLH = model.language_model(inputs_embeds=embeds_BLH, use_cache=False).last_hidden_state
    return torch.cat([head(hidden_BLH) for head in model.lm_heads], dim=-1)


PROVED_WITH = {"qwen3_tts": (load_qwen3_tts, qwen3_tts_logits), "moss": (load_moss, moss_logits)}


def _fill(model: nn.Module, weights: BaseWeights, prefix: str) -> None:
    """What of the weights begins with ``prefix``, in float32 on the CPU. ``CheckpointError`` for too little."""
    state = {name: weights.read(name).float() for name in weights.names if name.startswith(prefix)}
    try:
        missing = model.load_state_dict(state, strict=False, assign=True).missing_keys
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{weights.directory} does not fit its config.json: {reason}") from error
    if missing:
        raise CheckpointError(f"{weights.directory} lacks {len(missing)} tensors, {missing[0]} among them")


@contextmanager
def adapter_beside(model: nn.Module, fitted: Mapping[str, Pair], scale: float) -> Iterator[set[str]]:
    """Inside, each module adds its adapter's part to its output. Yields the names of modules as they are called."""
    called: set[str] = set()

    def hook(name: str, a_RI: Tensor, b_OR: Tensor) -> Any:
        def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            called.add(name)
            return output + scale * (inputs[0] @ a_RI.float().T) @ b_OR.float().T

        return add

    modules = dict(model.named_modules())
    handles = [
        modules[name].register_forward_hook(hook(name, a_RI, b_OR))
        for name, (a_RI, b_OR) in fitted.items()
        if isinstance(modules.get(name), nn.Linear)
    ]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
