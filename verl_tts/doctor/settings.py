"""The configuration: every word of it that is wrong, and every combination that cannot work."""

from collections.abc import Iterator, Sequence

from omegaconf import DictConfig

from verl_tts.config.compose import compose
from verl_tts.config.validate import problems
from verl_tts.doctor.findings import Finding
from verl_tts.errors import ConfigError

LOOK = "settings"


def read_settings(words: Sequence[str]) -> tuple[DictConfig | None, list[Finding]]:
    """The configuration of the words that can be read, and what is wrong with the others; None where none helps."""
    findings: list[Finding] = []
    taken: list[str] = []
    try:
        return compose(words), []
    except ConfigError:
        pass
    for word in words:
        try:
            compose([*taken, word])
            taken.append(word)
        except ConfigError as error:
            findings.append(Finding(LOOK, "fail", str(error)))
    try:
        return compose(taken), findings
    except ConfigError as error:
        return None, [*findings, Finding(LOOK, "fail", str(error))]


def settings(config: DictConfig) -> Iterator[Finding]:
    found = problems(config)
    for problem in found:
        yield Finding(LOOK, "fail", problem)
    if not found:
        yield Finding(LOOK, "ok", f"{config.tts.model}, {config.tts.trainable}, platform {config.tts.platform}")
