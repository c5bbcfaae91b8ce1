"""The Hindi recipe: what its launcher composes to, its scripts on small data, and the words of its README."""

import asyncio
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from tests.hindi_rig import PINS, RECIPE, REFERENCE, SMALL_SPLIT, make_hub, prepare
from verl_tts.config.compose import compose, tts_config
from verl_tts.config.inputs import check_inputs
from verl_tts.data.prompts import read_prompts
from verl_tts.models.qwen3_tts import LORA_PARENTS
from verl_tts.rewards.manager import RewardManager
from verl_tts.rewards.protocol import ScorerInfo
from verl_tts.types import CodecRollout, PromptRow, Score, Waveform

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "examples/grpo_trainer/qwen3_tts/run_qwen3_tts_hindi_grpo.sh"

# The settings of the published run, and of nothing else: see the README.
TABLE: dict[str, Any] = {
    "data.train_batch_size": 4,
    "data.train_max_samples": 863,
    "data.val_max_samples": 100,
    "data.max_prompt_length": 256,
    "data.max_response_length": 240,
    "data.seed": 42,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.actor.optim.lr": 5e-6,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": 10,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
    "actor_rollout_ref.actor.optim.weight_decay": 0.01,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.kl_loss_type": "k3",
    "actor_rollout_ref.actor.kl_loss_coef": 0.08,
    "algorithm.use_kl_in_reward": False,
    "actor_rollout_ref.rollout.temperature": 0.9,
    "actor_rollout_ref.rollout.top_p": 0.95,
    "actor_rollout_ref.rollout.top_k": 50,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 0.9,
    "actor_rollout_ref.rollout.val_kwargs.top_p": 0.95,
    "actor_rollout_ref.rollout.val_kwargs.top_k": 50,
    "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
    "tts.trainable": "lora",
    "actor_rollout_ref.model.lora_rank": 8,
    "actor_rollout_ref.model.lora_alpha": 16,
    "actor_rollout_ref.model.target_modules": [*LORA_PARENTS],
    "actor_rollout_ref.model.lora.merge": True,
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "fp32",  # that of the adapters
    "trainer.total_training_steps": 400,
    "trainer.val_before_train": True,
    "trainer.test_freq": 20,
    "trainer.save_freq": 20,
    "trainer.max_actor_ckpt_to_keep": 21,
    "trainer.experiment_name": "qwen3_tts_0_6b_hindi_sft_lora_grpo",
    "tts.output_dir": "outputs/qwen3_tts_hindi_grpo",
    "tts.reward.preset": "cer_published",
    "tts.reward.guards.enforce": False,
    "tts.reward.violation_score": 0.0,  # the lowest score of 1 - min(1, CER)
}


# ------------------------------------------------------------------ the launcher


def dry_run(places: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **places, "PYTHON_BIN": sys.executable}
    arguments = ["bash", LAUNCHER, "--dry-run", "tts.platform=cuda", *words]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_launcher_composes_to_exactly_the_published_table(places):
    done = dry_run(places)
    assert done.returncode == 0, done.stderr
    config = OmegaConf.create(done.stdout)
    assert {key: OmegaConf.to_object(OmegaConf.create([OmegaConf.select(config, key)]))[0] for key in TABLE} == TABLE


def words_of(launcher: Path) -> dict[str, str]:
    return dict(re.findall(r"^  ([\w.]+)=([\w.,\[\]-]+) \\$", launcher.read_text(), flags=re.MULTILINE))


def test_it_changes_only_what_differs_from_the_generic_launcher():
    generic, hindi = words_of(LAUNCHER.with_name("run_qwen3_tts_grpo.sh")), words_of(LAUNCHER)
    before, after = (
        compose(["tts.platform=cuda", *(f"{key}={value}" for key, value in words.items())])
        for words in (generic, hindi)
    )
    same = [key for key in hindi if OmegaConf.select(before, key) == OmegaConf.select(after, key)]
    assert len(hindi) == 22
    assert same == ["actor_rollout_ref.model.lora_alpha"]  # it belongs to the rank, whatever verl's default is


