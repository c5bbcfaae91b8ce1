"""The names that a configuration may use are those that verl has registered: no more, and no fewer."""

from verl_tts.config import validate
from verl_tts.report import trackers


def test_estimators_are_verls_but_for_those_that_are_refused_with_a_reason() -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    assert {*validate.ESTIMATORS, "gae", "gdpo", "remax"} == {str(name) for name in ADV_ESTIMATOR_REGISTRY}


def test_policy_losses_are_verls() -> None:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    assert set(validate.POLICY_LOSSES) == set(POLICY_LOSS_REGISTRY)


def test_loggers_are_verls() -> None:
    from verl.utils.tracking import Tracking

    assert sorted(trackers.PACKAGES) == sorted(Tracking.supported_backend)
