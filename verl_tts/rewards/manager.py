"""From a waveform to its reward: guards, a scorer, and the composition of its answer. What the agent loop calls.

    rewards = RewardManager.from_config(tts.reward, reward.custom_reward_function, num_workers=1)
    info = await rewards.probe()
    score = await rewards.score(row, waveform, rollout)
    rewards.end_step(scores_of_the_step)
    await rewards.aclose()

One manager per worker, used from one event loop. A clip either gets a Score or an exception that ends the
run; nothing else ever becomes a number. The parts of all scores of a split have the same names: what the guards
measured, the guards, the scorer's, the composition's, and in a validation the probes'. A part that was not measured,
because the clip was not sent, is NaN; ``mean_parts`` skips it.
"""

import asyncio
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, Self

from verl_tts.config.reward import RewardConfig, reward_config
from verl_tts.errors import ConfigError, ScorerProtocolError
from verl_tts.rewards.client import ScorerClient
from verl_tts.rewards.compose import SCORE, VIOLATION, Composer
from verl_tts.rewards.function import FunctionScorer
from verl_tts.rewards.guards import GuardVerdict, check_guards, check_transcript
from verl_tts.rewards.protocol import ScorerInfo
from verl_tts.types import CodecRollout, PromptRow, Scalar, Score, Waveform

_OUR_PREFIXES = ("clip/", "guard/", "component/", "probe/")

# The published HTTP client, which people name as their scoring function, and its arguments in our words.
PUBLISHED_CLIENT = "pkg://verl_omni.utils.reward_score.audio_http_scorer_client"
_PUBLISHED_ARGUMENTS = {
    "server_url": "scorer_url",
    "timeout": "timeout_s",
    "max_retries": "max_retries",
    "retry_backoff": "retry_backoff_s",
}


class ScoreSource(Protocol):
    """Who is asked for a score: ``ScorerClient`` or ``FunctionScorer``."""

    async def probe(self) -> ScorerInfo: ...

    async def score(self, waveform: Waveform, prompt: str, metadata: Mapping[str, Scalar]) -> Score: ...

    async def aclose(self) -> None: ...


