"""``key=value`` words in, the whole configuration out.

Overrides pass four steps: published keys are translated (``published_keys.yaml``), the presets of the platform and
of the reward are chosen, each key is looked up in the composed defaults and its value compared with the default's
type, and ``auto`` values are replaced. Hydra reads the files and the grammar of a value; the lookup is ours, so that a
misspelt key is answered with the nearest ones, and so that ``key=``, ``+key=`` and ``++key=`` mean the same.
"""

import importlib.util
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_tts.config.model_dir import read_model_type
from verl_tts.config.reward import build
from verl_tts.config.tts import TTSConfig
from verl_tts.errors import ConfigError

log = logging.getLogger(__name__)

CONFIG_DIR = Path(__file__).parent
NVIDIA_DEVICE = Path("/dev/nvidiactl")

# verl hands these on as they are, so a key below them cannot be looked up. Every mapping that is empty by
# default is of this kind too.
FREE_FORM = (
    "actor_rollout_ref.model.override_config",
    "ray_kwargs.ray_init",
)
# Numbers that may be absent: the epochs alone decide; every checkpoint is kept.
NULLABLE = ("trainer.total_training_steps", "trainer.max_actor_ckpt_to_keep")
GATES = "tts.gates."  # a level of theirs may be absent, too
# Its arguments are those of our own client.
PUBLISHED_CLIENT = "pkg://verl_omni.utils.reward_score.audio_http_scorer_client"
# What ray.init() refuses when it joins a cluster instead of starting one.
RAY_START_ONLY = ("num_cpus", "num_gpus", "object_store_memory")

KeyPath = tuple[str, ...]
Setting = tuple[str, Any, bool]  # key, value, whether the key may be one that nobody declared (++key=value)


def compose(
    overrides: Sequence[str], given: Mapping[str, Any] | None = None, *, mistakes: list[ConfigError] | None = None
) -> DictConfig:
    """Returns verl's configuration with our defaults, the platform's preset, ``tts`` and the overrides.

    ``compose(["tts.platform=cpu", "data.train_files=train.parquet"])``. ``given`` are settings, key to value, that come
    before the overrides.

    Nothing is read but configuration files and the model's config.json, and neither torch nor verl is
    imported. Raises ``ConfigError``: an unknown key, a value of the wrong type, an override that cannot be
    parsed. Combinations and paths are the business of ``validate()``. With ``mistakes``, a word that is wrong is left
    out, and its error is put there.
    """
    words: list[Setting] = []
    for word in overrides:
        with _noted(mistakes):
            words.append(_parse(word))
    before: list[Setting] = [(key, value, False) for key, value in (given or {}).items()]
    settings = [*before, *_translate_published(words)]
    loaded, defaults = _load_defaults(_choose_platform(settings))
    config = deepcopy(loaded)
    for key, value, forced in [*_reward_preset(settings), *settings]:
        with _noted(mistakes):
            _apply(config, defaults, key, value, forced)
    _check_interpolations(config, defaults, settings)
    _derive(config)
    reward = tts_config(config).reward
    if reward.compose.components and not reward.compose.ordered:
        log.warning(
            "tts.reward.preset=%s: as published, a broken clip may be rewarded more than a good one "
            "(tts.reward.compose.ordered=false)",
            reward.preset,
        )
    OmegaConf.set_struct(config, True)
    return config


@contextmanager
def _noted(mistakes: list[ConfigError] | None) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        if mistakes is None:
            raise
        mistakes.append(error)


def tts_config(config: DictConfig) -> TTSConfig:
    """The node ``tts`` as its dataclasses, which check themselves. Raises ``ConfigError``."""
    return build(TTSConfig, "tts", _as_dict(config.tts))


def trained_rule(config: DictConfig) -> dict[str, Any]:
    """What decides which parameters there are to train, and what an adapter counts; flat, as JSON."""
    model = config.actor_rollout_ref.model
    if model.lora_rank == 0:
        return {"tts.trainable": config.tts.trainable}
    targets = model.target_modules
    lora = {
        "lora_rank": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
    }
    return {
        "tts.trainable": config.tts.trainable,
        **{f"actor_rollout_ref.model.{name}": value for name, value in lora.items()},
    }


def worker_environment(config: DictConfig) -> dict[str, str]:
    """Environment variables that the driver and every process of the run need, as the preset names them."""
    return _as_dict(config.ray_kwargs.ray_init.runtime_env.env_vars)


@contextmanager
def environment_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process and those that it starts have these variables as well; behind it all is as before."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# --- the words of the command line ---------------------------------------------------------------------------


def _parse(word: str) -> Setting:
    try:
        parsed: Override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ConfigError(
            f"cannot read the override {word!r}: it has to be KEY=VALUE; "
            "a value with spaces or special characters needs quotes of its own, as in 'KEY=\"VALUE\"'"
        ) from error
    if parsed.is_delete():
        raise ConfigError(f"{word!r} would delete a setting, which nothing here needs; set another value instead")
    if parsed.is_sweep_override():
        raise ConfigError(
            f"{word!r} names several values; a list is written [a,b] and a text with a comma 'KEY=\"a,b\"'"
        )
    return parsed.key_or_group, parsed.value(), parsed.is_force_add()


