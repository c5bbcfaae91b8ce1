import errno
import json
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_tts.checkpoints.manifest import INCOMPLETE, commit
from verl_tts.errors import CheckpointError, ConfigError, RunStopped
from verl_tts.report import run_dir
from verl_tts.report.run_dir import LINE, RunDir, file_name, read_jsonl
from verl_tts.types import CodecRollout, PromptRow, Score, Waveform

CONFIG = {"data": {"seed": 7}, "actor": {"seed": "${data.seed}"}, "optim": {"lr": 1e-6}}


def save_checkpoint(run: RunDir, step: int, **extra: Any) -> Path:
    actor = run.checkpoints / INCOMPLETE / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    (actor / "model_world_size_1_rank_0.pt").write_bytes(b"weights")
    return commit(run.checkpoints, step, **extra)


def save_sample(run: RunDir, step: int, *, id: str = "hi-7", sample: int = 0, split="train", frames: int = 3, **score):
    times = np.arange(frames * 1920, dtype=np.float32) / 24000
    return run.save_sample(
        PromptRow(id=id, text="नमस्ते", split=split, index=7, data_source="indicvoices_r", ground_truth="नमस्ते"),
        CodecRollout(
            tokens_T=np.zeros(frames + 1, np.int64),
            codes_FQ=np.zeros((frames, 16), np.int64),
            logprobs_T=np.zeros(frames + 1, np.float32),
            stop_reason="eos",
            seed=2**62 + 1,
        ),
        Waveform(0.5 * np.sin(440 * times, dtype=np.float32), 24000),
        Score(**{"total": 0.75, "parts": {"cer": 0.1}, "notes": {"transcript": "नमस्ते"}} | score),
        split=split,
        step=step,
        sample=sample,
        language="Hindi",
        speaker="asha",
    )


def run_of(path: Path, steps: int, checkpoints: tuple[int, ...]) -> RunDir:
    """A run that made these steps, wrote metrics and samples of each, and has ended."""
    run = RunDir(path)
    run.start(CONFIG)
    for step in range(1, steps + 1):
        save_sample(run, step)
        if step in checkpoints:
            save_checkpoint(run, step)
        run.append_metrics(step, {"reward/mean": step / 10})
    run.close()
    return run


def steps_of(run: RunDir) -> list[int]:
    return [line["step"] for line in read_jsonl(run.metrics)]


def strict(line: str):
    """JSON as others read it: NaN and Infinity are not part of it."""

    def refuse(constant):
        raise ValueError(constant)

    return json.loads(line, parse_constant=refuse)


# ---------------------------------------------------------------- a fresh start


@pytest.mark.parametrize("resume", ["auto", "disable"])
def test_a_fresh_start_writes_the_resolved_config_and_the_versions(tmp_path, resume):
    run = RunDir(tmp_path / "new" / "run")
    attempt = run.start(OmegaConf.create(CONFIG), resume)
    assert (attempt.number, attempt.step, attempt.checkpoint, attempt.notes) == (0, 0, None, ())
    saved = OmegaConf.load(run.path / "config.yaml")
    assert saved == OmegaConf.create(CONFIG | {"actor": {"seed": 7}})
    assert isinstance(saved.optim.lr, float)
    packages = json.loads((run.path / "versions.json").read_text())["packages"]
    assert packages["verl"] == "0.9.1"
    assert packages["torch"].startswith("2.")


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_place_that_cannot_be_a_directory_is_refused_in_one_line(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"OUTPUT_DIR={tmp_path}/{place} cannot be written: "):
        RunDir(tmp_path / place).start(OmegaConf.create(CONFIG), "auto")


def test_no_secret_reaches_the_saved_config(tmp_path):
    env = {
        "WANDB_API_KEY": "hush-1",
        "HF_TOKEN": "hush-2",
        "AWS_SECRET_ACCESS_KEY": "hush-5",
        "token_env": "SCORER_TOKEN",
        "max_tokens": 5,
    }
    RunDir(tmp_path).start({"env": env, "url": "http://me:hush-3@host:80/score", "list": [{"password": "hush-4"}]})
    text = (tmp_path / "config.yaml").read_text()
    assert "hush" not in text
    assert "host:80/score" in text
    assert OmegaConf.load(tmp_path / "config.yaml").env.token_env == "SCORER_TOKEN"
    assert OmegaConf.load(tmp_path / "config.yaml").env.max_tokens == 5


