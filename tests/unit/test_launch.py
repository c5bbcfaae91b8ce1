"""What is refused or over before Ray is started; the run itself is in tests/loop."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_tts import launch
from verl_tts.checkpoints.manifest import REWARD_RULE, TRAINED, write_manifest
from verl_tts.config.compose import compose, trained_rule, tts_config
from verl_tts.config.reward import reward_rule
from verl_tts.data.quickstart import write_quickstart
from verl_tts.errors import CheckpointError, ConfigError, DataError, RegistrationError, ScorerUnavailable, Stalled
from verl_tts.report.console import Line
from verl_tts.rewards.protocol import ScorerInfo


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


FUNCTION = (
    "reward.custom_reward_function.path=pkg://verl_tts.rewards.functions",
    "reward.custom_reward_function.name=duration",
)


ANY_SCORER = ("tts.reward.allow_other_scorer=true",)


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", refuse)


def checkpoint(
    run: Path,
    step: int,
    world_size: int,
    scorer_fingerprint: str | None = None,
    reward: dict[str, Any] | None = None,
    validated: bool = False,
) -> Path:
    """A whole checkpoint as far as its manifest goes."""
    directory = run / "checkpoints" / f"global_step_{step}"
    (directory / "actor").mkdir(parents=True)
    for rank in range(world_size):
        (directory / "actor" / f"model_world_size_{world_size}_rank_{rank}.pt").write_bytes(b"shard")
    extra = {} if reward is None else {REWARD_RULE: reward}
    write_manifest(directory, step=step, scorer_fingerprint=scorer_fingerprint, extra=extra)
    validation = {"val-core/test/reward/mean@1": 0.5} if validated else {}
    (run / "metrics.jsonl").write_text(json.dumps({"step": step} | validation) + "\n")
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
    checkpoint(tmp_path / "run", step=8, world_size=1, validated=True)
    launch.run(compose([*overrides, *FUNCTION, "trainer.total_training_steps=8"]))
    assert "nothing to do: trainer.total_training_steps=8, and step 8 is done" in capfd.readouterr().out


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(("test_freq", "starts"), [(4, True), (5, True), (-1, False)])
def test_a_finished_run_whose_last_validation_was_cut_off_is_started_to_make_up_for_it(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test_freq: int, starts: bool
) -> None:
    driven: list[Any] = []
    monkeypatch.setattr(launch, "ray_cluster", lambda config: nullcontext(tmp_path))
    monkeypatch.setattr(launch, "_drive", lambda config, attempt, *_: driven.append(attempt.step))
    checkpoint(tmp_path / "run", step=8, world_size=1)
    settings = ["trainer.total_training_steps=8", f"trainer.test_freq={test_freq}"]
    launch.run(compose([*overrides, *FUNCTION, *ANY_SCORER, *settings]))
    assert driven == ([8] if starts else [])


@pytest.mark.usefixtures("no_ray")
def test_a_checkpoint_of_another_number_of_workers_is_refused_with_both_numbers(
    overrides: list[str], tmp_path: Path
) -> None:
    checkpoint(tmp_path / "run", step=8, world_size=2)
    with pytest.raises(CheckpointError, match=r"written by 2 actor worker\(s\), this run has 1"):
        launch.run(compose([*overrides, *FUNCTION, "trainer.total_training_steps=9"]))


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("def score(samples_S, rate, prompt, metadata): ...", "other", "has no function 'other'"),
        ("def score(): ...", "score", "cannot be called as"),
        ("def score(", "score", "cannot be imported: SyntaxError"),
        ("raise SystemExit(7)", "score", "cannot be imported: SystemExit"),
    ],
)
def test_a_scoring_function_that_cannot_be_used_is_found_before_anything_is_started_or_written(
    overrides: list[str], tmp_path: Path, source: str, name: str, message: str
) -> None:
    (tmp_path / "reward.py").write_text(source)
    node = "reward.custom_reward_function"
    config = compose([*overrides, f"{node}.path={tmp_path / 'reward.py'}", f"{node}.name={name}"])
    with pytest.raises(ConfigError, match=message):
        launch.run(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://[::1]:9", "127.0.0.1:99999"])
def test_a_cluster_where_nobody_listens_is_found_before_anything_is_started_or_written(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=.* cannot be joined") as refused:
        launch.run(compose([*overrides, *FUNCTION]))
    assert address in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_cluster_that_cannot_be_joined_is_the_users_to_mend(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: Any, **__: Any) -> None:
        raise ConnectionError("nobody is there")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("ray.init", cannot)
    before = dict(os.environ)
    with (
        pytest.raises(ConfigError, match=r"RAY_ADDRESS=10\.0\.0\.1:6379 cannot be joined"),
        launch.ray_cluster(compose(overrides)),
    ):
        pass
    assert dict(os.environ) == before, "TMPDIR would name a directory that is gone"


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


@pytest.fixture
def scorer() -> Iterator[str]:
    """A scorer that has its pages, scores at /score, and refuses every clip."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"name": "judge", "fingerprint": "a" * 64} if self.path == "/info" else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(400 if self.path == "/score" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("no_ray")
