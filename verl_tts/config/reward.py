"""Settings of the reward room: ``tts.reward.*``.

``ClientConfig`` is how a scorer is reached, ``GuardConfig`` is when a clip is a violation, ``ComposeConfig`` is
how the numbers of an answer become one reward, ``RewardConfig`` is the whole node. The defaults of the client are
those of the audio scorer protocol. Presets, ``tts.reward.preset=NAME``, are the files below ``config/reward/``.
"""

import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from verl_tts.errors import ConfigError

_SECRET_NAME = re.compile(r"(^|[_-]|api)(token|key|password|secret)$", re.IGNORECASE)


def _require_number(name: str, value: object, low: float, *, above: bool = False, integer: bool = False) -> None:
    """``value`` is a finite number of at least (or above) ``low``; a bool is not a number."""
    kinds = int if integer else (int, float)
    allowed = not isinstance(value, bool) and isinstance(value, kinds) and abs(value) <= sys.float_info.max
    if not allowed or value < low or (above and value == low):  # type: ignore[operator]
        kind = "an integer" if integer else "a finite number"
        bound = "" if low == -math.inf else f" {'above' if above else 'of at least'} {low}"
        raise ConfigError(f"tts.reward.{name}={value!r} must be {kind}{bound}")


def _require_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"tts.reward.{name}={value!r} must be true or false")


def _require_text(name: str, value: object, *, optional: bool = False) -> None:
    if not ((isinstance(value, str) and value) or (optional and value is None)):
        raise ConfigError(f"tts.reward.{name}={value!r} must be a text{' or null' if optional else ''}")


def _require_mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        raise ConfigError(f"tts.reward.{name}={value!r} must be a mapping with names as keys")


def _require_share(name: str, value: object) -> None:
    _require_number(name, value, 0)
    if value > 1:  # type: ignore[operator]
        raise ConfigError(f"tts.reward.{name}={value!r} is a share; it must be between 0 and 1")


def _require_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"tts.reward.{name}={value!r} is unknown; it must be one of {', '.join(choices)}")


@dataclass(frozen=True)
class ClientConfig:
    """How a scorer is reached."""

    scorer_url: str | None = None
    """Full address, path included. Several, separated by commas, share the requests."""

    timeout_s: float = 120.0
    """An attempt is over after this long, however slowly its answer drips in."""

    max_retries: int = 2
    """Attempts after the first one. A scorer that says "busy" uses up none."""

    retry_backoff_s: float = 0.5
    """First wait between attempts; doubled each time, plus up to half as much by chance."""

    busy_timeout_s: float = 600.0
    """How long one sample may be told to wait (429, or 503 with Retry-After), all waits together."""

    startup_timeout_s: float = 60.0
    """How long the start may wait for a scorer that is still loading."""

    max_in_flight: int = 32
    """Requests in flight in the whole run; divided among the workers."""

    token_env: str = "SCORER_TOKEN"
    """Environment variable that holds the bearer token; unset or empty: no token is sent."""

    def __post_init__(self) -> None:
        if self.scorer_url is not None and not isinstance(self.scorer_url, str):
            raise ConfigError(
                f"tts.reward.scorer_url={self.scorer_url!r} must be a text, several addresses with commas"
            )
        if not isinstance(self.token_env, str):
            raise ConfigError(f"tts.reward.token_env={self.token_env!r} must be the name of a variable, or empty")
        for url in self.urls:
            _require_url("scorer_url", url)
        _require_number("timeout_s", self.timeout_s, 0, above=True)
        _require_number("max_retries", self.max_retries, 0, integer=True)
        _require_number("retry_backoff_s", self.retry_backoff_s, 0)
        _require_number("busy_timeout_s", self.busy_timeout_s, 0)
        _require_number("startup_timeout_s", self.startup_timeout_s, 0)
        _require_number("max_in_flight", self.max_in_flight, 1, integer=True)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(url.strip() for url in (self.scorer_url or "").split(",") if url.strip())


def _require_url(setting: str, url: str) -> None:
    remedy = "write it as http://HOST:PORT/score"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        valid = valid and url.isprintable() and " " not in url
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"tts.reward.{setting}: {url!r} is not an HTTP address; {remedy}")
    if parts.username is not None:
        # The URL is part of every message, so a password in it would end up in the log.
        raise ConfigError(
            f"tts.reward.{setting}: the address of {parts.hostname} holds a user name; "
            "put a bearer token into the environment variable that tts.reward.token_env names instead"
        )
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if _SECRET_NAME.search(name):
            raise ConfigError(
                f"tts.reward.{setting}: the address of {parts.hostname} holds a {name}; "
                "put a bearer token into the environment variable that tts.reward.token_env names instead"
            )


