"""The MOSS recipe: what its launcher composes to, for each placement and phase, and its scripts on small data."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from omegaconf import OmegaConf

from verl_tts.config.compose import compose
from verl_tts.config.validate import validate
from verl_tts.data.prompts import read_prompts
from verl_tts.data.voices import read_references
from verl_tts.errors import ConfigError

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "examples/grpo_trainer/moss/run_moss_grpo.sh"
RECIPE = ROOT / "recipes/moss_voice_generator"

# The published settings, and of nothing else: see the README.
TABLE: dict[str, Any] = {
    "data.train_batch_size": 8,
    "actor_rollout_ref.rollout.n": 4,
    "data.seed": 42,
    "actor_rollout_ref.actor.optim.lr": 5e-5,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": 0,
    "actor_rollout_ref.actor.policy_loss.loss_mode": "gpg",
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    "algorithm.adv_estimator": "grpo",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.rollout_correction.rollout_is": "token",
    "tts.trainable": "lora",
    "actor_rollout_ref.model.lora_rank": 8,
    "actor_rollout_ref.model.lora_alpha": 16,
    "actor_rollout_ref.model.target_modules": [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ],
    "actor_rollout_ref.model.lora_adapter_path": None,
    "actor_rollout_ref.model.lora.merge": True,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.rollout.top_p": 0.8,
    "actor_rollout_ref.rollout.top_k": 50,
    "actor_rollout_ref.rollout.repetition_penalty": 1.0,
    "tts.channel_reduction": "weighted",
    "tts.channel_weights": "1,32",
    "tts.sync_every": 5,
    "tts.reward.preset": "laion_moss",
    "tts.reward.compose.weight_set": "v7",
    "tts.reward.compose.weight_sets.v7": {"speaker": 0.5, "emotion": 0.4, "quality": 0.1},
    "tts.reward.compose.squash": "sigmoid",
    "tts.reward.compose.gate.beta": 10.0,
    "trainer.total_training_steps": 1600,
    "trainer.save_freq": 200,
    "trainer.test_freq": 50,
    "trainer.val_before_train": True,
    "trainer.n_gpus_per_node": 1,
    "tts.engine.rollout_gpus": 6,
}  # fmt: skip

# Stands in for the Python of the environment: notes what it is called with, and does as SCORER and RUN say.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *"commands score"*) echo "$CUDA_VISIBLE_DEVICES" >"$SEEN/scorer.gpus"; echo $$ >"$SEEN/scorer.pid"; eval "$SCORER" ;;
  *main_omni* | *"commands doctor"*)
    printf '%s\\n' "$CUDA_VISIBLE_DEVICES" "${@:3}" >"$SEEN/run.words"; eval "${RUN:-exit 0}" ;;
  *"commands evaluate"*) echo "${*:4}" >>"$SEEN/evaluated" ;;
  *"commands merge-lora"*) echo "${*:4}" >>"$SEEN/merged" ;;
  *recipes/download.py*) echo "${*:2}" >>"$SEEN/downloads" ;;
  *) exec "$PYTHON" "$@" ;;
esac
"""
SERVES = """exec "$PYTHON" -c '
import http.server
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Healthy)
print(f"scorer several listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()'"""


