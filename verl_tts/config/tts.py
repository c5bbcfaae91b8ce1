"""The node ``tts:``, our own settings. What is verl's stays where verl has it."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from verl_tts.config.reward import RewardConfig
from verl_tts.errors import ConfigError
from verl_tts.report.console import CONSOLES

PLATFORMS = ("auto", "cpu", "cuda")
MODELS = ("auto", "qwen3_tts", "moss")
TRAINABLE = ("auto", "full", "backbone", "lora")
PROMPT_LAYOUTS = ("non_streaming", "streaming")
REDUCTIONS = ("weighted", "mean", "sum", "codebook0")
REFERENCE_FORMATS = ("in_context", "single_turn")
FAILED_GROUP = ("stop", "drop")
LOGPROB_SUPPORT = ("full", "truncated")
ALL = -1


@dataclass
class Levels:
    """Where a gate speaks up and where it ends the run; null: never."""

    warn: float | None
    stop: float | None


@dataclass
class GatesConfig:
    """Checks during the run, ``verl_tts/gates.py``. ``tts.gates.kl=2`` is short for ``tts.gates.kl.stop=2``."""

    steps_in_a_row: int = 5
    """Steps beyond its stop level after which a gate ends the run, with a checkpoint. Not for what is not finite."""

    logprob_max_abs: Levels = field(default_factory=lambda: Levels(0.1, 0.25))
    """Largest difference of log-probs, engine to actor, over the tokens of a step, in nats. Seen: 0.03 in BF16; an
    FP32 run can set 1e-4."""

    logprob_mean_abs: Levels = field(default_factory=lambda: Levels(0.01, 0.02))
    """Mean of the same. Seen: 0.004 in BF16."""

    logprob_correlation: Levels = field(default_factory=lambda: Levels(0.99, 0.9))
    """Correlation of the engine's log-probs with the actor's."""

    outside_support: Levels = field(default_factory=lambda: Levels(0.001, 0.01))
    """Share of sampled tokens that the actor's own truncation to top-k and top-p would not allow."""

    nearer_reference: Levels = field(default_factory=lambda: Levels(1.5, 4.0))
    """Mean difference of the engine's log-probs from the actor's over that from the reference's. 1 before the policy
    has moved, below 1 after; above 1 the engine holds old weights."""

    weights_unchanged: Levels = field(default_factory=lambda: Levels(0.0, 0.0))
    """1 where an update with a gradient and a learning rate above 0 left the engine's weights as they were, else 0."""

    identical_clips: Levels = field(default_factory=lambda: Levels(0.1, 0.5))
    """Share of clips whose samples equal those of another clip of their prompt."""

    flat_groups: Levels = field(default_factory=lambda: Levels(0.5, 0.9))
    """Share of groups in which all clips score the same."""

    eos_rate: Levels = field(default_factory=lambda: Levels(0.8, 0.05))
    """Share of clips that end by themselves, the others being cut off by data.max_response_length; lower is worse."""

    length_drift: Levels = field(default_factory=lambda: Levels(1.5, 4.0))
    """Frames per character over those of the run's first step, or the inverse, whichever is above 1. Both levels are
    guesses: no real weights have been trained with them."""

    kl: Levels = field(default_factory=lambda: Levels(0.5, 5.0))
    """Nats a token between the policy that sampled and the reference. Both levels are guesses, as above."""

    first_ratio: Levels = field(default_factory=lambda: Levels(0.1, 0.5))
    """Largest |ratio - 1| over the tokens of an update before its first optimizer step, where it has to be 0."""

    real_rows: Levels = field(default_factory=lambda: Levels(1.0, 0.6))
    """Share of the prompts asked for that are trained on, with tts.failed_group=drop; lower is worse."""

    def __post_init__(self) -> None:
        if self.steps_in_a_row < 1:
            raise ConfigError(f"tts.gates.steps_in_a_row={self.steps_in_a_row} has to be 1 or more")
        for gate in fields(self):
            if isinstance(levels := getattr(self, gate.name), Levels):
                for name, value in asdict(levels).items():
                    _level(f"tts.gates.{gate.name}.{name}", value)


