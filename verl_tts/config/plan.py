"""What a run will need, before it is started and for machines that are not there: steps, memory, disk, hours.

All of it follows from the settings and from config.json of the model; nothing is loaded. It is an estimate: counts of
parameters and of checkpoint bytes are exact, sizes of activations are counted from the code (tests compare them with
what autograd keeps), and what a GPU adds on top, ``ASSUMED``, was measured on none.

The memory of a GPU, in bytes. N is the number of actor workers, P the parameters that training loads, T those trained:

    parameters   model_dtype x P / N                          FSDP2 shards (Rajbhandari et al., 2020, stage 3)
    gradients    model_dtype x T / N
    optimizer    8 x T / N                                    two FP32 moments of Adam
    gathered     param_dtype x (root + embeddings + 2 layers) FSDP2 keeps the root, and one layer ahead
                 + (param_dtype + reduce_dtype) x largest trained unit, on its way to being reduced
    activations  see ``activation_bytes``
    reference    gathered like the actor's, one at a time; its shards are in host memory (verl's CPUOffloadPolicy).
                 With LoRA the actor without its adapter is the reference.
    engine       both stages: weights, KV cache of every request at its longest, and the decoder's work

The most is needed in one of three phases: sampling (the actor rests), log-probs (nothing is kept for a backward pass),
and the update. With ``free_cache_engine`` the engine gives back weights and cache in the last two.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from verl_tts.checkpoints.tiny import codec_shapes, model_shapes
from verl_tts.errors import ConfigError
from verl_tts.models.qwen3_tts_names import GENERATION_ONLY, is_trainable, lora_targets
from verl_tts.models.qwen3_tts_prompt import SAMPLES_PER_FRAME
from verl_tts.rollout.spec import RolloutSpec
from verl_tts.rollout.stages import DECODER_KV_BYTES, PROMPT_MARGIN, talker_kv_bytes

GIB = 2**30
Scorer = Literal["shared", "own", "none"]
SCORERS: tuple[Scorer, ...] = ("shared", "own", "none")
BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
# model_type -> name and shape of every tensor of model.safetensors, from config.json
SHAPES = {"qwen3_tts": model_shapes}
FLOAT32 = 4
ADAM_BYTES = 8
LORA_RANK = 16  # of the last remedy

# Settings by what they are in a plan.
FREE_ENGINE = "actor_rollout_ref.rollout.free_cache_engine"
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
MICRO_BATCH = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
LOG_PROB_BATCHES = (
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
)
MAX_NUM_SEQS = "actor_rollout_ref.rollout.max_num_seqs"
ENGINE_SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"


@dataclass(frozen=True)
class Assumed:
    """What cannot be computed from a configuration. Nothing here was measured on a GPU by us."""

    context_gib: float = 0.5
    """CUDA context and libraries' workspaces of one process; there are three on a card: actor and two stages."""

    codec_gib: float = 0.7
    """Weights of the speech tokenizer in FP32, where its config.json is not there to count them."""

    decode_gib: float = 1.0
    """Work of the codec's decoder for 300 frames, vLLM-Omni's chunk."""

    scorer_gib: float = 4.0
    """A scorer that shares a card: a recogniser of Whisper's large size in half precision with its batch."""

    usable: float = 0.92
    """Share of a card that can be allocated; the rest is the driver's and lost between blocks."""

    frame_s: tuple[float, float] = (0.03, 0.12)
    """One frame of all clips in flight: a step of the talker and 15 of the code predictor, without CUDA graphs. The
    slow end is what sglang-omni reports for Qwen3-TTS 0.6B on an H200 at 16 in flight (its pull request 451)."""

    flops: tuple[float, float] = (120e12, 20e12)
    """Operations a second that training reaches on one GPU, from a current data-centre card to a consumer's."""

    overhead_s: tuple[float, float] = (1.0, 5.0)
    """Between the phases of a step: batches through the transfer queue, weight sync, waiting for the scorer."""

    disk_bytes_s: tuple[float, float] = (2e9, 0.2e9)
    """Writing and hashing of a checkpoint."""

    mean_length: tuple[float, float] = (0.5, 1.0)
    """Mean length of a clip over data.max_response_length."""


ASSUMED = Assumed()


@dataclass(frozen=True)
class Machine:
    """What a run would be given; ``gpu_gib`` None: not known, so that nothing can be said to fit."""

    gpus: int  # of one node
    nodes: int = 1
    gpu_gib: float | None = None
    scorer: Scorer = "own"

    @property
    def workers(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True)