@pytest.fixture
def home(tmp_path) -> Path:
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def run(script: Path, home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PYTHON_BIN": str(home / "python")}
    environment |= {"SEEN": str(home), "SCORER": SERVES, "OMP_NUM_THREADS": "1", "WORK": str(home / "work")} | more
    return subprocess.run(
        ["bash", script, *words], env=environment, capture_output=True, text=True, timeout=120, check=False, cwd=home
    )


def make_places(home: Path) -> dict[str, str]:
    """What prepare.sh and the first phase leave in ``home/work``, as far as train.sh looks; nothing to be named."""
    for name in ("model", "codec", "emolia", "clap", "data", "v1"):
        (home / "work" / name).mkdir(parents=True, exist_ok=True)
    for name in ("train.parquet", "validation.parquet", "references.json"):
        (home / "work/data" / name).touch()
    return {"MVG_DIR": "", "CODEC_DIR": "", "EMOLIA_DIR": ""}


def trained(run: Path, adapter: str | None) -> Path:
    """A run directory with a checkpoint, which is returned; its second attempt had other settings."""
    checkpoint = run / "checkpoints/global_step_4"
    checkpoint.mkdir(parents=True)
    for name, weights in (("config.yaml", "v7"), ("config.2.yaml", "v1")):
        config = {
            "data": {"val_files": ["/data/held out.parquet"]},
            "actor_rollout_ref": {"model": {"path": "/m/began", "lora_adapter_path": adapter}},
            "tts": {"reward": {"compose": {"weight_set": weights}}},
        }
        (run / name).write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    return checkpoint


PLACES = {"MVG_DIR": "/m/mvg", "CODEC_DIR": "/m/codec", "EMOLIA_DIR": "/m/emo lia", "SCORER_URL": "http://far:1/score"}


def launched(home: Path, *words: str, script: Path = LAUNCHER, **more: str) -> tuple[str, Any]:
    """GPUs and composed configuration of the run that the launcher would start."""
    done = run(script, home, *words, **PLACES | more)
    assert done.returncode == 0, done.stderr
    gpus, *overrides = (home / "run.words").read_text().splitlines()
    return gpus, compose(["tts.platform=cuda", *overrides])


PATHS = (
    "actor_rollout_ref.model.path", "data.train_files", "data.val_files", "tts.references", "tts.codec_path",
    "tts.reference_dir",
)  # fmt: skip


def prepared(home: Path, *words: str, rows: int) -> subprocess.CompletedProcess[str]:
    """``prepare.sh`` on a small corpus and three voices."""
    for cluster in range(3):
        (home / f"emolia/c{cluster}").mkdir(parents=True, exist_ok=True)
        soundfile.write(home / f"emolia/c{cluster}/1.wav", np.zeros(16_000, np.float32), 16_000)
    (home / "shards").mkdir(exist_ok=True)
    texts = [{"text": f"This is the sentence with the number {n}.", "emotion": "Relief"} for n in range(rows)]
    (home / "shards/a.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (home / "revisions").write_text("OpenMOSS-Team/MOSS-VoiceGenerator abc123\n")
    places = {"EMOLIA_DIR": str(home / "emolia"), "SHARDS": str(home / "shards"), "REVISIONS": str(home / "revisions")}
    return run(RECIPE / "prepare.sh", home, "--validation-rows", "2", *words, **places)


def at(config: Any, key: str) -> Any:
    return OmegaConf.to_object(OmegaConf.create([OmegaConf.select(config, key)]))[0]


# ------------------------------------------------------------------ the launcher


def test_the_launcher_composes_to_exactly_the_published_table(home):
    _, config = launched(home)
    assert {key: at(config, key) for key in TABLE} == TABLE


def test_the_doctor_is_asked_about_the_same_settings(home):
    done = run(LAUNCHER, home, "data.seed=7", **PLACES | {"COMMAND": "doctor"})
    assert done.returncode == 0, done.stderr
    _, command, *overrides = (home / "run.words").read_text().splitlines()
    assert command == "doctor"
    launched(home, "data.seed=7")
    assert overrides == (home / "run.words").read_text().splitlines()[1:]
    assert run(LAUNCHER, home, **PLACES | {"COMMAND": "doktor"}).stderr.endswith("has to be train, doctor or screen\n")


def test_the_variables_reach_their_settings_whatever_they_hold(home):
    _, config = launched(home, LORA_INIT="/a dir/v1", OUTPUT_DIR="runs/mo'ss, {2}", DATA_DIR="d")
    assert at(config, "actor_rollout_ref.model.lora_adapter_path") == "/a dir/v1"
    assert (config.tts.codec_path, config.tts.reference_dir) == ("/m/codec", "/m/emo lia")
    assert (config.tts.references, config.data.train_files) == ("d/references.json", "d/train.parquet")
    assert config.tts.output_dir == "runs/mo'ss, {2}"
    _, config = launched(home, REFERENCES="null", SCORER_URL="null", RESUME_STEP="4", OUTPUT_DIR="it's")
    assert (config.tts.references, config.tts.reward.scorer_url) == (None, None)
    assert config.trainer.resume_from_path == "it's/checkpoints/global_step_4"


@pytest.mark.parametrize(
    ("train", "rollout", "scorer", "run_gpus", "scorer_gpus"),
    [
        (1, 6, 1, "0,1,2,3,4,5,6", "7"),  # published
        (1, 2, 1, "0,1,2", "3"),
        (1, 1, 0, "0,1", ""),
        (2, 0, 0, "0,1", ""),  # shared
        (2, 4, 2, "0,1,2,3,4,5", "6,7"),
    ],
)
def test_each_pool_has_gpus_of_its_own(home, train, rollout, scorer, run_gpus, scorer_gpus):
    gpus, config = launched(
        home,
        SCORER_URL="",
        CLAP_DIR="/m/clap",
        TRAIN_GPUS=str(train),
        ROLLOUT_GPUS=str(rollout),
        SCORER_GPUS=str(scorer),
    )
    assert gpus == run_gpus
    assert (home / "scorer.gpus").read_text().strip() == scorer_gpus
    assert (config.trainer.n_gpus_per_node, config.tts.engine.rollout_gpus) == (train, rollout)
    config.tts.reward.scorer_url = "http://far:1/score"
    config.tts.model = "moss"
    for key in PATHS:
        OmegaConf.update(config, key, str(home))
    validate(config)


def test_a_dry_run_on_a_tiny_model_and_prompts_of_the_data_script_passes(home, tmp_path_factory):
    from verl_tts.checkpoints.tiny_moss import build_tiny_moss

    model = tmp_path_factory.mktemp("moss") / "model"
    build_tiny_moss(model)
    places = {"MVG_DIR": str(model), "CODEC_DIR": str(model / "codec"), "PYTHON_BIN": sys.executable}
    places |= {"EMOLIA_DIR": str(home / "emolia"), "DATA_DIR": str(home / "work/data"), "CLAP_DIR": "/m/clap"}
    prepared(home, rows=20)
    done = run(LAUNCHER, home, "--dry-run", "tts.platform=cuda", **places)
    assert done.returncode == 0, done.stderr
    config = OmegaConf.create(done.stdout)
    assert (config.tts.model, config.tts.trainable, config.tts.engine.rollout_gpus) == ("moss", "lora", 6)


def test_the_scorer_of_the_launcher_has_the_parts_that_the_preset_asks_for_and_ends_with_the_run(home):
    _, config = launched(home, SCORER_URL="", CLAP_DIR="/m/clap", ASR_DIR="/m/asr", ECAPA_DIR="/m/ecapa")
    settings = json.loads((home / "outputs/moss_grpo.scorer.yaml").read_text())
    names = [entry.get("name", entry["scorer"]) for entry in settings["scorers"]]
    parts = {part["part"].split(".")[0] for part in at(config, "tts.reward.compose.components").values()}
    assert parts <= set(names)
    assert settings["scorers"][0]["options"] == {"device": "cuda", "model": "/m/asr"}
    assert settings["scorers"][1]["options"]["references"] == "/m/emo lia"
    assert not Path("/proc", (home / "scorer.pid").read_text().strip()).exists()


def test_the_replication_of_v7_is_one_command(home):
    _, config = launched(home, LORA_INIT="v1", TOTAL_TRAINING_STEPS="500", SAVE_FREQ="100")
    assert (config.trainer.total_training_steps, config.trainer.save_freq) == (500, 100)
    assert config.actor_rollout_ref.model.lora_adapter_path == "v1"
    places = PLACES | make_places(home)
    _, by_phase = launched(home, script=RECIPE / "train.sh", PHASE="v7", **places)
    assert (by_phase.trainer.total_training_steps, by_phase.trainer.save_freq) == (500, 100)
    assert by_phase.actor_rollout_ref.model.lora_adapter_path == f"{home}/work/v1"
    _, first = launched(home, script=RECIPE / "train.sh", PHASE="v1", **places)
    assert first.actor_rollout_ref.model.lora_adapter_path is None
    assert first.tts.reward.compose.weight_set == "v1"


def test_a_step_that_is_named_is_resumed_from(home):
    _, config = launched(home, RESUME_STEP="400", OUTPUT_DIR="runs/moss")
    assert config.trainer.resume_mode == "resume_path"
    assert config.trainer.resume_from_path == "runs/moss/checkpoints/global_step_400"


def test_syncing_every_step_needs_no_correction_and_what_comes_last_wins(home):
    _, config = launched(home, "data.seed=7", "actor_rollout_ref.actor.use_kl_loss=true", SYNC_EVERY="1", SEED="3")
    assert (config.tts.sync_every, config.algorithm.rollout_correction.rollout_is) == (1, None)
    assert (config.data.seed, config.actor_rollout_ref.actor.use_kl_loss) == (7, True)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_other_schedules_have_a_minimum(home, schedule):
    optim = "actor_rollout_ref.actor.optim"
    _, config = launched(home, f"{optim}.lr_scheduler_type={schedule}", f"{optim}.min_lr_ratio=0.1")
    assert config.actor_rollout_ref.actor.optim.min_lr_ratio == 0.1


def test_the_published_reward_and_the_corrected_one_differ_by_a_word(home):
    _, config = launched(home, "tts.reward.preset=laion_moss_published")
    assert (config.tts.reward.compose.squash, config.tts.reward.compose.ordered) == ("none", False)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"MVG_DIR": ""}, "set MVG_DIR"),
        ({"CODEC_DIR": ""}, "set CODEC_DIR"),
        ({"EMOLIA_DIR": ""}, "set EMOLIA_DIR"),
        ({"SCORER_URL": ""}, "set CLAP_DIR, or SCORER_URL to a scorer that is there"),
        ({"ROLLOUT_GPUS": "six"}, "are numbers, not six"),
        ({"TRAIN_GPUS": "08"}, "are numbers, not 08"),
        ({"TRAIN_GPUS": "9" * 20}, "are numbers, not 999"),
        ({"TRAIN_GPUS": "0"}, "TRAIN_GPUS=0 has to be 1 or more"),
        ({"SYNC_EVERY": "abc"}, "are numbers, not abc"),
        ({"SYNC_EVERY": "2x"}, "are numbers, not 2x"),
        ({"SYNC_EVERY": "08"}, "are numbers, not 08"),
        ({"SYNC_EVERY": "0"}, "SYNC_EVERY=0 has to be 1 or more"),
        ({"PYTHON_BIN": "/bin/false"}, "no verl_tts in /bin/false"),
    ],
)
def test_what_is_missing_is_said_in_one_line(home, more, message):
    done = run(LAUNCHER, home, **PLACES | more)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"run_moss_grpo.sh: .*{re.escape(message)}.*\n", done.stderr)


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_the_runs(home, code):
    assert run(LAUNCHER, home, **PLACES, RUN=f"exit {code}").returncode == code