@dataclass
class KeepConfig:
    """How much of what was sampled stays in ``OUTPUT_DIR/samples``; -1 keeps all, 0 none."""

    train_samples_per_step: int = 4
    """Clips of each training step that are written, as FLAC and as a line of samples.jsonl."""

    val_samples_per_step: int = ALL
    """The same for each validation."""

    train_every: int = 1
    """Training steps of which one is kept: 10 keeps clips of steps 10, 20, 30 and so on."""

    train_steps_back: int = ALL
    """Training steps whose clips stay; those of older ones are removed. Validations stay."""

    best_not_above_start: list[str] = field(default_factory=lambda: ["cer", "wer"])
    """Parts of the validation's score that may not be above their first value in the checkpoint that is kept as the
    best, beside the newest trainer.max_actor_ckpt_to_keep, and that the report names. ``cer`` is also ``SCORER.cer`` of
    several scorers. Where none of them is measured, clips may not end by themselves more rarely; [] asks nothing."""

    def __post_init__(self) -> None:
        for name in ("train_samples_per_step", "val_samples_per_step", "train_steps_back"):
            if getattr(self, name) < ALL:
                raise ConfigError(f"tts.keep.{name}={getattr(self, name)} has to be -1 (all), 0 or more")
        if self.train_every < 1:
            raise ConfigError(f"tts.keep.train_every={self.train_every} has to be 1 or more")


@dataclass
class EngineConfig:
    """How the rollout engine is started. The platform's preset sets what is right for it."""

    starts_early: bool = False
    """Start the servers beside the trainer: where a server need not wait to learn which device is its own."""

    stages_side_by_side: bool = False
    """Start the stages of a server at once: where none of them measures the memory that the other takes."""

    rollout_gpus: int = 0
    """GPUs of the rollout servers alone, a server on each, beside the trainer.n_gpus_per_node that train; 0: each
    actor worker has a server on its own GPU. On one node; a multiple of the actor workers."""

    executor: str | None = None
    """vLLM's distributed_executor_backend of both stages: uni, mp or ray; null leaves it to vLLM."""

    startup_timeout_s: float = 600.0
    """Limit of the start of a server, in seconds."""

    def __post_init__(self) -> None:
        _positive("tts.engine.startup_timeout_s", self.startup_timeout_s)
        if self.rollout_gpus < 0:
            raise ConfigError(f"tts.engine.rollout_gpus={self.rollout_gpus} has to be 0 (shared) or more")


