"""The checkpoints here are real ones: see fsdp_job.py."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from fsdp_cases import CASES, LOGITS, LORA_ALPHA, LORA_RANK, STEP
from safetensors.torch import load_file, save_file

from verl_tts.checkpoints import export as module
from verl_tts.checkpoints.adapter import export_adapter
from verl_tts.checkpoints.export import BaseWeights, export, read_shard
from verl_tts.checkpoints.lora import merge
from verl_tts.checkpoints.manifest import MANIFEST, verify, write_manifest
from verl_tts.checkpoints.tiny import build_tiny_qwen3_tts
from verl_tts.commands import export as command
from verl_tts.commands import main
from verl_tts.errors import CheckpointError, ConfigError
from verl_tts.models.qwen3_tts import is_trainable
from verl_tts.report.run_dir import RunDir

HEAD = "talker.codec_head.weight"
FROZEN = "talker.text_projection.linear_fc1.weight"


def build_base(directory: Path) -> Path:
    """A tiny model as big ones are published: bfloat16, in two files with an index, a dtype in its config."""
    build_tiny_qwen3_tts(directory)
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(weights)
    files = {"model-00001-of-00002.safetensors": names[:80], "model-00002-of-00002.safetensors": names[80:]}
    for file, its_names in files.items():
        tensors = {name: weights[name].bfloat16() for name in its_names}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in weights.values()) // 2},
        "weight_map": {name: file for file, its_names in files.items() for name in its_names},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((directory / "config.json").read_text())
    config["torch_dtype"] = config["talker_config"]["dtype"] = "bfloat16"
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return build_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, base) -> Path:
    """One folder a case, with a sealed checkpoint of step 7 and the weights that it was made of."""
    out = tmp_path_factory.mktemp("runs")
    subprocess.run(
        [sys.executable, Path(__file__).with_name("fsdp_job.py"), base, out],
        env=os.environ | {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=300,
    )
    for case in CASES:
        write_manifest(out / case.name / "checkpoints" / f"global_step_{STEP}", step=STEP)
    return out


@pytest.fixture
def one_thread():
    """Sums in the order in which the job made them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def checkpoint_of(run: Path) -> Path:
    return run / "checkpoints" / f"global_step_{STEP}"


# ---------------------------------------------------------------- what comes out


@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_a_float32_export_is_the_trained_policy_bit_for_bit(case, runs, base, tmp_path):
    export(checkpoint_of(runs / case), tmp_path / "out", base=base, dtype="float32")
    exported, original = read_weights(tmp_path / "out"), read_weights(base)
    trained = load_file(runs / case / "expected.safetensors")
    assert exported.keys() == original.keys()
    for name, tensor in exported.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, trained[name] if is_trainable(name, "full") else original[name].float()), name
    assert any(not torch.equal(exported[name], original[name].float()) for name in original)


@pytest.mark.parametrize("case", ["full_2", "lora_2"])
def test_logits_in_qwen_tts_are_those_of_the_trained_policy_bit_for_bit(case, runs, base, tmp_path, one_thread):
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration

    export(checkpoint_of(runs / case), tmp_path / "out", base=base, dtype="float32")
    model = Qwen3TTSForConditionalGeneration.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = load_file(runs / case / LOGITS)
    with torch.no_grad():
        logits = model.talker(inputs_embeds=expected["inputs_embeds"], use_cache=False).logits
    assert torch.equal(logits, expected["logits"])
    original = Qwen3TTSForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        before = original.talker(inputs_embeds=expected["inputs_embeds"], use_cache=False).logits
    assert not torch.allclose(logits, before, atol=0.01)


def test_by_default_every_tensor_has_the_dtype_of_the_base(runs, base, tmp_path):
    export(checkpoint_of(runs / "full_2"), tmp_path / "out", base=base)
    trained = load_file(runs / "full_2" / "expected.safetensors")
    exported = read_weights(tmp_path / "out")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert torch.equal(exported[HEAD], trained[HEAD].bfloat16())