@cache
def published_keys() -> Mapping[str, Any]:
    """What becomes of each key of the published launchers; see the head of published_keys.yaml."""
    return _as_dict(OmegaConf.load(CONFIG_DIR / "published_keys.yaml"))


def _translate_published(settings: Sequence[Setting]) -> list[Setting]:
    translated = []
    given = {key: value for key, value, _ in settings}
    own_function = given.get("reward.custom_reward_function.path") not in (None, PUBLISHED_CLIENT)
    for key, value, forced in settings:
        rule = published_keys().get(key, "same")
        if key.startswith("hydra."):
            rule = {"ignored": "no Hydra output directory is made"}
        if own_function and key.startswith("reward.custom_reward_function."):
            rule = "same"  # arguments of somebody else's function, whatever they are called
        if rule == "same":
            translated.append((key, value, forced))
            continue
        if "ignored" in rule:
            log.info("%s=%s is ignored: %s", key, value, rule["ignored"])
            continue
        new_key = rule.get("to", key)
        new_value = rule.get("values", {}).get(value, value) if isinstance(value, str) else value
        if (new_key, new_value) != (key, value):
            log.info("%s=%s is %s=%s here", key, value, new_key, new_value)
        translated.append((new_key, new_value, forced))
    return translated


# --- the files -----------------------------------------------------------------------------------------------


def _choose_platform(settings: Sequence[Setting]) -> str:
    asked = [value for key, value, _ in settings if key == "tts.platform"]
    if asked and asked[-1] != "auto":
        return TTSConfig(platform=str(asked[-1])).platform
    found = NVIDIA_DEVICE.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    platform = "cuda" if found else "cpu"
    log.info(
        "tts.platform=auto: %s, %s", platform, "an NVIDIA device is there" if found else "no NVIDIA device is there"
    )
    return platform


def _reward_preset(settings: Sequence[Setting]) -> list[Setting]:
    """The settings of the file that ``tts.reward.preset`` names."""
    asked = [value for key, value, _ in settings if key == "tts.reward.preset"]
    if not asked or asked[-1] is None:
        return []
    known = reward_presets()
    if not isinstance(asked[-1], str) or asked[-1] not in known:
        meant = f"; the nearest is {close[0]}" if (close := nearest(str(asked[-1]), known)) else ""
        raise ConfigError(f"tts.reward.preset={asked[-1]} is unknown{meant}; there are: {', '.join(known)}")
    return [(f"tts.reward.{key}", value, False) for key, value in known[asked[-1]].items()]


@cache
def reward_presets() -> Mapping[str, Mapping[str, Any]]:
    """Name to content of the files below config/reward/: what each sets below ``tts.reward``.

    ``extends`` names another file, whose settings come first.
    """
    files = {path.stem: _as_dict(OmegaConf.load(path)) for path in sorted((CONFIG_DIR / "reward").glob("*.yaml"))}
    presets = {}
    for name, own in files.items():
        base = own.pop("extends", None)
        presets[name] = _as_dict(OmegaConf.merge(files[base] if base else {}, own))
    return presets


@cache
def _load_defaults(platform: str) -> tuple[DictConfig, dict[str, Any]]:
    """The composed files, and the same resolved: what settings there are, and of which type."""
    verl_config_dir = Path(_package_dir("verl")) / "trainer" / "config"
    search_path = f"hydra.searchpath=['file://{verl_config_dir}']"
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        config = hydra_compose("omni_trainer", overrides=[f"platform={platform}", search_path])
    OmegaConf.set_struct(config, False)
    # A plain mapping: the checks of the dataclasses run once all is set.
    config.tts = OmegaConf.merge(asdict(TTSConfig()), config.tts)
    return config, _as_dict(config)


