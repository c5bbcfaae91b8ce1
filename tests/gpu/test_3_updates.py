"""Two updates by the launcher, with the engine asleep while the actor trains."""

import pytest

from verl_tts.data.quickstart import write_quickstart

from ..loop.runs import Inputs, explain, start

pytestmark = [pytest.mark.gpu_engine, pytest.mark.timeout(1800)]


def test_two_updates(model, platform, rung, tmp_path):
    data = tmp_path / "data"
    write_quickstart(data, model)
    inputs = Inputs(model, data / "train.parquet", data / "val.parquet", data / "speaker.json")
    run = start(
        tmp_path / "run",
        inputs,
        f"tts.platform={platform}",
        f"actor_rollout_ref.rollout.free_cache_engine={str(platform == 'cuda').lower()}",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "tts.rpc_timeout_s=300",
        steps=2,
        timeout_s=1500,
    )
    assert run.returncode == 0, explain(run)
    steps = run.metrics
    for step, metrics in steps.items():
        rung[f"step_{step}"] = {
            name: metrics[name] for name in ("timing_s/step", "gate/logprob_max_abs", "gate/logprob_mean_abs")
        }
    assert set(steps) == {1, 2}
    assert not run.leftovers
