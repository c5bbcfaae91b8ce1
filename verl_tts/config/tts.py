"""The node ``tts:``, our own settings. What is verl's stays where verl has it."""

import math
from dataclasses import dataclass, field

from verl_tts.config.reward import RewardConfig
from verl_tts.errors import ConfigError

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
class GatesConfig:
    """Limits that stop a run. Log-prob differences are in nats, between the engine's and the actor's."""

    logprob_max_abs: float = 0.25
    """Largest difference over the tokens of a step. Seen: 0.035 in BF16; an FP32 run can set 1e-4."""

    logprob_mean_abs: float = 0.02
    """Mean difference over the tokens of a step. Seen: 0.006 in BF16."""

    outside_support_share: float = 0.01
    """Share of sampled tokens that the actor's own truncation to top-k and top-p would not allow."""

    def __post_init__(self) -> None:
        _positive("tts.gates.logprob_max_abs", self.logprob_max_abs)
        _positive("tts.gates.logprob_mean_abs", self.logprob_mean_abs)
        _share("tts.gates.outside_support_share", self.outside_support_share)


@dataclass
class KeepConfig:
    """How much of what was sampled stays in ``OUTPUT_DIR/samples``; -1 keeps all, 0 none."""

    train_samples_per_step: int = 4
    """Clips of each training step that are written, as FLAC and as a line of samples.jsonl."""

    val_samples_per_step: int = ALL
    """The same for each validation."""

    def __post_init__(self) -> None:
        for name in ("train_samples_per_step", "val_samples_per_step"):
            if getattr(self, name) < ALL:
                raise ConfigError(f"tts.keep.{name}={getattr(self, name)} has to be -1 (all), 0 or more")


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
    """Support of the policy's distribution in the loss: full, or truncated to top_k and top_p as sampled."""

    sync_every: int = 1
    """Updates between two weight syncs into the rollout engine. Above 1 clips are of an older policy, by up to so many
    updates less one (rollout/staleness); algorithm.rollout_correction.rollout_is has to weigh them then."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    gates: GatesConfig = field(default_factory=GatesConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    keep: KeepConfig = field(default_factory=KeepConfig)

    def __post_init__(self) -> None:
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
        _positive("tts.rpc_timeout_s", self.rpc_timeout_s)
        _share("tts.min_groups", self.min_groups)
        if not self.language.strip():
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


def _share(key: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{key}={value} is a share; it has to be between 0 and 1")
