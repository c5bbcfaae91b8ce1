"""What a run is given: the model directory, speakers, prompt files, the scorer. Shapes: ``H`` hidden."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from omegaconf import DictConfig

from verl_tts.config.compose import tts_config
from verl_tts.config.model_dir import (
    CONFIG,
    WEIGHTS,
    codec_dir,
    read_header,
    read_model_config,
    speaker_size,
    takes_speakers,
    weight_files,
)
from verl_tts.config.validate import data_files
from verl_tts.data.check import OWN, check_files, scripts_of
from verl_tts.data.prompts import read_prompts
from verl_tts.data.reference import MIN_RMS
from verl_tts.data.speaker import read_speaker, speaker_file
from verl_tts.data.voices import read_references, reference_file
from verl_tts.doctor.findings import Finding
from verl_tts.errors import ConfigError, DataError, UserError
from verl_tts.files import read_json_object
from verl_tts.launch import check_prompts, reward_manager
from verl_tts.models.facts import facts_of
from verl_tts.rewards.doctor import Diagnosis, Reading, examine_source
from verl_tts.types import PromptRow, Scalar

SHOWN = 3  # mistakes of a kind; the rest is counted
SMALL_VALIDATION = 20  # prompts
LISTENED = 20  # recordings whose loudness is looked at
LATIN = ["Latin"]
MARKS = {"im_start_token_id": "<|im_start|>", "im_end_token_id": "<|im_end|>"}  # of a turn


# ------------------------------------------------------------------ the model


def model(config: DictConfig) -> Iterator[Finding]:
    """Files, architecture and dimensions, without loading a weight."""
    if not config.actor_rollout_ref.model.path:
        raise ConfigError("actor_rollout_ref.model.path is not set")
    path = Path(config.actor_rollout_ref.model.path)
    model_config = read_model_config(str(path))
    facts = facts_of(model_config)
    import_module(f"verl_tts.rollout.{config.tts.model}").check_model(model_config)
    stored: dict[str, tuple[int, ...]] = {}
    for file in weight_files(next(path / name for name in WEIGHTS if (path / name).is_file())):
        stored |= {name: tuple(entry["shape"]) for name, entry in read_header(file).items()}
    for name, shape in facts.shapes(model_config):
        if stored.get(name) != shape:
            found = f"has shape {list(stored[name])}" if name in stored else "is missing"
            said = f"{path}: {name} {found}, by its config.json it has shape {list(shape)}"
            yield Finding("model", "fail", said, "weights and config.json are of two models; download both again")
            return
    size = sum(int(np.prod(shape)) for shape in stored.values()) / 1e6
    hidden = facts.language_model(model_config)["hidden_size"]
    said = f"{model_config['model_type']}, {size:.1f} M parameters, hidden {hidden}"
    yield Finding("model", "ok", said)


def tokenizer(config: DictConfig) -> Iterator[Finding]:
    """The model's own: it knows the special tokens of config.json, and cuts a prompt as the policy counts on."""
    from transformers import AutoTokenizer

    path = config.actor_rollout_ref.model.path
    facts, model_config = facts_of(read_model_config(path)), read_model_config(path)
    try:
        tokens = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        yield Finding("tokenizer", "fail", f"{path} has none that loads: {str(error).splitlines()[0]}")
        return
    remedy = "it is that of a text model; copy the tokenizer's files from the speech model"
    for name in facts.special_tokens:
        token_id = model_config.get(name)
        if token_id is not None and (token_id >= len(tokens) or tokens.convert_ids_to_tokens(token_id) is None):
            said = f"{path}: config.json has {name}={token_id}, the tokenizer has {len(tokens)} tokens and not this one"
            yield Finding("tokenizer", "fail", said, remedy)
            return
        if token_id is not None and token_id not in (*tokens.all_special_ids, *tokens.added_tokens_decoder):
            said = f"{path}: config.json has {name}={token_id}, to the tokenizer that is a piece of text"
            yield Finding("tokenizer", "fail", said, remedy)
            return
    for name, mark in MARKS.items():
        if (known := tokens.convert_tokens_to_ids(mark)) != model_config.get(name):
            said = f"{path}: config.json has {name}={model_config.get(name)}, to the tokenizer {mark} is {known}"
            yield Finding("tokenizer", "fail", said, remedy)
            return
    template, wanted = facts.template
    if (around := len(tokens(template)["input_ids"])) != wanted:
        said = f"{path}: the chat template is {around} tokens, {wanted} are counted on"
        yield Finding("tokenizer", "fail", said, remedy)
        return
    yield Finding("tokenizer", "ok", f"{len(tokens)} tokens; {_longest(config)}")


