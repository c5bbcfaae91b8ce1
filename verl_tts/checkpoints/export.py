"""A training checkpoint of any world size becomes a model directory that qwen-tts and vLLM-Omni load.

    seal checked -> shards of all ranks joined -> LoRA merged -> names accounted for -> base copied, tensors replaced

The base model directory gives the names, the dtypes and every file that training does not touch (config,
tokenizer, speech tokenizer); the checkpoint gives the policy's tensors. Frozen tensors in the checkpoint are
compared with the base's, which finds a base that is not the one the run started from.
"""

import json
import logging
import math
import os
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard  # also makes DTensors loadable with weights_only
from torch.distributed.tensor.placement_types import Placement

from verl_tts.checkpoints.manifest import MANIFEST, read_manifest, verify, world_size_of
from verl_tts.config.model_dir import CODEC_DIRS, codec_dir, policy_of, read_model_config
from verl_tts.errors import CheckpointError, ConfigError
from verl_tts.files import check_is_new, read_json_object, staged
from verl_tts.models.base import get_policy
from verl_tts.report.run_dir import RunDir

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INDEX = "model.safetensors.index.json"
HIDDEN = (".git", ".cache")  # what a download leaves beside a model
PEFT_ROOT = "base_model.model."  # what PEFT puts before a module's name
ORIGIN = "verl_tts_export.json"  # written into the exported directory: which checkpoint it came from

Tensors = dict[str, Tensor]


def export(
    checkpoint: Path, out: Path, *, base: Path | None = None, dtype: str | None = None, codec: Path | None = None
) -> None:
    """Writes the model directory ``out`` from ``checkpoint`` (``RUN/checkpoints/global_step_<n>``).

    ``base`` is by default the model that the run's config.yaml names. ``dtype`` is a key of ``DTYPES``; by default
    every tensor has the dtype that it has in the base. ``codec`` is one that the base lacks, to be copied to where it
    is looked for. ``out`` appears whole or not at all.

    CheckpointError: the checkpoint is damaged, or does not fit the base. ConfigError: ``out`` exists, or ``dtype`` is
    unknown.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype} is unknown; it has to be one of {', '.join(DTYPES)}")
    check_is_new(out, checkpoint)
    verify(checkpoint)
    base = base or base_of_run(checkpoint)
    check_is_new(out, base)
    config = read_model_config(str(base))
    name = policy_of(config) or ""
    policy = get_policy(name)
    if codec is not None:
        codec = codec_dir(str(base), config, str(codec))  # whole, before anything is written

    weights = BaseWeights(base)
    trained = read_actor(checkpoint / "actor", weights)
    must_have = {name for name in weights.names if policy.is_trainable(name, "full")}
    replaced = check_fit(trained, weights, must_have)

    with staged(out) as model:
        copy_all_but_weights(weights, model)
        if codec is not None:
            place = model / CODEC_DIRS[name]
            shutil.rmtree(place, ignore_errors=True)  # of the base, another one
            shutil.copytree(codec, place, ignore=shutil.ignore_patterns(*HIDDEN))
        weights.write(model, replaced, DTYPES[dtype] if dtype else None)
        write_origin(model, checkpoint, dtype=dtype or "as in the base model")


def write_origin(directory: Path, checkpoint: Path, dtype: str) -> None:
    digest = sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
    origin = {"step": read_manifest(checkpoint).step, "manifest_sha256": digest, "dtype": dtype}
    (directory / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")


def base_of_run(checkpoint: Path) -> Path:
    """The model directory that the run of this checkpoint started from, as its newest config.yaml says."""
    path = setting_of_run(checkpoint, "actor_rollout_ref.model.path")
    if not path:
        raise CheckpointError(f"no config.yaml above {checkpoint} says what the base model is; name it with --base")
    if not Path(path).is_dir():
        raise CheckpointError(f"the base model of {checkpoint}, {path}, is not a directory here; name it with --base")
    return Path(path)


def setting_of_run(checkpoint: Path, key: str) -> str | None:
    """What the newest config.yaml of the checkpoint's run says of a path; None: nothing, or there is no run."""
    run = next((folder for folder in checkpoint.absolute().parents if (folder / "config.yaml").is_file()), None)
    return None if run is None else OmegaConf.select(RunDir(run).latest_config(), key)


# ------------------------------------------------------------------------------------------- trained tensors


def read_actor(actor: Path, weights: "BaseWeights") -> Tensors:
    """The actor's full tensors on the CPU, in the dtype they were trained in, under their published names."""
    tensors = read_tensors(actor)
    if any(".lora_" in name for name in tensors):
        return merge_lora(tensors, actor, weights)
    return tensors