def test_everything_else_comes_from_the_base(runs, base, tmp_path):
    out = tmp_path / "out"
    export(checkpoint_of(runs / "full_1"), out, base=base)
    others = {path.relative_to(base) for path in base.rglob("*") if path.is_file() and path.parent == base}
    others = {name for name in others if name.suffix != ".safetensors"}
    codec = {path.relative_to(base) for path in (base / "speech_tokenizer").rglob("*")}
    assert Path("speech_tokenizer/model.safetensors") in codec
    for name in (others | codec) - {Path("model.safetensors.index.json")}:
        assert (out / name).read_bytes() == (base / name).read_bytes(), name
    for file in base.glob("*.safetensors"):
        assert (out / file.name).stat().st_mode == file.stat().st_mode
    origin = json.loads((out / "verl_tts_export.json").read_text())
    assert origin["step"] == STEP


def test_the_config_and_the_index_say_what_the_weights_are(runs, base, tmp_path):
    export(checkpoint_of(runs / "full_1"), tmp_path / "out", base=base, dtype="float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == config["talker_config"]["dtype"] == "float32"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    weights = read_weights(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert index["weight_map"].keys() == weights.keys()


def test_the_base_is_the_one_that_the_last_attempt_of_the_run_names(runs, base, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs / "full_1", run)
    for number, path in enumerate(["/nowhere", str(base)]):
        (run / ("config.1.yaml" if number else "config.yaml")).write_text(
            json.dumps({"actor_rollout_ref": {"model": {"path": path}}})
        )
    assert RunDir(run).latest_config().actor_rollout_ref.model.path == str(base)
    export(checkpoint_of(run), tmp_path / "out")
    assert read_weights(tmp_path / "out").keys() == read_weights(base).keys()


def test_the_command_exports_and_says_where(runs, base, tmp_path, capfd):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = [str(checkpoint_of(runs / "full_1")), str(tmp_path / "out"), "--base", str(base), "--dtype", "float16"]
    assert command.run(parser.parse_args(arguments)) == 0
    checkpoint = checkpoint_of(runs / "full_1")
    assert capfd.readouterr() == (f"exported {checkpoint} to {tmp_path / 'out'}\n", ""), "nothing of any library's"
    assert read_weights(tmp_path / "out")[HEAD].dtype == torch.float16


def test_a_codec_from_elsewhere_is_put_where_a_model_has_its_own(runs, base, tmp_path, capsys):
    """As the command does it: the run's configuration says that its codec is elsewhere."""
    run, codec = tmp_path / "run", tmp_path / "codec"
    shutil.copytree(runs / "full_1", run)
    shutil.copytree(base / "speech_tokenizer", codec)
    (codec / "here.txt").write_text("another one")
    (codec / ".cache").mkdir()
    said = {"actor_rollout_ref": {"model": {"path": str(base)}}, "tts": {"codec_path": str(codec)}}
    (run / "config.yaml").write_text(json.dumps(said))
    assert main(["export", str(checkpoint_of(run)), str(tmp_path / "out")]) == 0
    copied = {path.name for path in (tmp_path / "out/speech_tokenizer").iterdir()}
    assert copied == {path.name for path in codec.iterdir()} - {".cache"}
    (codec / "config.json").unlink()
    assert main(["export", str(checkpoint_of(run)), str(tmp_path / "again")]) == 2
    assert f"{codec} (tts.codec_path) has no codec" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("case", ["lora_1", "lora_2", "lora_2_only_adapters"])
def test_an_adapter_alone_merged_into_its_base_is_the_export(case, runs, base, tmp_path):
    export_adapter(checkpoint_of(runs / case), tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (LORA_RANK, LORA_ALPHA, "LORA")
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    export(checkpoint_of(runs / case), tmp_path / "exported", base=base)
    merged, exported = read_weights(tmp_path / "merged"), read_weights(tmp_path / "exported")
    assert merged.keys() == exported.keys()
    assert [name for name in merged if not torch.equal(merged[name], exported[name])] == []


def test_peft_itself_takes_the_adapter(runs, tmp_path):
    from peft import PeftConfig

    export_adapter(checkpoint_of(runs / "lora_2"), tmp_path / "adapter")
    config = PeftConfig.from_pretrained(tmp_path / "adapter")
    assert (config.r, config.lora_alpha) == (LORA_RANK, LORA_ALPHA)
    modules = {name.split(".lora_")[0] for name in load_file(tmp_path / "adapter/adapter_model.safetensors")}
    assert modules == {f"base_model.model.{name}" for name in config.target_modules}


def test_there_is_no_adapter_of_a_run_without_lora_and_none_in_another_form(runs, base, tmp_path, capsys):
    words = ["export", str(checkpoint_of(runs / "full_1")), str(tmp_path / "out"), "--adapter"]
    assert main(words) == 2
    assert "has no adapter: its run trained the weights themselves" in capsys.readouterr().err
    assert main([*words, "--base", str(base)]) == 2
    assert "leave --base, --codec and --dtype out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def spoiled(runs, tmp_path):
    """A copy of a checkpoint whose rank 0 has been changed and sealed again."""

    def spoil(case: str, change) -> Path:
        run = tmp_path / "spoiled"
        shutil.copytree(runs / case, run)
        shard = min((checkpoint_of(run) / "actor").glob("model_*_rank_0.pt"))
        tensors = torch.load(shard, weights_only=True)
        change(tensors)
        torch.save(tensors, shard)
        write_manifest(checkpoint_of(run), step=STEP)
        return checkpoint_of(run)

    return spoil


def rename(name):
    return lambda tensors: tensors.update({f"{name}_new": tensors.pop(name)})


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


LORA_A = "base_model.model.talker.model.layers.0.self_attn.q_proj.lora_A.default.weight"


@pytest.mark.parametrize(
    ("case", "change", "reason"),
    [
        ("full_1", rename(HEAD), "1 tensors of the checkpoint are not in .*codec_head.weight_new among them"),
        ("full_1", lambda t: t.pop(HEAD), "lacks 1 trained tensors, talker.codec_head.weight among them"),
        ("full_1", lambda t: t.update({HEAD: torch.zeros(2, 3)}), r"is \(2, 3\), in .* \(3072, 64\)"),
        ("full_1", lambda t: t[FROZEN].to_local().add_(1), "was frozen and differs from .*--base"),
        ("full_1", lambda t: t.update(evil=Evil()), "holds more than tensors"),
        ("full_2", lambda t: t.pop(HEAD), "saved tensors of different names"),
        ("full_2", lambda t: t.update({HEAD: t[HEAD].to_local()}), "is sharded on 1 of 2 ranks"),
        ("full_2_copies", lambda t: t[HEAD].to_local().add_(1), "should be the same on every rank"),
        ("lora_1", lambda t: t.pop(LORA_A), "q_proj is not a whole one of rank 4"),
        ("lora_1", lambda t: t.update({f"{LORA_A}.x": t[LORA_A]}), "1 adapter tensors are of an unknown kind"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line(
    case, change, reason, spoiled, base, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=reason) as refused:
        export(spoiled(case, change), tmp_path / "out", base=base)
    assert "\n" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spoiled"]


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04cut"])
def test_a_shard_that_is_none_is_one_line(tmp_path, content):
    path = tmp_path / "model_world_size_1_rank_0.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"^{path} (cannot be read|holds)") as refused:
        read_shard(path)
    assert "\n" not in str(refused.value)


def test_a_shard_is_a_mapping(tmp_path):
    torch.save([torch.zeros(1)], tmp_path / "shard.pt")
    with pytest.raises(CheckpointError, match="holds a list, not tensors by name"):
        read_shard(tmp_path / "shard.pt")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_an_index_that_is_none_is_one_line(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="is no index of weights"):
        BaseWeights(tmp_path)


def test_a_damaged_shard_is_refused_before_it_is_loaded(runs, base, tmp_path, monkeypatch):
    shutil.copytree(runs / "full_2", tmp_path / "run")
    shard = checkpoint_of(tmp_path / "run") / "actor" / "model_world_size_2_rank_1.pt"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(CheckpointError, match=r"the content of actor/model_world_size_2_rank_1\.pt"):
        export(checkpoint_of(tmp_path / "run"), tmp_path / "out", base=base)


def test_adapters_without_their_rank_and_alpha_are_refused(runs, base, tmp_path):
    shutil.copytree(runs / "lora_1", tmp_path / "run")
    checkpoint = checkpoint_of(tmp_path / "run")
    (checkpoint / "actor" / "lora_train_meta.json").unlink()
    write_manifest(checkpoint, step=STEP)
    with pytest.raises(CheckpointError, match=r"no lora_train_meta\.json"):
        export(checkpoint, tmp_path / "out", base=base)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}", "r=None has to be a whole number"),
        ("[]", "is not a JSON object"),
        ('{"r": 0, "lora_alpha": 16}', "r=0 has to be a whole number"),
        ('{"r": "8", "lora_alpha": 16}', "r='8' has to be a whole number"),
        ('{"r": 8, "lora_alpha": null}', "lora_alpha=None has to be a finite number"),
        ('{"r": 8, "lora_alpha": NaN}', "lora_alpha=nan has to be a finite number"),
        ('{"r": 3, "lora_alpha": 16}', "of rank 3$|says 3$"),
    ],
)
def test_a_rank_and_an_alpha_that_cannot_be_are_refused(content, reason, runs, base, tmp_path):
    shutil.copytree(runs / "lora_1", tmp_path / "run")
    checkpoint = checkpoint_of(tmp_path / "run")
    (checkpoint / "actor" / "lora_train_meta.json").write_text(content)
    write_manifest(checkpoint, step=STEP)
    for write in (partial(export, base=base), export_adapter):
        with pytest.raises(CheckpointError, match=reason):
            write(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ({"dtype": "int8"}, ConfigError, "dtype int8 is unknown; it has to be one of float32, bfloat16, float16"),
        ({"base": None}, CheckpointError, "name it with --base"),
        ({"base": Path("/nowhere")}, CheckpointError, "/nowhere is not a directory"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, error, reason, runs, base, tmp_path):
    with pytest.raises(error, match=reason):
        export(checkpoint_of(runs / "full_1"), tmp_path / "out", **({"base": base} | arguments))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", [export, export_adapter])
def test_neither_what_exists_nor_what_it_is_made_from_is_written_into(write, runs, base, tmp_path):
    checkpoint = checkpoint_of(runs / "lora_1")
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    refused = {
        tmp_path / "out": "exists already",
        tmp_path / "link": "exists already",
        checkpoint / "actor" / "out": "lies inside .*global_step",
    }
    if write is not export_adapter:
        write = partial(export, base=base)
        refused[base / "out"] = "lies inside"
    for out, reason in refused.items():
        with pytest.raises(ConfigError, match=reason):
            write(checkpoint, out)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "link"}
    assert list((tmp_path / "out").iterdir()) == []
    assert verify(checkpoint), "still whole"


def test_the_copy_of_a_model_that_is_read_only_can_be_written(runs, base, tmp_path):
    shared = tmp_path / "shared"
    shutil.copytree(base, shared)
    for path in (shared, *shared.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    export(checkpoint_of(runs / "full_1"), tmp_path / "out", base=shared)
    assert all(path.stat().st_mode & 0o200 for path in (tmp_path / "out", *(tmp_path / "out").rglob("*")))


def test_an_export_ended_by_a_signal_leaves_nothing(runs, base, tmp_path, monkeypatch):
    def ended(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(module, "save_file", ended)
    arguments = argparse.Namespace(
        checkpoint=checkpoint_of(runs / "full_1"),
        out=tmp_path / "out",
        base=base,
        dtype=None,
        codec=None,
        adapter=False,
    )
    with pytest.raises(SystemExit) as ended_with:
        command.run(arguments)
    assert ended_with.value.code == 143
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert (checkpoint_of(runs / "full_1") / MANIFEST).exists()


def test_what_is_no_checkpoint_is_said_with_what_one_is(runs, tmp_path, capfd):
    for place in (runs / "full_1", tmp_path / "gone"):
        assert main(["export", str(place), str(tmp_path / "out")]) == 2
        error = f"verl-tts export: {place} is no checkpoint; name RUN/checkpoints/global_step_<n>\n"
        assert capfd.readouterr() == ("", error)


def test_a_path_that_is_too_long_is_one_line(runs, tmp_path, capsys):
    assert main(["export", str(checkpoint_of(runs / "lora_1")), str(tmp_path / ("a" * 300)), "--adapter"]) == 2
    assert "File name too long; name another path" in capsys.readouterr().err