def test_a_scorer_that_ends_ends_the_launcher_with_its_last_line(home):
    done = run(LAUNCHER, home, **PLACES | {"SCORER_URL": ""}, CLAP_DIR="/m/clap", SCORER="echo no model >&2; exit 2")
    assert (done.returncode, done.stderr) == (3, "run_moss_grpo.sh: the scorer ended: no model\n")
    assert not (home / "run.words").exists()


# ------------------------------------------------------------------ the recipe's scripts


def test_prepare_downloads_links_and_writes_prompts_and_leaves_them_alone_the_second_time(home):
    done = prepared(home, rows=6)
    assert done.returncode == 0, done.stderr
    first, *others = (home / "downloads").read_text().splitlines()
    assert first == f"OpenMOSS-Team/MOSS-VoiceGenerator abc123 {home}/work/model"
    assert all(line.split()[1] == "main" for line in others)
    data = home / "work/data"
    assert len(read_prompts(data / "train.parquet")) == 4
    assert len(read_references(data / "references.json").validation) == 1
    assert (home / "work/emolia/c0/1.wav").is_file()
    before = (data / "manifest.json").stat().st_mtime_ns
    assert prepared(home, rows=6).returncode == 0
    assert (data / "manifest.json").stat().st_mtime_ns == before


def test_prepare_without_references_ends_before_it_downloads(home):
    for value, message in (("", "set EMOLIA_DIR"), ("/gone", "EMOLIA_DIR=/gone is no folder")):
        done = run(RECIPE / "prepare.sh", home, EMOLIA_DIR=value)
        assert done.returncode == 2
        assert message in done.stderr
    assert not (home / "downloads").exists()


