"""The configuration: every word of it that is wrong, and every combination that cannot work."""

from collections.abc import Iterator, Sequence

from omegaconf import DictConfig

from verl_tts.config.compose import compose
from verl_tts.config.tts import MODELS
from verl_tts.config.validate import problems
from verl_tts.doctor.findings import Finding
from verl_tts.errors import CheckpointError, ConfigError

LOOK = "settings"


def read_settings(words: Sequence[str]) -> tuple[DictConfig | None, list[Finding]]:
    """The configuration of the words that can be read, and what is wrong with the others; None where none helps."""
    mistakes: list[ConfigError] = []
    try:
        config = compose(words, mistakes=mistakes)
    except CheckpointError:
        # config.json cannot be read, and the look at the model says so; the other looks go on.
        mistakes.clear()
        config = compose([*words, f"tts.model={MODELS[1]}"], mistakes=mistakes)
    except ConfigError as error:
        return None, [Finding(LOOK, "fail", str(mistake)) for mistake in (*mistakes, error)]
    return config, [Finding(LOOK, "fail", str(mistake)) for mistake in mistakes]


def settings(config: DictConfig, unread: Sequence[Finding] = ()) -> Iterator[Finding]:
    """What cannot work together; ``unread`` is what ``read_settings`` has found already."""
    found = problems(config)
    for problem in found:
        yield Finding(LOOK, "fail", problem)
    if not found and not unread:
        yield Finding(LOOK, "ok", f"{config.tts.model}, {config.tts.trainable}, platform {config.tts.platform}")