class Sizes:
    """Parameters of a policy, counted from the shapes of its tensors."""

    file: int
    """In model.safetensors."""
    loaded: int
    """P: in memory while it trains, adapters included."""
    trained: int
    """T: of these, with an optimizer state."""
    exported: int
    """Sent to the rollout engine after an update."""
    layer: int
    embeddings: int
    """In units of their own."""
    root: int
    """In no unit of their own."""
    largest_trained_unit: int

    @classmethod
    def of(cls, model_config: Mapping[str, Any], config: DictConfig) -> "Sizes":
        """Raises ``ConfigError`` for a model whose tensors are not known here."""
        if model_config["model_type"] not in SHAPES:
            raise ConfigError(
                f"there is no plan for a model of type {model_config['model_type']}; there is for {', '.join(SHAPES)}"
            )
        shapes = dict(SHAPES[model_config["model_type"]](model_config))
        model = config.actor_rollout_ref.model
        loaded = {name: prod(shape) for name, shape in shapes.items() if not GENERATION_ONLY.fullmatch(name)}
        units: dict[str, int] = {}
        trained_units: dict[str, int] = {}
        trained = exported = adapters = 0
        targets = _targets(model.target_modules) if model.lora_rank > 0 else None
        for name, size in loaded.items():
            unit = _unit_of(name)
            units[unit] = units.get(unit, 0) + size
            if targets is not None:
                if targets.fullmatch(name.removesuffix(".weight")):
                    adapters += model.lora_rank * sum(shapes[name])
                    exported += size
                    trained_units[unit] = trained_units.get(unit, 0) + model.lora_rank * sum(shapes[name])
            elif is_trainable(name, config.tts.trainable):
                trained, exported = trained + size, exported + size
                trained_units[unit] = trained_units.get(unit, 0) + size
        return cls(
            file=sum(map(prod, shapes.values())),
            loaded=sum(loaded.values()) + adapters,
            trained=trained + adapters,
            exported=exported,
            layer=max(size for unit, size in units.items() if ".layers." in unit),
            embeddings=sum(size for unit, size in units.items() if unit.endswith("embedding")),
            root=units[ROOT],
            largest_trained_unit=max(trained_units.values()),
        )


ROOT = "root"


def _targets(target_modules: Any) -> re.Pattern[str]:
    """The compiled expression of the modules that get an adapter."""
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    return re.compile(lora_targets(targets))


def _unit_of(name: str) -> str:
    """The module that FSDP2 shards a parameter with: its decoder layer, its embedding table, or the root (verl's
    ``apply_fsdp2`` wraps layers by class and every ``nn.Embedding``)."""
    parts = name.split(".")
    if "layers" in parts:
        return ".".join(parts[: parts.index("layers") + 2])
    module = name.removesuffix(".weight")
    last = module.rpartition(".")[2]
    if last.endswith("embedding") or (last.isdecimal() and "codec_embedding" in parts):
        return module if not last.isdecimal() else f"{module}.embedding"
    return ROOT


def activation_bytes(
    talker: Mapping[str, Any], rows: int, width: int, frames: int, param_bytes: int
) -> tuple[int, int]:
    """What autograd keeps for ``rows`` sequences of ``width`` positions: (of one decoder layer, of all else).

    Counted tensor by tensor from Qwen3's layer as Transformers runs it, as Korthikanti et al. (2022, arXiv 2205.05198)
    do for GPT: RMSNorm in FP32 and its result cast back, for hidden states and for queries and keys; query, key, value
    and result of SDPA, which reads grouped keys without repeating them; a gated MLP. All else: the sums of the
    embeddings, the last norm in FP32, the head's columns of the engine's support, and log-softmax of ``frames + 1``
    positions a row.
    """
    hidden, inner, head = talker["hidden_size"], talker["intermediate_size"], talker["head_dim"]
    query, key = talker["num_attention_heads"] * head, talker["num_key_value_heads"] * head
    cast = param_bytes if param_bytes < FLOAT32 else 0  # a tensor that is FP32 already is not copied
    norms = 2 * (FLOAT32 + cast + param_bytes) * hidden
    heads = (FLOAT32 + cast) * (query + key) + 2 * param_bytes * head
    attention = 2 * param_bytes * (query + key)
    mlp = 4 * param_bytes * inner
    support = talker["code_predictor_config"]["vocab_size"]
    positions, predictions = rows * width, rows * (frames + 1)
    rest = positions * 3 * hidden + predictions * (support + hidden) + support * hidden
    return positions * (norms + heads + attention + mlp), FLOAT32 * rest


