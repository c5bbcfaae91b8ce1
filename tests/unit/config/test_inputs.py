import json
import shutil
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from verl_tts.config.inputs import check_inputs
from verl_tts.config.model_dir import read_model_config, speaker_size
from verl_tts.data.prompts import write_prompts
from verl_tts.data.quickstart import quickstart_rows, write_quickstart
from verl_tts.errors import CheckpointError, ConfigError, DataError


@pytest.fixture
def inputs(tiny_checkpoint, tmp_path):
    write_quickstart(tmp_path, tiny_checkpoint)
    return OmegaConf.create({
        "actor_rollout_ref": {"model": {"path": str(tiny_checkpoint)}},
        "data": {
            "train_files": [f"{tmp_path}/train.parquet"],
            "val_files": f"{tmp_path}/val.parquet",
            "train_batch_size": 4,
            "train_max_samples": -1,
        },
        "tts": {"speaker_path": f"{tmp_path}/speaker.json", "language": "Auto", "references": None},
    })  # fmt: skip


def test_a_tiny_checkpoint_with_quickstart_data_passes(inputs):
    check_inputs(inputs)


@pytest.mark.parametrize(("batch", "kept", "prompts"), [(49, -1, 48), (4, 3, 3)])
def test_a_batch_that_the_training_prompts_do_not_fill_is_refused(inputs, batch, kept, prompts):
    inputs.data.train_batch_size, inputs.data.train_max_samples = batch, kept
    with pytest.raises(ConfigError, match=rf"train_batch_size={batch} is more than the {prompts} training prompts"):
        check_inputs(inputs)


def test_a_speaker_of_another_size_is_refused_with_both_numbers(inputs, tmp_path, tiny_checkpoint):
    size = speaker_size(read_model_config(str(tiny_checkpoint)))
    (tmp_path / "speaker.json").write_text(json.dumps([0.0] * 1024))
    with pytest.raises(DataError, match=rf"1024 values.* has {size}"):
        check_inputs(inputs)


def test_a_language_that_the_model_has_no_token_for_is_refused_with_those_that_it_has(inputs, tmp_path):
    inputs.tts.language = "Hindi"
    with pytest.raises(ConfigError, match=r"tts.language=Hindi is unknown.*auto, chinese, english"):
        check_inputs(inputs)
    inputs.tts.language = "english"
    write_prompts([replace(row, language="Klingon") for row in quickstart_rows()["val"]], tmp_path / "val.parquet")
    with pytest.raises(DataError, match=r"extra_info.language=Klingon of en-00"):
        check_inputs(inputs)


def test_the_speaker_of_every_row_has_to_be_there(inputs, tmp_path):
    write_prompts([replace(row, speaker="asha") for row in quickstart_rows()["val"]], tmp_path / "val.parquet")
    with pytest.raises(DataError, match=r"extra_info.speaker=asha.*not a folder"):
        check_inputs(inputs)


def halve(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def shard(model, name):
    """The weights as an index and a file of another name, which is not there."""
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": name}}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: (model / "config.json").unlink(), "config.json is missing"),
        (lambda model: (model / "config.json").write_text("{"), "is not JSON"),
        (lambda model: (model / "config.json").write_text('{"model_type": "llama"}'), "type llama; .* qwen3_tts"),
        (lambda model: (model / "model.safetensors").unlink(), "has no weights"),
        (lambda model: shutil.rmtree(model / "speech_tokenizer"), "has no codec"),
        (lambda model: (model / "vocab.json").unlink(), "has no tokenizer: neither tokenizer.json nor vocab.json with"),
        (lambda model: (model / "model.safetensors").write_bytes(b""), "model.safetensors has 0 bytes"),
        (lambda model: halve(model / "model.safetensors"), r"has \d+ bytes, its header says \d+"),
        (lambda model: halve(model / "speech_tokenizer" / "model.safetensors"), "speech_tokenizer.*its header says"),
        (lambda model: (model / "model.safetensors").write_bytes(b"PK" * 400), "no whole header"),
        (lambda model: (model / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"[]"), "header cannot be read"),
        (lambda model: shard(model, "gone.safetensors"), "gone.safetensors is missing"),
        (lambda model: shutil.rmtree(model), "is not a directory"),
    ],
)
def test_a_damaged_model_directory_is_refused_before_it_loads(tiny_checkpoint, tmp_path, damage, message):
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    damage(model)
    with pytest.raises(CheckpointError, match=message):
        read_model_config(str(model))


@pytest.mark.parametrize("talker", [None, 3, {}, {"hidden_size": None}, {"hidden_size": "1024"}, {"hidden_size": 0}])
def test_a_config_json_that_does_not_say_how_long_an_embedding_is_is_refused(talker):
    with pytest.raises(CheckpointError, match=r"talker_config\.hidden_size=.*; it has to be a number of 1 or more"):
        speaker_size({"model_type": "qwen3_tts"} | ({} if talker is None else {"talker_config": talker}))
