"""What an evaluation keeps, what it refuses to go on with, and what its clips amount to."""

import json
import math

import numpy as np
import pytest

from verl_tts.errors import ConfigError
from verl_tts.report.evaluation_dir import EvaluationDir, compare, summarise
from verl_tts.types import CodecRollout, PromptRow, Score, Waveform

IDENTITY = {"policy_sha256": "aa", "data_sha256": "bb", "samples": 2, "seed": 42, "scorer_fingerprint": "cc"}


def line(row: str, score: float, cer: float | None = 0.1, sample: int = 0, **more):
    whole = {"id": row, "sample": sample, "score": score, "parts": {"cer": cer}, "notes": {}}
    return whole | {"stop_reason": "eos", "frames": 10} | more


def save(out: EvaluationDir, row: str, sample: int = 0, total: float = 0.5, cer: float = 0.25, frames: int = 2) -> None:
    tokens_T = np.array([*[7] * frames, 2150])
    rollout = CodecRollout(tokens_T, np.full((frames, 16), 7), np.zeros(frames + 1, np.float32), "eos", 11)
    waveform = Waveform(np.full(1920 * frames, 0.1, np.float32), 24_000)
    prompt = PromptRow(row, "Hello.", "val", 0, "test", "Hello.", speaker="anna")
    out.save(prompt, rollout, waveform, Score(total, {"cer": cer}), sample=sample, language="Auto")


@pytest.fixture
def out(tmp_path):
    directory = EvaluationDir(tmp_path / "evaluation")
    yield directory
    directory.close()


# ------------------------------------------------------------------ the directory


def test_a_clip_that_has_its_line_is_done_and_can_be_heard(out):
    assert out.start(IDENTITY, {}) == set()
    save(out, "a", 0)
    save(out, "a", 1, frames=0)
    out.close()
    assert out.start(IDENTITY, {}) == {("a", 0), ("a", 1)}
    first, second = out.lines()
    assert (out.path / first["path"]).is_file()
    assert second["path"] is None
    assert (first["speaker"], first["split"], first["seed"]) == ("anna", "val", 11)


def test_a_line_that_a_crash_has_torn_is_cut_off_and_its_clip_is_not_done(out):
    out.start(IDENTITY, {})
    save(out, "a", 0)
    with out.samples.open("ab") as file:
        file.write(b'{"id": "b", "sample": 0, "sc')
    out.close()
    assert out.start(IDENTITY, {}) == {("a", 0)}
    save(out, "b", 0)
    assert [line["id"] for line in out.lines()] == ["a", "b"]


@pytest.mark.parametrize("key", IDENTITY)
def test_a_restart_with_another_setting_is_refused_and_changes_nothing(out, key):
    out.start(IDENTITY, {})
    save(out, "a")
    out.close()
    before = {path: path.read_bytes() for path in out.path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=rf"holds an evaluation with {key}={IDENTITY[key]}, this one has other;"):
        out.start(IDENTITY | {key: "other"}, {})
    assert {path: path.read_bytes() for path in out.path.rglob("*") if path.is_file()} == before


def test_a_path_or_an_address_may_change(out):
    out.start(IDENTITY, {"scorer_url": "http://a"})
    out.close()
    out.start(IDENTITY, {"scorer_url": "http://b"})


def test_a_directory_that_holds_something_else_or_is_no_directory_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match="is not empty and holds no evaluation"):
        EvaluationDir(tmp_path / "run").start(IDENTITY, {})
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]
    for content in ("{", "[]", '{"identity": 1}'):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other/evaluation.json").write_text(content)
        with pytest.raises(ConfigError, match=r"evaluation\.json is no"):
            EvaluationDir(tmp_path / "other").start(IDENTITY, {})
    with pytest.raises(ConfigError, match="cannot be written"):
        EvaluationDir(tmp_path / "run/config.yaml/deeper").start(IDENTITY, {})


def test_two_processes_do_not_write_one_evaluation(out):
    out.start(IDENTITY, {})
    with pytest.raises(ConfigError, match="another process is writing"):
        EvaluationDir(out.path).start(IDENTITY, {})


# ------------------------------------------------------------------ against another one


def finished(path, identity=IDENTITY, **scores: float) -> EvaluationDir:
    out = EvaluationDir(path)
    out.start(identity, {})
    for row, score in scores.items():
        save(out, row, total=score)
    out.finish(None)
    out.close()
    return out