def _longest(config: DictConfig) -> str:
    """Raises ``DataError`` for a text that is too long, with its row."""
    rows, conditioner = prompt_rows(config), check_prompts(config)
    longest = max(conditioner.length(row) for row in rows)
    return f"the longest of {len(rows)} prompts has {longest} of data.max_prompt_length={config.data.max_prompt_length}"


def prompt_rows(config: DictConfig) -> list[PromptRow]:
    return read_prompts(*data_files(config.data.train_files), *data_files(config.data.val_files))


def codec(config: DictConfig) -> Iterator[Finding]:
    """It decodes what the policy writes: codebooks, codes and rate; and its weights are those of its config.json."""
    path = config.actor_rollout_ref.model.path
    model_config = read_model_config(path)
    facts, directory = facts_of(model_config), codec_dir(path, model_config, config.tts.codec_path)
    codec_config = read_json_object(directory / CONFIG)
    fits = [*facts.codec_fits(model_config, codec_config)]
    for fit in fits:
        if not fit.fits:
            yield Finding("codec", "fail", f"{directory} has {fit.found} {fit.name}, the policy needs {fit.wanted}")
            return
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        yield Finding("codec", "fail", f"{directory} has no weights", "download the whole directory again")
        return
    yield Finding("codec", "ok", ", ".join(f"{fit.found} {fit.name}" for fit in fits))


# ------------------------------------------------------------------ voices and prompts


def voices(config: DictConfig) -> Iterator[Finding]:
    """Where the policy has its voices from: speaker embeddings, or recordings."""
    takes = takes_speakers(read_model_config(config.actor_rollout_ref.model.path))
    yield from speakers(config) if takes else references(config)


def speakers(config: DictConfig) -> Iterator[Finding]:
    size = speaker_size(read_model_config(config.actor_rollout_ref.model.path))
    if not config.tts.speaker_path:
        raise ConfigError("tts.speaker_path is not set")
    names = sorted({row.speaker for row in prompt_rows(config)}, key=lambda name: name or "")
    norms = []
    for name in names:
        speaker_H = read_speaker(speaker_file(config.tts.speaker_path, name), size)
        norms.append(float(np.linalg.norm(speaker_H)))
        if norms[-1] == 0:
            yield Finding("speaker", "fail", f"the embedding of {name or config.tts.speaker_path} is all zeros")
            return
    yield Finding("speaker", "ok", f"{len(names)} of {size} values, norm {min(norms):.3g} to {max(norms):.3g}")


def references(config: DictConfig) -> Iterator[Finding]:
    """The recordings that rows name and that training draws in their place: all can be read, the first are audible."""
    folder, rows = Path(config.tts.reference_dir or "."), prompt_rows(config)
    names = sorted({str(name) for row in rows if (name := row.extra.get("ref_audio"))})
    if config.tts.references is not None:
        names += [
            f"{cluster}/{name}" for cluster, of in read_references(config.tts.references).train.items() for name in of
        ]
    if not names:
        yield Finding("speaker", "ok", "no row names a recording: each clip has the voice that its text suggests")
        return
    wrong, seconds = [], []
    for name in names:
        try:
            seconds.append(soundfile.info(reference_file(folder, name)).duration)
        except DataError as error:
            wrong.append(str(error))
        except (OSError, soundfile.LibsndfileError) as error:
            wrong.append(f"{folder / name} cannot be read: {error}")
    wrong += [f"{folder / name} is silent" for name in names[:LISTENED] if not wrong and _is_silent(folder / name)]
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        remedy = "tts.reference_dir is the folder that ref_audio and tts.references are below"
        yield Finding("speaker", "fail", "; ".join(wrong[:SHOWN]) + more, remedy)
        return
    kept = config.tts.reference_seconds
    said = f"{len(names)} recording(s) of {min(seconds):.1f} to {max(seconds):.1f} s, of which {kept:g} s are kept"
    yield Finding("speaker", "ok", said)


def _is_silent(file: Path) -> bool:
    samples_SC, _ = soundfile.read(file, dtype="float32", always_2d=True)
    return float(samples_SC.mean(axis=1).std(dtype=np.float64)) < MIN_RMS if len(samples_SC) else True