def read_tensors(actor: Path) -> Tensors:
    """The same under the names that they were saved by, adapters beside the weights."""
    world_size = world_size_of(actor.parent)
    shards = [read_shard(actor / f"model_world_size_{world_size}_rank_{rank}.pt") for rank in range(world_size)]
    if any(shard.keys() != shards[0].keys() for shard in shards):
        raise CheckpointError(f"the ranks in {actor} have saved tensors of different names")
    return {name: join([shard[name] for shard in shards], name) for name in shards[0]}


def read_shard(path: Path) -> Tensors:
    """What one rank has saved. Nothing is unpickled but tensors and how they were sharded."""
    # torch warns of each mesh that it loads outside of a process group, which joining does not need.
    logger = logging.getLogger("torch.distributed.device_mesh")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        shard = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} holds more than tensors: {str(error).splitlines()[0]}") from error
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {(str(error) or 'it is cut').splitlines()[0]}") from error
    finally:
        logger.setLevel(level)
    if not isinstance(shard, dict):
        raise CheckpointError(f"{path} holds a {type(shard).__name__}, not tensors by name")
    return shard


def join(parts: Sequence[Tensor], name: str) -> Tensor:
    """One tensor from what each rank has of it: DTensors by their placements, plain ones are copies of each other."""
    sharded = [part for part in parts if isinstance(part, DTensor)]
    if not sharded:
        return _same(parts, name)
    if len(sharded) < len(parts):
        raise CheckpointError(f"{name} is sharded on {len(sharded)} of {len(parts)} ranks")
    whole, local = sharded[0], [part.to_local() for part in sharded]

    def join_mesh(ranks: Tensor, placements: Sequence[Placement]) -> Tensor:
        if not placements:
            return local[int(ranks)]
        along = [join_mesh(rest, placements[1:]) for rest in ranks.unbind()]
        if type(placements[0]) is Shard:
            return torch.cat(along, placements[0].dim)
        if type(placements[0]) is Replicate:
            return _same(along, name)
        raise CheckpointError(f"{name} is placed as {placements[0]}; only Shard and Replicate can be exported")

    joined = join_mesh(whole.device_mesh.mesh, whole.placements)
    if joined.shape != whole.shape:
        raise CheckpointError(f"the shards of {name} join to {tuple(joined.shape)}, not to {tuple(whole.shape)}")
    return joined


def merge_lora(tensors: Tensors, actor: Path, weights: "BaseWeights") -> Tensors:
    """PEFT's names and adapters become published names and merged weights: W + (alpha / r) B A, in float32.

    A checkpoint of adapters alone (``checkpoint.save_lora_only``) takes W, and everything else, from the base.
    """
    rank, alpha = lora_settings(actor)
    scale = alpha / rank

    named = {name.removeprefix(PEFT_ROOT): tensor for name, tensor in tensors.items()}
    adapters = {name: tensor for name, tensor in named.items() if ".lora_" in name}
    merged = {name.replace(".base_layer.", "."): named[name] for name in named.keys() - adapters.keys()}
    if not merged:
        merged = {name: weights.read(name) for name in weights.names}

    for module in {name.partition(".lora_")[0] for name in adapters}:
        a = adapters.pop(f"{module}.lora_A.default.weight", None)
        b = adapters.pop(f"{module}.lora_B.default.weight", None)
        weight = merged.get(f"{module}.weight")
        if a is None or b is None or weight is None or len(a) != rank or b.shape[1] != rank:
            raise CheckpointError(f"the adapter of {module} is not a whole one of rank {rank}")
        merged[f"{module}.weight"] = merged_weight(weight, a, b, scale)
    if adapters:
        raise CheckpointError(f"{len(adapters)} adapter tensors are of an unknown kind, {min(adapters)} among them")
    return merged