def test_a_path_at_which_nobody_scores_is_found_before_anything_is_started_or_written(
    overrides: list[str], tmp_path: Path, scorer: str
) -> None:
    config = compose([*overrides, f"tts.reward.scorer_url={scorer.removesuffix('/score')}/socre"])
    with pytest.raises(ConfigError, match=r"/socre: nobody scores at the path '/socre' \(HTTP 404\)") as refused:
        launch.run(config)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("before", ["b" * 64, None])
def test_another_scorer_than_that_of_the_checkpoint_is_refused_with_both_names(
    overrides: list[str], tmp_path: Path, scorer: str, before: str | None
) -> None:
    checkpoint(tmp_path / "run", step=8, world_size=1, scorer_fingerprint=before)
    config = compose([*overrides, f"tts.reward.scorer_url={scorer}", "trainer.total_training_steps=9"])
    with pytest.raises(CheckpointError) as refused:
        launch.run(config)
    line = str(refused.value)
    assert (before or "without a fingerprint") in line
    assert f"{'a' * 64} (judge)" in line
    assert "tts.reward.allow_other_scorer=true" in line
    assert refused.value.exit_code == 2


@pytest.mark.usefixtures("no_ray")
def test_a_resume_that_is_refused_has_changed_nothing(overrides: list[str], tmp_path: Path, scorer: str) -> None:
    earlier = checkpoint(tmp_path / "run", step=4, world_size=1, scorer_fingerprint="b" * 64)
    checkpoint(tmp_path / "run", step=8, world_size=1, scorer_fingerprint="b" * 64)
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={earlier}"]
    config = compose([*overrides, *resume, f"tts.reward.scorer_url={scorer}", "trainer.total_training_steps=9"])

    def content() -> dict[Path, bytes]:
        files = (path for path in (tmp_path / "run").rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in files if path.name not in (".lock", "train.log")}

    before = content()
    with pytest.raises(CheckpointError, match="trained with the scorer"):
        launch.run(config)
    assert content() == before


LORA = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("actor_rollout_ref.model.lora_rank=4", LORA[1]), "lora_rank was 8, is 4"),
        ((LORA[0], "actor_rollout_ref.model.lora_alpha=64"), "lora_alpha was 16, is 64"),
        ((*LORA, "actor_rollout_ref.model.target_modules=[q_proj]"), "target_modules was all-linear, is ['q_proj']"),
        ((), "tts.trainable was lora, is full"),
    ],
)
def test_a_resume_that_trains_other_parameters_is_refused(
    overrides: list[str], tmp_path: Path, settings: tuple[str, ...], said: str
) -> None:
    directory = tmp_path / "run" / "checkpoints" / "global_step_4"
    (directory / "actor").mkdir(parents=True)
    (directory / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b"shard")
    write_manifest(directory, step=4, extra={TRAINED: trained_rule(compose([*overrides, *LORA]))})
    launch.check_trained(directory, compose([*overrides, *LORA]))
    with pytest.raises(CheckpointError, match="trains other parameters") as refused:
        launch.check_trained(directory, compose([*overrides, *settings]))
    assert said in str(refused.value)


@pytest.mark.parametrize(("before", "setting"), [("a", []), ("b", ["tts.reward.allow_other_scorer=true"])])
def test_the_same_scorer_goes_on_and_another_one_where_a_setting_allows_it(
    overrides: list[str], tmp_path: Path, before: str, setting: list[str]
) -> None:
    whole = checkpoint(tmp_path / "run", step=8, world_size=1, scorer_fingerprint=before * 64)
    launch.check_scorer(whole, ScorerInfo(fingerprint="a" * 64), compose([*overrides, *setting]))