class RewardManager:
    def __init__(
        self, config: RewardConfig, source: ScoreSource, probes: Mapping[str, ScoreSource] | None = None
    ) -> None:
        self._config = config
        self._source = source
        self._probes = dict(probes or {})
        self._composer = Composer(config.compose)
        self._info: ScorerInfo | None = None
        self._probing = asyncio.Lock()
        self._scorer_parts: tuple[str, ...] | None = None
        self._incomplete: list[dict[str, float]] = []  # parts of clips turned down before the names were known

    @classmethod
    def from_config(
        cls,
        reward: RewardConfig | Mapping[str, Any],
        custom_reward_function: Mapping[str, Any] | None = None,
        *,
        num_workers: int = 1,
    ) -> Self:
        """A manager for the nodes ``tts.reward`` and verl's ``reward.custom_reward_function``.

        ``num_workers`` managers share ``max_in_flight``. Raises ConfigError.
        """
        config = reward if isinstance(reward, RewardConfig) else reward_config(reward)
        function = dict(custom_reward_function or {})
        kwargs = dict(function.get("reward_kwargs") or {})
        if function.get("path") == PUBLISHED_CLIENT:
            config, function = _as_published(config, kwargs), {}

        config = replace(config, max_in_flight=max(1, config.max_in_flight // num_workers))
        probes = {name: ScorerClient(replace(config, scorer_url=url)) for name, url in config.probes.items()}
        if not function.get("path"):
            return cls(config, ScorerClient(config), probes)
        if config.urls:
            raise ConfigError(
                f"both tts.reward.scorer_url={config.scorer_url} and reward.custom_reward_function.path="
                f"{function['path']} are set; set one of them to null"
            )
        name = function.get("name") or "compute_score"
        source = FunctionScorer(
            function["path"], name, kwargs, timeout_s=config.timeout_s, max_in_flight=config.max_in_flight
        )
        return cls(config, source, probes)

    async def probe(self) -> ScorerInfo:
        """Who scores; the first call asks, the held-out probes too.

        Raises a ScorerError, or ConfigError if a violation would pay.
        """
        async with self._probing:
            if self._info is None:
                info, *_ = await asyncio.gather(self._source.probe(), *(p.probe() for p in self._probes.values()))
                low = info.score_range[0]
                if not self._composer.components and low is not None and self._config.violation_score > low:
                    raise ConfigError(
                        f"tts.reward.violation_score={self._config.violation_score} is above {low}, the low end of "
                        f"the scorer's range: silence would pay more than bad speech; set it to {low} or below"
                    )
                self._scorer_parts = info.part_names
                self._info = info
        return self._info

    async def score(
        self, row: PromptRow, waveform: Waveform, rollout: CodecRollout, *, held_out: bool = False
    ) -> Score:
        """The reward of one clip. ``held_out``: with what the probes say, ``probe/<name>``, which is no part of it.

        Raises RolloutError for a waveform that cannot be audio, ScorerError as the protocol says.
        """
        await self.probe()
        parts: dict[str, float] = {}
        scored = await self._score(row, waveform, rollout, parts)
        if held_out:
            for name, probe in self._probes.items():
                parts[f"probe/{name}"] = await self._ask_probe(probe, row, waveform)
        return scored

    async def _score(self, row: PromptRow, waveform: Waveform, rollout: CodecRollout, parts: dict[str, float]) -> Score:
        """As ``score``; fills ``parts``, which are those of the result."""
        guards = self._config.guards
        clip, verdicts = check_guards(guards, waveform, rollout, row.ground_truth, row.id)
        parts |= clip | {verdict.part: float(verdict.struck) for verdict in verdicts}
        if guards.penalise_empty_transcript:
            parts["guard/empty_transcript"] = math.nan
        violation = next((verdict for verdict in verdicts if verdict.is_violation), None)
        if violation is not None:
            parts |= dict.fromkeys((*(self._scorer_parts or ()), *self._composed_parts), math.nan)
            if self._scorer_parts is None:
                self._incomplete.append(parts)
            return self._violation(_reason(violation), parts)

        answer = await self._source.score(waveform, row.ground_truth, _metadata(row))
        self._check_parts(row.id, answer)
        parts |= answer.parts
        heard = check_transcript(guards, answer.notes)
        if heard is not None:
            parts[heard.part] = float(heard.struck)
        if self._composer.components:
            composed = self._composer.compose(answer, row.id)
            parts |= {SCORE: answer.total, **composed.parts}
            answer = replace(answer, total=composed.total)
            if composed.violation is not None:
                return self._violation(f"gate: {composed.violation}", parts, answer.notes)
        if heard is not None and heard.is_violation:
            return self._violation(_reason(heard), parts, answer.notes)
        return replace(answer, parts=parts)

    @property
    def _composed_parts(self) -> tuple[str, ...]:
        return (SCORE, *self._composer.part_names) if self._composer.components else ()

    def _violation(self, reason: str, parts: dict[str, float], notes: Mapping[str, Scalar] | None = None) -> Score:
        return Score(self._config.violation_score, parts, {**(notes or {}), VIOLATION: reason})

    async def _ask_probe(self, probe: ScoreSource, row: PromptRow, waveform: Waveform) -> float:
        """NaN for a clip without a sample, which nobody can be asked about."""
        if len(waveform.samples_S) == 0:
            return math.nan
        return (await probe.score(waveform, row.ground_truth, _metadata(row))).total

    # ------------------------------------------------------------------ running statistics

    def end_step(self, scores: Iterable[Score]) -> None:
        """A training step's scores are complete; between two steps, so that no clip is being scored."""
        self._composer.end_step(scores)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return self._composer.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken; CheckpointError if it is that of another composition."""
        self._composer.load_state(state, allow_other=self._config.allow_other_reward)

    async def aclose(self) -> None:
        await asyncio.gather(self._source.aclose(), *(probe.aclose() for probe in self._probes.values()))

    def _check_parts(self, sample_id: str, score: Score) -> None:
        """A part that comes and goes would be averaged over whoever happens to have it, and one of ours overwritten."""
        for name in (*score.parts, *score.notes):
            if name.startswith(_OUR_PREFIXES) or name == VIOLATION:
                raise ScorerProtocolError(
                    f"the scorer's answer for sample {sample_id!r} has the key {name!r}, which is a name of the "
                    f"trainer's own, as are {VIOLATION} and all that begin with {', '.join(_OUR_PREFIXES)}: rename it"
                )
        names = tuple(sorted(score.parts))
        if self._scorer_parts is None:  # a scorer without /info, or a function: its first answer tells
            self._scorer_parts = names
            for parts in self._incomplete:
                parts.update(dict.fromkeys(names, math.nan))
            self._incomplete.clear()
        if names != tuple(sorted(self._scorer_parts)):
            raise ScorerProtocolError(
                f"the scorer's answer for sample {sample_id!r} has the numbers {list(names)}, "
                f"not with {sorted(self._scorer_parts)} as announced or as before"
            )


def mean_parts(scores: Iterable[Score]) -> dict[str, float]:
    """Mean of each part over the clips in which it was measured; a part that nobody measured is left out."""
    values: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.parts.items():
            if not math.isnan(value):
                values.setdefault(name, []).append(value)
    return {name: math.fsum(measured) / len(measured) for name, measured in values.items()}


def _metadata(row: PromptRow) -> dict[str, Scalar]:
    """The row's ``extra_info`` as the scorer sees it."""
    metadata: dict[str, Scalar] = {**row.extra, "id": row.id, "split": row.split, "index": row.index}
    if row.language is not None:
        metadata["language"] = row.language
    if row.speaker is not None:
        metadata["speaker"] = row.speaker
    return metadata


def _reason(verdict: GuardVerdict) -> str:
    return f"{verdict.name}: {verdict.reason}"


def _as_published(config: RewardConfig, kwargs: dict[str, Any]) -> RewardConfig:
    """``config`` with the arguments of the published client, which win over our defaults."""
    for name in kwargs:
        if name not in _PUBLISHED_ARGUMENTS:
            raise ConfigError(
                f"unknown reward.custom_reward_function.reward_kwargs.{name}; "
                f"the HTTP scorer client knows: {', '.join(_PUBLISHED_ARGUMENTS)}"
            )
    given = {_PUBLISHED_ARGUMENTS[name]: value for name, value in kwargs.items()}
    url = given.get("scorer_url")
    if config.urls and url is not None and url != config.scorer_url:
        raise ConfigError(
            f"tts.reward.scorer_url={config.scorer_url} and reward.custom_reward_function.reward_kwargs.server_url="
            f"{url} differ; set one of them"
        )
    return replace(config, **given)
