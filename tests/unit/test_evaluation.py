"""An evaluation with its engine replaced: what is sampled, what is asked of the scorer, and how it goes on.

The engine itself is in tests/recipes: there an evaluation is held against the validation of a run, bit for bit.
"""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from tests import scorer_rig
from verl_tts.config.compose import compose
from verl_tts.data.prompts import read_prompts, write_prompts
from verl_tts.errors import CheckpointError, ConfigError, DataError, ScorerError, TTSError
from verl_tts.evaluation import OF_THE_RUN, VAL, Request, compose_evaluation, evaluate
from verl_tts.report.run_dir import read_jsonl
from verl_tts.rewards.protocol import Clip
from verl_tts.rollout.seeds import sample_seed
from verl_tts.scorers.app import ServerSettings, create_app
from verl_tts.scorers.base import fingerprint_of
from verl_tts.types import CodecRollout, PromptRow, Waveform

ROWS = 4


class Judge:
    """A scorer that counts what it is asked, and breaks after so many clips."""

    name, version, model, revision = "judge", "1", None, None
    score_range = (0.0, 1.0)
    part_names = ("cer",)
    details: dict[str, object] = {}

    def __init__(self, breaks_after: int | None = None, version: str = "1") -> None:
        self.asked: Counter[str] = Counter()
        self.breaks_after, self.version = breaks_after, version

    def fingerprint(self) -> str:
        return fingerprint_of(name=self.name, version=self.version)

    def check(self, clip: Clip) -> None:
        pass

    def score_batch(self, clips):
        answers = []
        for clip in clips:
            if self.breaks_after is not None and self.asked.total() >= self.breaks_after:
                raise RuntimeError("out of memory")
            self.asked[clip.metadata["id"]] += 1
            answers.append({"score": 0.75, "cer": 0.25})
        return answers


