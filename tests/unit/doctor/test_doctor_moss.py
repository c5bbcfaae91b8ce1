"""The doctor's looks at a MOSS run: the same mistakes, in the places where this policy has them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from safetensors.numpy import load_file, save_file

from verl_tts.commands import doctor
from verl_tts.commands import main as verl_tts
from verl_tts.config.plan import Machine
from verl_tts.data.prompts import write_prompts
from verl_tts.data.quickstart import quickstart_rows
from verl_tts.doctor import inputs, machine
from verl_tts.doctor.settings import read_settings
from verl_tts.dry_run import plan_here

JUDGE = Path(__file__).with_name("judge.py")
VOICE = "anna/1.wav"


@pytest.fixture
def model(tiny_moss, tmp_path):
    """A copy of the tiny checkpoint, to be damaged."""
    return shutil.copytree(tiny_moss, tmp_path / "model")


@pytest.fixture
def voices(tmp_path):
    """A folder of recordings: one speaker for training, one for validation."""
    noise = np.random.default_rng(0).normal(scale=0.1, size=24_000).astype(np.float32)
    for name in (VOICE, "bo/1.wav"):
        (tmp_path / "voices" / name).parent.mkdir(parents=True)
        soundfile.write(tmp_path / "voices" / name, noise, 24_000)
    return tmp_path / "voices"


@pytest.fixture
def words(tiny_moss, tmp_path, voices):
    """Overrides of a run in which every second row has a recording, with a scorer that knows speech from noise."""
    for split, rows in quickstart_rows().items():
        given = [replace(row, extra={**row.extra, "ref_audio": VOICE}) if row.index % 2 else row for row in rows]
        write_prompts(given, tmp_path / f"{split}.parquet")
    return [
        "tts.platform=cpu",
        f"actor_rollout_ref.model.path={tiny_moss}",
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
        f"tts.reference_dir={voices}",
        f"tts.output_dir={tmp_path}/run",
        f"reward.custom_reward_function.path={JUDGE}",
        "reward.custom_reward_function.name=score",
        "data.max_prompt_length=640",
        "data.max_response_length=40",
        "trainer.total_training_steps=4",
    ]


def configured(words, *more):
    config, mistakes = read_settings([*words, *more])
    assert config is not None
    assert not mistakes
    return config


def only(look, at):
    (finding,) = doctor.looked_at(look, at)
    return finding


def test_a_healthy_run_has_every_look_and_no_failure(words, monkeypatch, capfd):
    monkeypatch.setattr(machine, "registration", lambda config: iter(()))  # a process of seconds, tested by itself
    assert verl_tts(["doctor", "--quick", *words]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line[:5].strip()]
    looks = {line[6:19].strip(): line[20:] for line in lines}
    assert {"model", "tokenizer", "codec", "speaker", "disk", "shared memory", "scorer"} <= looks.keys()
    assert looks["model"].startswith("moss_tts_delay, 2.2 M parameters")
    assert looks["codec"].startswith("16 codebooks, 1024 codes in a codebook, 1920 samples a frame")
    assert looks["speaker"].startswith("1 recording(s) of 1.0 to 1.0 s")
    assert "FAIL" not in "".join(lines)


def test_weights_of_another_model_than_config_json_are_found(words, model):
    content = json.loads((model / "config.json").read_text())
    content["language_config"]["intermediate_size"] = 256
    (model / "config.json").write_text(json.dumps(content))
    finding = only("model", lambda: inputs.model(configured(words, f"actor_rollout_ref.model.path={model}")))
    assert finding.state == "fail"
    assert "mlp.gate_proj.weight has shape [128, 64], by its config.json it has shape [256, 64]" in finding.said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["MossTTSLocalModel"]}, "architectures=['MossTTSLocalModel']"),
        ({"architectures": None}, "architectures=[]"),
        ({"audio_vocab_size": 2048}, "codebook size and pad code are 2048 and 1024"),
    ],
)
def test_a_model_that_the_engines_stages_are_not_made_for_is_found(words, model, change, said):
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    finding = only("model", lambda: inputs.model(configured(words, f"actor_rollout_ref.model.path={model}")))
    assert finding.state == "fail"
    assert said in finding.said


def test_weights_without_a_head_are_found(words, model):
    weights = load_file(model / "model.safetensors")
    del weights["lm_heads.16.weight"]
    save_file(weights, model / "model.safetensors")
    finding = only("model", lambda: inputs.model(configured(words, f"actor_rollout_ref.model.path={model}")))
    assert finding.state == "fail"
    assert "lm_heads.16.weight is missing" in finding.said


def test_a_tokenizer_without_the_tokens_of_audio_is_found(words, model):
    file = model / "tokenizer_config.json"
    content = json.loads(file.read_text())
    kept = {number: of for number, of in content["added_tokens_decoder"].items() if "audio" not in of["content"]}
    file.write_text(json.dumps(content | {"added_tokens_decoder": kept}))
    finding = only("tokenizer", lambda: inputs.tokenizer(configured(words, f"actor_rollout_ref.model.path={model}")))
    assert finding.state == "fail"
    assert "audio_start_token_id=323" in finding.said


def test_the_longest_prompt_is_counted_with_its_recording(words):
    finding = only("tokenizer", lambda: inputs.tokenizer(configured(words)))
    assert finding.state == "ok", finding
    finding = only("tokenizer", lambda: inputs.tokenizer(configured(words, "data.max_prompt_length=400")))
    assert finding.state == "fail"
    assert "data.max_prompt_length=400" in finding.said


def test_a_missing_codec_is_found_where_the_settings_say_that_it_is(words, tmp_path):
    config = configured(words)
    config.tts.codec_path = str(tmp_path / "nowhere")
    finding = only("codec", lambda: inputs.codec(config))
    assert finding.state == "fail"
    assert f"{tmp_path}/nowhere (tts.codec_path) has no codec" in finding.said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sampling_rate": 48_000, "downsample_rate": 3840}, "has 3840 samples a frame, the policy needs 1920"),
        ({"quantizer_kwargs": {"num_quantizers": 12, "codebook_size": 1024}}, "has 12 codebooks, the policy needs 16"),
        ({"quantizer_kwargs": {"num_quantizers": 32, "codebook_size": 4096}}, "has 4096 codes in a codebook"),
    ],
)
def test_a_codec_of_another_kind_is_found(words, model, change, said):
    file = model / "codec" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    finding = only("codec", lambda: inputs.codec(configured(words, f"tts.codec_path={model}/codec")))
    assert finding.state == "fail"
    assert said in finding.said


def test_the_published_codec_with_its_32_codebooks_decodes_16(words, model):
    file = model / "codec" / "config.json"
    content = json.loads(file.read_text())
    content["quantizer_kwargs"]["num_quantizers"] = 32
    file.write_text(json.dumps(content))
    assert only("codec", lambda: inputs.codec(configured(words, f"tts.codec_path={model}/codec"))).state == "ok"


def test_a_recording_that_is_not_there_is_found_by_name(words, voices):
    (voices / VOICE).unlink()
    finding = only("speaker", lambda: inputs.voices(configured(words)))
    assert finding.state == "fail"
    assert f"{voices}/{VOICE} cannot be read" in finding.said
    assert "tts.reference_dir" in finding.remedy


def test_a_silent_recording_is_found(words, voices):
    soundfile.write(voices / VOICE, np.zeros(24_000, np.float32), 24_000)
    finding = only("speaker", lambda: inputs.voices(configured(words)))
    assert (finding.state, finding.said) == ("fail", f"{voices}/{VOICE} is silent")


def test_recordings_that_training_draws_are_looked_at_too(words, tmp_path):
    listed = {"train": {"cy": ["1.wav", "2.wav"]}, "validation": {"anna": ["1.wav"]}}
    (tmp_path / "references.json").write_text(json.dumps(listed))
    finding = only("speaker", lambda: inputs.voices(configured(words, f"tts.references={tmp_path}/references.json")))
    assert finding.state == "fail"
    assert "cy/1.wav cannot be read" in finding.said
    assert "cy/2.wav cannot be read" in finding.said


def test_rows_without_a_recording_need_none(words, tmp_path):
    for split, rows in quickstart_rows().items():
        write_prompts(rows, tmp_path / f"{split}.parquet")
    assert only("speaker", lambda: inputs.voices(configured(words, "tts.reference_dir=null"))).state == "ok"


@pytest.mark.parametrize(
    ("gib", "state", "said"), [(80.0, "ok", "(rollout GPU) of 73.6 GiB"), (0.5, "fail", "of 0.5 GiB")]
)
def test_the_memory_of_both_pools_is_compared_with_the_cards(words, gib, state, said):
    plan = plan_here(configured(words, "tts.engine.rollout_gpus=2"))
    finding = only("memory", lambda: machine.memory(replace(plan, machine=Machine(1, 1, gib))))
    assert finding.state == state
    assert said in finding.said


def test_the_gpus_of_both_pools_have_to_be_there(words, monkeypatch):
    config = configured(words, "tts.engine.rollout_gpus=6")
    config.tts.platform = "cuda"
    monkeypatch.setattr(machine, "nvidia_cards", lambda: ["H100"] * 4)
    finding = only("platform", lambda: machine.on_platform(config))
    assert finding.state == "fail"
    assert finding.said == "trainer.n_gpus_per_node=1, tts.engine.rollout_gpus=6, and nvidia-smi shows 4 GPU(s)"