@pytest.mark.parametrize(
    ("source", "reason"),
    [("import nowhere_at_all", "No module named 'nowhere_at_all'"), ("raise OSError(7)", "OSError: 7")],
)
def test_a_module_of_the_users_that_fails_to_import_ends_with_2_and_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    from verl_tts.plugin import import_modules

    (tmp_path / "broken_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RegistrationError, match=r"external_lib=broken_module cannot be imported") as refused:
        import_modules(["json", "broken_module"])
    assert reason in str(refused.value)
    assert refused.value.exit_code == 2


# ------------------------------------------------------------------ the reward that a run began with

LAION = "tts.reward.preset=laion_moss"


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("tts.reward.compose.gate.beta=5", r"compose\.gate\.beta was 10\.0, is 5\.0; set what was"),
        (
            "tts.reward.compose.weight_set=v1",
            r"compose\.weights\.speaker was 0\.5, is 0\.6, .* and \d+ more; set what was",
        ),
        ("tts.reward.guards.max_code_run=null", r"guards\.max_code_run was 50\.0, is None; set what was"),
        ("tts.reward.violation_score=-1", r"violation_score was -0\.5, is -1\.0; set what was"),
        ("tts.reward.compose.warmup_steps=0", r"compose\.warmup_steps was 10\.0, is 0\.0; set what was"),
    ],
)
def test_another_reward_than_that_of_the_checkpoint_is_refused_with_what_was_there_before(
    overrides: list[str], tmp_path: Path, setting: str, line: str
) -> None:
    before = reward_rule(tts_config(compose([*overrides, LAION])).reward)
    whole = checkpoint(tmp_path / "run", step=8, world_size=1, reward=before)
    with pytest.raises(CheckpointError, match=line) as refused:
        launch.check_reward(whole, compose([*overrides, LAION, setting]))
    assert str(refused.value).endswith("or tts.reward.allow_other_reward=true")
    assert refused.value.exit_code == 2
    launch.check_reward(whole, compose([*overrides, LAION, setting, "tts.reward.allow_other_reward=true"]))


@pytest.mark.usefixtures("no_ray")
def test_another_reward_is_refused_before_anything_is_started(overrides: list[str], tmp_path: Path) -> None:
    before = reward_rule(tts_config(compose([*overrides, *FUNCTION])).reward)
    checkpoint(tmp_path / "run", step=8, world_size=1, reward=before)
    settings = ["trainer.total_training_steps=9", "tts.reward.guards.max_code_run=9", *ANY_SCORER]
    with pytest.raises(CheckpointError, match=r"guards\.max_code_run was None, is 9\.0"):
        launch.run(compose([*overrides, *FUNCTION, *settings]))


def test_how_a_scorer_is_reached_and_how_a_reward_is_named_are_no_other_reward(
    overrides: list[str], tmp_path: Path
) -> None:
    before = reward_rule(tts_config(compose([*overrides, LAION, "tts.reward.compose.weight_set=v7"])).reward)
    whole = checkpoint(tmp_path / "run", step=8, world_size=1, reward=json.loads(json.dumps(before)))
    reached = ["tts.reward.scorer_url=http://10.0.0.1:1/score", "tts.reward.timeout_s=5", "tts.reward.max_in_flight=4"]
    written_out = ["tts.reward.compose.weight_set=null"]
    written_out += ["tts.reward.compose.weights={speaker: 0.5, emotion: 0.4, quality: 0.1}"]
    launch.check_reward(whole, compose([*overrides, LAION, *reached, *written_out]))


def test_a_checkpoint_that_says_nothing_of_its_reward_goes_on(overrides: list[str], tmp_path: Path) -> None:
    launch.check_reward(checkpoint(tmp_path / "run", step=8, world_size=1), compose([*overrides, LAION]))


# ------------------------------------------------------------------ while it runs


NEVER = object()  # a call that is not answered


