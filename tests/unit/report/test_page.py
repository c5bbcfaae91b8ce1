"""The report page of runs that were simulated: its numbers, its size, and runs that are not as they should be."""

import json
import re
import shutil
import time
from pathlib import Path

import pytest
import soundfile
from markupsafe import escape

from tests.unit.report import simulated
from tests.unit.report.page_numbers import Files, PageNumbers
from tests.unit.report.simulated import HOSTILE, simulate
from verl_tts.commands import main
from verl_tts.report.page import figure, signed, write_report

KINDS = {"val", "overall", "clip", "row", "score-change", "probe-change", "probe", "distribution", "endings"}
KINDS |= {"metric", "metrics", "throughput", "scorer", "run"}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    directory = tmp_path_factory.mktemp("simulated") / "run-a"
    simulate(directory, steps=12, val_freq=3, val_rows=10, samples=2)
    return directory


@pytest.fixture(scope="module")
def page(run_dir: Path) -> str:
    out = run_dir.parent / "page.html"
    write_report(run_dir, out)
    return out.read_text(encoding="utf-8")


def report(run_dir: Path, *options: str) -> tuple[int, str]:
    out = run_dir.parent / f"{run_dir.name}.html"
    code = main(["report", str(run_dir), "--out", str(out), *options])
    return code, out.read_text(encoding="utf-8") if out.exists() else ""


# ------------------------------------------------------------------ numbers


def test_every_number_on_the_page_is_the_one_computed_from_the_files(page: str, run_dir: Path) -> None:
    files, found = Files(run_dir), PageNumbers(page).found
    assert {of.partition("/")[0] for of, _, _ in found} == KINDS
    assert len(found) > 500
    for of, value, _ in found:
        assert value == pytest.approx(files.expected(of), rel=1e-9, abs=1e-12), of


def test_what_is_shown_is_the_exact_value_rounded(page: str) -> None:
    for of, value, text in PageNumbers(page).found:
        if text is not None:
            shown = float(text.replace("\u2212", "-").replace(",", ""))
            assert shown == pytest.approx(value, rel=6e-3, abs=1e-12), of
            assert text in (figure(value), signed(value))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.34349, "0.343"),
        (28.62, "28.6"),
        (12800, "12,800"),
        (-0.5, "\u22120.500"),
        (1.234e-5, "1.23e\u22125"),
    ],
)
def test_a_number_is_shown_with_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_the_page_needs_nothing_but_itself(page: str) -> None:
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", page)
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_nothing_is_left_of_the_templates(page: str) -> None:
    assert not re.search(r"\{\{|\{%|Undefined|>None<|>nan<", page)


# ------------------------------------------------------------------ what it says


def test_the_alarm_of_a_probe_is_at_the_top(page: str) -> None:
    """The simulated policy games its scorer."""
    assert '<p class="big">alarm</p>' in page


def test_the_checkpoint_to_keep_meets_the_constraint(run_dir: Path) -> None:
    _, free = report(run_dir, "--keep", "none")
    _, strict = report(run_dir, "--keep", "cer<=0.3")
    assert kept_in(free) == "step 12"
    assert kept_in(strict) == "step 9"
    assert "Step 12 scores higher, but it breaks cer \u2264 0.3." in strict


def kept_in(page: str) -> str:
    return re.search(r'Checkpoint to keep</span>\s*<p class="big">([^<]+)', page)[1]  # type: ignore[index]


def test_two_runs_are_compared_over_the_prompts_that_both_have(run_dir: Path) -> None:
    other = run_dir.parent / "run-b"
    if not other.exists():
        simulate(other, steps=6, val_freq=3, val_rows=12, seed=1)
    code, page = report(run_dir, "--compare", str(other))
    assert code == 0
    assert "over the 10 prompts that both have" in page
    found = {of: value for of, value, _ in PageNumbers(page).found}
    assert found["compare/score/mean"] == pytest.approx(found["compare/score/here"] - found["compare/score/there"])


def test_the_document_is_named(page: str) -> None:
    assert "docs/reading_a_run.md" in page


# ------------------------------------------------------------------ size


def test_two_hundred_steps_of_32_samples_are_a_page_under_20_mb_in_under_20_s(tmp_path: Path, monkeypatch) -> None:
    encoded: dict[tuple[int, float], bytes] = {}
    encode = soundfile.write

    def write(file: Path, samples_S, *args, **kwargs) -> None:
        """The same clips come again and again: each is encoded once."""
        key = len(samples_S), float(samples_S[-1])
        if key not in encoded:
            encode(file, samples_S, *args, **kwargs)
            encoded[key] = file.read_bytes()
        file.write_bytes(encoded[key])

    with monkeypatch.context() as patched:
        patched.setattr(soundfile, "write", write)
        run = simulate(tmp_path / "big", steps=200, val_freq=1, val_rows=32, train_kept=0, seconds=(0.2, 0.9))
    assert len(list(run.samples.rglob("*.flac"))) > 6000
    began = time.process_time()  # this machine may be busy with other things
    code, page = report(run.path)
    assert time.process_time() - began < 20
    assert code == 0
    assert len(page.encode()) < 20e6
    assert "Curves show 60 of 201 validations" in page


def test_clips_beyond_the_limit_are_left_out_and_counted(run_dir: Path) -> None:
    _, page = report(run_dir, "--audio-mb", "0.05")
    sounds = json.loads(re.search(r'id="clips">(.*?)</script>', page)[1])  # type: ignore[index]
    assert 0 < sum(map(len, sounds.values())) <= 0.05e6
    assert "chosen clips are left out: the limit of 0.05 MB is reached" in page
    assert "not in this file" in page


# ------------------------------------------------------------------ runs that are not as they should be