@dataclass(frozen=True)
class GuardConfig:
    """Beyond which limits a clip is a violation and gets ``violation_score``.

    The limits are far from anything that a listener would call speech: a guard should catch what is
    broken and leave the judgement to the scorer. Null turns a limit off; what it limits is measured and logged
    all the same. Limits that a policy before its first update may exceed are off here and on in the presets.
    """

    enforce: bool = True
    """False: guards are logged and only a clip that cannot be sent at all is a violation."""

    min_seconds: float = 0.1
    """One frame of a 12.5 Hz codec lasts 0.08 s; no word of any language is that short."""

    min_rms: float = 1e-4
    """Root mean square about the mean, full scale = 1. 1e-4 is -80 dBFS, three steps of 16-bit audio."""

    penalise_truncation: bool = False
    """A clip cut off by the frame limit is always flagged; true makes it a violation as well."""

    penalise_empty_transcript: bool = True
    """An ``asr_text`` without a word in it is a violation, whatever error rate was answered for it."""

    max_silence_share: float | None = None
    """Share of windows of 20 ms that are silent: 40 dB and more below the loudest one."""

    max_trailing_silence_s: float | None = None
    """Seconds of silent windows at the end."""

    max_clipping_share: float | None = None
    """Share of samples at full scale."""

    min_seconds_per_letter: float | None = None
    """Speech is not faster: about 0.07 s a letter is usual. What a letter of each script counts is in guards.py."""

    max_seconds_per_letter: float | None = None
    """Speech is not slower, two seconds for pauses at either end allowed."""

    max_code_run: int | None = None
    """Frames in a row with the same code in codebook 0."""

    max_repeated_share: float | None = None
    """Share of the 4-grams of codebook 0 that the clip has had before."""

    def __post_init__(self) -> None:
        for name in ("enforce", "penalise_truncation", "penalise_empty_transcript"):
            _require_flag(f"guards.{name}", getattr(self, name))
        for name in ("min_seconds", "min_rms"):
            _require_number(f"guards.{name}", getattr(self, name), 0)
        for name in ("max_silence_share", "max_clipping_share", "max_repeated_share"):
            if getattr(self, name) is not None:
                _require_share(f"guards.{name}", getattr(self, name))
        for name in ("max_trailing_silence_s", "min_seconds_per_letter", "max_seconds_per_letter"):
            if getattr(self, name) is not None:
                _require_number(f"guards.{name}", getattr(self, name), 0)
        if self.max_code_run is not None:
            _require_number("guards.max_code_run", self.max_code_run, 1, integer=True)
        low, high = self.min_seconds_per_letter, self.max_seconds_per_letter
        if low is not None and high is not None and low >= high:
            raise ConfigError(
                f"tts.reward.guards.min_seconds_per_letter={low} must be below guards.max_seconds_per_letter={high}"
            )


NORMALISERS = ("none", "affine", "running_z", "tanh", "exp")
COMBINATIONS = ("sum", "harmonic_mean")
SQUASHES = ("none", "sigmoid")
GATES = ("none", "exp", "zones")
WEIGHT_TOLERANCE = 1e-6  # of a sum of weights about 1


@dataclass(frozen=True)
class ComponentConfig:
    """One number of the scorer's answer, and how it becomes comparable with the others."""

    part: str
    """Key of the answer: ``<scorer>.<name>`` or the plain name of one scorer; ``score`` is the score itself."""

    normaliser: str = "none"
    """none: x. affine: scale * x + offset. running_z: (x - mean) / standard deviation of the run so far.
    tanh: 1 - tanh(scale * x). exp: exp(-scale * x)."""

    scale: float = 1.0
    offset: float = 0.0

    low: float | None = None
    """The normalised value is clamped to [low, high]; null is no bound."""

    high: float | None = None

    initial_mean: float = 0.0
    """What running_z takes during ``compose.warmup_steps``."""

    initial_std: float = 1.0