def test_what_comes_after_its_name_wins_and_the_published_strategy_runs_as_fsdp2_with_one_line(places):
    done = dry_run(
        {**places, "TOTAL_TRAINING_STEPS": "8", "OUTPUT_DIR": "runs/it's"},
        "trainer.test_freq=4",
        "actor_rollout_ref.actor.strategy=fsdp",
    )
    config = OmegaConf.create(done.stdout)
    assert (config.trainer.total_training_steps, config.trainer.test_freq) == (8, 4)
    assert config.tts.output_dir == "runs/it's"
    assert config.actor_rollout_ref.actor.strategy == config.actor_rollout_ref.ref.strategy == "fsdp2"
    strategy, preset, *_ = done.stderr.splitlines()  # where there is no card, the plan says so
    assert "tts.reward.preset=cer_published: as published" in preset
    assert "actor_rollout_ref.actor.strategy=fsdp runs as fsdp2" in strategy


# ------------------------------------------------------------------ the reward


class Answers:
    """In place of the scorer: the same answer to every clip."""

    async def probe(self) -> ScorerInfo:
        return ScorerInfo(score_range=(0.0, 1.0))

    async def score(self, *_: Any) -> Score:
        errors = {"cer": 1.25, "cer_capped": 1.0, "cer_indic": 0.25, "cer_indic_capped": 0.25}
        return Score(0.0, errors, {"asr_text": "हिन्दी"})


def reward_of(*words: str, truncated: bool = False) -> Score:
    reward = tts_config(compose(["tts.platform=cpu", "tts.reward.preset=cer_published", *words])).reward
    samples_S = np.random.default_rng(0).normal(0, 0.1, 24_000).astype(np.float32)
    rollout = CodecRollout(np.array([7, 9]), np.full((1, 16), 7), np.zeros(2), "length" if truncated else "eos", 0)
    row = PromptRow("hi-1", "हिन्दी", "val", 0, "test", "हिन्दी")
    return asyncio.run(RewardManager(reward, Answers()).score(row, Waveform(samples_S, 24_000), rollout))


def test_guards_and_the_other_normaliser_are_logged_and_one_setting_makes_each_of_them_the_reward():
    as_published = reward_of(truncated=True)
    assert as_published.total == 0.0  # 1 - min(1, CER)
    assert (as_published.parts["guard/truncated"], as_published.parts["cer_indic"]) == (1.0, 0.25)
    assert "violation" not in as_published.notes

    assert reward_of("tts.reward.compose.components.accuracy.part=cer_indic_capped").total == 0.75
    guarded = "tts.reward.guards.penalise_truncation=true"
    assert "violation" not in reward_of(guarded, truncated=True).notes
    assert "violation" in reward_of(guarded, "tts.reward.guards.enforce=true", truncated=True).notes
    assert "violation" in reward_of(guarded, "tts.reward.preset=cer", truncated=True).notes


# ------------------------------------------------------------------ prepare.sh


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    return make_hub(tmp_path_factory.mktemp("home"))


def test_prepare_makes_model_speaker_and_prompts_that_fit_each_other_and_leaves_them_alone_the_second_time(hub):
    done = prepare(hub, *SMALL_SPLIT, REF_AUDIO=str(REFERENCE))
    assert done.returncode == 0, done.stderr
    work = hub / "work"
    record = json.loads((work / "model/verl_tts_merge.json").read_text())
    assert (len(record["modules"]), record["rank"], record["scale"]) == (28, 8, 2.0)
    assert len(read_prompts(work / "data/train.parquet")) == 8
    assert "refused: none" in done.stdout
    assert [line.split() for line in (hub / "downloads").read_text().splitlines() if str(work) in line] == [
        [PINS[name], PINS[f"{kind}_revision"], str(work / folder)]
        for name, kind, folder in (
            ("base_model", "base", "base"),
            ("scorer_model", "scorer", "whisper"),
            ("adapter", "adapter", "adapter"),
        )
    ]

    made = {path: path.stat().st_mtime_ns for name in ("model", "data") for path in (work / name).rglob("*")}
    assert prepare(hub, *SMALL_SPLIT, REF_AUDIO=str(REFERENCE)).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in made} == made

    # ... and a run would take them, as train.sh names them.
    check_inputs(
        compose([
            f"actor_rollout_ref.model.path={work}/model",
            f"tts.speaker_path={work}/speaker.json",
            f"data.train_files={work}/data/train.parquet",
            f"data.val_files={work}/data/validation.parquet",
        ])
    )  # fmt: skip


