"""The MOSS recipe from the published corpus to a trained, evaluated and served model: its own scripts, on small things.

Model, codec, scorers, voices and corpus are made in the published formats, see tests/moss_rig.py. The run has the
recipe's placement and staleness shrunk: one actor worker, a pool of two rollout servers, a sync after every second
update. One start of the loop, four of the engine alone.
"""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from omegaconf import OmegaConf

from tests.loop.runs import FP32, FP32_LIMIT, Inputs, Run, explain, start
from tests.moss_rig import RECIPE, SMALL_SPLIT, make_hub, prepare
from tests.serving import Server, assert_ends_by_sigterm, heard, serving
from verl_tts.commands.generate import take_seed
from verl_tts.data.prompts import read_prompts
from verl_tts.data.voices import draw_reference, read_references
from verl_tts.rollout.seeds import sample_seed

pytestmark = pytest.mark.loop

SEED, GROUP, SAMPLES = 7, 4, 2
LENGTHS = ("data.max_prompt_length=640", "data.max_response_length=48")
BASE = ("tts.platform=cpu", "tts.rpc_timeout_s=60", *LENGTHS)
OVERRIDES = (
    *FP32,
    "data.train_batch_size=2",
    "data.train_max_samples=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "tts.keep.train_samples_per_step=-1",
    # A random policy that is driven this hard goes where no gate would let it.
    "tts.gates.length_drift.stop=null",
)
SAMPLING = ("tts.platform=cpu", "actor_rollout_ref.rollout.dtype=float32", *LENGTHS)
SAME = ("id", "sample", "seed", "frames", "stop_reason", "ref_audio", "parts")
PARTS = ("whisper_wer.wer", "speaker_similarity.score", "clap_emotion.score", "clap_quality.score")
PLACEMENT = {"TRAIN_GPUS": "1", "ROLLOUT_GPUS": "2", "SCORER_GPUS": "0", "SYNC_EVERY": "2", "SEED": str(SEED)}

TEXT, INSTRUCTION, VOICE, MAX_FRAMES = "Good morning to all of you.", "Speak softly.", "c0/0.wav", "48"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What prepare.sh leaves."""
    home = make_hub(tmp_path_factory.mktemp("moss"))
    done = prepare(home, *SMALL_SPLIT)
    assert done.returncode == 0, done.stderr
    return home / "work"


@pytest.fixture(scope="module")
def trained(work: Path) -> Run:
    """Four updates of train.sh's first phase, validated before and after, with the scorers that it starts itself."""
    inputs = Inputs(work / "model", work / "data/train.parquet", work / "data/validation.parquet", work / "no-speaker")
    return start(
        work / "run",
        inputs,
        *OVERRIDES,
        base=BASE,
        launcher=RECIPE / "train.sh",
        scorer_url="",
        steps=4,
        save_freq=4,
        test_freq=4,
        environment={"WORK": str(work), "PHASE": "v1", **PLACEMENT},
        timeout_s=600,
    )


@pytest.fixture(scope="module")
def evaluations(work: Path, trained: Run) -> Path:
    """evaluate.sh on the model before and on the newest checkpoint."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    places = {"WORK": str(work), "OUTPUT_DIR": str(trained.directory), "SCORER_GPU": ""}
    done = subprocess.run(
        ["bash", str(RECIPE / "evaluate.sh"), str(trained.checkpoint(4)), *SAMPLING],
        env=environment | places | {"SAMPLES": str(SAMPLES), "PYTHON_BIN": sys.executable, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return work / "evaluations"


@pytest.fixture(scope="module")
def exported(work: Path, trained: Run) -> Path:
    """The README's command: a directory that needs nothing beside it."""
    command("export", trained.checkpoint(4), work / "trained")
    return work / "trained"


@pytest.fixture(scope="module")
def server(work: Path, exported: Path) -> Iterator[Server]:
    with serving(exported, "--references", str(work / "emolia"), "--max-frames", MAX_FRAMES) as started:
        yield started


def command(*words: Any) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "verl_tts.commands", *map(str, words)],
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def lines_of(evaluation: Path) -> dict[tuple[str, int], dict[str, Any]]:
    lines = map(json.loads, (evaluation / "samples.jsonl").read_text().splitlines())
    return {(line["id"], line["sample"]): line for line in lines}


# ------------------------------------------------------------------ the data


def test_the_corpus_becomes_prompts_with_voices_of_their_split(work: Path) -> None:
    voices = read_references(work / "data/references.json")
    for split, count, clusters in (("train", 8, voices.train), ("validation", 2, voices.validation)):
        rows = read_prompts(work / f"data/{split}.parquet")
        assert len(rows) == count
        assert {str(row.extra["ref_audio"]).split("/")[0] for row in rows} <= clusters.keys()
        assert all(row.extra["instruction"].startswith("Speak with ") for row in rows)
    assert not (work / "model/codec").exists(), "the codec is published by itself"


