"""The Hindi recipe from the raw corpus to a merged, trained and evaluated model: its own scripts, on small things.

Corpus, adapter and recogniser are made in the published formats, see tests/hindi_rig.py. Everything runs in FP32, so
that what should be equal is equal bit for bit. Two starts of the loop, three of the engine alone.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.hindi_rig import RECIPE, REFERENCE, SMALL_SPLIT, make_hub, prepare
from tests.loop.runs import FP32, FP32_LIMIT, MARK, Inputs, Run, explain, flat, processes_with, start
from verl_tts.data.prompts import read_prompts

pytestmark = pytest.mark.loop

SAMPLES = 2
LENGTHS = ("data.max_prompt_length=192", "data.max_response_length=24")
OVERRIDES = (*FP32, f"tts.gates.logprob_max_abs={FP32_LIMIT}", "trainer.val_before_train=true")
SAMPLING = ("tts.platform=cpu", "actor_rollout_ref.rollout.dtype=float32", *LENGTHS)
ONE_BY_ONE = ("actor_rollout_ref.rollout.max_num_seqs=1", "tts.reward.max_in_flight=1")  # so that some are left to do


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What prepare.sh leaves."""
    hub = make_hub(tmp_path_factory.mktemp("hindi"))
    done = prepare(hub, *SMALL_SPLIT, REF_AUDIO=str(REFERENCE))
    assert done.returncode == 0, done.stderr
    return hub / "work"


def train(work: Path, directory: Path) -> Run:
    """train.sh, with the Whisper scorer that it starts itself."""
    inputs = Inputs(
        work / "model", work / "data/train.parquet", work / "data/validation.parquet", work / "speaker.json"
    )
    return start(
        directory,
        inputs,
        *OVERRIDES,
        launcher=RECIPE / "train.sh",
        scorer_url="",
        steps=4,
        save_freq=2,
        test_freq=4,
        environment={"WORK": str(work), "SCORER_GPU": "cpu"},
        timeout_s=700,
    )


@pytest.fixture(scope="module")
def trained(work: Path) -> Run:
    """Four updates, validated before and after, saved after two and four."""
    return train(work, work / "run")


