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
    engine       both stages: weights, KV cache of every request at its longest, heads in FP32, the decoder's work

The most is needed in one of three phases: sampling (the actor rests), log-probs (nothing is kept for a backward pass),
and the update. With ``free_cache_engine`` the engine gives back weights and cache in the last two. With
``tts.engine.rollout_gpus`` the first is that of the GPUs that sample, the others are those of the GPUs that train.

What differs between policies is in ``verl_tts/models/facts.py``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, floor, prod
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from verl_tts.errors import ConfigError
from verl_tts.models.facts import Heads, PolicyFacts, facts_of, sizes_of
from verl_tts.rollout.spec import RolloutSpec
from verl_tts.rollout.stages import DECODER_KV_BYTES, PROMPT_MARGIN, talker_kv_bytes

GIB = 2**30
Scorer = Literal["shared", "own", "none"]
SCORERS: tuple[Scorer, ...] = ("shared", "own", "none")
BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
FLOAT32 = 4
INDEX = 8
HIDDEN_COPIES = 3  # in FP32, of a position: the sum of its embeddings, and the last norm
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
SMALLEST_SHARE = 0.01
MAX_NUM_SEQS = "actor_rollout_ref.rollout.max_num_seqs"
ENGINE_SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"


@dataclass(frozen=True)
class Assumed:
    """What cannot be computed from a configuration. Nothing here was measured on a GPU by us."""

    context_gib: float = 0.5
    """CUDA context and libraries' workspaces of one process: of the actor, and of each of the engine's two stages."""

    decode_gib: float = 1.0
    """Work of the codec's decoder for 300 frames, vLLM-Omni's chunk."""

    scorer_gib: float = 4.0
    """A scorer that shares a card: a recogniser of Whisper's large size in half precision with its batch."""

    usable: float = 0.92
    """Share of a card that can be allocated; the rest is the driver's and lost between blocks."""

    frame_s: tuple[float, float] = (0.03, 0.12)
    """One frame of all clips in flight, without CUDA graphs: a step of the talker, and of Qwen3-TTS 15 of the code
    predictor. The slow end is what sglang-omni reports for Qwen3-TTS 0.6B on an H200 at 16 in flight (its pull request
    451)."""

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
        """Raises ``CheckpointError`` for a config.json that ``facts_of`` refuses."""
        facts = facts_of(model_config)
        shapes = dict(facts.shapes(model_config))
        model = config.actor_rollout_ref.model
        loaded = {name: prod(shape) for name, shape in shapes.items() if not facts.generation_only.fullmatch(name)}
        units: dict[str, int] = {}
        trained_units: dict[str, int] = {}
        trained = exported = adapters = 0
        targets = _targets(facts, model.target_modules) if model.lora_rank > 0 else None
        for name, size in loaded.items():
            unit = _unit_of(name, facts.embeddings)
            units[unit] = units.get(unit, 0) + size
            if targets is not None:
                if targets.fullmatch(name.removesuffix(".weight")):
                    adapters += model.lora_rank * sum(shapes[name])
                    exported += size
                    trained_units[unit] = trained_units.get(unit, 0) + model.lora_rank * sum(shapes[name])
            elif facts.is_trainable(name, config.tts.trainable):
                trained, exported = trained + size, exported + size
                trained_units[unit] = trained_units.get(unit, 0) + size
        return cls(
            file=sum(map(prod, shapes.values())),
            loaded=sum(loaded.values()) + adapters,
            trained=trained + adapters,
            exported=exported,
            layer=max(size for unit, size in units.items() if ".layers." in unit),
            embeddings=sum(size for unit, size in units.items() if facts.embeddings.fullmatch(f"{unit}.weight")),
            root=units[ROOT],
            largest_trained_unit=max(trained_units.values()),
        )


ROOT = "root"
ACTOR, STAGES = 1, 2  # processes on a card
BOTH, TRAINS, SAMPLES = "GPU", "training GPU", "rollout GPU"


def _targets(facts: PolicyFacts, target_modules: Any) -> re.Pattern[str]:
    """The compiled expression of the modules that get an adapter."""
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    return re.compile(facts.lora_targets(targets))


def _unit_of(name: str, embeddings: re.Pattern[str]) -> str:
    """The module that FSDP2 shards a parameter with: its decoder layer, its embedding table, or the root (verl's
    ``apply_fsdp2`` wraps layers by class and every ``nn.Embedding``)."""
    parts = name.split(".")
    if "layers" in parts:
        return ".".join(parts[: parts.index("layers") + 2])
    return name.removesuffix(".weight") if embeddings.fullmatch(name) else ROOT