@pytest.fixture
def copy(run_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_dir, tmp_path / "copy"))


def test_a_run_without_validations_shows_its_training_samples(copy: Path) -> None:
    shutil.rmtree(copy / "samples/val")
    code, page = report(copy)
    assert code == 0
    assert "what follows are training samples" in page
    assert "training step 12" in page
    numbers_hold(page, copy)


def test_a_run_without_samples_shows_its_metrics(copy: Path) -> None:
    shutil.rmtree(copy / "samples")
    code, page = report(copy)
    assert code == 0
    assert "No clip was kept" in page
    numbers_hold(page, copy)


def test_a_run_of_one_validation_has_no_change_to_speak_of(tmp_path: Path) -> None:
    run = simulate(tmp_path / "one", steps=0, total_steps=40)
    code, page = report(run.path)
    assert code == 0
    assert "there is no change to speak of" in page
    assert "0 of 40 updates are done" in page
    numbers_hold(page, run.path)


def test_a_run_that_was_killed_before_its_first_step_has_a_page(tmp_path: Path) -> None:
    simulate(tmp_path / "fresh", steps=0, val_freq=0)
    code, page = report(tmp_path / "fresh")
    assert code == 0
    assert "This run has not ended a step" in page


def test_one_prompt_gives_no_interval_and_a_page(tmp_path: Path) -> None:
    run = simulate(tmp_path / "lone", steps=2, val_freq=1, val_rows=1)
    code, page = report(run.path)
    assert code == 0
    assert "Too few prompts in common" in page


def test_clips_whose_files_are_gone_keep_their_numbers(copy: Path) -> None:
    for file in copy.rglob("*.flac"):
        file.unlink()
    code, page = report(copy)
    assert code == 0
    assert re.search(r"\d+ chosen clips have no file that can be read", page)
    numbers_hold(page, copy)


def test_a_torn_clip_and_torn_lines_are_left_out(copy: Path) -> None:
    for file in copy.rglob("*.flac"):
        file.write_bytes(file.read_bytes()[:30])
    for file in (copy / "metrics.jsonl", *copy.rglob("samples.jsonl")):
        file.write_bytes(file.read_bytes() + b'{"step": 13, "id": "row')
    code, page = report(copy)
    assert code == 0
    assert "updates done" in page


def test_metrics_that_are_not_finite_are_named(copy: Path) -> None:
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines[4] |= {"actor/grad_norm": None, "non_finite": ["actor/grad_norm"]}
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, page = report(copy)
    assert code == 0
    assert "actor/grad_norm in 1 line(s)" in page
    numbers_hold(page, copy)


def test_a_resumed_run_says_how_often_it_was_started_and_what_was_changed(copy: Path) -> None:
    config = (copy / "config.yaml").read_text()
    (copy / "config.1.yaml").write_text(config.replace("lr: 5.0e-06", "lr: 1.0e-06"))
    code, page = report(copy)
    assert code == 0
    assert "Changed at resume 1" in page
    assert re.search(r"optim\.lr</code>: <code>5e-06</code> → <code>1e-06", page)


def test_what_somebody_asked_for_help_needs_to_know_is_on_the_page(run_dir: Path, page: str) -> None:
    """The model, the settings, the versions, a sample of the data, the numbers."""
    versions = json.loads((run_dir / "versions.json").read_text())
    packages = {name: version for name, version in versions["packages"].items() if version}
    assert f"Made with Python {versions['python']} on {versions['platform']}" in page
    assert all(f"{name} {version}" in page for name, version in packages.items())
    assert "<dt>model</dt><dd>tiny</dd>" in re.sub(r">\s+<", "><", page)
    assert re.search(
        r"<code>actor_rollout_ref\.actor\.optim\.lr</code></th><td><code>[^<]+</code></td><td><code>5e-06", page
    )
    assert simulated.TEXTS[0] in page


def test_prompts_are_text_whatever_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "TEXTS", HOSTILE)
    run = simulate(tmp_path / "<b>run</b>", steps=2, val_freq=1, val_rows=len(HOSTILE))
    code, page = report(run.path)
    assert code == 0
    assert page.count("<script") == 2  # the clips and the page's own
    assert "<img" not in page
    assert "<b>run" not in page
    assert str(escape(HOSTILE[1])) in page
    assert "{{ 7 * 7 }}" in page
    numbers_hold(page, run.path)


def numbers_hold(page: str, run_dir: Path) -> None:
    files = Files(run_dir)
    for of, value, _ in PageNumbers(page).found:
        assert value == pytest.approx(files.expected(of), rel=1e-9, abs=1e-12), of


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--keep", "cer<first"], "has to be PART<=LIMIT, PART>=LIMIT or none"),
        (["--keep", "mos>=3"], "validations have no part mos; they have score, eos, cer"),
        (["--audio-mb", "-1"], "has to be between 0 and 1000"),
        (["--out", "/nowhere/page.html"], "there is no directory /nowhere"),
        (["--out", "/tmp"], "--out /tmp is a directory"),
        (["--compare", "/nowhere"], "is no directory; name the OUTPUT_DIR of a run"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run_dir: Path, options: list[str], says: str, capsys) -> None:
    assert main(["report", str(run_dir), "--out", str(run_dir.parent / "never.html"), *options]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_directory_without_a_run_is_one_line(tmp_path: Path, capsys) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_config_that_is_no_yaml_is_one_line(copy: Path, capsys) -> None:
    (copy / "config.yaml").write_text("a: [1, 2\n  b: }")
    assert main(["report", str(copy), "--out", str(copy.parent / "x.html")]) == 2
    assert "config.yaml cannot be read" in capsys.readouterr().err