@pytest.fixture(scope="module")
def resumed(work: Path, trained: Run) -> Run:
    """The same directory as a crash in the fourth step leaves it: the newest checkpoint is cut. Started again."""
    directory = work / "resumed"
    shutil.copytree(trained.directory, directory)
    (shard,) = (directory / "checkpoints/global_step_4/actor").glob("model_*.pt")
    os.truncate(shard, shard.stat().st_size // 2)
    return train(work, directory)


def evaluate(work: Path, run: Run, watch: Callable[[subprocess.Popen], None] | None = None) -> tuple[int, str, str]:
    """evaluate.sh on the last checkpoint: exit code, what the terminal showed, and the mark of its processes."""
    mark = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"WORK": str(work), "SCORER_GPU": "cpu", "PYTHON_BIN": sys.executable, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        ["bash", str(RECIPE / "evaluate.sh"), str(run.checkpoint(4)), *SAMPLING, *ONE_BY_ONE],
        env=environment | {"SAMPLES": str(SAMPLES), MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    watching = threading.Thread(target=watch or (lambda _: None), args=(process,))
    watching.start()
    try:
        out, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    watching.join()
    return process.returncode, out, mark


def lines_of(evaluation: Path) -> list[dict[str, Any]]:
    path = evaluation / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def killed(work: Path, trained: Run) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The evaluation of the model before, killed with -9 after some clips: their lines, and what it left running."""
    before = work / "evaluations/before"

    def kill_evaluation(script: subprocess.Popen) -> None:
        while script.poll() is None and not lines_of(before):
            time.sleep(0.01)
        for child in psutil.Process(script.pid).children():
            if "evaluate" in child.cmdline():
                child.kill()

    code, out, mark = evaluate(work, trained, kill_evaluation)
    assert code == 128 + signal.SIGKILL, out
    lines = lines_of(before)
    deadline = time.monotonic() + 10
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return lines, left


@pytest.fixture(scope="module")
def evaluations(work: Path, trained: Run, killed: Any) -> Path:
    """Both evaluations, by the command that was killed."""
    code, out, _ = evaluate(work, trained)
    assert code == 0, out
    return work / "evaluations"


# ------------------------------------------------------------------ the data, the merge


def test_the_corpus_becomes_prompts_and_the_adapter_part_of_the_model(work: Path) -> None:
    assert len(read_prompts(work / "data/train.parquet")) == 8
    assert len(read_prompts(work / "data/validation.parquet")) == 4
    base, merged = (load_file(work / name / "model.safetensors") for name in ("base", "model"))
    assert sum(not torch.equal(base[name], merged[name]) for name in base) == 28


# ------------------------------------------------------------------ the run


def test_the_run_ends_with_zero_and_ends_its_scorer(trained: Run) -> None:
    assert trained.returncode == 0, explain(trained)
    assert trained.leftovers == []
    assert sorted(trained.metrics) == [0, 1, 2, 3, 4]


def test_the_published_reward_is_what_whisper_hears(trained: Run) -> None:
    for line in trained.samples(1):
        if line["frames"]:
            assert line["score"] == pytest.approx(1 - min(1, line["parts"]["cer"]))
            assert isinstance(line["notes"]["asr_text"], str)
    assert len({line["score"] for line in trained.samples(1)}) > 1


def test_the_reference_is_the_model_without_the_adapter(trained: Run) -> None:
    """A new adapter adds nothing, so the first distance is 0; a reference that moved along would keep it there."""
    kl = [trained.metrics[step]["actor/kl_loss"] for step in (1, 2, 3, 4)]
    assert kl[0] == 0
    assert min(kl[1:]) > 0, kl


def test_the_adapter_alone_is_trained_and_reaches_the_engine(work: Path, trained: Run) -> None:
    model, tensors = load_file(work / "model/model.safetensors"), trained.tensors(4)
    adapters = {name: tensor.full_tensor() for name, tensor in tensors.items() if ".lora_" in name}
    assert all(tensor.any() for tensor in adapters.values())
    for name, tensor in tensors.items():
        if name not in adapters:
            published = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            assert torch.equal(tensor.full_tensor(), model[published]), name
    gaps = {step: trained.metrics[step]["gate/logprob_max_abs"] for step in (1, 2, 3, 4)}
    assert max(gaps.values()) < FP32_LIMIT, gaps


# ------------------------------------------------------------------ its resume


def test_a_resume_goes_on_after_the_last_whole_checkpoint(resumed: Run) -> None:
    assert resumed.returncode == 0, explain(resumed)
    assert {step: line["attempt"] for step, line in resumed.metrics.items() if step > 2} == {3: 1, 4: 1}


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_adapter_and_optimizer_end_bit_identical(trained: Run, resumed: Run, kind: str) -> None:
    ours, theirs = (flat(run.tensors(4, kind)) for run in (resumed, trained))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_the_same_clips_are_sampled_and_scored_as_without_the_break(trained: Run, resumed: Run) -> None:
    for step in (3, 4):
        for ours, theirs in zip(resumed.samples(step), trained.samples(step), strict=True):
            assert [ours[name] for name in SAME] == [theirs[name] for name in SAME]
            if ours["path"]:
                assert (resumed.directory / ours["path"]).read_bytes() == (
                    trained.directory / theirs["path"]
                ).read_bytes()


SAME = ("id", "sample", "seed", "frames", "stop_reason", "score")


# ------------------------------------------------------------------ the evaluation


def test_an_evaluation_that_is_killed_keeps_its_clips_and_leaves_no_process(killed: Any) -> None:
    lines, left = killed
    assert 0 < len(lines) < 4 * SAMPLES
    assert left == {}


def test_the_same_command_goes_on_and_scores_no_clip_again(killed: Any, evaluations: Path) -> None:
    lines, _ = killed
    now = lines_of(evaluations / "before")
    assert now[: len(lines)] == lines
    assert len({(line["id"], line["sample"]) for line in now}) == len(now) == 4 * SAMPLES


@pytest.mark.parametrize(("step", "name"), [(0, "before"), (4, "global_step_4")])
def test_an_evaluation_is_the_validation_of_the_run_bit_for_bit(
    trained: Run, evaluations: Path, step: int, name: str
) -> None:
    """Step 0 is a new adapter merged into the model, the evaluation before is that of the model without any."""
    evaluated = {(line["id"], line["sample"]): line for line in lines_of(evaluations / name)}
    validated = trained.samples(step, "val")
    assert len(validated) == 4
    for line in validated:
        same = evaluated[line["id"], line["sample"]]
        assert [same[key] for key in SAME] == [line[key] for key in SAME]
        if line["path"]:
            clip = (evaluations / name / same["path"]).read_bytes()
            assert clip == (trained.directory / line["path"]).read_bytes()


def test_the_policy_says_something_else_after_the_updates(trained: Run) -> None:
    before, after = (trained.samples(step, "val") for step in (0, 4))
    clips = [(trained.directory / line["path"]).read_bytes() for line in (*before, *after) if line["path"] is not None]
    assert len(set(clips)) > len([line for line in before if line["path"]])


def test_before_and_after_are_compared_with_an_interval(evaluations: Path) -> None:
    summary = json.loads((evaluations / "global_step_4/summary.json").read_text())
    against = summary["against"]
    assert against["path"] == str(evaluations / "before")
    assert against["low"] <= against["difference"] <= against["high"]
    assert against["score_mean"] + against["difference"] == pytest.approx(summary["score"]["mean"])
    assert (summary["rows"], summary["clips"]) == (4, 4 * SAMPLES)
    assert 0 <= summary["cer_above_0.3"] <= 1
    assert not (evaluations / "global_step_4/.model").exists()