def activation_bytes(
    language_model: Mapping[str, Any], heads: Heads, rows: int, width: int, answered: int, param_bytes: int
) -> tuple[int, int]:
    """What autograd keeps for ``rows`` sequences of ``width`` positions: (of one decoder layer, of all else).

    Counted tensor by tensor from Qwen3's layer as Transformers runs it, as Korthikanti et al. (2022, arXiv 2205.05198)
    do for GPT: RMSNorm in FP32 and its result cast back, for hidden states and for queries and keys; query, key, value
    and result of SDPA, which reads grouped keys without repeating them; a gated MLP. All else: the sums of the
    embeddings, the last norm in FP32, the heads as far as they are read, and log-softmax of the ``answered`` positions
    of a row.
    """
    hidden, inner = language_model["hidden_size"], language_model["intermediate_size"]
    head = language_model["head_dim"]
    query, key = language_model["num_attention_heads"] * head, language_model["num_key_value_heads"] * head
    halved = param_bytes < FLOAT32
    cast = param_bytes if halved else 0  # a tensor that is FP32 already is not copied
    norms = 2 * (FLOAT32 + cast + param_bytes) * hidden
    per_head = (FLOAT32 + cast) * (query + key) + 2 * param_bytes * head
    attention = 2 * param_bytes * (query + key)
    mlp = 4 * param_bytes * inner
    positions, predictions = rows * width, rows * answered
    rest = positions * HIDDEN_COPIES * hidden + predictions * (heads.columns + hidden) + rows * heads.columns_a_clip
    rest += heads.copied + (heads.cast if halved else 0)
    layer = positions * (norms + per_head + attention + mlp)
    return layer, FLOAT32 * rest + INDEX * positions * heads.indices


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

    @cached_property
    def facts(self) -> PolicyFacts:
        return facts_of(self.model_config)

    @property
    def pool(self) -> int:
        """GPUs of the rollout servers alone; 0: each worker has one on its own."""
        return int(self.config.tts.engine.rollout_gpus)

    @property
    def cards(self) -> int:
        return self.machine.workers + self.pool

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

    @property
    def frames(self) -> int:
        """Of a clip at its longest; the rest of data.max_response_length is no audio."""
        return max(0, self.config.data.max_response_length - self.facts.overhead(self.model_config))

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
        # Beside what autograd keeps: the gradients of the logits, then what they are computed from or what is computed
        # from them, the gradients of the heads' copies.
        heads = self._heads
        logits = rows * (self.config.data.max_response_length * heads.columns + heads.columns_a_clip)
        weights = heads.copied + (heads.cast if self._bytes[1] < FLOAT32 else 0)
        rest += FLOAT32 * (logits + max(logits, weights if self.config.tts.trainable != "lora" else 0))
        language_model = self._language_model
        layers = language_model["num_hidden_layers"]
        if not self.config.actor_rollout_ref.model.enable_gradient_checkpointing:
            return layers * layer + rest
        inputs = rows * self.width * language_model["hidden_size"] * self._bytes[1]
        return layers * inputs + layer + rest

    @cached_property
    def forward(self) -> float:
        """Of one micro-batch of log-probs: a layer at a time."""
        rows = max(OmegaConf.select(self.config, key) or 1 for key in LOG_PROB_BATCHES)
        return sum(self._activations(min(rows, self._rows_a_worker)))

    @property
    def _language_model(self) -> Mapping[str, Any]:
        return self.facts.language_model(self.model_config)

    @property
    def _heads(self) -> Heads:
        return self.facts.heads(self.model_config)

    @property
    def _rows_a_worker(self) -> int:
        return max(1, self.clips_a_step // self.machine.workers)

    def _activations(self, rows: int) -> tuple[int, int]:
        answered = self.config.data.max_response_length
        return activation_bytes(self._language_model, self._heads, rows, self.width, answered, self._bytes[1])

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
        return float(talker_kv_bytes(self.spec, self._language_model, tokens) + DECODER_KV_BYTES)

    @cached_property
    def codec(self) -> float:
        """Its weights, in FP32. Raises ``CheckpointError`` for a config.json that is none of a codec."""
        if self.codec_config is None:
            return self.facts.codec_gib * GIB
        return FLOAT32 * sum(sizes_of(self.facts.codec_shapes, self.codec_config, "the codec's config.json").values())

    @property
    def codec_host(self) -> float:
        """Beside the trainer, where recordings become part of a prompt."""
        return self.codec if self.facts.reads_references else 0.0

    @property
    def engine_weights(self) -> float:
        return BYTES[self.spec.dtype] * self.sizes.file + self.codec

    @property
    def engine_heads(self) -> float:
        """Copies in FP32 that a step of the talker makes, see rollout/float32.py."""
        return FLOAT32 * (self._heads.copied + self._heads.cast) if BYTES[self.spec.dtype] < FLOAT32 else 0.0

    @property
    def engine(self) -> float:
        return self.engine_weights + self.engine_cache + self.engine_heads + self.assumed.decode_gib * GIB

    def always(self, processes: int) -> float:
        """Contexts of the processes on a card, and a scorer that shares it."""
        scorer = self.assumed.scorer_gib if self.machine.scorer == "shared" else 0.0
        return (processes * self.assumed.context_gib + scorer) * GIB

    @cached_property
    def phases(self) -> dict[str, float]:
        fsdp = self._actor.fsdp_config
        resting = (0.0 if fsdp.param_offload else self.parameters) + (0.0 if fsdp.optimizer_offload else self.optimizer)
        beside = 0.0 if self.config.actor_rollout_ref.rollout.free_cache_engine else self.engine
        kept = self.parameters + (0.0 if fsdp.optimizer_offload else self.optimizer)
        sampling, training = self.always(ACTOR + STAGES) + resting, self.always(ACTOR + STAGES) + beside
        if self.pool:
            sampling, training = self.always(STAGES), self.always(ACTOR)
        update = self.parameters + self.optimizer + self.gradients + self.gathered + self.reduced + self.activations
        return {
            "sampling": sampling + self.engine,
            "log-probs": training + kept + max(self.gathered, self.reference) + self.forward,
            "update": training + update,
        }

    @property
    def peaks(self) -> dict[str, float]:
        """Of each kind of GPU that the run has."""
        sampling, *training = self.phases.values()
        return {TRAINS: max(training), SAMPLES: sampling} if self.pool else {BOTH: max(sampling, *training)}

    @property
    def peak(self) -> float:
        return max(self.peaks.values())

    @property
    def engine_share(self) -> float:
        """``gpu_memory_utilization`` that the second stage can find free when it starts; 1 is the whole card."""
        assert self.machine.gpu_gib is not None
        card = self.machine.gpu_gib * GIB
        first_stage = self.engine_weights - self.codec + self.engine_cache
        beside = self.always(STAGES) if self.pool else self.always(ACTOR + STAGES) + self.parameters
        return max(0.0, (card - beside - first_stage) / card)

    @property
    def fits(self) -> bool:
        return (
            self.fits_at_a_share and self.config.actor_rollout_ref.rollout.gpu_memory_utilization <= self.engine_share
        )

    @property
    def fits_at_a_share(self) -> bool:
        """With the right ``gpu_memory_utilization``, whatever it is now."""
        assert self.machine.gpu_gib is not None
        return self.peak <= self.assumed.usable * self.machine.gpu_gib * GIB and self.engine_share >= SMALLEST_SHARE

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
        clip = self.frames * self.facts.samples_per_frame * 1.5
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
            waves = ceil(ceil(clips / (self.pool or workers)) / self.spec.max_num_seqs)
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
    if plan.fits:
        return Answer(plan, {})
    changed = plan
    for remedy in _remedies(plan):
        if changed.fits_at_a_share:
            break
        after = _with(changed, [remedy])
        if sum(after.peaks.values()) < sum(changed.peaks.values()) or after.engine_share > changed.engine_share:
            changed = after
            taken.append(remedy)
    if not changed.fits_at_a_share:
        return Answer(plan, None)
    for remedy in [*taken]:  # what turned out not to be needed
        fewer = [other for other in taken if other is not remedy]
        if _with(plan, fewer).fits_at_a_share:
            taken = fewer
    if not (changed := _with(plan, taken)).fits:
        taken.append({ENGINE_SHARE: floor(100 * min(0.1, changed.engine_share)) / 100})
    return Answer(plan, _merged(taken))


def _remedies(plan: Plan) -> Iterator[dict[str, Any]]:
    config = plan.config
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