def data(config: DictConfig) -> Iterator[Finding]:
    """As ``verl-tts check-data``: what a run would refuse, and what it would train on without a word."""
    model_config: Mapping[str, Any] | None = None
    with suppress(UserError):  # the look at the model says what is wrong with it
        model_config = read_model_config(config.actor_rollout_ref.model.path or "")
    train, val = (list(map(Path, data_files(files))) for files in (config.data.train_files, config.data.val_files))
    if not train or not val:
        raise ConfigError(f"data.{'val' if train else 'train'}_files is not set")
    files, across = check_files([*train, *val], None, model_config)
    refused = [reason for file in files for reason in file.refused]
    warned = [warning for file in files for warning in file.warnings] + across
    for state, reasons, remedy in (
        ("fail", refused, "`verl-tts check-data` shows all of them"),
        ("warn", warned, "a text that is trained on cannot be validated with; `verl-tts check-data` shows all of them"),
    ):
        if reasons:
            more = f"; and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
            yield Finding("data", state, "; ".join(reasons[:SHOWN]) + more, remedy)  # type: ignore[arg-type]
    if refused:
        return
    prompts = sum(len(file.rows) for file in files[: len(train)])
    if prompts < config.data.train_batch_size:
        raise DataError(f"data.train_batch_size={config.data.train_batch_size} is more than {prompts} training prompts")
    held_out = sum(len(file.rows) for file in files[len(train) :])
    if held_out < SMALL_VALIDATION:
        said = f"{held_out} validation prompts: a mean over so few says little"
        yield Finding("data", "warn", said, f"{SMALL_VALIDATION} and more, better 100, tell small changes from chance")
    languages = sorted({name for file in files for name in file.languages} - {OWN}) or ["the run's own"]
    if not warned:
        yield Finding("data", "ok", f"{prompts} prompts, {held_out} held out, languages: {', '.join(languages)}")


# ------------------------------------------------------------------ the scorer


def scorer(config: DictConfig, reading: Reading | None = None) -> Iterator[Finding]:
    """Seven clips that anybody can rank, as ``verl-tts score-check``; ``reading`` is a clip of the user's own."""
    rows: Sequence[PromptRow] = ()
    with suppress(UserError):  # the look at the data says what is wrong with it
        rows = prompt_rows(config)
    diagnosis = asyncio.run(_examined(config, reading, _metadata(rows)))
    name = diagnosis.scorer.name or config.tts.reward.scorer_url
    seconds = f"{diagnosis.seconds:.2f} s a clip" if diagnosis.seconds is not None else "no clip scored"
    guarded, bare = diagnosis.objections(guarded=True), diagnosis.objections(guarded=False)
    remedy = "a policy is paid for whatever is not below speech: mend the scorer, or set guards (docs/rewards.md)"
    if not _heeds_text(diagnosis):
        remedy = (
            "the scorer does not listen to the text: enough to try the loop with; to train speech name one that does, "
            "alone or beside it (docs/scorers.md)"
        )
    if guarded and reading is None and _foreign(rows):
        own = "the bundled clip is English and the prompts are not: --audio, --text and --wrong-text name one of yours"
        yield Finding("scorer", "warn", f"{name}: {'; '.join(guarded[:SHOWN])}", own)
    elif guarded:
        yield Finding("scorer", "fail", f"{name}: {'; '.join(guarded[:SHOWN])}", remedy)
    elif bare:
        said = f"{name} ranks speech first with our guards alone; without, {'; '.join(bare[:SHOWN])}"
        yield Finding("scorer", "warn", said, "leave tts.reward.guards.enforce=true")
    else:
        yield Finding("scorer", "ok", f"{name} ranks speech above noise, silence and other texts, {seconds}")


def _heeds_text(diagnosis: Diagnosis) -> bool:
    """Whether one clip gets another score for another text; True where there is none to compare."""
    scores = {finding.name: finding.score.total for finding in diagnosis.findings if finding.score is not None}
    return not {"right", "wrong_text"} <= scores.keys() or scores["right"] != scores["wrong_text"]


async def _examined(config: DictConfig, reading: Reading | None, metadata: Mapping[str, Scalar]) -> Any:
    rewards = reward_manager(config)
    try:
        await rewards.probe()
        return await examine_source(
            rewards.source, tts_config(config).reward.guards, reading or Reading.bundled(), metadata
        )
    finally:
        await rewards.aclose()


def _metadata(rows: Sequence[PromptRow]) -> dict[str, Scalar]:
    """What a scorer may need of a row; the length of the clip is its own."""
    if not rows:
        return {}
    row = rows[0]
    known = {"language": row.language, "speaker": row.speaker}
    kept = {name: value for name, value in row.extra.items() if name != "target_seconds"}
    return kept | {name: value for name, value in known.items() if value is not None}


def _foreign(rows: Sequence[PromptRow]) -> bool:
    """Whether most of the texts are in another script than the bundled clip's."""
    return bool(rows) and sum(scripts_of(row.text) != LATIN for row in rows) > len(rows) / 2
