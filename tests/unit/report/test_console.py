"""A quiet terminal and a whole log.

Descriptors 1 and 2 are the process's own, so each case is a process of its own whose output is looked at.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from verl_tts.report.console import step_line, validation_line

HEAD = """
import os, subprocess, sys
from pathlib import Path
from verl_tts.report.console import output_to
log = Path(sys.argv[1])
descriptors = lambda: sorted(os.listdir("/proc/self/fd"))
"""


def run(program: str, log: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", HEAD + program, log], capture_output=True, text=True, timeout=60)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "train.log"


def test_the_terminal_gets_what_is_said_and_the_log_gets_everything(log):
    done = run(
        """
print("before")
with output_to(log) as say:
    print("a print")
    print("a warning", file=sys.stderr)
    os.write(1, b"from C\\n")
    subprocess.run([sys.executable, "-c", "import sys; print('a child'); print('its error', file=sys.stderr)"])
    say("step 1/2 \u0928\u092e\u0938\u094d\u0924\u0947")
print("after")
print("after, error", file=sys.stderr)
""",
        log,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["before", "step 1/2 नमस्ते", "after"]
    assert done.stderr.splitlines() == ["after, error"]
    lines = log.read_text().splitlines()
    assert sorted(lines) == sorted(["a print", "a warning", "from C", "a child", "its error", "step 1/2 नमस्ते"]), (
        "and nothing of before or after"
    )


def test_a_log_is_appended_to(log):
    log.write_text("attempt 0\n")
    run("with output_to(log) as say: say('attempt 1')", log)
    assert log.read_text() == "attempt 0\nattempt 1\n"


def test_an_exception_gives_the_terminal_back(log):
    done = run(
        """
before = descriptors()
try:
    with output_to(log):
        print("half a line", end="")
        raise KeyError("stop")
except KeyError:
    print("caught")
assert descriptors() == before, (descriptors(), before)
raise SystemExit("at the end")
""",
        log,
    )
    assert (done.stdout, done.stderr) == ("caught\n", "at the end\n")
    assert log.read_text() == "half a line"


def test_a_log_that_cannot_be_opened_leaves_the_terminal_as_it_is(log):
    done = run(
        """
before = descriptors()
try:
    with output_to(log / "no" / "folder"):
        pass
except OSError:
    print("refused")
assert descriptors() == before, (descriptors(), before)
""",
        log,
    )
    assert (done.stdout, done.stderr) == ("refused\n", "")


METRICS = {
    "reward/mean": 0.4123,
    "rollout/frames/mean": 28.61,
    "rollout/eos_rate": 0.9375,
    "rollout/groups_dropped": 0,
    "actor/kl_loss": 0.00312,
    "gate/logprob_max_abs": 2.1e-6,
    "timing_s/step": 11.24,
}


def test_a_step_is_one_line():
    line = step_line(12, 40, METRICS)
    assert line == "step 12/40  reward 0.412  frames 28.6  eos 94 %  kl 0.0031  log-prob gap 2.1e-06  11.2 s"


def test_a_step_without_kl_or_with_dropped_groups_says_so():
    metrics = {name: value for name, value in METRICS.items() if name != "actor/kl_loss"}
    line = step_line(1, 2, metrics | {"rollout/groups_dropped": 2})
    assert "kl" not in line
    assert line.endswith("11.2 s  2 group(s) dropped")


def test_a_validation_names_each_source_with_its_mean():
    metrics = {"val-core/hindi/reward/mean@1": 0.5, "val-core/google/fleurs/reward/mean@1": 0.25}
    line = validation_line(20, metrics | {"val-aux/hindi/cer/mean@1": 9})
    assert line == "validation at step 20  hindi 0.500  google/fleurs 0.250"


def test_a_validation_of_several_samples_a_prompt_shows_their_mean_and_not_the_best():
    """verl files mean, best-of and majority under the same heading."""
    core = "val-core/hindi/reward"
    metrics = {f"{core}/mean@4": 0.5, f"{core}/best@4/mean": 0.9, f"{core}/best@4/std": 0.1, f"{core}/maj@4/mean": 0.7}
    assert validation_line(20, metrics) == "validation at step 20  hindi 0.500"
