"""It learns: two targets in one data set, told apart by the text alone."""

import pytest

from .learning import BUILDERS, TARGET_SECONDS, learn, rise, write_inputs
from .runs import Run, explain

pytestmark = pytest.mark.loop


@pytest.fixture(scope="module", params=["qwen3_tts", pytest.param("moss", marks=pytest.mark.slow)])
def learned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Each policy, by its own tiny checkpoint."""
    directory = tmp_path_factory.mktemp("learning")
    BUILDERS[request.param](directory / "model")
    return learn(directory / "run", write_inputs(directory / "data", directory / "model"))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("group", TARGET_SECONDS)
def test_each_group_rises_beyond_chance(learned: Run, group: str) -> None:
    """The lower end of the paired 95 % bootstrap interval is above three standard errors of step 0."""
    assert learned.returncode == 0, explain(learned)
    mean, lower, bar = rise(learned, group)
    assert lower > bar, f"{group}: rise {mean:.3f}, at least {lower:.3f}, needed {bar:.3f}"


def test_log_probs_agree_in_bf16_through_all_updates(learned: Run) -> None:
    """By mean; the largest of some 3000 differences grows with the logits of a policy that is driven this hard."""
    steps = [line for step, line in learned.metrics.items() if step > 0]
    assert max(line["gate/logprob_mean_abs"] for line in steps) < 0.01
    assert max(line["gate/logprob_max_abs"] for line in steps) < 0.25