@pytest.mark.parametrize(
    "trace", ["config.yaml", "metrics.jsonl", "checkpoints/global_step_1/data.pt", "samples/val/x"]
)
def test_a_fresh_start_into_a_directory_that_holds_a_run_is_refused_and_changes_nothing(tmp_path, trace):
    (tmp_path / trace).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / trace).write_text("{}\n")
    with pytest.raises(ConfigError, match=r"holds a run already; resume it .* or name another OUTPUT_DIR") as refused:
        RunDir(tmp_path).start(CONFIG, "disable")
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert files_of(tmp_path).keys() - {".lock"} == {trace}


def test_a_log_that_the_shell_has_opened_is_not_a_run(tmp_path):
    (tmp_path / "train.log").write_text("started\n")
    assert RunDir(tmp_path).start(CONFIG, "disable").number == 0


def test_two_processes_cannot_write_one_run(tmp_path):
    first = RunDir(tmp_path)
    first.start(CONFIG)
    first.append_metrics(1, {})
    with pytest.raises(ConfigError, match="another process is writing"):
        RunDir(tmp_path).start(CONFIG, "auto")
    assert steps_of(first) == [1]
    first.close()
    assert RunDir(tmp_path).start(CONFIG, "auto").number == 1


# ---------------------------------------------------------------- resuming


def test_resuming_goes_on_from_the_newest_checkpoint_and_cuts_what_lies_above_it(tmp_path):
    run_of(tmp_path, steps=5, checkpoints=(2, 4))
    run = RunDir(tmp_path)
    attempt = run.start(CONFIG, "auto")
    assert (attempt.number, attempt.step, attempt.checkpoint) == (1, 4, run.checkpoints / "global_step_4")
    assert steps_of(run) == [1, 2, 3, 4]
    assert sorted(path.name for path in (run.samples / "train").iterdir()) == ["step_1", "step_2", "step_3", "step_4"]
    assert attempt.notes == (
        "cut 1 line(s) above step 4 off metrics.jsonl",
        "removed 1 sample folder(s) above step 4",
    )
    run.append_metrics(5, {})
    assert [line["attempt"] for line in read_jsonl(run.metrics)] == [0, 0, 0, 0, 1]


def test_each_resume_keeps_its_own_config_and_the_latest_is_found(tmp_path):
    run_of(tmp_path, steps=2, checkpoints=(2,))
    for number in range(1, 12):
        run = RunDir(tmp_path)
        assert run.start(CONFIG | {"number": number}).number == number
        run.close()
    assert "number" not in OmegaConf.load(tmp_path / "config.yaml")
    assert OmegaConf.load(tmp_path / "config.3.yaml").number == 3
    assert RunDir(tmp_path).latest_config().number == 11
    assert (tmp_path / "versions.11.json").exists()


def test_a_damaged_checkpoint_is_skipped_set_aside_and_named(tmp_path):
    run = run_of(tmp_path, steps=4, checkpoints=(2, 4))
    (run.checkpoints / "global_step_4" / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b"")
    attempt = RunDir(tmp_path).start(CONFIG)
    assert attempt.step == 2
    assert attempt.notes[0].startswith("skipped global_step_4: actor/model_world_size_1_rank_0.pt has 0 bytes")
    assert (run.checkpoints / "set_aside" / "attempt_1" / "global_step_4" / "MANIFEST.json").exists()
    assert steps_of(run) == [1, 2]


def test_a_run_that_died_before_its_first_checkpoint_starts_again_at_step_0(tmp_path):
    run = run_of(tmp_path, steps=3, checkpoints=())
    attempt = RunDir(tmp_path).start(CONFIG)
    assert (attempt.number, attempt.step, attempt.checkpoint) == (1, 0, None)
    assert attempt.notes[0].startswith("no whole checkpoint")
    assert steps_of(run) == []
    assert list(run.samples.glob("*/*")) == []


