"""The front half of a run: what happens before anything starts. The other half is in tests/loop."""

import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_tts import main_omni
from verl_tts.errors import GateError

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "examples/grpo_trainer/qwen3_tts/run_qwen3_tts_grpo.sh"


@pytest.fixture
def words(places):
    return [
        f"actor_rollout_ref.model.path={places['MODEL_PATH']}",
        f"data.train_files={places['TRAIN_FILE']}",
        f"data.val_files={places['VAL_FILE']}",
        f"tts.speaker_path={places['SPK_EMBED_PATH']}",
        f"tts.reward.scorer_url={places['SCORER_URL']}",
    ]


@pytest.fixture(autouse=True)
def keep_signal_handler():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def launch(monkeypatch):
    """Puts a function in the place of the run itself."""

    def replace(run):
        monkeypatch.setitem(sys.modules, "verl_tts.launch", types.SimpleNamespace(run=run))

    return replace


def run_launcher(places, *arguments):
    environment = {**os.environ, "PYTHON_BIN": sys.executable, **places}
    return subprocess.run(["bash", LAUNCHER, *arguments], env=environment, capture_output=True, text=True, timeout=60)


def test_the_launcher_prints_its_resolved_settings_and_starts_nothing(places):
    done = run_launcher(
        {**places, "SEED": "7", "TEST_FREQ": "-1", "OUTPUT_DIR": "runs/a=1"}, "--dry-run", "data.seed=8"
    )
    assert done.returncode == 0, done.stderr
    config = OmegaConf.create(done.stdout)
    assert config.data.seed == config.actor_rollout_ref.rollout.seed == 8  # what comes after the launcher's own wins
    assert config.trainer.test_freq == -1
    assert config.tts.output_dir == "runs/a=1"
    assert "${" not in done.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SCORER_URL": ""}, "set SCORER_URL"),
        ({"TRAIN_FILE": "gone.parquet"}, "data.train_files=gone.parquet does not exist"),
        ({"SCORER_URL": "null"}, "no scorer"),
        ({"PYTHON_BIN": "/nowhere/python"}, "no verl_tts in /nowhere/python: set PYTHON_BIN"),
    ],
)
def test_a_missing_variable_or_path_is_one_line_and_exit_code_2(places, change, message):
    done = run_launcher({**places, **change}, "tts.platform=cpu")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("urls", ["http://a:1/score,http://b:2/score", "http://[::1]:80/score", "http://h/score?x=1"])
def test_an_address_of_a_scorer_passes_the_launcher_as_it_is(places, urls):
    done = run_launcher({**places, "SCORER_URL": urls}, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert OmegaConf.create(done.stdout).tts.reward.scorer_url == urls


@pytest.mark.parametrize("command", ["doctor", "screen"])
def test_what_comes_before_a_run_gets_the_same_settings(places, tmp_path, command):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || printf "%s\\n" "$@"\n')
    python.chmod(0o755)
    words = [
        run_launcher({**places, "PYTHON_BIN": str(python), **more}, "data.seed=8", "--quick").stdout.splitlines()
        for more in ({}, {"COMMAND": command})
    ]
    assert words[0][:2] == ["-m", "verl_tts.main_omni"]
    assert words[1] == ["-m", "verl_tts.commands", command, *words[0][2:]]


def test_another_command_is_refused(places):
    done = run_launcher({**places, "COMMAND": "doktor"})
    assert done.returncode == 2
    assert done.stderr.endswith("COMMAND=doktor has to be train, doctor or screen\n")


def test_the_published_smoke_line_composes(places):
    smoke = {"TOTAL_TRAINING_STEPS": "2", "TEST_FREQ": "-1", "SAVE_FREQ": "-1", "RESUME_MODE": "disable"}
    done = run_launcher(
        {**places, **smoke}, "--dry-run", "trainer.val_before_train=false", "trainer.log_val_generations=0"
    )
    assert done.returncode == 0, done.stderr
    trainer = OmegaConf.create(done.stdout).trainer
    assert (trainer.total_training_steps, trainer.save_freq, trainer.resume_mode) == (2, -1, "disable")


def test_a_run_gets_the_composed_configuration(words, launch):
    seen = []
    launch(seen.append)
    assert main_omni.main([*words, "data.train_batch_size=8"]) == 0
    assert [config.data.train_batch_size for config in seen] == [8]


def test_a_dry_run_finds_a_scoring_function_that_is_not_there(words, capsys):
    function = ["reward.custom_reward_function.path=pkg://verl_tts.rewards.functions"]
    settings = [*words, "tts.reward.scorer_url=null", *function]
    assert main_omni.main(["--dry-run", *settings, "reward.custom_reward_function.name=duration"]) == 0
    assert main_omni.main(["--dry-run", *settings, "reward.custom_reward_function.name=g"]) == 2
    assert "has no function 'g'" in capsys.readouterr().err


def test_a_dry_run_starts_nothing_and_says_what_the_run_will_need(words, launch, capsys):
    launch(lambda config: pytest.fail("started"))
    assert main_omni.main(["--dry-run", *words]) == 0
    told = capsys.readouterr().out
    assert OmegaConf.create(told).tts.model == "qwen3_tts"  # the plan is a comment
    assert "# steps         500 of 4 prompts x 8 = 32 clips, 48 prompts: 12 steps an epoch, 41.7 epochs" in told
    assert "M parameters" in told


@pytest.mark.parametrize("mistake", ["data.train_batch_sise=8", "tts.speaker_path=gone.json", "tts.language=Klingon"])
def test_a_mistake_is_answered_before_the_run_starts(words, launch, capsys, mistake):
    launch(lambda config: pytest.fail("started"))
    assert main_omni.main([*words, mistake]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("verl_tts: ")
    assert mistake.partition("=")[0] in error


@pytest.mark.parametrize(("raised", "code"), [(GateError("log-probs disagree"), 3), (KeyboardInterrupt(), 130)])
def test_a_run_that_is_stopped_ends_with_its_exit_code_and_no_traceback(words, launch, capsys, raised, code):
    def run(config):
        raise raised

    launch(run)
    assert main_omni.main(words) == code
    assert "Traceback" not in capsys.readouterr().err


def test_a_termination_signal_ends_with_143(words, launch):
    launch(lambda config: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        main_omni.main(words)
    assert ended.value.code == 143


def test_a_bug_of_ours_keeps_its_traceback(words, launch):
    def run(config):
        raise ZeroDivisionError("ours")

    launch(run)
    with pytest.raises(ZeroDivisionError):
        main_omni.main(words)