def test_evaluate_without_a_checkpoint_and_a_phase_that_is_none_are_one_line(home):
    done = run(RECIPE / "evaluate.sh", home)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "train first, or name one" in done.stderr
    done = run(RECIPE / "train.sh", home, PHASE="v2")
    assert (done.returncode, done.stderr) == (2, "train.sh: PHASE=v2 has to be v1, v7 or empty\n")


@pytest.mark.parametrize("missing", ["model", "codec", "emolia", "clap", "data/validation.parquet", "v1"])
def test_what_is_not_prepared_is_named_before_a_scorer_starts(home, missing):
    make_places(home)
    (home / "work" / missing).rename(home / "elsewhere")
    done = run(RECIPE / "train.sh", home, PHASE="v7")
    assert done.returncode == 2
    maker = "verl-tts export CHECKPOINT_OF_V1" if missing == "v1" else "prepare.sh makes it"
    assert re.fullmatch(f"train.sh: there is no {home}/work/{missing}: {maker}.*\n", done.stderr)
    assert not (home / "scorer.pid").exists()
    assert not (home / "outputs").exists()


@pytest.mark.parametrize("adapter", [None, "/a dir/v1"])
def test_an_evaluation_has_the_settings_of_the_run_and_compares_with_what_it_began_with(home, adapter):
    """That is the base and the adapter that the run went on from, where there was one."""
    checkpoint, kept = trained(home / "run", adapter), home / "work/evaluations"
    # What is set for another run does not matter.
    more = {"PHASE": "v7", "LORA_INIT": "/other", "MVG_DIR": "/other", "DATA_DIR": "/other"}
    done = run(RECIPE / "evaluate.sh", home, SCORER_URL="http://far:1/score", OUTPUT_DIR=str(home / "run"), **more)
    assert done.returncode == 0, done.stderr
    before, after = (home / "evaluated").read_text().splitlines()
    start = f"{kept}/start" if adapter else "/m/began"
    assert before.startswith(f"{start} --data /data/held out.parquet --config {kept}/settings.yaml ")
    assert before.endswith(f"--out {kept}/before")
    assert OmegaConf.load(kept / "settings.yaml").tts.reward.compose.weight_set == "v1"
    assert after.startswith(f"{checkpoint} ")
    assert after.endswith(f"--out {kept}/global_step_4 --against {kept}/before")
    if adapter is None:
        assert not (home / "merged").exists()
    else:
        assert (home / "merged").read_text() == f"--base /m/began --adapter {adapter} --out {kept}/start\n"