@dataclass(frozen=True)
class Plan:
    """One configuration on one machine. Sizes are bytes, of one GPU where nothing else is said."""

    config: DictConfig
    machine: Machine
    model_config: Mapping[str, Any]
    prompts: int | None  # rows to train on; None: not known
    val_prompts: int | None
    codec_config: Mapping[str, Any] | None = None
    assumed: Assumed = ASSUMED

    # ------------------------------------------------------------------ steps

    @cached_property
    def steps_an_epoch(self) -> int | None:
        return None if self.prompts is None else self.prompts // self.config.data.train_batch_size

    @cached_property
    def steps(self) -> int:
        """verl ends at the last step or the last epoch, whichever comes first. Raises ``ConfigError``."""
        trainer = self.config.trainer
        ends = [trainer.total_training_steps] if trainer.total_training_steps is not None else []
        if self.steps_an_epoch is not None:
            ends.append(self.steps_an_epoch * trainer.total_epochs)
        if not ends:
            raise ConfigError(
                "the number of steps follows from data.train_files or trainer.total_training_steps; set one"
            )
        return min(ends)

    @property
    def clips_a_step(self) -> int:
        return self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n

    def _times(self, every: int) -> int:
        """How often what happens each ``every`` steps, and after the last one, happens."""
        return 0 if every <= 0 else ceil(self.steps / every)

    @property
    def validations(self) -> int:
        trainer = self.config.trainer
        return self._times(trainer.test_freq) + int(trainer.val_before_train)

    # ------------------------------------------------------------------ memory

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes.of(self.model_config, self.config)

    @property
    def _actor(self) -> Any:
        return self.config.actor_rollout_ref.actor

    @cached_property
    def _bytes(self) -> tuple[int, int, int]:
        """Of a parameter as it is kept, as it computes, and of its gradient as it is reduced."""
        fsdp = self._actor.fsdp_config
        mixed = fsdp.mixed_precision
        return BYTES[fsdp.model_dtype], BYTES[mixed.param_dtype], BYTES[mixed.reduce_dtype]

    @property
    def parameters(self) -> float:
        return self._bytes[0] * self.sizes.loaded / self.machine.workers

    @property
    def gradients(self) -> float:
        return self._bytes[0] * self.sizes.trained / self.machine.workers

    @property
    def optimizer(self) -> float:
        return ADAM_BYTES * self.sizes.trained / self.machine.workers

    @property
    def gathered(self) -> float:
        sizes = self.sizes
        return self._bytes[1] * (sizes.root + sizes.embeddings + 2 * sizes.layer)

    @property
    def reduced(self) -> float:
        """Gradients of the largest unit, gathered, on their way to being reduced."""
        return (self._bytes[1] + self._bytes[2]) * self.sizes.largest_trained_unit

    @property
    def width(self) -> int:
        """Positions of the longest row."""
        data = self.config.data
        return data.max_prompt_length + data.max_response_length

    @cached_property
    def activations(self) -> float:
        """Of one micro-batch of the update."""
        rows = min(self._actor.ppo_micro_batch_size_per_gpu or 1, self._rows_a_worker)
        layer, rest = self._activations(rows)
        # The gradients of the logits, and what they are computed from, beside what autograd keeps.
        rest += 2 * FLOAT32 * rows * (self.config.data.max_response_length + 1) * self._support
        layers = self.model_config["talker_config"]["num_hidden_layers"]
        if not self.config.actor_rollout_ref.model.enable_gradient_checkpointing:
            return layers * layer + rest
        inputs = rows * self.width * self.model_config["talker_config"]["hidden_size"] * self._bytes[1]
        return layers * inputs + layer + rest

    @cached_property
    def forward(self) -> float:
        """Of one micro-batch of log-probs: a layer at a time."""
        rows = max(OmegaConf.select(self.config, key) or 1 for key in LOG_PROB_BATCHES)
        return sum(self._activations(min(rows, self._rows_a_worker)))

    @property
    def _support(self) -> int:
        return int(self.model_config["talker_config"]["code_predictor_config"]["vocab_size"])

    @property
    def _rows_a_worker(self) -> int:
        return max(1, self.clips_a_step // self.machine.workers)

    def _activations(self, rows: int) -> tuple[int, int]:
        talker = self.model_config["talker_config"]
        return activation_bytes(talker, rows, self.width, self.config.data.max_response_length, self._bytes[1])

    @property
    def has_reference(self) -> bool:
        return bool(self._actor.use_kl_loss or self.config.algorithm.use_kl_in_reward)

    @property
    def reference(self) -> float:
        """Beside the actor's shards, while the reference's log-probs are computed."""
        with_adapter = self.config.actor_rollout_ref.model.lora_rank > 0
        return 0.0 if with_adapter or not self.has_reference else self.gathered

    @property
    def reference_host(self) -> float:
        """Shards of the reference in the host memory of one worker."""
        return 0.0 if not self.reference else self._bytes[0] * self.sizes.loaded / self.machine.workers

    @cached_property
    def spec(self) -> RolloutSpec:
        return RolloutSpec.from_config(self.config)

    @cached_property
    def engine_cache(self) -> float:
        tokens = self.spec.max_prompt_tokens + PROMPT_MARGIN + self.spec.max_response_tokens
        return float(talker_kv_bytes(self.spec, self.model_config["talker_config"], tokens) + DECODER_KV_BYTES)

    @cached_property
    def engine_weights(self) -> float:
        codec = self.assumed.codec_gib * GIB
        if self.codec_config is not None:
            codec = FLOAT32 * sum(prod(shape) for _, shape in codec_shapes(self.codec_config))
        return BYTES[self.spec.dtype] * self.sizes.file + codec

    @property
    def engine(self) -> float:
        return self.engine_weights + self.engine_cache + self.assumed.decode_gib * GIB

    @property
    def always(self) -> float:
        """Contexts of the actor and of both stages, and a scorer that shares the card."""
        scorer = self.assumed.scorer_gib if self.machine.scorer == "shared" else 0.0
        return (3 * self.assumed.context_gib + scorer) * GIB

    @cached_property
    def phases(self) -> dict[str, float]:
        fsdp = self._actor.fsdp_config
        resting = (0.0 if fsdp.param_offload else self.parameters) + (0.0 if fsdp.optimizer_offload else self.optimizer)
        beside = 0.0 if self.config.actor_rollout_ref.rollout.free_cache_engine else self.engine
        kept = self.parameters + (0.0 if fsdp.optimizer_offload else self.optimizer)
        update = self.parameters + self.optimizer + self.gradients + self.gathered + self.reduced + self.activations
        return {
            "sampling": self.always + resting + self.engine,
            "log-probs": self.always + kept + max(self.gathered, self.reference) + self.forward + beside,
            "update": self.always + update + beside,
        }

    @property
    def peak(self) -> float:
        return max(self.phases.values())

    @property
    def engine_share(self) -> float:
        """``gpu_memory_utilization`` that the second stage can find free when it starts; 1 is the whole card."""
        assert self.machine.gpu_gib is not None
        card = self.machine.gpu_gib * GIB
        first_stage = self.engine_weights + self.engine_cache
        return max(0.0, (card - self.always - self.parameters - first_stage) / card)

    @property
    def fits(self) -> bool:
        assert self.machine.gpu_gib is not None
        wanted = self.config.actor_rollout_ref.rollout.gpu_memory_utilization
        return self.peak <= self.assumed.usable * self.machine.gpu_gib * GIB and wanted <= self.engine_share

    # ------------------------------------------------------------------ disk, shared memory, time

    @property
    def checkpoint(self) -> int:
        """Bytes of one, of all workers: parameters and the optimizer's moments; see ``save_contents``."""
        what = set(self._actor.checkpoint.save_contents)
        model = self._bytes[0] * self.sizes.loaded if "model" in what else 0
        return model + (ADAM_BYTES * self.sizes.trained if "optimizer" in what else 0)

    @property
    def checkpoints_kept(self) -> int:
        """The newest, the best, and the one that is being written."""
        trainer = self.config.trainer
        saves, keep = self._times(trainer.save_freq), trainer.max_actor_ckpt_to_keep
        return saves if not keep or keep <= 0 else min(saves, keep + 2)

    @property
    def samples_bytes(self) -> float:
        """FLAC of noise-like speech is near 12 of 16 bits; clips at their longest."""
        clip = self.config.data.max_response_length * SAMPLES_PER_FRAME * 1.5
        keep = self.config.tts.keep
        train = self.clips_a_step if keep.train_samples_per_step < 0 else keep.train_samples_per_step
        val = self.clips_a_validation if keep.val_samples_per_step < 0 else keep.val_samples_per_step
        return clip * (self.steps * train + self.validations * val)

    @property
    def clips_a_validation(self) -> int:
        return (self.val_prompts or 0) * self.config.actor_rollout_ref.rollout.val_kwargs.n

    @property
    def disk(self) -> float:
        return self.checkpoint * self.checkpoints_kept + self.samples_bytes

    @property
    def shared_memory(self) -> int:
        """Of one node, while every worker sends its engine the trained tensors."""
        return BYTES[self.spec.dtype] * self.sizes.exported * self.machine.gpus

    def hours(self) -> tuple[float, float]:
        """The whole run, from fast to slow, with ``assumed`` at its fast and at its slow end."""
        return tuple(self._seconds(end) / 3600 for end in (0, 1))  # type: ignore[return-value]

    def _seconds(self, end: int) -> float:
        a, workers = self.assumed, self.machine.workers
        frames = self.config.data.max_response_length * a.mean_length[end]

        def sampling(clips: int) -> float:
            waves = ceil(ceil(clips / workers) / self.spec.max_num_seqs)
            return waves * frames * a.frame_s[end]

        sizes = self.sizes
        positions = self.clips_a_step * (self.config.data.max_prompt_length * a.mean_length[end] + frames) / workers
        # A position costs 2 operations a parameter forward, 4 backward; embeddings are looked up.
        computing = sizes.loaded - sizes.embeddings
        passes = (
            2
            + 2 * self.has_reference
            + self._actor.ppo_epochs * (6 + 2 * bool(self.config.actor_rollout_ref.model.enable_gradient_checkpointing))
        )
        training = passes * computing * positions / a.flops[end]
        step = sampling(self.clips_a_step) + training + a.overhead_s[end]
        saves = self._times(self.config.trainer.save_freq) * self.checkpoint / a.disk_bytes_s[end]
        return self.steps * step + self.validations * sampling(self.clips_a_validation) + saves


# ---------------------------------------------------------------------- remedies


@dataclass(frozen=True)
class Answer:
    """``changes`` are settings with which it fits; None where none that are known here are enough."""

    plan: Plan
    changes: Mapping[str, Any] | None

    @property
    def fits(self) -> bool:
        return self.changes == {}


def answer(plan: Plan) -> Answer:
    """Whether it fits, or what to change: first what costs nothing, then what costs time, then what trains less."""
    taken: list[dict[str, Any]] = []
    for remedy in _remedies(plan):
        before = _with(plan, taken)
        if before.fits:
            break
        if _with(plan, [*taken, remedy]).peak < before.peak or ENGINE_SHARE in remedy:
            taken.append(remedy)
    if not _with(plan, taken).fits:
        return Answer(plan, None)
    for remedy in [*taken]:  # what turned out not to be needed
        fewer = [other for other in taken if other is not remedy]
        if _with(plan, fewer).fits:
            taken = fewer
    return Answer(plan, _merged(taken))


def _remedies(plan: Plan) -> Iterator[dict[str, Any]]:
    config = plan.config
    yield {ENGINE_SHARE: round(min(0.1, plan.engine_share), 2)}
    yield {FREE_ENGINE: True}
    yield {CHECKPOINTING: True}
    rows = max(OmegaConf.select(config, key) or 1 for key in LOG_PROB_BATCHES)
    while rows > 1:
        rows //= 2
        yield dict.fromkeys(LOG_PROB_BATCHES, rows)
    rows = config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu or 1
    while rows > 1:
        rows //= 2
        yield {MICRO_BATCH: rows}
    in_flight = config.actor_rollout_ref.rollout.max_num_seqs
    while in_flight > 8:
        in_flight //= 2
        yield {MAX_NUM_SEQS: in_flight}
    yield {"actor_rollout_ref.actor.fsdp_config.optimizer_offload": True}
    yield {"actor_rollout_ref.actor.fsdp_config.param_offload": True}
    if config.tts.trainable == "full":
        yield {"tts.trainable": "backbone"}
    if config.tts.trainable != "lora":
        yield {"tts.trainable": "lora", "actor_rollout_ref.model.lora_rank": LORA_RANK}


def _merged(remedies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for remedy in remedies for key, value in remedy.items()}


def _with(plan: Plan, remedies: Sequence[Mapping[str, Any]]) -> Plan:
    if not remedies:
        return plan
    config = deepcopy(plan.config)
    for key, value in _merged(remedies).items():
        OmegaConf.update(config, key, value, force_add=True)
    return replace(plan, config=config)
