"""What is refused or over before Ray is started; the run itself is in tests/loop."""

import json
from pathlib import Path
from typing import Any

import pytest

from verl_tts import launch
from verl_tts.checkpoints.manifest import write_manifest
from verl_tts.config.compose import compose
from verl_tts.data.quickstart import write_quickstart
from verl_tts.errors import CheckpointError, ConfigError, DataError, ScorerUnavailable


@pytest.fixture
def overrides(tiny_checkpoint: Path, tmp_path: Path) -> list[str]:
    write_quickstart(tmp_path / "data", tiny_checkpoint)
    return [
        "tts.platform=cpu",
        f"tts.output_dir={tmp_path / 'run'}",
        f"actor_rollout_ref.model.path={tiny_checkpoint}",
        f"data.train_files={tmp_path / 'data' / 'train.parquet'}",
        f"data.val_files={tmp_path / 'data' / 'val.parquet'}",
        f"tts.speaker_path={tmp_path / 'data' / 'speaker.json'}",
    ]


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", refuse)


def checkpoint(run: Path, step: int, world_size: int) -> Path:
    """A whole checkpoint as far as its manifest goes."""
    directory = run / "checkpoints" / f"global_step_{step}"
    (directory / "actor").mkdir(parents=True)
    for rank in range(world_size):
        (directory / "actor" / f"model_world_size_{world_size}_rank_{rank}.pt").write_bytes(b"shard")
    write_manifest(directory, step=step)
    (run / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
    return directory


@pytest.mark.usefixtures("no_ray")
def test_a_scorer_that_is_down_is_found_before_anything_is_started_or_written(
    overrides: list[str], tmp_path: Path
) -> None:
    config = compose([*overrides, "tts.reward.scorer_url=http://127.0.0.1:9/score", "tts.reward.startup_timeout_s=0.2"])
    with pytest.raises(ScorerUnavailable, match=r"http://127\.0\.0\.1:9"):
        launch.run(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_ray")
def test_a_finished_run_says_so_and_starts_nothing(
    overrides: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path / "run", step=8, world_size=1)
    launch.run(compose([*overrides, "trainer.total_training_steps=8"]))
    assert "nothing to do: trainer.total_training_steps=8, and step 8 is done" in capfd.readouterr().out


@pytest.mark.usefixtures("no_ray")
def test_a_checkpoint_of_another_number_of_workers_is_refused_with_both_numbers(
    overrides: list[str], tmp_path: Path
) -> None:
    checkpoint(tmp_path / "run", step=8, world_size=2)
    with pytest.raises(CheckpointError, match=r"written by 2 actor worker\(s\), this run has 1"):
        launch.run(compose([*overrides, "trainer.total_training_steps=9"]))


def test_a_cluster_that_cannot_be_joined_is_the_users_to_mend(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: Any, **__: Any) -> None:
        raise ConnectionError("nobody is there")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("ray.init", cannot)
    with (
        pytest.raises(ConfigError, match=r"RAY_ADDRESS=10\.0\.0\.1:6379 cannot be joined"),
        launch.ray_cluster(compose(overrides)),
    ):
        pass


def test_every_prompt_is_measured_with_the_models_own_tokenizer(overrides: list[str]) -> None:
    config = compose([*overrides, "data.max_prompt_length=60"])
    with pytest.raises(DataError, match=r"row \S+ has \d+ tokens, data.max_prompt_length=60"):
        launch.check_prompts(config)


def test_a_prompt_becomes_what_the_policy_is_given(overrides: list[str]) -> None:
    from verl_tts.data.quickstart import quickstart_rows

    conditioner = launch.check_prompts(compose([*overrides, "data.max_prompt_length=256"]))
    english, hindi = quickstart_rows()["train"][:2]
    assert conditioner(english).language_id == 2050
    assert conditioner(hindi).language_id is None
    assert conditioner(english).speaker_H.shape == (64,)