def test_an_evaluation_is_scored_by_the_scorers_of_the_run(home):
    """Also where the variables that named them are gone; the GPU is its own."""
    make_places(home)
    (home / "work/mine").mkdir()
    places = {"OUTPUT_DIR": str(home / "work/run"), "SCORER_GPUS": "1", "SCORER_GPU": ""}
    of_run = {"ASR_DIR": "/m/asr", "ECAPA_DIR": "/m/ecapa", "CLAP_DIR": str(home / "work/mine")}
    done = run(RECIPE / "train.sh", home, **places, **of_run)
    assert done.returncode == 0, done.stderr
    trained(home / "work/run", None)
    done = run(RECIPE / "evaluate.sh", home, **places)
    assert done.returncode == 0, done.stderr
    of_run, of_evaluation = (
        json.loads((home / "work" / name).read_text()) for name in ("run.scorer.yaml", "evaluations/scorer.yaml")
    )
    models = [entry["options"].get("model") for entry in of_run["scorers"]]
    assert models == ["/m/asr", "/m/ecapa", f"{home}/work/mine", f"{home}/work/mine"]
    assert {entry["options"].pop("device") for entry in of_run["scorers"]} == {"cuda"}
    assert {entry["options"].pop("device") for entry in of_evaluation["scorers"]} == {"cpu"}
    assert of_evaluation == of_run


def test_the_recipes_have_the_same_file_names():
    here, hindi = ({path.name for path in folder.iterdir()} for folder in (RECIPE, RECIPE.with_name("hindi_sft_lora")))
    assert here == hindi


def test_a_staleness_that_nothing_weighs_is_refused(home):
    _, config = launched(home, "algorithm.rollout_correction.rollout_is=null")
    with pytest.raises(ConfigError, match="up to 4 updates lie between"):
        validate(config)


# ------------------------------------------------------------------ the README


def readme() -> str:
    return (RECIPE / "README.md").read_text()


def test_the_settings_of_the_readme_are_those_of_the_launcher(home):
    _, config = launched(home)
    rows = re.findall(r"^\| `([\w.]+)` \| `([^`]+)` \|$", readme(), flags=re.MULTILINE)
    assert len(rows) > 15
    for key, value in rows:
        expected = OmegaConf.create([OmegaConf.select(config, key)])
        assert OmegaConf.create(f"- {value}") == expected, key


def test_every_variable_of_the_launcher_is_in_the_readme():
    scripts = LAUNCHER.read_text() + (RECIPE / "scorer.sh").read_text()
    read = set(re.findall(r"\$\{([A-Z][A-Z_]+)[:}-]", scripts)) - {"BASH_SOURCE", "CUDA_VISIBLE_DEVICES", "DEVICE"}
    assert not {name for name in read if f"`{name}`" not in readme()}