@dataclass
class TTSConfig:
    """Composed by ``compose()``, which also replaces ``auto`` by what it stands for."""

    platform: str = "auto"
    """auto, cpu or cuda: the preset below config/platform/. auto: cuda where there is an NVIDIA device."""

    model: str = "auto"
    """auto, qwen3_tts or moss: the policy. auto: what config.json of the model directory says."""

    codec_path: str | None = None
    """Directory of a codec that is no part of the model's directory, as MOSS is published; null: codec/ in it."""

    output_dir: str = "outputs/${trainer.project_name}/${trainer.experiment_name}"
    """The run directory: config, log, metrics, samples and checkpoints."""

    trainable: str = "auto"
    """full, backbone (layers, norm and head: no optimizer state for the text embedding), lora, or auto: lora
    if actor_rollout_ref.model.lora_rank > 0, else full."""

    prompt_layout: str = "non_streaming"
    """non_streaming: the whole text comes before the first frame; streaming: one text token a frame."""

    language: str = "Auto"
    """Language tag of the prompt, e.g. English; the one of a row wins."""

    speaker_path: str | None = None
    """Speaker embedding, NAME.json, or a folder of them if rows name their speaker. For qwen3_tts."""

    reference_dir: str | None = None
    """The folder that a row's ref_audio is below; null: the working directory. For moss."""

    reference_format: str = "in_context"
    """How moss is given a reference: in_context, as an answer before, or single_turn, as part of the request."""

    reference_seconds: float = 10.0
    """What is kept of a reference, from its beginning."""

    channel_reduction: str = "weighted"
    """The log-prob of a position of moss, of those of its text token and its codes: weighted (by channel_weights),
    mean, sum (the joint log-prob), or codebook0 (the text and the first code)."""

    channel_weights: str = "1,32"
    """For weighted: the weight of the text, and that of all codebooks together, as published."""

    text_temperature: float = 1.0
    """Of the text channel of moss. Codes are drawn at rollout.temperature, truncated to top_k and top_p."""

    references: str | None = None
    """references.json of a data script: the voices that training draws anew for each prompt in each step, see
    data/voices.py; null: a row keeps its ref_audio."""

    rpc_timeout_s: float = 600.0
    """Limit of every remote call to a rollout server, in seconds."""

    failed_group: str = "stop"
    """What happens when a rollout of a group fails: stop the run, or drop the whole group."""

    min_groups: float = 0.5
    """Share of a step's groups that must be left after dropping; below it the run stops."""

    logprob_support: str = "full"
    """Support of the policy's distribution in the loss: full, or truncated to top_k and top_p as sampled. full, as
    published: the truncated set moves with the policy, and a sampled token that has left it, or is outside that of the
    reference, would have no ratio."""

    sync_every: int = 1
    """Updates between two weight syncs into the rollout engine. Above 1 clips are of an older policy, by up to so many
    updates less one (training/off_policy/trajectory_staleness); algorithm.rollout_correction.rollout_is has to weigh
    them then. A validation has a sync before it in any case."""

    grace_s: float = 120.0
    """Seconds after a first SIGTERM or Ctrl-C in which the step in hand may end and be saved; a second one stops at
    once, with the last checkpoint."""

    heartbeat_s: float = 30.0
    """Seconds after which a phase says that it is still under way, and again after as many."""

    stall_s: float = 1800.0
    """Seconds without any progress after which the run ends, with the stacks of its processes in OUTPUT_DIR."""

    console: str = "normal"
    """quiet (results and warnings), normal (steps, too) or verbose (details, too). train.log gets all of it."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    gates: GatesConfig = field(default_factory=GatesConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    keep: KeepConfig = field(default_factory=KeepConfig)

    def __post_init__(self) -> None:
        for name in ("codec_path", "speaker_path", "reference_dir", "references"):
            if not isinstance(path := getattr(self, name), str | None):
                raise ConfigError(f"tts.{name}={path} has to be a path; one of digits alone wants quotes of its own")
        _one_of("tts.platform", self.platform, PLATFORMS)
        _one_of("tts.model", self.model, MODELS)
        _one_of("tts.trainable", self.trainable, TRAINABLE)
        _one_of("tts.prompt_layout", self.prompt_layout, PROMPT_LAYOUTS)
        _one_of("tts.reference_format", self.reference_format, REFERENCE_FORMATS)
        _one_of("tts.channel_reduction", self.channel_reduction, REDUCTIONS)
        parse_weights(self.channel_weights)
        _positive("tts.text_temperature", self.text_temperature)
        _positive("tts.reference_seconds", self.reference_seconds)
        _one_of("tts.failed_group", self.failed_group, FAILED_GROUP)
        _one_of("tts.logprob_support", self.logprob_support, LOGPROB_SUPPORT)
        _one_of("tts.console", self.console, tuple(CONSOLES))
        for name in ("rpc_timeout_s", "grace_s", "heartbeat_s", "stall_s"):
            _positive(f"tts.{name}", getattr(self, name))
        _share("tts.min_groups", self.min_groups)
        if not (self.language or "").strip():
            raise ConfigError("tts.language is empty; it has to be a language tag such as English, or Auto")
        if self.sync_every < 1:
            raise ConfigError(f"tts.sync_every={self.sync_every} has to be 1 or more")


def parse_weights(value: str) -> tuple[float, float]:
    """``"1,32"`` -> (1.0, 32.0): the weight of the text and of all codebooks together. Raises ``ConfigError``."""
    try:
        text, codes = (float(part) for part in value.split(","))
    except ValueError:
        text = codes = -1.0
    if not (0 <= text < math.inf and 0 < codes < math.inf):
        raise ConfigError(
            f'tts.channel_weights={value} has to be two numbers, of the text and of all codebooks: "1,32"'
        )
    return text, codes


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value} is unknown; it has to be one of {', '.join(choices)}")


def _positive(key: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{key}={value} has to be above 0")


def _level(key: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
        raise ConfigError(f"{key}={value} has to be a number from 0 on, or null for never")


def _share(key: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{key}={value} is a share; it has to be between 0 and 1")