class Runner:
    """A TaskRunner that answers from a script, and a Ray that calls it here and now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pulses: list[launch.Pulse], ends_after: int, steps: bool):
        self.pulses, self.polls, self.ends_after, self.steps, self.asked = pulses, 0, ends_after, steps, 0
        self.pulse = SimpleNamespace(
            remote=lambda: lambda: self.pulses.pop(0) if self.pulses else launch.Pulse([], None)
        )
        self.stop_after_step = SimpleNamespace(remote=lambda: self.stop)

        def wait(calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
            if calls[0] is NEVER:
                return [], calls
            if calls[0] is not self.running:
                return calls, []
            self.polls += 1
            return (calls, []) if self.polls >= self.ends_after else ([], calls)

        monkeypatch.setattr("ray.wait", wait)
        monkeypatch.setattr("ray.get", lambda call, timeout=None: call())

    def stop(self) -> bool:
        self.asked += 1
        return self.steps


def watch(runner: Runner, signals: list[signal.Signals], running: Any = lambda: None, **tts: float) -> list[str]:
    runner.running = running
    said: list[Line] = []
    settings = OmegaConf.create({"stall_s": 10.0, "grace_s": 100.0} | tts)
    try:
        launch._watch(runner, running, signals, said.append, settings)
    finally:
        runner.said = [line.text for line in said]
    return runner.said


def test_lines_of_the_run_are_shown_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pulses = [
        launch.Pulse([Line("ready")], None),
        launch.Pulse([], None),
        launch.Pulse([Line("step 1/1", "step")], None),
    ]
    assert watch(Runner(monkeypatch, pulses, ends_after=3, steps=True), []) == ["ready", "step 1/1"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_first_signal_waits_for_the_step_in_hand_and_then_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    runner = Runner(monkeypatch, [], ends_after=4, steps=True)
    with pytest.raises(SystemExit) as ended:
        watch(runner, [number])
    assert ended.value.code == code
    assert (runner.asked, runner.polls) == (1, 4)
    assert runner.said == [
        f"signal {number.name}: stopping after this step; once more stops at once",
        f"signal {number.name}: stopped, its last step is saved; the same command goes on from there",
    ]


def test_a_second_signal_stops_at_once_and_the_first_one_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(monkeypatch, [], ends_after=99, steps=True)
    signals = [signal.SIGINT]
    runner.stop = lambda: not signals.append(signal.SIGTERM)  # type: ignore[func-returns-value]
    with pytest.raises(SystemExit) as ended:
        watch(runner, signals)
    assert ended.value.code == 130
    assert runner.polls == 2
    assert runner.said[-1] == "signal SIGINT: stopping now"


def test_after_its_grace_a_step_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(monkeypatch, [], ends_after=99, steps=True)
    with pytest.raises(SystemExit):
        watch(runner, [signal.SIGTERM], grace_s=1e-9)
    assert runner.polls == 2


def test_without_a_step_in_hand_a_first_signal_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(monkeypatch, [], ends_after=99, steps=False)
    with pytest.raises(SystemExit):
        watch(runner, [signal.SIGTERM])
    assert runner.polls == 1


def test_a_run_that_fails_while_it_is_stopping_says_what_it_failed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed() -> None:
        raise ScorerUnavailable("nobody answers")

    with pytest.raises(ScorerUnavailable):
        watch(Runner(monkeypatch, [], ends_after=3, steps=True), [signal.SIGTERM], failed)


def test_a_run_that_stalls_ends_with_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(monkeypatch, [launch.Pulse([], "the update: 20 s; nothing has moved")], ends_after=99, steps=True)
    with pytest.raises(Stalled, match="the update: 20 s") as stalled:
        watch(runner, [])
    assert stalled.value.exit_code == 3


@pytest.mark.parametrize("method", ["pulse", "stop_after_step"])
def test_a_trainer_that_does_not_answer_is_stalled(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    runner = Runner(monkeypatch, [], ends_after=99, steps=True)
    setattr(runner, method, SimpleNamespace(remote=lambda: NEVER))
    with pytest.raises(Stalled, match=r"the trainer has not answered for 0\.01 s \(tts.stall_s\)"):
        watch(runner, [signal.SIGINT], stall_s=0.01)
    with pytest.raises(SystemExit) as ended:
        watch(runner, [signal.SIGINT, signal.SIGINT])
    assert ended.value.code == 130


def test_signals_are_noted_and_one_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with launch.signals_noted() as noted:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
        assert noted == [signal.SIGTERM]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with launch.signals_noted() as noted:
            signal.raise_signal(signal.SIGINT)
        assert noted == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