def test_resuming_from_an_earlier_checkpoint_sets_the_later_ones_aside(tmp_path):
    run = run_of(tmp_path, steps=6, checkpoints=(2, 4, 6))
    attempt = RunDir(tmp_path).start(CONFIG, run.checkpoints / "global_step_2")
    assert attempt.step == 2
    assert sorted(path.name for path in run.checkpoints.iterdir() if path.is_dir() and path.name != INCOMPLETE) == [
        "global_step_2",
        "set_aside",
    ]
    assert steps_of(run) == [1, 2]


def test_a_checkpoint_of_another_run_starts_a_new_run_but_does_not_enter_an_old_one(tmp_path):
    other = run_of(tmp_path / "other", steps=3, checkpoints=(3,))
    checkpoint = other.checkpoints / "global_step_3"
    attempt = RunDir(tmp_path / "new").start(CONFIG, checkpoint)
    assert (attempt.number, attempt.step, attempt.checkpoint) == (0, 3, checkpoint)
    run_of(tmp_path / "old", steps=1, checkpoints=())
    with pytest.raises(ConfigError, match="name another OUTPUT_DIR"):
        RunDir(tmp_path / "old").start(CONFIG, checkpoint)
    assert steps_of(RunDir(tmp_path / "old")) == [1]


def test_a_checkpoint_that_was_asked_for_and_is_not_whole_is_an_error(tmp_path):
    run = run_of(tmp_path, steps=2, checkpoints=(1, 2))
    (run.checkpoints / "global_step_2" / "MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match=r"global_step_2: it has no MANIFEST\.json"):
        RunDir(tmp_path).start(CONFIG, run.checkpoints / "global_step_2")
    with pytest.raises(CheckpointError, match="there is no such directory"):
        RunDir(tmp_path).start(CONFIG, run.checkpoints / "global_step_5")
    assert steps_of(run) == [1, 2]


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_what_is_only_claimed_stays_as_it_is(tmp_path):
    """A resume that is refused for its settings, its scorer or its workers has cut nothing."""
    run = run_of(tmp_path, steps=4, checkpoints=(2, 4))
    before = files_of(tmp_path)
    resumed = RunDir(tmp_path)
    claimed = resumed.claim(run.checkpoints / "global_step_2")
    assert (claimed.number, claimed.step) == (1, 2)
    resumed.close()
    assert files_of(tmp_path) == before


def test_checkpoints_are_looked_at_once_nobody_else_can_change_them(tmp_path, monkeypatch):
    """A job that is queued again looks for minutes while the one before saves, prunes and ends."""
    running = RunDir(tmp_path)
    running.start(CONFIG)
    save_checkpoint(running, 4)
    monkeypatch.setattr(run_dir, "newest_valid", lambda checkpoints: pytest.fail("looked at"))
    with pytest.raises(ConfigError, match="another process is writing"):
        RunDir(tmp_path).claim()


def test_a_claim_that_fails_lets_the_next_one_have_the_directory(tmp_path):
    run = run_of(tmp_path, steps=1, checkpoints=(1,))
    refused = RunDir(tmp_path)
    with pytest.raises(ConfigError, match="holds a run already"):
        refused.claim("disable")
    assert RunDir(tmp_path).start(CONFIG).checkpoint == run.checkpoints / "global_step_1"


def test_clips_of_a_first_validation_that_was_cut_off_are_made_again(tmp_path):
    run = RunDir(tmp_path)
    run.start(CONFIG)
    save_sample(run, 0, split="val")
    run.close()
    resumed = RunDir(tmp_path)
    resumed.start(CONFIG)
    assert not (run.samples / "val" / "step_0").exists()
    save_sample(resumed, 0, split="val")
    resumed.append_metrics(0, {"val-core/x": 1.0})
    resumed.close()
    RunDir(tmp_path).start(CONFIG)
    assert (run.samples / "val" / "step_0").exists(), "it has its line"


def test_a_disk_that_is_full_as_lines_are_cut_is_said_in_one_line(tmp_path, monkeypatch):
    run_of(tmp_path, steps=3, checkpoints=(2,))

    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(run_dir, "write_whole", full)
    with pytest.raises(RunStopped, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        RunDir(tmp_path).start(CONFIG)


def test_what_an_interrupted_save_has_left_is_removed(tmp_path):
    run = run_of(tmp_path, steps=2, checkpoints=(2,))
    (run.checkpoints / INCOMPLETE / "global_step_3").mkdir(parents=True)
    RunDir(tmp_path).start(CONFIG)
    assert not (run.checkpoints / INCOMPLETE).exists()


def test_metrics_torn_at_any_byte_resume_to_whole_lines(tmp_path):
    whole = run_of(tmp_path / "whole", steps=3, checkpoints=()).metrics.read_bytes()
    run = run_of(tmp_path / "torn", steps=2, checkpoints=(2,))
    lines = whole.splitlines(keepends=True)
    line_ends = [index for index, byte in enumerate(whole) if byte == ord("\n")]  # torn just before the newline
    for length in [*range(0, len(whole) + 1, 11), *line_ends, len(whole)]:
        run.metrics.write_bytes(whole[:length])
        resumed = RunDir(run.path)
        resumed.start(CONFIG)
        resumed.append_metrics(3, {})
        resumed.close()
        complete = whole[:length].count(b"\n")
        kept = run.metrics.read_bytes().splitlines(keepends=True)
        assert kept[:-1] == lines[: min(complete, 2)]
        assert strict(kept[-1].decode())["step"] == 3


def test_dying_while_lines_are_cut_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    run = run_of(tmp_path, steps=3, checkpoints=(2,))
    before = run.metrics.read_bytes()

    def die(*paths):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            RunDir(tmp_path).start(CONFIG)
    assert run.metrics.read_bytes() == before


# ---------------------------------------------------------------- metrics


def test_a_step_is_one_line_of_plain_json_with_our_keys_first(tmp_path):
    run = RunDir(tmp_path)
    run.start(CONFIG)
    run.append_metrics(
        3,
        {
            "actor/loss": np.float32(0.5),
            "actor/kl": float("nan"),
            "actor/grad_norm": np.float64("inf"),
            "rollout/rows": np.int64(8),
            "note": "ध्वनि",
            "step": 99,
        },
    )
    (text,) = run.metrics.read_text().splitlines()
    line = strict(text)
    assert list(line)[:3] == ["step", "time", "attempt"]
    assert line.pop("time") > 1.7e9
    assert line == {
        "step": 3,
        "attempt": 0,
        "actor/loss": 0.5,
        "actor/kl": None,
        "actor/grad_norm": None,
        "rollout/rows": 8,
        "note": "ध्वनि",
        "non_finite": ["actor/kl", "actor/grad_norm"],
    }


def test_a_step_is_never_written_twice_not_even_after_a_resume(tmp_path):
    run_of(tmp_path, steps=2, checkpoints=(2,))
    run = RunDir(tmp_path)
    run.start(CONFIG)
    with pytest.raises(ValueError, match="step 2 comes after step 2"):
        run.append_metrics(2, {})
    assert run.last_step == 2
    run.append_metrics(3, {})
    with pytest.raises(ValueError, match="step 3 comes after step 3"):
        run.append_metrics(3, {})
    assert steps_of(run) == [1, 2, 3]


def test_a_step_that_was_saved_and_never_had_its_line_gets_it_back_from_its_checkpoint(tmp_path):
    first = RunDir(tmp_path / "run")
    first.start(CONFIG)
    first.append_metrics(1, {"loss": 3.0})
    save_checkpoint(first, 2, extra={LINE: first.metrics_line(2, {"loss": 2.0, "reward/mean": float("nan")})})
    first.close()
    attempt = RunDir(tmp_path / "run").start(CONFIG)
    assert attempt.restored
    assert attempt.notes == ("restored the line of step 2 from its checkpoint",)
    lines = list(read_jsonl(first.metrics))
    assert [(line["step"], line["loss"], line["attempt"]) for line in lines] == [(1, 3.0, 0), (2, 2.0, 0)]
    assert lines[1]["non_finite"] == ["reward/mean"]


def test_a_step_that_has_its_line_keeps_it(tmp_path):
    first = RunDir(tmp_path / "run")
    first.start(CONFIG)
    save_checkpoint(first, 2, extra={LINE: first.metrics_line(2, {"loss": 2.0})})
    first.append_metrics(2, {"loss": 2.0, "val-core/hindi/reward/mean@1": 0.5})
    first.close()
    attempt = RunDir(tmp_path / "run").start(CONFIG)
    assert not attempt.restored
    assert [line.get("val-core/hindi/reward/mean@1") for line in read_jsonl(first.metrics)] == [0.5]


def test_the_checkpoint_of_another_run_brings_no_line_along(tmp_path):
    other = RunDir(tmp_path / "other")
    other.start(CONFIG)
    checkpoint = save_checkpoint(other, 2, extra={LINE: other.metrics_line(2, {"loss": 2.0})})
    here = RunDir(tmp_path / "run")
    assert not here.start(CONFIG, checkpoint).restored
    assert not here.metrics.exists()


@pytest.mark.parametrize(
    ("step", "every", "last_step", "owes"),
    [(6, 3, 9, True), (7, 3, 9, False), (7, 3, 7, True), (7, 3, None, False), (6, 0, 6, False), (6, -1, 6, False)],
)
def test_a_validation_is_due_each_so_many_steps_and_at_the_last(tmp_path, step, every, last_step, owes):
    run = RunDir(tmp_path / "run")
    run.start(CONFIG)
    run.append_metrics(step, {"loss": 1.0})
    assert run.owes_validation(step, every, last_step) == owes


@pytest.mark.parametrize("line", ['{"loss": 1}', '{"step": "2"}', '{"step": null}', '{"step": 2.5}', "[" * 100_000])
def test_a_line_of_no_step_is_left_out_and_cut_by_a_resume(tmp_path, line):
    run = RunDir(tmp_path / "run")
    run.start(CONFIG)
    run.append_metrics(0, {"loss": 1.0})
    run.close()
    with run.metrics.open("a") as file:
        file.write(f"{line}\n")
    assert RunDir(run.path).last_step == 0
    assert RunDir(run.path).owes_validation(0, every=1, last_step=None)
    RunDir(run.path).start(CONFIG)
    assert [json.loads(kept)["step"] for kept in run.metrics.read_text().splitlines()] == [0]


def test_a_validation_that_was_missed_completes_the_line_of_the_last_step(tmp_path):
    run = RunDir(tmp_path / "run")
    run.start(CONFIG)
    for step in (1, 2):
        run.append_metrics(step, {"loss": float(step)})
    assert run.owes_validation(2, every=2, last_step=None)
    before = list(read_jsonl(run.metrics))
    run.add_to_line(2, {"val-core/hindi/reward/mean@1": 0.5})
    assert not run.owes_validation(2, every=2, last_step=None)
    assert list(read_jsonl(run.metrics)) == [before[0], before[1] | {"val-core/hindi/reward/mean@1": 0.5}]
    run.append_metrics(3, {"loss": 3.0})
    assert run.last_step == 3


def test_clips_of_older_steps_are_removed_up_to_the_number_that_stays(tmp_path):
    run = RunDir(tmp_path / "run")
    for split, step in (("train", 1), ("train", 2), ("train", 9), ("train", 10), ("val", 1)):
        (run.samples / split / f"step_{step}").mkdir(parents=True)
    assert sorted(path.name for path in run.prune_samples("train", 10, keep_steps=2)) == ["step_1", "step_2"]
    assert sorted(path.name for path in run.samples.glob("*/*")) == ["step_1", "step_10", "step_9"]
    run.prune_samples("train", 10, keep_steps=0)
    assert [path.parent.name for path in run.samples.glob("*/*")] == ["val"]


def test_a_line_is_on_disk_when_the_call_returns(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    run.start(CONFIG)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    run.append_metrics(1, {})
    assert synced == [str(run.metrics)]


def full_disk(descriptor, data):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("write", [full_disk, lambda descriptor, data: len(data) - 1])
def test_a_full_disk_stops_the_run_with_the_name_of_the_file(tmp_path, monkeypatch, write):
    run = RunDir(tmp_path)
    run.start(CONFIG)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(RunStopped, match=r"cannot write .*metrics.jsonl"):
            run.append_metrics(1, {})


@pytest.mark.parametrize("act", [lambda run: run.start(CONFIG), lambda run: run.add_to_line(1, {"loss": 2.0})])
def test_a_full_disk_is_said_of_files_that_are_replaced_too(tmp_path, monkeypatch, act):
    run = run_of(tmp_path, steps=1, checkpoints=(1,))
    before = run.metrics.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda descriptor: full_disk(descriptor, b""))
    with pytest.raises(RunStopped, match=rf"cannot write {tmp_path}.*: No space left on device; free space"):
        act(run)
    assert run.metrics.read_bytes() == before


# ---------------------------------------------------------------- samples


def test_a_sample_is_a_clip_that_plays_and_a_line_that_replays_it(tmp_path):
    run = RunDir(tmp_path)
    clip = save_sample(run, 20, id="hi-7", sample=3, split="val")
    assert clip == tmp_path / "samples" / "val" / "step_20" / "hi-7_3.flac"
    samples_S, rate = soundfile.read(clip, dtype="float32")
    expected_S = 0.5 * np.sin(440 * np.arange(3 * 1920) / 24000)
    assert rate == 24000
    np.testing.assert_allclose(samples_S, expected_S, atol=1 / 32768)
    (line,) = read_jsonl(clip.with_name("samples.jsonl"))
    assert line == {
        "id": "hi-7",
        "sample": 3,
        "step": 20,
        "split": "val",
        "text": "नमस्ते",
        "score": 0.75,
        "parts": {"cer": 0.1},
        "notes": {"transcript": "नमस्ते"},
        "frames": 3,
        "stop_reason": "eos",
        "seed": 2**62 + 1,
        "language": "Hindi",
        "speaker": "asha",
        "ref_audio": None,
        "data_source": "indicvoices_r",
        "index": 7,
        "path": "samples/val/step_20/hi-7_3.flac",
    }


def test_an_utterance_without_audio_has_a_line_and_no_clip(tmp_path):
    run = RunDir(tmp_path)
    assert save_sample(run, 1, frames=0) is None
    (line,) = read_jsonl(run.samples / "train" / "step_1" / "samples.jsonl")
    assert (line["frames"], line["path"]) == (0, None)


def test_a_part_that_is_not_a_number_is_named_and_the_line_stays_json(tmp_path):
    run = RunDir(tmp_path)
    save_sample(run, 1, parts={"cer": float("nan")})
    line = strict((run.samples / "train" / "step_1" / "samples.jsonl").read_text())
    assert (line["parts"], line["non_finite"]) == ({"cer": None}, ["parts/cer"])


@pytest.mark.parametrize("id", ["../../../etc/passwd", "/etc/passwd", "..", "a/b", "a\0b", "-rf", "", "ा" * 300])
def test_a_hostile_id_stays_inside_its_folder(tmp_path, id):
    clip = save_sample(RunDir(tmp_path), 1, id=id)
    assert clip.resolve().parent == (tmp_path / "samples" / "train" / "step_1").resolve()
    assert clip.exists()


def write_many(path: Path, worker: int) -> None:
    for sample in range(40):
        save_sample(RunDir(path), 1, id=f"worker-{worker}" * 20, sample=sample, frames=0)


def test_lines_of_several_processes_do_not_mix(tmp_path):
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=write_many, args=(tmp_path, worker)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    lines = (tmp_path / "samples" / "train" / "step_1" / "samples.jsonl").read_text().splitlines()
    assert len({(strict(line)["id"], strict(line)["sample"]) for line in lines}) == 160


# ---------------------------------------------------------------- file names

names = st.text(max_size=200) | st.text(alphabet="ab~./-_2E", max_size=8)


@given(names)
@example("a" * 161)
@example("ā" * 40)
def test_a_file_name_is_plain_ascii_within_every_limit(text):
    assert re.fullmatch(r"[A-Za-z0-9_~][A-Za-z0-9_.~-]*|", file_name(text))
    assert len(f"{file_name(text)}_100.flac") < 255


@settings(max_examples=300)
@given(names, names)
@example("a" * 161, "a" * 162)
@example("~2E", ".")
@example("a~20b", "a b")
def test_different_ids_have_different_file_names(one, other):
    assert (file_name(one) == file_name(other)) == (one == other)


def test_an_ordinary_id_is_its_own_file_name():
    assert file_name("hi-00000007") == "hi-00000007"
    assert file_name("../a b") == "~2E.~2Fa~20b"
