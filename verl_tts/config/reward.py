"""Settings of the reward room: ``tts.reward.*``.

``ClientConfig`` is how a scorer is reached, ``GuardConfig`` is when a clip is not worth a request,
``RewardConfig`` is the whole node. The defaults of the client are those of the audio scorer protocol.
"""

import math
import sys
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from verl_tts.errors import ConfigError


def _require_number(name: str, value: object, low: float, *, above: bool = False, integer: bool = False) -> None:
    """``value`` is a finite number of at least (or above) ``low``; a bool is not a number."""
    kinds = int if integer else (int, float)
    allowed = not isinstance(value, bool) and isinstance(value, kinds) and abs(value) <= sys.float_info.max
    if not allowed or value < low or (above and value == low):  # type: ignore[operator]
        kind = "an integer" if integer else "a finite number"
        raise ConfigError(f"tts.reward.{name}={value!r} must be {kind} {'above' if above else 'of at least'} {low}")


def _require_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"tts.reward.{name}={value!r} must be true or false")


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
        for url in self.urls:
            _require_url(url)
        _require_number("timeout_s", self.timeout_s, 0, above=True)
        _require_number("max_retries", self.max_retries, 0, integer=True)
        _require_number("retry_backoff_s", self.retry_backoff_s, 0)
        _require_number("busy_timeout_s", self.busy_timeout_s, 0)
        _require_number("startup_timeout_s", self.startup_timeout_s, 0)
        _require_number("max_in_flight", self.max_in_flight, 1, integer=True)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(url.strip() for url in (self.scorer_url or "").split(",") if url.strip())


def _require_url(url: str) -> None:
    remedy = "write it as http://HOST:PORT/score"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"tts.reward.scorer_url: {url!r} is not an HTTP address; {remedy}")
    if parts.username is not None:
        # The URL is part of every message, so a password in it would end up in the log.
        raise ConfigError(
            f"tts.reward.scorer_url: the address of {parts.hostname} holds a user name; "
            "put a bearer token into the environment variable that tts.reward.token_env names instead"
        )


@dataclass(frozen=True)
class GuardConfig:
    """Below which limits a clip gets ``violation_score`` without being sent to a scorer.

    The limits are far from anything that a listener would call speech: a guard should catch what is
    broken and leave the judgement to the scorer.
    """

    min_seconds: float = 0.1
    """One frame of a 12.5 Hz codec lasts 0.08 s; no word of any language is that short."""

    min_rms: float = 1e-4
    """Root mean square about the mean, full scale = 1. 1e-4 is -80 dBFS, three steps of 16-bit audio."""

    penalise_truncation: bool = False
    """A clip cut off by the frame limit is always flagged; true makes it a violation as well."""

    def __post_init__(self) -> None:
        _require_number("guards.min_seconds", self.min_seconds, 0)
        _require_number("guards.min_rms", self.min_rms, 0)
        _require_flag("guards.penalise_truncation", self.penalise_truncation)


@dataclass(frozen=True)
class RewardConfig(ClientConfig):
    """The node ``tts.reward``."""

    guards: GuardConfig = field(default_factory=GuardConfig)
    violation_score: float = 0.0
    """What a clip gets that a guard turned down. Never above the low end of the scorer's range."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_number("violation_score", self.violation_score, -math.inf)
