"""A scorer that hangs, and one that answers nonsense, in the middle of a step; one that dies is in test_faults.py.

Each ends the run with its own error, within the bound, with the last checkpoint as it was, and the run goes on where it
was once a scorer is well again.
"""

from collections.abc import Callable

import pytest

from verl_tts.checkpoints.manifest import newest_valid

from .conftest import HANGING_S, RETRIES
from .fickle import NONSENSE, Fickle
from .runs import Run, explain

pytestmark = pytest.mark.loop

ENDING_S = 30.0  # from the error to the last line: the processes of the run have to end


def test_a_scorer_that_hangs_ends_the_run_with_three_and_names_sample_and_attempts(lora: Run, fickle: Fickle) -> None:
    assert lora.returncode == 3, explain(lora)
    assert lora.lines[-1].startswith(f"verl_tts: {fickle.url}: sample "), lora.lines[-1]
    assert f"has no score after {RETRIES + 1} attempts: no complete answer within 4 s" in lora.lines[-1]
    assert "Traceback" not in "\n".join(lora.lines)


def test_a_scorer_that_hangs_is_noticed_within_its_attempts(
    lora: Run, fickle: Fickle, record_property: Callable[[str, float], None]
) -> None:
    record_property("seconds from the first request that hung to the last line", fickle.seconds["hangs"])
    assert HANGING_S - 1 < fickle.seconds["hangs"] < HANGING_S + ENDING_S, explain(lora)


def test_nonsense_ends_the_run_with_three_at_once_and_is_shown(lied_to: Run, fickle: Fickle) -> None:
    assert lied_to.returncode == 3, explain(lied_to)
    assert lied_to.lines[-1].startswith(f"verl_tts: {fickle.url}: sample "), lied_to.lines[-1]
    assert "has no score after 1 attempt: the answer is not JSON" in lied_to.lines[-1]
    assert NONSENSE.decode() in lied_to.lines[-1]
    assert fickle.seconds["lies"] < ENDING_S
    assert "Traceback" not in "\n".join(lied_to.lines)


@pytest.mark.parametrize("run", ["lora", "lied_to"])
def test_the_last_checkpoint_survives_and_nothing_is_left_behind(run: str, request: pytest.FixtureRequest) -> None:
    stopped: Run = request.getfixturevalue(run)
    # That of the last step that has its line: the one in whose middle the run was stopped has neither.
    assert newest_valid(stopped.directory / "checkpoints") == (stopped.checkpoint(max(stopped.metrics)), [])
    assert stopped.leftovers == []
    assert stopped.shared_memory == []


def test_a_run_whose_scorer_died_goes_on_with_the_next_step(lied_to: Run) -> None:
    assert "ready: training from step 4 to 30" in lied_to.lines
    assert [lied_to.metrics[step]["attempt"] for step in (1, 2, 3, 4)] == [0, 0, 0, 1]


def test_a_run_that_was_lied_to_goes_on_with_the_next_step_to_its_end(lied_to: Run, believed: Run) -> None:
    assert believed.returncode == 0, explain(believed)
    assert list(believed.metrics) == [*lied_to.metrics, max(lied_to.metrics) + 1], "none is missing or there twice"
    assert believed.metrics[max(believed.metrics)]["attempt"] == 2