def test_only_policy_seed_and_number_of_samples_may_differ_in_a_comparison(tmp_path):
    before = finished(tmp_path / "before", a=0.5)
    before.check_comparable(IDENTITY | {"policy_sha256": "other", "seed": 1, "samples": 5})
    for key in ("data_sha256", "scorer_fingerprint"):
        with pytest.raises(ConfigError, match=rf"was made with {key}=\w\w, this evaluation has other: the two cannot"):
            before.check_comparable(IDENTITY | {key: "other"})


def test_what_is_no_evaluation_or_not_finished_is_not_compared_with(tmp_path):
    with pytest.raises(ConfigError, match="there is no evaluation"):
        EvaluationDir(tmp_path / "gone").check_comparable(IDENTITY)
    begun = EvaluationDir(tmp_path / "begun")
    begun.start(IDENTITY, {})
    with pytest.raises(ConfigError, match="is not finished"):
        begun.check_comparable(IDENTITY)
    begun.close()


def test_the_summary_holds_the_paired_interval_against_the_other_evaluation(tmp_path):
    before = finished(tmp_path / "before", a=0.1, b=0.5, c=0.9)
    after = finished(tmp_path / "after", a=0.3, b=0.7, c=1.1)
    against = after.finish(before)["against"]
    assert against["path"] == str(before.path)
    assert against["score_mean"] == pytest.approx(0.5)
    assert [against[name] for name in ("difference", "low", "high")] == pytest.approx([0.2] * 3)  # rows are paired
    assert against["excludes_zero"]
    assert json.loads(after.summary.read_text())["against"] == against


# ------------------------------------------------------------------ numbers


def test_a_mean_is_over_rows_and_a_median_over_clips():
    lines = [line("a", 1.0, sample=0), line("a", 0.0, sample=1), line("a", 0.0, sample=2), line("b", 1.0)]
    summary = summarise(lines)
    assert (summary["rows"], summary["clips"]) == (2, 4)
    assert summary["score"]["mean"] == pytest.approx((1 / 3 + 1) / 2)
    assert summary["score"]["median"] == 0.5
    assert summary["score"]["low"] <= summary["score"]["mean"] <= summary["score"]["high"]


def test_a_clip_without_an_error_rate_counts_as_one_that_is_not_understood():
    lines = [line("a", 0.9, 0.1), line("b", 0.7, 0.3), line("c", 0.6, 0.31), line("d", 0.0, None)]
    summary = summarise(lines)
    assert summary["cer_above_0.3"] == 0.5
    assert summary["parts"]["cer"] == pytest.approx(0.71 / 3)


def test_each_recogniser_has_its_share_and_a_scorer_without_error_rate_has_none():
    parts = [{"one.cer": 0.0, "two.cer": 1.0, "two.cer_capped": 1.0}] * 2
    summary = summarise([line("a", 0.5, parts=part) for part in parts])
    assert {name for name in summary if "above" in name} == {"one.cer_above_0.3", "two.cer_above_0.3"}
    assert (summary["one.cer_above_0.3"], summary["two.cer_above_0.3"]) == (0, 1)
    assert not [name for name in summarise([line("a", 0.5, parts={"seconds": 1.0})]) if "above" in name]


def test_ends_and_violations_are_counted():
    lines = [line("a", 0.5), line("b", 0.5, stop_reason="length", frames=20), line("c", 0.0, notes={"violation": "x"})]
    summary = summarise(lines)
    assert summary["eos_rate"] == pytest.approx(2 / 3)
    assert summary["violation_rate"] == pytest.approx(1 / 3)
    assert summary["frames"] == pytest.approx(40 / 3)
    assert "x" not in summary["parts"]
    assert all(math.isfinite(value) for value in summary["parts"].values())


def test_one_clip_a_row_leaves_a_wider_interval_than_many():
    random = np.random.default_rng(0)
    truth = random.uniform(0.3, 0.9, 40)

    def width(samples: int) -> float:
        before, after = (
            [
                line(f"r{i}", float(np.clip(t + shift + random.normal(0, 0.2), 0, 1)), sample=k)
                for i, t in enumerate(truth)
                for k in range(samples)
            ]
            for shift in (0, 0.03)
        )
        result = compare(before, after)
        return result["high"] - result["low"]

    assert width(8) < 0.7 * width(1)