# ------------------------------------------------------------------ the run


def test_the_run_ends_with_zero_and_ends_its_scorer(trained: Run) -> None:
    assert trained.returncode == 0, explain(trained)
    assert trained.leftovers == []
    assert sorted(trained.metrics) == [0, 1, 2, 3, 4]


def test_one_server_of_four_scorers_makes_the_published_reward(work: Path, trained: Run) -> None:
    settings = json.loads((work / "run.scorer.yaml").read_text())
    assert [entry.get("name", entry["scorer"]) for entry in settings["scorers"]] == [
        "whisper_wer", "speaker_similarity", "clap_emotion", "clap_quality",
    ]  # fmt: skip
    assert settings["scorers"][1]["options"]["backend"] == "ecapa"
    config = OmegaConf.load(trained.directory / "config.yaml")
    assert config.tts.reward.compose.weight_set == "v1"
    lines = [line for step in (1, 2, 3, 4) for line in trained.samples(step)]
    judged = [line for line in lines if "violation" not in line["notes"]]  # the others are no scorer's business
    assert len({line["parts"]["speaker_similarity.score"] for line in judged}) > 1
    for line in judged:
        assert all(np.isfinite(line["parts"][part]) for part in PARTS)
        assert line["parts"]["clap_emotion.score"] != line["parts"]["clap_quality.score"]
        assert line["score"] < np.exp(-10 * line["parts"]["whisper_wer.wer"]), "a sigmoid times exp(-10 WER)"


def test_every_clip_is_drawn_by_the_seed_of_the_run_and_by_nothing_else(trained: Run) -> None:
    for step in (1, 2, 3, 4):
        for line in trained.samples(step):
            place = line["id"], line["sample"], step
            assert line["seed"] == sample_seed(SEED, "train", *place) != sample_seed(42, "train", *place)
    clips = [(trained.directory / line["path"]).read_bytes() for line in trained.samples(1) if line["path"]]
    assert len(set(clips)) == len(clips), "of one prompt too: they differ by their seed alone"


def test_a_group_shares_a_voice_that_is_drawn_anew_in_each_step(work: Path, trained: Run) -> None:
    """By the run's seed; in a validation the row's own stays."""
    voices = read_references(work / "data/references.json").train
    heard_in: dict[str, set[str]] = {}
    for step in (1, 2, 3, 4):
        lines = trained.samples(step)
        assert {line["sample"] for line in lines} == set(range(GROUP))
        for line in lines:
            assert line["ref_audio"] == draw_reference(voices, SEED, line["id"], step)
            heard_in.setdefault(line["id"], set()).add(line["ref_audio"])
    assert len(heard_in) == 4, "two epochs of two steps"
    assert max(map(len, heard_in.values())) == 2
    own = {row.id: row.extra["ref_audio"] for row in read_prompts(work / "data/validation.parquet")}
    for step in (0, 4):
        assert {line["id"]: line["ref_audio"] for line in trained.samples(step, "val")} == own


def test_both_servers_of_the_pool_hold_what_was_sent_after_every_second_update(trained: Run) -> None:
    for step in (1, 2, 3, 4):
        line = trained.metrics[step]
        assert ("sync/servers" in line) == (step % 2 == 0)
    assert [trained.metrics[step]["sync/servers"] for step in (2, 4)] == [2, 2]
    assert [trained.metrics[step]["sync/changed"] for step in (2, 4)] == [1, 1]


def test_the_engines_are_the_actor_after_a_sync_and_an_update_behind_before_the_next(trained: Run) -> None:
    """Eight clips a step are spread over two servers: one that had missed a sync would show in the largest gap."""
    gaps = {step: trained.metrics[step]["gate/logprob_max_abs"] for step in (1, 2, 3, 4)}
    assert max(gaps[1], gaps[3]) < FP32_LIMIT < min(gaps[2], gaps[4]), gaps
    staleness = [trained.metrics[step]["training/off_policy/trajectory_staleness/mean"] for step in (1, 2, 3, 4)]
    assert staleness[0] == staleness[2] == staleness[1] - 1 == staleness[3] - 1, staleness
    assert [trained.metrics[step]["sync/behind"] for step in (1, 2, 3, 4)] == [0, 1, 0, 1]


def test_a_stale_token_is_weighed(trained: Run) -> None:
    """By how much likelier it has become: exactly 1 where nothing lies between, something else after an update."""
    weights = {step: trained.metrics[step]["rollout_corr/rollout_is_std"] for step in (1, 2, 3, 4)}
    # A float32 in which 1 and its neighbour are told apart has a standard deviation of the root of 2^-23, 0.00035.
    assert max(weights[1], weights[3]) < 0.001 < min(weights[2], weights[4]), weights