@dataclass(frozen=True)
class GateConfig:
    """What the combined components are multiplied with, or sorted by. ``part`` is an error rate: lower is better."""

    kind: str = "none"
    """none, exp: times exp(-beta * error). zones: plus ``bonus`` up to ``clean``, as it is up to ``limit``, and
    beyond it a violation."""

    part: str | None = None
    beta: float = 10.0
    clean: float = 0.10
    limit: float = 0.30
    bonus: float = 0.5

    def __post_init__(self) -> None:
        _require_one_of("compose.gate.kind", self.kind, GATES)
        _require_text("compose.gate.part", self.part, optional=True)
        _require_number("compose.gate.beta", self.beta, 0)
        _require_number("compose.gate.clean", self.clean, 0)
        _require_number("compose.gate.limit", self.limit, self.clean)
        _require_number("compose.gate.bonus", self.bonus, 0)
        if (self.kind == "none") != (self.part is None):
            raise ConfigError(
                f"tts.reward.compose.gate.part={self.part} with kind={self.kind}: a gate needs the part of the "
                "answer that it looks at, and no gate has none"
            )


@dataclass(frozen=True)
class ComposeConfig:
    """total = gate(combination of normalised components). Without components the scorer's score is the reward."""

    components: Mapping[str, Any] = field(default_factory=dict)
    """Name to ``ComponentConfig``."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Name to weight; they sum to 1. A component of weight 0 is not asked for."""

    weight_sets: Mapping[str, Any] = field(default_factory=dict)
    """Named ``weights`` of a preset."""

    weight_set: str | None = None
    """Which of them counts, in place of ``weights``."""

    combine: str = "sum"
    """sum, or harmonic_mean, of which one bad component is enough to make a bad reward."""

    squash: str = "none"
    """sigmoid: the combination becomes a number above 0 before it meets the gate."""

    gate: GateConfig = field(default_factory=GateConfig)

    warmup_steps: int = 10
    """Training steps whose running_z is that of ``initial_mean`` and ``initial_std``, while statistics gather."""

    feasible_floor: float = 0.0
    """No clip that is not a violation gets less."""

    ordered: bool = True
    """False gives up that floor, to reproduce a published reward; it is warned about."""

    def __post_init__(self) -> None:
        for name in ("components", "weights", "weight_sets"):
            _require_mapping(f"compose.{name}", getattr(self, name))
        _require_text("compose.weight_set", self.weight_set, optional=True)
        components = {name: _component(name, value) for name, value in self.components.items()}
        object.__setattr__(self, "components", components)
        _require_one_of("compose.combine", self.combine, COMBINATIONS)
        _require_one_of("compose.squash", self.squash, SQUASHES)
        _require_number("compose.warmup_steps", self.warmup_steps, 0, integer=True)
        _require_number("compose.feasible_floor", self.feasible_floor, -math.inf)
        _require_flag("compose.ordered", self.ordered)
        if components:
            self._check_weights()
        elif self.gate.kind != "none" or self.squash != "none":
            raise ConfigError(
                f"tts.reward.compose: gate.kind={self.gate.kind} and squash={self.squash} without components would not "
                "count; give components, or choose a preset"
            )

    @property
    def chosen_weights(self) -> Mapping[str, float]:
        return self.weights if self.weight_set is None else self.weight_sets[self.weight_set]

    def _check_weights(self) -> None:
        if self.weight_set is not None:
            _require_one_of("compose.weight_set", self.weight_set, tuple(self.weight_sets))
        weights = self.chosen_weights
        if not isinstance(weights, Mapping):
            raise ConfigError(
                f"tts.reward.compose.weight_sets.{self.weight_set}={weights!r} must be name: weight pairs"
            )
        if set(weights) != set(self.components):
            raise ConfigError(
                f"tts.reward.compose: the weights are of {sorted(weights)}, the components are "
                f"{sorted(self.components)}; give each component one weight"
            )
        for name, weight in weights.items():
            _require_number(f"compose.weights.{name}", weight, 0)
        total = math.fsum(weights.values())
        if abs(total - 1) > WEIGHT_TOLERANCE:
            raise ConfigError(f"tts.reward.compose: the weights {dict(weights)} sum to {total:g}; they must sum to 1")


