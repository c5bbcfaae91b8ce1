"""Opens what the configuration names, before any model loads: the model directory, the prompts, the speakers."""

from collections.abc import Iterable
from typing import Any

from omegaconf import DictConfig

from verl_tts.config.model_dir import codec_dir, language_tags, read_model_config, speaker_size, takes_speakers
from verl_tts.config.validate import data_files
from verl_tts.data.prompts import read_prompts
from verl_tts.data.speaker import read_speakers
from verl_tts.data.voices import read_references
from verl_tts.errors import ConfigError, DataError
from verl_tts.types import PromptRow

AUTO = "auto"


def check_inputs(config: DictConfig) -> None:
    """Raises ``CheckpointError`` or ``DataError`` that names the file and the row, the length or the index."""
    model_config = read_model_config(config.actor_rollout_ref.model.path)
    train, val = (read_prompts(*data_files(files)) for files in (config.data.train_files, config.data.val_files))
    kept = config.data.train_max_samples
    prompts = min(len(train), kept) if kept > 0 else len(train)
    if prompts < config.data.train_batch_size:
        raise ConfigError(
            f"data.train_batch_size={config.data.train_batch_size} is more than the {prompts} training prompts "
            f"(data.train_files has {len(train)} rows, data.train_max_samples={kept}): there would be no step"
        )
    rows = [*train, *val]
    if config.tts.references is not None:
        read_references(config.tts.references)
    if takes_speakers(model_config):
        read_speakers(config.tts.speaker_path, {row.speaker for row in rows}, speaker_size(model_config))
    else:
        codec_dir(config.actor_rollout_ref.model.path, model_config, config.tts.codec_path)
    check_languages(config, model_config, rows)


def check_languages(config: DictConfig, model_config: dict[str, Any], rows: Iterable[PromptRow]) -> None:
    """The run's own language and those of the rows are the model's. Raises ``ConfigError`` or ``DataError``."""
    if (tags := language_tags(model_config)) is None:
        return
    known = {AUTO, *tags}
    if config.tts.language.lower() not in known:
        raise ConfigError(f"tts.language={config.tts.language} is unknown to the model; it knows {_listed(known)}")
    for row in rows:
        if row.language is not None and row.language.lower() not in known:
            raise DataError(
                f"extra_info.language={row.language} of {row.id} is unknown to the model; it knows {_listed(known)}"
            )


def _listed(tags: set[str]) -> str:
    return ", ".join(sorted(tags))