# ------------------------------------------------------------------ the evaluation


@pytest.mark.parametrize(("step", "name"), [(0, "before"), (4, "global_step_4")])
def test_an_evaluation_repeats_the_clips_of_the_runs_validation_bit_for_bit(
    trained: Run, evaluations: Path, step: int, name: str
) -> None:
    evaluated = lines_of(evaluations / name)
    validated = trained.samples(step, "val")
    assert len(validated) == 2
    for line in validated:
        same = evaluated[line["id"], line["sample"]]
        assert [same[key] for key in SAME] == [line[key] for key in SAME]
        if line["path"]:
            clip = (evaluations / name / same["path"]).read_bytes()
            assert clip == (trained.directory / line["path"]).read_bytes()


def test_an_evaluation_has_the_reward_of_the_run_without_being_told(evaluations: Path) -> None:
    assert OmegaConf.load(evaluations / "settings.yaml").tts.reward.compose.weight_set == "v1"


def test_before_and_after_are_compared_with_an_interval(evaluations: Path) -> None:
    summary = json.loads((evaluations / "global_step_4/summary.json").read_text())
    against = summary["against"]
    assert against["path"] == str(evaluations / "before")
    assert against["low"] <= against["difference"] <= against["high"]
    assert (summary["rows"], summary["clips"]) == (2, 2 * SAMPLES)


def test_the_policy_says_something_else_after_the_updates(evaluations: Path) -> None:
    before, after = (
        {key: line["path"] and (evaluations / name / line["path"]).read_bytes() for key, line in lines.items()}
        for name, lines in ((name, lines_of(evaluations / name)) for name in ("before", "global_step_4"))
    )
    assert before.keys() == after.keys()
    assert before != after


# ------------------------------------------------------------------ its use


def test_the_export_is_complete_though_the_codec_was_elsewhere(work: Path, exported: Path) -> None:
    for file in (work / "codec").iterdir():
        assert (exported / "codec" / file.name).read_bytes() == file.read_bytes()


@pytest.fixture(scope="module")
def published_answer(server: Server) -> dict[str, Any]:
    """To ``POST /generate``, sampled as ``generate`` does by default."""
    _, client = server
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "seed": take_seed(42, 0)}
    body = {"text": f"${{instruction:{INSTRUCTION}}}{TEXT}", "audio_data": VOICE, "sampling_params": settings}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_published_form_answers_with_a_clip(published_answer: dict[str, Any]) -> None:
    samples_S, rate_hz = heard(base64.b64decode(published_answer["text"]))
    assert len(samples_S) > 0
    assert (len(samples_S) % 1920, rate_hz) == (0, 24_000)


def test_the_openai_form_answers_with_the_same_clip(
    work: Path, server: Server, published_answer: dict[str, Any]
) -> None:
    _, client = server
    body = {
        "input": TEXT,
        "instructions": INSTRUCTION,
        "ref_audio": f"file://{work}/emolia/{VOICE}",
        "seed": take_seed(42, 0),
        "extra_params": {"top_p": 1.0, "top_k": -1},
    }
    answer = client.post("/v1/audio/speech", json=body)
    assert answer.status_code == 200, answer.text
    (ours_S, rate_hz), (theirs_S, _) = heard(answer.content), heard(base64.b64decode(published_answer["text"]))
    assert rate_hz == 24_000
    np.testing.assert_array_equal(ours_S, theirs_S)
    assert client.post("/v1/audio/speech", json=body | {"voice": VOICE}).status_code == 400
    assert client.post("/v1/audio/speech", json=body | {"ref_audio": "file:///etc/passwd"}).status_code == 400


def test_sigterm_ends_the_server_with_all_of_its_processes(server: Server, published_answer: dict[str, Any]) -> None:
    assert_ends_by_sigterm(server[0])


def test_the_adapter_beside_its_base_speaks_as_the_export_does(
    work: Path, trained: Run, published_answer: dict[str, Any], tmp_path: Path
) -> None:
    command("export", trained.checkpoint(4), tmp_path / "adapter", "--adapter")
    command(
        "generate", "--model", work / "model", "--adapter", tmp_path / "adapter", "--text", TEXT,
        "--instruction", INSTRUCTION, "--ref-audio", work / "emolia" / VOICE, "--max-frames", MAX_FRAMES,
        "--output", tmp_path / "out.wav", "--set", f"tts.codec_path='{work}/codec'",
    )  # fmt: skip
    ours_S, _ = soundfile.read(tmp_path / "out.wav", dtype="float32")
    theirs_S, _ = heard(base64.b64decode(published_answer["text"]))
    np.testing.assert_array_equal(ours_S, theirs_S)
