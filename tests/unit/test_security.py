"""What docs/security.md promises of our own code: nothing is unpickled, secrets stay out, rows name nothing outside."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_tts import launch
from verl_tts.checkpoints.manifest import write_manifest
from verl_tts.commands import main as verl_tts
from verl_tts.config.compose import compose
from verl_tts.data.speaker import speaker_file
from verl_tts.errors import CheckpointError, ConfigError, DataError
from verl_tts.main_omni import main as main_omni
from verl_tts.report.run_dir import RunDir, file_name

PACKAGE = Path(__file__).parents[2] / "verl_tts"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PICKLING = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Imported for the name of an error alone: what torch.load raises where it refuses.
FOR_ITS_ERROR = {"checkpoints/export.py", "scorers/pretrained.py"}
# Call -> the argument that keeps it from running what it reads.
HARMLESS_WITH = {("torch", "load"): ("weights_only", True), ("np", "load"): ("allow_pickle", False)}


def nodes(kind):
    for source in SOURCES:
        name = source.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                yield name, node


def called(node):
    """("torch", "load") of ``torch.load(...)``; None of a call of another form."""
    function = node.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.value.id, function.attr
    return None


def test_no_module_that_unpickles_is_used_but_for_the_name_of_its_error():
    users = {
        file
        for file, node in nodes((ast.Import, ast.ImportFrom))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if name.partition(".")[0] in PICKLING
    }
    assert users == FOR_ITS_ERROR
    uses = {(file, node.attr) for file, node in nodes(ast.Attribute) if ast.unparse(node.value) in PICKLING}
    assert uses == {(file, "UnpicklingError") for file in FOR_ITS_ERROR}


def test_every_load_is_the_one_that_runs_nothing():
    loads = [(file, node) for file, node in nodes(ast.Call) if called(node) in HARMLESS_WITH]
    assert len(loads) > 3
    for file, node in loads:
        argument, value = HARMLESS_WITH[called(node)]
        given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
        assert given.get(argument) is value, f"{file}:{node.lineno}"


def test_nothing_is_evaluated_and_no_yaml_makes_objects():
    for file, node in nodes(ast.Call):
        assert not (isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec")), f"{file}:{node.lineno}"
        assert called(node) not in {("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load")}, file


def test_code_of_a_checkpoint_is_never_asked_for():
    for file, node in nodes(ast.keyword):
        if node.arg == "trust_remote_code":
            assert getattr(node.value, "value", None) is False, file


# ------------------------------------------------------------------ verl's shards


@pytest.fixture
def checkpoint(tmp_path):
    """A whole checkpoint of a run, as far as its manifest goes."""
    directory = tmp_path / "run" / "checkpoints" / "global_step_2"
    (directory / "actor").mkdir(parents=True)
    (directory / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b"shard")
    write_manifest(directory, step=2)
    return directory


def put(checkpoint, name, content):
    (checkpoint / "actor" / name).write_bytes(content)


@pytest.mark.parametrize(
    "tamper",
    [
        lambda checkpoint: put(checkpoint, "model_world_size_1_rank_0.pt", b"SHARD"),  # of the same size
        lambda checkpoint: put(checkpoint, "optim_world_size_1_rank_0.pt", b"one more, which verl would unpickle"),
        lambda checkpoint: (checkpoint / "MANIFEST.json").unlink(),
    ],
)
def test_a_shard_that_its_manifest_does_not_vouch_for_is_never_handed_to_verl(checkpoint, tamper):
    tamper(checkpoint)
    run = checkpoint.parents[1]
    with pytest.raises(CheckpointError):
        RunDir(run).start({}, str(checkpoint))
    assert RunDir(run).start({}, "auto").checkpoint is None


def test_a_whole_checkpoint_is(checkpoint):
    assert RunDir(checkpoint.parents[1]).start({}, "auto").checkpoint == checkpoint


# ------------------------------------------------------------------ secrets


SECRET = "hunter2-s3cret"


@pytest.fixture
def words(places):
    return [
        "tts.platform=cpu",
        f"actor_rollout_ref.model.path={places['MODEL_PATH']}",
        f"data.train_files={places['TRAIN_FILE']}",
        f"data.val_files={places['VAL_FILE']}",
        f"tts.speaker_path={places['SPK_EMBED_PATH']}",
        f"tts.reward.scorer_url={places['SCORER_URL']}",
        f"ray_kwargs.ray_init.runtime_env.env_vars.SCORER_TOKEN={SECRET}",
        f"ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY={SECRET}",
    ]


def test_tokens_are_in_no_saved_configuration(words, tmp_path, monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", SECRET)
    RunDir(tmp_path / "run").start(compose(words))
    for file in (tmp_path / "run").rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


def test_tokens_are_not_printed_by_a_dry_run_or_in_a_message(words, monkeypatch, capfd):
    monkeypatch.setenv("SCORER_TOKEN", SECRET)
    assert main_omni(["--dry-run", *words]) == 0
    assert main_omni([*words, "tts.reward.startup_timeout_s=0.1"]) == 3  # nobody listens at port 9
    assert verl_tts(["doctor", "--quick", *words[:1], *words[5:], "tts.reward.startup_timeout_s=0.1"]) == 2
    told = capfd.readouterr()
    assert SECRET not in told.out + told.err


@pytest.mark.parametrize("name", ["token", "api_key", "X-Api-Key", "password"])
def test_a_scorers_address_with_a_token_in_it_is_refused_unseen(words, name):
    with pytest.raises(ConfigError, match=f"holds a {name}; put a bearer token") as refused:
        compose([*words, f"tts.reward.scorer_url='http://127.0.0.1:9/score?x=1&{name}={SECRET}'"])
    assert SECRET not in str(refused.value)


# ------------------------------------------------------------------ rows


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", ""])
def test_a_row_cannot_name_a_speaker_outside_of_the_folder(tmp_path, name):
    with pytest.raises(DataError):
        speaker_file(tmp_path, name)


def test_a_speaker_that_is_a_link_to_the_outside_is_refused(tmp_path):
    (tmp_path / "speakers").mkdir()
    (tmp_path / "outside.json").write_text("[0.0]")
    (tmp_path / "speakers" / "anna.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(DataError, match="leads out of"):
        speaker_file(tmp_path / "speakers", "anna")


@pytest.mark.parametrize("row_id", ["../../etc/cron.d/x", "/abs", "a/b", ".."])
def test_a_rows_id_becomes_a_file_below_the_run_directory(row_id):
    name = file_name(row_id)
    assert "/" not in name
    assert name not in (".", "..")


# ------------------------------------------------------------------ where a cluster listens


@pytest.fixture
def environment(monkeypatch):
    """A copy of the process's, to be changed at will."""
    copied = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", *launch.KEPT_AT_HOME)}
    monkeypatch.setattr(os, "environ", copied)
    monkeypatch.setattr("ray.init", lambda **settings: None)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    return copied


@pytest.mark.parametrize(
    ("nodes", "before", "after"),
    [
        (1, {}, "0"),
        (2, {}, None),
        (1, {"RAY_ADDRESS": "10.0.0.1:6379"}, None),
        (1, {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}, "1"),  # somebody wants it so
    ],
)
def test_a_cluster_of_one_node_listens_to_this_machine_alone(words, environment, tmp_path, nodes, before, after):
    """That it does is looked at in tests/loop/test_one_run.py; here, when it is asked to."""
    config = compose([*words, f"trainer.nnodes={nodes}", f"tts.output_dir={tmp_path}"])
    environment.update(before)
    with launch.ray_cluster(config):
        assert environment.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == after


def test_ray_reads_the_variable_when_it_is_imported(environment):
    """Names of Ray's that are its own: they may go with any release."""
    program = "from ray._private import services; print(services.get_node_ip_address())"
    for value, is_loopback in (("0", True), ("1", False)):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**environment, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": value},
            capture_output=True,
            text=True,
            check=True,
        )
        assert (done.stdout.strip() == launch.LOOPBACK) is is_loopback, done.stdout
