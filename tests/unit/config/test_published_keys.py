"""Everything that the two published launchers set composes here; their overrides lie in published/."""

import logging
from pathlib import Path

import pytest

from verl_tts.config.compose import PUBLISHED_CLIENT, compose, published_keys, tts_config
from verl_tts.config.compose import _parse as parse

PUBLISHED = Path(__file__).parent / "published"
PLACES = {"SCORER_URL": "http://scorer:18080/score", "OUTPUT_DIR": "runs/hindi"}
REWARD_KWARGS = "reward.custom_reward_function.reward_kwargs"


def overrides_of(launcher: str) -> list[str]:
    words = (PUBLISHED / f"{launcher}.txt").read_text().split("\n")
    for place, value in PLACES.items():
        words = [word.replace(place, value) for word in words]
    return [word for word in words if word]


def test_the_table_has_exactly_the_keys_of_the_published_launchers():
    keys = {parse(word)[0] for launcher in ("generic", "hindi") for word in overrides_of(launcher)}
    assert set(published_keys()) == keys


def test_every_rule_is_one_of_the_four_kinds():
    for key, rule in published_keys().items():
        assert rule == "same" or set(rule) in ({"ignored"}, {"to"}, {"values"}, {"to", "values"}), key


@pytest.fixture(scope="module", params=["generic", "hindi"])
def published(request):
    """The Hindi launcher adds to the generic one."""
    words = overrides_of("generic") + (overrides_of("hindi") if request.param == "hindi" else [])
    return request.param, compose(["tts.platform=cuda", *words])


def test_published_places_become_ours(published):
    _, config = published
    tts = tts_config(config)
    assert tts.speaker_path == "SPK_EMBED_PATH"
    assert tts.language == "Auto"
    assert tts.model == config.actor_rollout_ref.model.model_type == "qwen3_tts"
    assert tts.output_dir == "runs/hindi"
    assert config.trainer.default_local_dir == "runs/hindi/checkpoints"
    assert tts.reward.urls == ("http://scorer:18080/score",)
    assert (tts.reward.timeout_s, tts.reward.max_retries, tts.reward.retry_backoff_s) == (120.0, 2, 0.5)
    assert config.reward.custom_reward_function.path is None
    assert config.actor_rollout_ref.rollout.agent.default_agent_loop == "qwen3_tts"


def test_published_values_arrive(published):
    launcher, config = published
    actor = config.actor_rollout_ref.actor
    seen = (actor.optim.lr, actor.kl_loss_coef, actor.kl_loss_type, config.actor_rollout_ref.rollout.top_k)
    assert seen == {"generic": (1e-6, 0.12, "low_var_kl", -1), "hindi": (5e-6, 0.08, "k3", 50)}[launcher]


def test_lora_turns_fsdp_into_fsdp2_and_full_training_keeps_it(published):
    launcher, config = published
    strategy = {"generic": "fsdp", "hindi": "fsdp2"}[launcher]
    assert config.actor_rollout_ref.actor.strategy == config.actor_rollout_ref.ref.strategy == strategy
    assert config.tts.trainable == {"generic": "full", "hindi": "lora"}[launcher]


def test_what_is_mapped_or_ignored_is_said_once(caplog):
    with caplog.at_level(logging.INFO):
        compose(["tts.platform=cpu", "actor_rollout_ref.rollout.layered_summon=true", "+hydra.run.dir=outputs"])
    assert [record.message for record in caplog.records] == [
        "actor_rollout_ref.rollout.layered_summon=True is ignored: weights are always sent tensor by tensor",
        "hydra.run.dir=outputs is ignored: no Hydra output directory is made",
    ]


@pytest.mark.parametrize("path", ["reward.py", "pkg://my_rewards"])
def test_arguments_of_a_users_own_function_stay_its_own(path):
    config = compose([
        f"reward.custom_reward_function.path={path}", f"+{REWARD_KWARGS}.timeout=3", f"+{REWARD_KWARGS}.weight=2"
    ])  # fmt: skip
    assert config.reward.custom_reward_function.reward_kwargs == {"timeout": 3, "weight": 2}
    assert config.tts.reward.timeout_s == 120.0


def test_arguments_of_the_published_client_are_those_of_ours():
    config = compose([f"reward.custom_reward_function.path={PUBLISHED_CLIENT}", f"+{REWARD_KWARGS}.timeout=3"])
    assert config.tts.reward.timeout_s == 3.0
    assert config.reward.custom_reward_function.reward_kwargs == {}