def lora_settings(actor: Path) -> tuple[int, float]:
    """Rank and alpha of the adapters, which verl saves beside them. Raises ``CheckpointError``."""
    settings_file = actor / "lora_train_meta.json"
    if not settings_file.is_file():
        raise CheckpointError(f"{actor} holds adapters, but no {settings_file.name} that says their rank and alpha")
    settings = read_json_object(settings_file)
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise CheckpointError(f"{settings_file}: r={rank!r} has to be a whole number, 1 or more")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha) or alpha == 0:
        raise CheckpointError(f"{settings_file}: lora_alpha={alpha!r} has to be a finite number other than 0")
    return rank, alpha


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale B A in float32, scale = alpha / r (Hu et al. 2021, section 4.1). W (out, in), A (r, in), B (out, r)."""
    return weight.float() + (b.float() @ a.float()) * scale


def check_fit(trained: Tensors, weights: "BaseWeights", must_have: set[str]) -> Tensors:
    """What replaces tensors of the base. CheckpointError for a name or shape that does not fit it.

    ``must_have`` are the names that training may have changed; others may be absent, and must equal the base's.
    """
    if unknown := sorted(trained.keys() - weights.names):
        raise CheckpointError(
            f"{len(unknown)} tensors of the checkpoint are not in {weights.directory}, {unknown[0]} among them"
        )
    if missing := sorted(must_have - trained.keys()):
        raise CheckpointError(f"the checkpoint lacks {len(missing)} trained tensors, {missing[0]} among them")
    for name, tensor in trained.items():
        original = weights.read(name)
        if tensor.shape != original.shape:
            raise CheckpointError(f"{name} is {tuple(tensor.shape)}, in {weights.directory} {tuple(original.shape)}")
        if name not in must_have and not torch.equal(tensor, original.to(tensor.dtype)):
            raise CheckpointError(
                f"{name} was frozen and differs from {weights.directory}; name the model the run began with: --base"
            )
    return {name: tensor for name, tensor in trained.items() if name in must_have}


def _same(copies: Sequence[Tensor], name: str) -> Tensor:
    if not all(torch.equal(copies[0], copy) for copy in copies[1:]):
        raise CheckpointError(f"{name} should be the same on every rank, and is not")
    return copies[0]


# ------------------------------------------------------------------------------------------- base directory


class BaseWeights:
    """The safetensors of a model directory, one file or several with an index. Raises ``CheckpointError``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = directory / INDEX
        if index.is_file():
            try:
                self.files = sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise CheckpointError(f"{index} is no index of weights: {error!r}") from error
        else:
            self.files = ["model.safetensors"]
        self._file_of: dict[str, str] = {}
        for file in self.files:
            try:
                with safe_open(directory / file, framework="pt") as opened:
                    self._file_of |= dict.fromkeys(opened.keys(), file)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{directory / file} cannot be read as safetensors: {error}") from error

    @property
    def names(self) -> set[str]:
        return {*self._file_of}

    def read(self, name: str) -> Tensor:
        with safe_open(self.directory / self._file_of[name], framework="pt") as opened:
            return opened.get_tensor(name)

    def write(self, model: Path, replaced: Tensors, dtype: torch.dtype | None) -> None:
        """The same files in ``model``, with ``replaced`` put in; ``dtype`` None leaves every tensor its own."""

        def cast(name: str, original: Tensor) -> Tensor:
            tensor = replaced.get(name, original)
            if not original.is_floating_point():
                return tensor.contiguous()
            return tensor.to(dtype or original.dtype).contiguous()

        total_bytes = 0
        for file in self.files:
            with safe_open(self.directory / file, framework="pt") as opened:
                tensors = {name: cast(name, opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118
                metadata = opened.metadata() or {"format": "pt"}
            save_file(tensors, model / file, metadata=metadata)
            # save_file lets nobody but the owner read it.
            (model / file).chmod(0o200 | (self.directory / file).stat().st_mode)
            total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if (model / INDEX).exists():
            _rewrite_json(model / INDEX, lambda index: index["metadata"].update(total_size=total_bytes))
        if dtype is not None:
            name = str(dtype).removeprefix("torch.")
            _rewrite_json(model / "config.json", lambda config: _set_dtype(config, name))


def copy_all_but_weights(weights: BaseWeights, model: Path) -> None:
    """Everything else of the base directory: config, tokenizer, speech tokenizer. Links are followed.

    A model that is shared may be read-only; its copy is the user's.
    """

    def skip(folder: str, names: list[str]) -> set[str]:
        at_top = Path(folder) == weights.directory
        return {*weights.files} & {*names} if at_top else set()

    shutil.copytree(
        weights.directory,
        model,
        ignore=lambda folder, names: skip(folder, names) | {*HIDDEN},
        copy_function=shutil.copyfile,
        dirs_exist_ok=True,
    )
    for folder, _, _ in os.walk(model):
        os.chmod(folder, 0o700 | os.stat(folder).st_mode)


def _rewrite_json(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _set_dtype(config: Mapping[str, Any], name: str) -> None:
    """Where a config, or one inside it, states a dtype, it states that of the new weights."""
    for key, value in config.items():
        if isinstance(value, dict):
            _set_dtype(value, name)
        elif key in ("dtype", "torch_dtype") and isinstance(config, dict):
            config[key] = name