def _component(name: str, value: object) -> ComponentConfig:
    node = f"compose.components.{name}"
    if isinstance(value, ComponentConfig):
        return value
    if not isinstance(value, Mapping) or not isinstance(value.get("part"), str) or not value["part"]:
        raise ConfigError(f"tts.reward.{node}={value!r} must be a mapping with the key part, a key of the answer")
    component: ComponentConfig = build(ComponentConfig, f"tts.reward.{node}", value)
    _require_one_of(f"{node}.normaliser", component.normaliser, NORMALISERS)
    for setting in ("scale", "offset", "initial_mean"):
        _require_number(f"{node}.{setting}", getattr(component, setting), -math.inf)
    _require_number(f"{node}.initial_std", component.initial_std, 0, above=True)
    for setting in ("low", "high"):
        if getattr(component, setting) is not None:
            _require_number(f"{node}.{setting}", getattr(component, setting), -math.inf)
    if component.low is not None and component.high is not None and component.low > component.high:
        raise ConfigError(f"tts.reward.{node}: low={component.low} is above high={component.high}")
    return component


@dataclass(frozen=True)
class RewardConfig(ClientConfig):
    """The node ``tts.reward``."""

    preset: str | None = None
    """A file below config/reward/, whose settings come before those of the command line."""

    guards: GuardConfig = field(default_factory=GuardConfig)
    compose: ComposeConfig = field(default_factory=ComposeConfig)

    violation_score: float = 0.0
    """What a clip gets that is a violation. Below ``compose.feasible_floor``, or, without components, not above the
    low end of the scorer's range."""

    probes: Mapping[str, str] = field(default_factory=dict)
    """Name to address of scorers that are asked in validations and never optimised."""

    allow_other_scorer: bool = False
    """Resume although the scorer is not the one that the checkpoint was trained with."""

    allow_other_reward: bool = False
    """Resume although guards or composition are not those that the checkpoint was trained with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_flag("allow_other_reward", self.allow_other_reward)
        _require_number("violation_score", self.violation_score, -math.inf)
        _require_flag("allow_other_scorer", self.allow_other_scorer)
        _require_text("preset", self.preset, optional=True)
        _require_mapping("probes", self.probes)
        for name, url in self.probes.items():
            if not name.isidentifier():
                raise ConfigError(f"tts.reward.probes: {name!r} names a metric; use letters, digits and underscores")
            _require_url(f"probes.{name}", str(url))
        if self.compose.components and self.compose.ordered and self.violation_score >= self.compose.feasible_floor:
            raise ConfigError(
                f"tts.reward.violation_score={self.violation_score} must be below "
                f"tts.reward.compose.feasible_floor={self.compose.feasible_floor}: a violation may never pay"
            )


def reward_rule(config: RewardConfig) -> dict[str, Any]:
    """All that turns a scorer's answer into a reward, flat, as JSON: ``{"compose.gate.beta": 10.0, ...}``.

    How the scorer is reached is not part of it, nor by which preset or set of weights the numbers were named.
    """
    weights = config.compose.chosen_weights
    used = {name: asdict(part) for name, part in config.compose.components.items() if weights[name] > 0}
    rest = {name: value for name, value in asdict(config.compose).items() if not name.startswith("weight")}
    compose = {"weights": {name: weights[name] for name in used}, **rest, "components": used}
    return dict(
        _flat({"violation_score": config.violation_score, "compose": compose, "guards": asdict(config.guards)}, "")
    )


def _flat(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def reward_config(values: Mapping[str, Any]) -> RewardConfig:
    """The node ``tts.reward`` from plain mappings; ConfigError for a key that is none."""
    return build(RewardConfig, "tts.reward", values)


def build(kind: type, node: str, values: Mapping[str, Any]) -> Any:
    """An instance of the dataclass ``kind``, nested ones included.

    ConfigError names an unknown key of ``node``, a list where a text has to be, or null where there has to be a value.
    """
    known = {field.name: field.type for field in fields(kind)}
    arguments = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"unknown key {node}.{name}; there are: {', '.join(known)}")
        nested = known[name]
        if is_dataclass(nested) and not isinstance(value, nested):  # type: ignore[arg-type]
            if not isinstance(value, Mapping):
                raise ConfigError(f"{node}.{name}={value!r} must be a mapping of settings")
            value = build(nested, f"{node}.{name}", value)  # type: ignore[arg-type]
        if nested in (str, str | None) and isinstance(value, list | Mapping):
            raise ConfigError(f"{node}.{name}={value} has to be one text, in quotes where it has a comma")
        if nested in (str, int, float, bool) and value is None:
            raise ConfigError(f"{node}.{name}=null: it has to have a value; leave it out for the default")
        arguments[name] = value
    return kind(**arguments)
