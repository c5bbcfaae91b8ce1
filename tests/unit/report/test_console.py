"""A quiet terminal and a whole log.

Descriptors 1 and 2 are the process's own, so each case is a process of its own whose output is looked at.
"""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from verl_tts.report.console import Clip, duration, phases_line, step_line, validation_table

HEAD = """
import os, subprocess, sys
from pathlib import Path
from verl_tts.report.console import Line, output_to
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
    say(Line("step 1/2 \u0928\u092e\u0938\u094d\u0924\u0947"))
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


def test_a_log_that_cannot_be_written_ends_the_run_with_its_name_and_gives_the_terminal_back():
    done = run(
        """
from verl_tts.errors import RunStopped
try:
    with output_to(log) as say:
        say(Line("step 1/2"))
except RunStopped as error:
    print("stopped:", error)
""",
        Path("/dev/full"),
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout == "stopped: cannot write /dev/full: No space left on device; free space on its disk and resume\n"
    )


def test_a_log_is_appended_to(log):
    log.write_text("attempt 0\n")
    run("with output_to(log) as say: say(Line('attempt 1'))", log)
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


def test_a_step_says_how_long_the_others_will_take():
    assert step_line(12, 40, METRICS, 315).endswith("11.2 s  5 min left")
    assert step_line(40, 40, METRICS, 0.0).endswith("11.2 s")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3599, "1 h 0 min"), (4800, "1 h 20 min"), (273_600, "3 d 4 h")],
)
def test_a_duration_has_two_units_at_most(seconds, text):
    assert duration(seconds) == text


def test_the_phases_of_a_step_come_largest_first():
    line = phases_line({"share/update": 0.2, "share/rollout": 0.75, "share/other": 0.05, "reward/mean": 1.0})
    assert line == "rollout 75 %  update 20 %  other 5 %"


def test_a_validation_is_a_table_by_source_with_its_best_and_worst_clip():
    parts = {"whisper/cer": 0.25}
    clips = [
        Clip("hi-1#0", "hindi", 0.5, 20, True, parts, Path("samples/val/step_20/hi-1_0.flac")),
        Clip("en-1#0", "english", 1.0, 40, True, {"whisper/cer": 0.0}, Path("samples/val/step_20/en-1_0.flac")),
        Clip("en-2#0", "english", 0.0, 0, False, {}, None),
    ]
    assert validation_table(20, clips, seconds=1.5, kl=0.0031).splitlines() == [
        "validation at step 20      clips   score     cer     eos  frames      kl clips/s",
        "  all                          3   0.500   0.125    67 %    20.0  0.0031     2.0",
        "  english                      2   0.500   0.000    50 %    20.0",
        "  hindi                        1   0.500   0.250   100 %    20.0",
        "  best 1.000 en-1#0 samples/val/step_20/en-1_0.flac",
        "  worst 0.000 en-2#0 (no audio)",
    ]


@pytest.mark.parametrize(
    ("console", "shown"),
    [
        ("quiet", ["done", "careful"]),
        ("normal", ["ready", "step 1/2", "done", "careful"]),
        ("verbose", ["ready", "step 1/2", "rollout 50 %", "done", "careful"]),
    ],
)
def test_the_terminal_gets_the_kinds_of_lines_that_were_asked_for_and_the_log_gets_all(log, console, shown):
    done = run(
        f"""
with output_to(log, {console!r}) as say:
    say("ready")
    say(Line("step 1/2", "step"))
    say(Line("rollout 50 %", "detail"))
    say(Line("done", "result"))
    say(Line("careful", "warning"))
""",
        log,
    )
    assert done.stdout.splitlines() == shown
    assert log.read_text().splitlines() == ["ready", "step 1/2", "rollout 50 %", "done", "careful"]


def test_on_a_terminal_a_step_takes_the_place_of_the_one_before(log):
    """Everything else stays, and the last step does."""
    program = """
with output_to(log) as say:
    for line in (Line("ready"), Line("step 1/3", "step"), Line("step 2/3", "step"), Line("a warning", "warning"),
                 Line("step 3/3", "step")):
        say(line)
"""
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", HEAD + program, log], stdout=theirs, check=True, timeout=60)
    os.close(theirs)
    shown = os.read(ours, 4096).decode().replace("\r\n", "\n")
    os.close(ours)
    over = "\r\x1b[K"
    assert shown == f"ready\nstep 1/3{over}step 2/3{over}a warning\nstep 3/3\n"
    assert log.read_text().splitlines() == ["ready", "step 1/3", "step 2/3", "a warning", "step 3/3"]