def test_prepare_takes_the_published_merge_if_told_so(hub, places):
    merged, work = PINS["merged_model"].split("/")[1], hub / "ready"
    shutil.copytree(hub / "hub" / PINS["base_model"].split("/")[1], hub / "hub" / merged)
    (work / "data").mkdir(parents=True)
    shutil.copy(places["SPK_EMBED_PATH"], work / "speaker.json")
    shutil.copy(places["TRAIN_FILE"], work / "data/train.parquet")
    shutil.copy(places["VAL_FILE"], work / "data/validation.parquet")
    done = prepare(hub, READY_MADE="1", WORK=str(work), REF_AUDIO=str(REFERENCE))
    assert done.returncode == 0, done.stderr
    *_, last = (hub / "downloads").read_text().splitlines()
    assert last.split() == [PINS["merged_model"], PINS["merged_revision"], f"{work}/model"]
    assert not (work / "adapter").exists()


def test_prepare_without_a_recording_ends_before_it_downloads(hub):
    before = (hub / "downloads").read_text() if (hub / "downloads").exists() else None
    for value, message in (
        ("", "set REF_AUDIO to a recording of the voice"),
        ("/gone.wav", "REF_AUDIO=/gone.wav is no file"),
    ):
        done = prepare(hub, REF_AUDIO=value)
        assert (done.returncode, done.stderr) == (2, f"prepare.sh: {message}\n")
    assert ((hub / "downloads").read_text() if (hub / "downloads").exists() else None) == before


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path):
    """Both recipes download by this script."""
    words = [sys.executable, ROOT / "recipes/download.py", PINS["base_model"], PINS["base_revision"], tmp_path / "base"]
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert re.fullmatch(
        f"prepare.sh: {PINS['base_model']} cannot be downloaded: .+; the same command goes on .+\n", done.stderr
    )


# ------------------------------------------------------------------ train.sh

# Stands in for the Python of the environment: a scorer that does as SCORER says, a run that does as RUN says.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *"commands score"*)
    echo $$ >"$SEEN/scorer.pid"; echo "$CUDA_VISIBLE_DEVICES $*" >"$SEEN/scorer.words"; eval "$SCORER" ;;
  *main_omni*) echo $$ >"$SEEN/run.pid"; printf '%s\\n' "$CUDA_VISIBLE_DEVICES" "$@" >"$SEEN/run.words"; eval "$RUN" ;;
  *"commands evaluate"*) echo "$CUDA_VISIBLE_DEVICES $*" >>"$SEEN/evaluate.words"; eval "$EVALUATE" ;;
  *) exec "$PYTHON" "$@" ;;
esac
"""
# Says its address at once and is healthy half a second later.
SERVES = """exec "$PYTHON" -c '
import http.server, os, time
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = time.monotonic() > started + 0.5 and self.path == "/healthz"
        open(os.environ["SEEN"] + "/asked", "a").write(f"{ready}\\n")
        self.send_response(200 if ready else 503); self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Healthy)
started = time.monotonic()
print(f"scorer whisper_cer listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()'"""


@pytest.fixture
def home(tmp_path) -> Path:
    """Prepared, as far as the scripts look at it."""
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "work/model").mkdir(parents=True)
    (tmp_path / "work/data").mkdir()
    for name in ("speaker.json", "data/train.parquet", "data/validation.parquet"):
        (tmp_path / "work" / name).touch()
    return tmp_path