class Engine:
    """In place of the rollout server: 0.2 s of noise for every request."""

    started: list["Engine"] = []

    def __init__(self, spec: Any, replica_rank: int) -> None:
        self.spec, self.requests, self.ended = spec, [], False
        self.weights = (Path(spec.model_path) / "config.json").read_text()
        Engine.started.append(self)

    async def launch(self) -> None:
        pass

    async def sample(self, request_id: str, **request: Any) -> tuple[CodecRollout, Waveform]:
        self.requests.append({"request_id": request_id, **request})
        random = np.random.default_rng(request["seed"])
        codes_FQ = random.integers(1, 2048, (3, 16))
        samples_S = random.normal(0, 0.1, 3 * 1920).astype(np.float32)
        tokens_T = np.array([*codes_FQ[:, 0], 2150])
        rollout = CodecRollout(tokens_T, codes_FQ, np.zeros(4, np.float32), "eos", request["seed"])
        return rollout, Waveform(samples_S, 24_000)

    async def shutdown(self) -> None:
        self.ended = True


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    Engine.started = []
    monkeypatch.setattr("verl_tts.rollout.server.RolloutServer", Engine)
    environment = dict(os.environ)
    yield
    # What the stages of an engine inherit was set in this very process.
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def serve():
    """``serve(judge)`` is the address of its scorer."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def start(judge: Judge) -> str:
            app = create_app(judge, ServerSettings(batch_size=1))
            return f"{stack.enter_context(scorer_rig.running(app))}/score"

        yield start


@pytest.fixture
def request_of(places, tmp_path):
    """A request on the tiny model; keywords change it."""
    data = tmp_path / "val.parquet"
    write_prompts(read_prompts(places["VAL_FILE"])[:ROWS], data)

    def make(scorer_url: str, **changes: Any) -> Request:
        fields = {"model": Path(places["MODEL_PATH"]), "data": data, "out": tmp_path / "out", "samples": 2}
        fields |= {"speaker": Path(places["SPK_EMBED_PATH"]), "overrides": ["tts.platform=cpu"]}
        return Request(**fields | {"scorer_url": scorer_url} | changes)

    return make


def test_every_row_is_spoken_with_the_prompt_the_sampling_and_the_noise_of_a_validation(request_of, serve, places):
    judge = Judge()
    words = ["tts.platform=cpu", "actor_rollout_ref.rollout.val_kwargs.top_k=7", "data.seed=5"]
    summary = evaluate(request_of(serve(judge), overrides=words))
    (started,) = Engine.started
    assert started.ended
    assert started.spec.model_path == places["MODEL_PATH"]
    assert started.spec.external_lib == ()  # neither verl nor Ray
    assert {(r["sample_id"], r["seed"]) for r in started.requests} == {
        (f"{row.id}#{k}", sample_seed(5, "val", row.id, k, None))
        for row in read_prompts(places["VAL_FILE"])[:ROWS]
        for k in range(2)
    }
    assert all(r["sampling_params"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 7} for r in started.requests)
    assert set(judge.asked.values()) == {2}
    assert (summary["rows"], summary["clips"], summary["score"]["mean"]) == (ROWS, 2 * ROWS, 0.75)
    assert (summary["cer_above_0.3"], summary["eos_rate"]) == (0, 1)


def test_guards_and_presets_count_as_in_training(request_of, serve):
    words = ["tts.platform=cpu", "tts.reward.guards.min_seconds=1.0", "tts.reward.violation_score=-2.0"]
    judge = Judge()
    summary = evaluate(request_of(serve(judge), overrides=words))
    assert (summary["score"]["mean"], summary["violation_rate"], summary["cer_above_0.3"]) == (-2.0, 1, 1)
    assert not judge.asked


def test_after_a_crash_no_clip_is_scored_again_and_the_engine_samples_what_is_missing(request_of, serve, tmp_path):
    first, second = Judge(breaks_after=3), Judge()
    with pytest.raises(ScorerError):
        evaluate(request_of(serve(first)))
    assert Engine.started[0].ended
    kept = {(line["id"], line["sample"]) for line in read_jsonl(tmp_path / "out/samples.jsonl")}
    assert 0 < len(kept) <= 3
    assert not (tmp_path / "out/summary.json").exists()

    summary = evaluate(request_of(serve(second)))
    assert second.asked.total() == 2 * ROWS - len(kept)
    assert not {(r["sample_id"]) for r in Engine.started[1].requests} & {f"{row}#{k}" for row, k in kept}
    assert summary["clips"] == 2 * ROWS


def test_a_finished_evaluation_is_only_summed_up_again(request_of, serve, tmp_path):
    judge = Judge()
    url = serve(judge)
    summary = evaluate(request_of(url))
    (tmp_path / "out/summary.json").unlink()
    assert evaluate(request_of(url)) == summary
    assert len(Engine.started) == 1
    assert judge.asked.total() == 2 * ROWS


def change_model(request: Request, tmp_path: Path) -> dict[str, Any]:
    shutil.copytree(request.model, tmp_path / "changed")
    (tmp_path / "changed/generation_config.json").write_text("{}")
    return {"model": tmp_path / "changed"}


def change_data(request: Request, tmp_path: Path) -> dict[str, Any]:
    write_prompts(read_prompts(request.data)[1:], tmp_path / "fewer.parquet")
    return {"data": tmp_path / "fewer.parquet"}


def change_speaker(request: Request, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "other.json").write_text(json.dumps([0.25] * 64))
    return {"speaker": tmp_path / "other.json"}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (change_model, "policy_sha256"),
        (change_data, "data_sha256"),
        (change_speaker, "speakers_sha256"),
        (lambda *_: {"samples": 3}, "samples"),
        (lambda *_: {"overrides": ["tts.platform=cpu", "data.seed=7"]}, "seed"),
        (lambda *_: {"overrides": ["tts.platform=cpu", f"{VAL}.temperature=0.5"]}, "temperature"),
        (lambda *_: {"overrides": ["tts.platform=cpu", "tts.reward.violation_score=-1"]}, "reward"),
    ],
)
def test_another_policy_prompt_speaker_or_setting_is_refused_in_the_same_directory(
    request_of, serve, tmp_path, change, key
):
    judge = Judge()
    url = serve(judge)
    evaluate(request_of(url))
    before = (tmp_path / "out/samples.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=f"holds an evaluation with {key}="):
        evaluate(request_of(url, **change(request_of(url), tmp_path)))
    assert (tmp_path / "out/samples.jsonl").read_bytes() == before
    assert len(Engine.started) == 1


def test_another_scorer_is_refused_in_the_same_directory_and_in_a_comparison(request_of, serve, tmp_path):
    url, other = serve(Judge()), serve(Judge(version="2"))
    evaluate(request_of(url))
    with pytest.raises(ConfigError, match="holds an evaluation with scorer_fingerprint="):
        evaluate(request_of(other))
    with pytest.raises(ConfigError, match="was made with scorer_fingerprint="):
        evaluate(request_of(other, out=tmp_path / "after", against=tmp_path / "out"))
    assert not (tmp_path / "after").exists()


def test_the_same_policy_with_the_same_noise_differs_by_nothing(request_of, serve, tmp_path):
    url = serve(Judge())
    evaluate(request_of(url))
    against = evaluate(request_of(url, out=tmp_path / "after", against=tmp_path / "out"))["against"]
    assert (against["difference"], against["excludes_zero"]) == (0, False)
    with pytest.raises(ConfigError, match="is the evaluation itself"):
        evaluate(request_of(url, against=tmp_path / "out"))


def test_a_row_is_spoken_by_its_own_speaker(request_of, serve, tmp_path):
    names = ("anna", "ben")
    for value, name in enumerate(names):
        (tmp_path / "speakers").mkdir(exist_ok=True)
        (tmp_path / f"speakers/{name}.json").write_text(json.dumps([float(value)] * 64))
    rows = [PromptRow(name, "Hello.", "val", 0, "test", "Hello.", speaker=name) for name in names]
    write_prompts(rows, tmp_path / "two.parquet")
    evaluate(request_of(serve(Judge()), data=tmp_path / "two.parquet", speaker=tmp_path / "speakers", samples=1))
    (started,) = Engine.started
    assert {r["sample_id"]: r["speaker"][0] for r in started.requests} == {"anna#0": 0.0, "ben#0": 1.0}
    assert {line["speaker"] for line in read_jsonl(tmp_path / "out/samples.jsonl")} == {*names}


def test_the_command_shows_how_far_it_is_and_what_came_out(request_of, serve, tmp_path, capfd):
    from verl_tts.commands import main

    request = request_of(serve(Judge()))
    words = ["--data", request.data, "--speaker", request.speaker, "--scorer-url", request.scorer_url]
    words = [*map(str, words), "--set", "tts.platform=cpu", "data.seed=3"]
    assert main(["evaluate", str(request.model), "--out", str(tmp_path / "a"), *words]) == 0
    out = capfd.readouterr().out.splitlines()
    assert any(line.startswith(f"{ROWS}/{ROWS} clips  score 0.750") for line in out)
    assert f"{ROWS} clips of {ROWS} rows" in out
    assert "cer_above_0.3  0.0 %" in out

    words += ["--out", str(tmp_path / "b"), "--against", str(tmp_path / "a")]
    assert main(["evaluate", str(request.model), *words]) == 0
    *_, against, _ = capfd.readouterr().out.splitlines()
    assert "0.7500 -> 0.7500, difference +0.0000" in against
    assert "not told from chance" in against

    assert main(["evaluate", str(request.model), *words, "--samples", "0"]) == 2
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("verl-tts"))
    assert line == "verl-tts evaluate: --samples 0 has to be 1 or more"


# ------------------------------------------------------------------ where settings come from


@pytest.fixture
def saved(places, tmp_path) -> Path:
    """The configuration of a run, as a run directory has it."""
    words = [
        "tts.platform=cuda",
        f"actor_rollout_ref.model.path={places['MODEL_PATH']}",
        "data.max_response_length=33",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0.9",
        "actor_rollout_ref.rollout.dtype=float32",
        "tts.language=English",
        f"tts.speaker_path={places['SPK_EMBED_PATH']}",
        "tts.reward.preset=cer_published",
        "tts.reward.scorer_url=http://far:1/score",
    ]
    path = tmp_path / "config.yaml"
    path.write_text(OmegaConf.to_yaml(compose(words), resolve=True))
    return path


def test_a_run_gives_its_sampling_and_its_reward_and_this_machine_the_rest(request_of, saved):
    config = compose_evaluation(request_of("http://here:1/score", config=saved, speaker=None, overrides=[]), None)
    assert config.trainer.device == "cpu"
    assert (config.data.max_response_length, config.actor_rollout_ref.rollout.dtype) == (33, "float32")
    assert config.actor_rollout_ref.rollout.val_kwargs.temperature == 0.9
    assert (config.tts.language, config.tts.reward.scorer_url) == ("English", "http://here:1/score")
    assert config.tts.reward.preset == "cer_published"
    assert config.tts.reward.compose.components.accuracy.part == "cer_capped"
    assert not config.tts.reward.guards.enforce


def test_what_is_set_by_hand_wins_and_another_preset_leaves_nothing_of_the_runs(request_of, saved):
    words = ["data.max_response_length=44", "tts.reward.preset=cer"]
    config = compose_evaluation(request_of("http://here:1/score", config=saved, overrides=words), None)
    assert config.data.max_response_length == 44
    assert config == compose_evaluation(
        request_of(
            "http://here:1/score",
            config=saved,
            overrides=[*words, "tts.reward.guards.enforce=true", "tts.reward.violation_score=-0.5"],
        ),
        None,
    )


def test_every_setting_that_is_taken_from_a_run_exists():
    config = compose(["tts.platform=cpu"])
    for key in OF_THE_RUN:
        parent, _, leaf = key.rpartition(".")
        assert leaf in OmegaConf.select(config, parent)


# ------------------------------------------------------------------ mistakes, before anything is started


def text_file(content: str, name: str):
    def write(tmp_path: Path) -> Path:
        (tmp_path / name).write_text(content)
        return tmp_path / name

    return write


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"samples": 0}, ConfigError, "--samples 0 has to be 1 or more"),
        ({"speaker": None}, ConfigError, "no speaker: name an embedding"),
        ({"speaker": Path("gone.json")}, DataError, r"gone\.json does not exist"),
        ({"model": Path("gone")}, CheckpointError, "the model gone is not a directory"),
        ({"data": Path("gone.parquet")}, DataError, r"gone\.parquet does not exist"),
        ({"data": text_file("hello", "a.parquet")}, DataError, "cannot be read as parquet"),
        ({"config": Path("gone.yaml")}, ConfigError, r"--config gone\.yaml cannot be read"),
        ({"config": text_file("a: [", "a.yaml")}, ConfigError, "cannot be read"),
        ({"config": text_file("a: 1", "b.yaml")}, ConfigError, "is no configuration of a run"),
        ({"against": Path("gone")}, ConfigError, "there is no evaluation"),
        ({"scorer_url": None}, ConfigError, "no scorer"),
        ({"scorer_url": "ftp://a"}, ConfigError, "is not an HTTP address"),
        ({"overrides": ["data.max_prompt_length=60"]}, DataError, "has [0-9]+ tokens, data.max_prompt_length=60"),
        ({"overrides": ["data.max_response_length=0"]}, ConfigError, "has to be between 1 and"),
        ({"overrides": ["tts.language=Klingon"]}, TTSError, "Klingon"),
        ({"overrides": ["data.sede=1"]}, ConfigError, "there is no setting data.sede"),
    ],
)
def test_a_mistake_is_found_before_the_engine_starts_and_leaves_no_directory(
    request_of, serve, tmp_path, changes, error, message
):
    changes = {name: value(tmp_path) if callable(value) else value for name, value in changes.items()}
    with pytest.raises(error, match=message) as raised:
        evaluate(request_of(**({"scorer_url": serve(Judge())} | changes)))
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)
    assert not Engine.started
    assert not (tmp_path / "out").exists()


def test_an_evaluation_does_not_go_into_the_model_that_it_is_of(request_of, serve, tmp_path):
    request = request_of(serve(Judge()))
    shutil.copytree(request.model, tmp_path / "model")
    with pytest.raises(ConfigError, match="lies inside"):
        evaluate(request_of(request.scorer_url, model=tmp_path / "model", out=tmp_path / "model/evaluation"))
    assert not (tmp_path / "model/evaluation").exists()


def test_a_scorer_that_nobody_has_started_ends_it_before_the_engine(request_of, tmp_path):
    words = ["tts.platform=cpu", "tts.reward.startup_timeout_s=0"]
    with pytest.raises(ScorerError, match="no scorer within 0 s"):
        evaluate(request_of(scorer_rig.unused_url(), overrides=words))
    assert not Engine.started
    assert not (tmp_path / "out").exists()


def test_a_run_is_not_a_checkpoint_and_a_checkpoint_that_is_not_whole_is_refused(request_of, serve, saved, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints/global_step_4/actor").mkdir(parents=True)
    saved.rename(run / "config.yaml")
    url = serve(Judge())
    with pytest.raises(CheckpointError, match=r"is a run; name one of its checkpoints"):
        evaluate(request_of(url, model=run))
    with pytest.raises(CheckpointError, match=r"global_step_4"):
        evaluate(request_of(url, model=run / "checkpoints/global_step_4"))
    assert not (tmp_path / "out").exists()