def _package_dir(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the package {name} is not installed in this environment")
    return spec.submodule_search_locations[0]


# --- one setting into the configuration ----------------------------------------------------------------------


def _apply(config: DictConfig, defaults: dict[str, Any], key: str, value: Any, forced: bool) -> None:
    if key == "tts.platform":
        return
    path = tuple(key.split("."))
    declared, default = _look_up(defaults, path)
    if key.startswith(GATES) and isinstance(default, dict) and not isinstance(value, dict):
        # A gate's one number is where it stops.
        _apply(config, defaults, f"{key}.stop", value, forced)
        return
    if isinstance(value, dict) and declared and isinstance(default, dict) and default and key not in FREE_FORM:
        for name, inner in value.items():
            _apply(config, defaults, f"{key}.{name}", inner, forced)
        return
    if declared:
        value = _as_type_of(default, value, key)
    elif not (forced and path[0] != "tts") and not _is_free_form(defaults, path):
        raise ConfigError(_unknown(key, defaults))
    try:
        OmegaConf.update(config, key, value, force_add=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}={value}: {_first_line(error)}") from error


def _check_interpolations(config: DictConfig, defaults: dict[str, Any], settings: Sequence[Setting]) -> None:
    """``${...}`` in a setting points to something, and to something of the right type."""
    for key, value, _ in settings:
        if not (isinstance(value, str) and "${" in value):
            continue
        try:
            resolved = OmegaConf.select(config, key, throw_on_missing=True)
        except (OmegaConfBaseException, RecursionError) as error:
            raise ConfigError(f"{key}={value} cannot be resolved: {_first_line(error)}") from error
        declared, default = _look_up(defaults, tuple(key.split(".")))
        if declared and not OmegaConf.is_config(resolved):
            _as_type_of(default, resolved, key)


def _look_up(defaults: Mapping[str, Any], path: KeyPath) -> tuple[bool, Any]:
    """Whether ``path`` is declared, and its default."""
    node: Any = defaults
    for name in path:
        if not isinstance(node, dict) or name not in node:
            return False, None
        node = node[name]
    return True, node


def _is_free_form(defaults: Mapping[str, Any], path: KeyPath) -> bool:
    for depth in range(1, len(path)):
        parent = path[:depth]
        if ".".join(parent) in FREE_FORM or _look_up(defaults, parent) == (True, {}):
            return True
    return False


def _as_type_of(default: Any, value: Any, key: str) -> Any:
    """``value``, if it can stand where ``default`` stands; a whole float becomes an integer, a number a text."""
    if default is None or (isinstance(value, str) and "${" in value):
        return value
    if value is None and (key in NULLABLE or key.startswith(GATES)):
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match default:
        case bool() if isinstance(value, bool):
            return value
        case bool():
            wanted = "true or false"
        case int() if number and float(value).is_integer():
            return int(value)
        case int():
            wanted = "a whole number"
        case float() if number and not math.isfinite(value):
            wanted = "a finite number"
        case float() if number:
            return float(value)
        case float():
            wanted = "a number"
        case str() if number:
            return str(value)
        case str() if not isinstance(value, dict | bool):
            return value  # a path may be a list of paths, a name may be null
        case str():
            wanted = "a text"
        case list() if isinstance(value, list):
            return value
        case list() if isinstance(value, str):
            return [value]
        case list():
            wanted = "a list such as [a,b]"
        case _ if isinstance(value, dict) or (value is None and not default):
            return value
        case _:
            raise ConfigError(f"{key}={value} is of the wrong type: it is a mapping; set the keys below it")
    raise ConfigError(f"{key}={value} is of the wrong type: {wanted} is needed; its default is {default}")


def _unknown(key: str, defaults: Mapping[str, Any]) -> str:
    parent, _, leaf = key.rpartition(".")

    def likeness(candidate: str) -> float:
        """At most 2.4: the whole key, the last name alone (a moved key), and something for the right place."""
        place, _, name = candidate.rpartition(".")
        ratios = (SequenceMatcher(None, *pair).ratio() for pair in ((candidate, key), (name, leaf)))
        return sum(ratios) + (0.4 if place == parent else 0.0)

    nearest_keys = sorted(_keys(defaults), key=likeness, reverse=True)[:3]
    return (
        f"there is no setting {key}; the nearest are {', '.join(nearest_keys)} "
        f"(++{key}=... adds one that verl reads without declaring it)"
    )


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The names that one may have meant, the most alike first; none that is not alike."""
    return get_close_matches(name, [*known], n=3)


def _keys(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in node.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")


# --- what follows from the settings --------------------------------------------------------------------------


def _derive(config: DictConfig) -> None:
    """Replaces ``auto``, and settles what only a combination of keys decides. Each change says so in one line."""
    actor, model, tts = config.actor_rollout_ref.actor, config.actor_rollout_ref.model, config.tts
    if not isinstance(model.path, str | None):
        raise ConfigError(f"actor_rollout_ref.model.path={model.path} has to be the path of a directory")
    if tts.model == "auto":
        tts.model = read_model_type(model.path) or "auto"
    if tts.trainable == "auto":
        tts.trainable = "lora" if model.lora_rank > 0 else "full"

    if model.lora_rank > 0 and "fsdp" in (actor.strategy, config.actor_rollout_ref.ref.strategy):
        log.info("actor_rollout_ref.actor.strategy=fsdp runs as fsdp2: with FSDP1 no LoRA weight reaches the rollout")
        actor.strategy = config.actor_rollout_ref.ref.strategy = "fsdp2"

    for key in ("tts.output_dir", "trainer.default_local_dir"):
        if not isinstance(directory := OmegaConf.select(config, key), str) or not directory:
            raise ConfigError(f"{key}={directory} has to be a directory")
    checkpoints = Path(config.trainer.default_local_dir)
    if checkpoints != Path(tts.output_dir) / "checkpoints":
        tts.output_dir = str(checkpoints.parent if checkpoints.name == "checkpoints" else checkpoints)
        log.info("trainer.default_local_dir=%s: the run directory is %s", checkpoints, tts.output_dir)
        config.trainer.default_local_dir = "${tts.output_dir}/checkpoints"

    if os.environ.get("RAY_ADDRESS"):
        for name in RAY_START_ONLY:
            config.ray_kwargs.ray_init.pop(name, None)


def _as_dict(node: Any) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