def train(
    home: Path, *words: str, scorer: str = SERVES, run: str = "exit 0", script: str = "train.sh", **more: str
) -> subprocess.Popen[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PYTHON_BIN": str(home / "python")}
    environment |= {"SEEN": str(home), "SCORER": scorer, "RUN": run, "EVALUATE": "exit 0", "WORK": str(home / "work")}
    environment |= {"OUTPUT_DIR": str(home / "run")} | more
    return subprocess.Popen(
        ["bash", RECIPE / script, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def is_alive(home: Path, name: str) -> bool:
    return Path("/proc", (home / f"{name}.pid").read_text().strip()).exists()


@pytest.mark.parametrize("code", [0, 3])
def test_a_scorer_is_started_beside_the_gpus_of_the_run_and_ends_with_it(home, code):
    process = train(home, "data.seed=7", run=f"exit {code}")
    out, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert not is_alive(home, "scorer")
    gpu, *words = (home / "scorer.words").read_text().split()
    assert (gpu, words[:2]) == ("2", ["-m", "verl_tts.commands"])
    assert words[2:] == shlex.split(
        f"score --scorer whisper_cer --model {home}/work/whisper --language hi --device cuda --port 0"
    )
    assert (home / "asked").read_text().splitlines()[-1] == "True"
    address = re.search(r"scorer on (\S+),", out).group(1)
    gpus, *words = (home / "run.words").read_text().splitlines()
    assert gpus == "0,1"
    assert f"tts.reward.scorer_url='{address}/score'" in words
    assert f"actor_rollout_ref.model.path='{home}/work/model'" in words
    assert f"data.val_files='{home}/work/data/validation.parquet'" in words
    assert "actor_rollout_ref.model.lora_rank=8" in words
    assert words[-1] == "data.seed=7"


def test_a_scorer_that_is_there_is_used_and_left_alone(home):
    process = train(home, SCORER_URL="http://far:18080/score", MODEL_PATH=str(home))
    process.communicate(timeout=30)
    assert process.returncode == 0
    words = (home / "run.words").read_text()
    assert "tts.reward.scorer_url='http://far:18080/score'" in words
    assert f"actor_rollout_ref.model.path='{home}'" in words
    assert not (home / "scorer.pid").exists()


def test_a_scorer_may_run_on_a_gpu_that_is_named_or_on_none(home):
    for gpu, seen, device in (("7", "7 ", "cuda"), ("cpu", " ", "cpu")):
        train(home, SCORER_GPU=gpu).communicate(timeout=30)
        words = (home / "scorer.words").read_text()
        assert words.startswith(f"{seen}-m")
        assert f"--device {device} " in words


@pytest.mark.parametrize(
    ("scorer", "limit", "message"),
    [
        (
            "echo 'verl-tts score: whisper_cer: no model' >&2; exit 2",
            "60",
            "the scorer ended: verl-tts score: whisper_cer",
        ),
        ("exec sleep 60", "1", "the scorer did not answer in 1 s, see "),
    ],
)
def test_a_scorer_that_does_not_start_ends_it_before_the_run(home, scorer, limit, message):
    process = train(home, scorer=scorer, SCORER_TIMEOUT_S=limit)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 3
    assert message in errors
    assert not (home / "run.words").exists()
    assert not is_alive(home, "scorer")


@pytest.mark.parametrize("missing", ["model", "speaker.json", "data/train.parquet", "data/validation.parquet"])
def test_what_is_not_prepared_is_named_before_a_scorer_starts(home, missing):
    place = home / "work" / missing
    place.rename(home / "elsewhere")
    process = train(home)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (
        2,
        f"train.sh: there is no {place}: prepare.sh makes it, in WORK={home}/work\n",
    )
    assert not (home / "scorer.pid").exists()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_and_the_scorer(home, sent, code):
    process = train(home, run="exec sleep 60")
    deadline = time.monotonic() + 20
    while not (home / "run.words").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(sent)
    process.communicate(timeout=20)
    assert process.returncode == code
    assert not is_alive(home, "run")
    assert not is_alive(home, "scorer")


# ------------------------------------------------------------------ evaluate.sh


def evaluate(home: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    return train(home, *words, script="evaluate.sh", **more)


def trained(run: Path, *steps: int) -> Path:
    """A run directory with checkpoints, whose second attempt had other settings; returns the last of them."""
    for step in steps:
        (run / f"checkpoints/global_step_{step}").mkdir(parents=True)
    for name, seed in (("config.yaml", 1), ("config.2.yaml", 42)):
        config = {
            "data": {"seed": seed, "val_files": "/data/held out.parquet"},
            "actor_rollout_ref": {"model": {"path": "/models/began", "lora_adapter_path": None}},
        }
        (run / name).write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    return run / f"checkpoints/global_step_{steps[-1]}"


def asked(home: Path) -> list[list[str]]:
    """GPUs and words of each evaluation."""
    return [line.split(" ") for line in (home / "evaluate.words").read_text().splitlines()]


def test_the_newest_checkpoint_is_evaluated_against_the_model_that_the_run_began_with(home):
    """With the settings of the run's last attempt, on the prompts that it was validated with."""
    trained(home / "run", 20, 100, 80)
    process = evaluate(home)
    out, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    address = re.search(r"scorer on (\S+),", out).group(1)
    assert (home / "scorer.words").read_text().startswith("1 ")  # the GPU after its own
    assert not is_alive(home, "scorer")
    settings = home / "work/evaluations/settings.yaml"
    assert OmegaConf.load(settings).data.seed == 42
    common = f"--data /data/held out.parquet --config {settings} --scorer-url {address}/score --samples 4"
    kept = home / "work/evaluations"
    newest = home / "run/checkpoints/global_step_100"
    assert [" ".join(words) for words in asked(home)] == [
        f"0 -m verl_tts.commands evaluate /models/began {common} --out {kept}/before",
        f"0 -m verl_tts.commands evaluate {newest} {common} --out {kept}/global_step_100 --against {kept}/before",
    ]


def test_a_checkpoint_that_is_named_is_evaluated_with_the_overrides_that_follow_it(home):
    checkpoint = trained(home / "elsewhere", 7)
    more = {"SCORER_URL": "http://far:1/score", "SAMPLES": "8", "VAL_FILE": "/others.parquet"}
    evaluate(home, str(checkpoint), "data.seed=7", **more).communicate(timeout=30)
    before, after = asked(home)
    assert "--data /others.parquet" in " ".join(before)
    assert before[-2:] == after[-2:] == ["--set", "data.seed=7"]
    assert after[4] == str(checkpoint)
    assert " ".join(after).count("--samples 8 ") == 1
    assert not (home / "scorer.pid").exists()


def test_without_a_checkpoint_nothing_is_started(home):
    for words in ((), (str(home / "gone"),)):
        process = evaluate(home, *words)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 2
        assert errors.startswith("evaluate.sh: no checkpoint ")
    assert not (home / "scorer.pid").exists()


def test_a_checkpoint_of_no_run_is_one_line_and_no_scorer(home):
    (home / "run/checkpoints/global_step_2").mkdir(parents=True)
    process = evaluate(home)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert errors == f"evaluate.sh: {home}/run holds no config.yaml, so it is not a run directory\n"
    assert not (home / "scorer.pid").exists()


def test_an_evaluation_that_is_stopped_ends_it_with_its_code_and_the_scorer(home):
    trained(home / "run", 2)
    process = evaluate(home, EVALUATE="exit 3")
    process.communicate(timeout=30)
    assert process.returncode == 3
    assert len(asked(home)) == 1
    assert not is_alive(home, "scorer")


# ------------------------------------------------------------------ the README


def readme() -> str:
    return (RECIPE / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_the_table_of_the_run():
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `([^`]+)` \|", readme(), flags=re.MULTILINE))
    assert {key: rows[key] for key in rows if key in TABLE} == rows
    shown = {key: OmegaConf.create({"value": TABLE[key]}).value for key in rows}
    assert {key: str(OmegaConf.create(f"value: {value}").value) for key, value in rows.items()} == {
        key: str(value) for key, value in shown.items()
    }
    assert len(rows) >= 20


def test_every_line_of_the_data_script_that_is_shown_can_be_parsed():
    spec = importlib.util.spec_from_file_location("indicvoices_hindi", ROOT / "data_process/indicvoices_hindi.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    lines = re.findall(r"^(?:\S+ )?python3? data_process/indicvoices_hindi\.py (.*)$", readme(), flags=re.MULTILINE)
    assert lines
    for line in lines:
        module.build_parser().parse_args(shlex.split(line))


def test_every_variable_that_is_shown_is_read_by_a_script():
    scripts = "".join(
        path.read_text() for path in [*RECIPE.glob("*.sh"), LAUNCHER, LAUNCHER.with_name("run_qwen3_tts_grpo.sh")]
    )
    lines = [line for line in readme().splitlines() if not line.startswith("make ")]
    shown = set(re.findall(r"\b([A-Z][A-Z_]+)=", "\n".join(lines)))
    assert {"REF_AUDIO", "SCORER_URL", "WORK"} <= shown
    assert not [name for name in shown if not re.search(rf"\$\{{?!?{name}\b", scripts)]


def test_every_revision_that_is_pinned_is_named():
    for name in ("base", "adapter", "merged", "scorer", "dataset"):
        assert PINS[f"{name}_revision"][:8] in readme()
