"""Prompts in, groups of scored samples out: the loop, a scoring function and the run directory are real."""

import asyncio
import concurrent.futures
import contextlib
import gc
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from verl_tts.config.compose import compose
from verl_tts.errors import ProcessDied, RolloutError, ScorerRejected
from verl_tts.report.run_dir import RunDir, read_jsonl
from verl_tts.rewards.manager import RewardManager
from verl_tts.rollout.agent_loop import AgentLoopManager
from verl_tts.rollout.groups import describe
from verl_tts.rollout.seeds import sample_seed
from verl_tts.types import Conditioning, PromptRow

GROUP = 3


@dataclass
class Client:
    """In place of verl's client of the rollout servers. ``behave`` sees each request and may wait or raise."""

    make: Any
    behave: Callable[..., Any] | None = None
    stop_reason: str = "eos"
    requests: list[dict[str, Any]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    async def generate(self, **request: Any) -> Any:
        self.requests.append(request)
        try:
            frames = 2
            if self.behave is not None:
                frames = await self.behave(request) or frames
            rollout = self.make.rollout(frames, self.stop_reason, seed=request["seed"] % 1000)
            fields = {"rollout": rollout, "waveform": self.make.waveform(frames), "global_steps": 3}
            return SimpleNamespace(extra_fields=fields)
        finally:
            self.ended.append(request["sample_id"])


def reward(samples_S: np.ndarray, sample_rate_hz: int, prompt: str, metadata: dict) -> dict:
    """The scoring function of these tests; a row may ask it to fail."""
    if metadata.get("fails"):
        raise ValueError("no model is loaded")
    return {"score": len(samples_S) / sample_rate_hz, "index": metadata["index"]}


def condition(row: PromptRow) -> Conditioning:
    return Conditioning([1, 2, 3], np.zeros(4, np.float32), row.language or "Auto", None)


class Loop:
    """An agent loop with its parts, and an ear for what asyncio complains about."""

    def __init__(self, tmp_path, make, *overrides: str, rewards: dict[str, Any] | None = None) -> None:
        config = compose(
            ["tts.platform=cpu", f"actor_rollout_ref.rollout.n={GROUP}", f"tts.output_dir={tmp_path}", *overrides]
        )
        function = {"path": __file__, "name": "reward"}
        manager = RewardManager.from_config(rewards or {"guards": {"min_seconds": 0.0}}, function)
        self.run_dir = RunDir(tmp_path)
        self.manager = AgentLoopManager(config, rewards=manager, run_dir=self.run_dir)
        self.client, self.make = Client(make), make
        self.manager.connect(self.client, condition)

    def rows(self, count: int, **values) -> list[PromptRow]:
        return [self.make.row(index, **values) for index in range(count)]


@pytest.fixture
def loop(tmp_path, make, caplog):
    loops: list[Loop] = []

    def start(*overrides: str, **more: Any) -> Loop:
        loops.append(Loop(tmp_path, make, *overrides, **more))
        return loops[-1]

    with caplog.at_level(logging.WARNING, "asyncio"):
        yield start
        for started in loops:
            if not started.manager._loop.is_closed():
                started.manager.close()
        gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


# ------------------------------------------------------------------------------------------------ groups


def test_groups_come_back_in_the_order_in_which_they_went_whatever_finishes_first(loop):
    started = loop()
    has_ended = [asyncio.Event() for _ in range(4)]

    async def later_rows_first(request):
        index, k = int(request["sample_id"][4]), int(request["sample_id"][-1])
        if index < 3:
            await has_ended[index + 1].wait()
        has_ended[index].set()
        return 1 + k

    started.client.behave = later_rows_first
    started.manager.submit(started.rows(4), "train", step=1)
    groups = started.manager.collect("train")
    assert [group.row.index for group in groups] == [0, 1, 2, 3]
    assert all(group.failure is None for group in groups)
    assert [[len(sample.rollout.codes_FQ) for sample in group.samples] for group in groups] == [[1, 2, 3]] * 4
    assert started.client.ended[0].startswith("row-3"), "they ran at the same time"
    sample = groups[2].samples[1]
    assert sample.score.total == pytest.approx(2 * 0.08)
    assert sample.score.parts["index"] == 2
    assert sample.weights_step == 3
    assert started.manager.collect("train") == []


def test_training_and_validation_do_not_mix(loop):
    started = loop("actor_rollout_ref.rollout.val_kwargs.n=2")
    started.manager.submit(started.rows(2), "train", step=1)
    started.manager.submit(started.rows(1), "val", step=1)
    assert [len(group.samples) for group in started.manager.collect("val")] == [2]
    assert [len(group.samples) for group in started.manager.collect("train")] == [GROUP, GROUP]


def test_every_sample_has_its_own_seed_and_a_validations_do_not_change(loop):
    started = loop("data.seed=9")
    for step in (1, 2):
        started.manager.submit(started.rows(2), "train", step)
        started.manager.submit(started.rows(2), "val", step)
        started.manager.collect("train")
        started.manager.collect("val")
    seeds: dict[str, list[int]] = {"train": [], "val": []}
    for request in started.client.requests:
        split, step, _, index, k = request["request_id"].split("-")
        expected = sample_seed(9, split, f"row-{index}", int(k), int(step) if split == "train" else None)
        assert request["seed"] == expected
        assert request["sample_id"] == f"row-{index}#{k}"
        seeds[split].append(request["seed"])
    assert len(set(seeds["train"])) == 2 * 2 * GROUP
    assert len(set(seeds["val"])) == 2, "the same noise at both steps"
    assert len({request["request_id"] for request in started.client.requests}) == len(started.client.requests)


def test_requests_carry_what_was_configured_for_their_split(loop):
    started = loop(
        "actor_rollout_ref.rollout.temperature=0.8",
        "actor_rollout_ref.rollout.top_k=50",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=false",
    )
    started.manager.submit(started.rows(1, language="English"), "train", 1)
    started.manager.submit(started.rows(1), "val", 1)
    started.manager.collect("train")
    started.manager.collect("val")
    asked = {request["request_id"].split("-")[0]: request for request in started.client.requests}
    assert asked["train"]["sampling_params"] == {"temperature": 0.8, "top_p": 1.0, "top_k": 50}
    assert asked["val"]["sampling_params"] == {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    assert (asked["train"]["language"], asked["val"]["language"]) == ("English", "Auto")
    assert asked["train"]["prompt_ids"] == [1, 2, 3]


@pytest.mark.parametrize("penalised", [False, True])
def test_an_engine_that_never_stops_is_marked_counted_and_penalised_where_the_setting_says_so(loop, penalised):
    guards = {"min_seconds": 0.0, "penalise_truncation": penalised}
    started = loop("tts.keep.train_samples_per_step=-1", rewards={"violation_score": -0.5, "guards": guards})
    started.client.stop_reason = "length"
    started.manager.submit(started.rows(2), "train", 1)
    groups = started.manager.collect("train")
    lines = list(read_jsonl(started.run_dir.samples / "train" / "step_1" / "samples.jsonl"))
    assert [line["stop_reason"] for line in lines] == ["length"] * 2 * GROUP
    assert [line["parts"]["guard/truncated"] for line in lines] == [1.0] * 2 * GROUP
    assert describe(groups, groups)["rollout/eos_rate"] == 0.0
    scored = [sample.score.total for group in groups for sample in group.samples]
    assert scored == pytest.approx([-0.5 if penalised else 2 * 0.08] * 2 * GROUP)


# ------------------------------------------------------------------------------------------------ failures


def test_a_failed_rollout_fails_its_group_once_all_siblings_have_settled(loop):
    started = loop()

    async def one_fails_early(request):
        if request["sample_id"] == "row-1#0":
            raise RolloutError("sample row-1#0: the talker returned nothing")
        await asyncio.sleep(0.1)

    started.client.behave = one_fails_early
    started.manager.submit(started.rows(3), "train", 1)
    groups = started.manager.collect("train")
    assert [group.failure is None for group in groups] == [True, False, True]
    assert groups[1].samples == ()
    assert isinstance(groups[1].failure, RolloutError)
    assert "row-1#0" in str(groups[1].failure)
    assert len(started.client.ended) == 3 * GROUP, "none runs on under the next weights"


def test_a_failure_that_ray_brings_from_another_process_is_the_failure_itself(loop):
    from ray.exceptions import RayTaskError

    started = loop()

    async def fails(request):
        cause = RolloutError("sample row-0#0: 3 log-probs for 4 sampled tokens")
        raise RayTaskError("generate", "traceback", cause).as_instanceof_cause()

    started.client.behave = fails
    started.manager.submit(started.rows(1), "train", 1)
    (group,) = started.manager.collect("train")
    assert type(group.failure) is RolloutError
    assert str(group.failure) == "sample row-0#0: 3 log-probs for 4 sampled tokens"


def test_a_scorers_error_is_raised_at_once_and_what_is_under_way_is_ended(loop):
    started = loop()

    async def others_hang(request):
        if not request["sample_id"].startswith("row-2"):
            await asyncio.sleep(60)

    started.client.behave = others_hang
    rows = [*started.rows(2), started.make.row(2, extra={"fails": True})]
    started.manager.submit(rows, "train", 1)
    began = time.monotonic()
    with pytest.raises(ScorerRejected, match=r"sample 'row-2' has no score: it raised ValueError: no model is loaded"):
        started.manager.collect("train")
    assert time.monotonic() - began < 5
    deadline = time.monotonic() + 5
    while len(started.client.ended) < len(started.client.requests) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(started.client.ended) == len(started.client.requests) == 3 * GROUP


def test_a_server_that_is_gone_is_raised_and_is_no_failed_group(loop):
    started = loop()

    async def dies(request):
        raise ProcessDied("replica 0: a stage of the rollout engine died")

    started.client.behave = dies
    started.manager.submit(started.rows(2), "train", 1)
    with pytest.raises(ProcessDied, match="replica 0"):
        started.manager.collect("train")


def test_a_waveform_that_is_not_audio_fails_its_group(loop, monkeypatch, make):
    started = loop()
    broken = make.waveform(2)
    broken.samples_S[5] = np.nan
    monkeypatch.setattr(started.make, "waveform", lambda frames: broken)
    started.manager.submit(started.rows(1), "train", 1)
    (group,) = started.manager.collect("train")
    assert "NaN or infinite" in str(group.failure)


# ------------------------------------------------------------------------------------------------ progress


def test_the_samples_under_way_are_counted_and_the_one_that_takes_longest_is_named(loop):
    started, hold = loop(), threading.Event()

    async def all_but_one(request):
        if request["sample_id"] == "row-1#2":
            while not hold.is_set():
                await asyncio.sleep(0.01)

    started.client.behave = all_but_one
    assert started.manager.progress() is None
    for step in (1, 2):
        hold.clear()
        started.manager.submit(started.rows(2), "train", step)
        deadline = time.monotonic() + 10
        while (progress := started.manager.progress()) is None or progress.done < 5:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert progress[:3] == (5, 6, "row-1#2")
        assert 0 < progress.slowest_s < 10
        hold.set()
        started.manager.collect("train")
        assert started.manager.progress() is None


# ------------------------------------------------------------------------------------------------ what is kept


def test_of_some_steps_no_clip_is_kept(loop):
    started = loop("tts.keep.train_every=2", "tts.keep.train_samples_per_step=-1")
    for step in (1, 2, 3):
        started.manager.submit(started.rows(1), "train", step)
        kept = [sample.clip for group in started.manager.collect("train") for sample in group.samples]
        assert all(clip is not None and clip.exists() for clip in kept) == (step == 2)
    assert [path.name for path in (started.run_dir.samples / "train").iterdir()] == ["step_2"]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (0, []),
        (2, ["row-0#0", "row-0#1"]),
        (4, ["row-0#0", "row-0#1", "row-0#2", "row-1#0"]),
        (-1, [f"row-{index}#{k}" for index in range(3) for k in range(GROUP)]),
    ],
)
def test_the_clips_of_the_first_groups_are_kept_up_to_the_limit(loop, limit, expected):
    started = loop(f"tts.keep.train_samples_per_step={limit}")
    started.manager.submit(started.rows(1), "train", 4)
    started.manager.submit([started.make.row(1), started.make.row(2)], "train", 4)  # a batch may come in parts
    started.manager.collect("train")
    lines = list(read_jsonl(started.run_dir.samples / "train" / "step_4" / "samples.jsonl"))
    assert sorted(f"{line['id']}#{line['sample']}" for line in lines) == sorted(expected)
    for line in lines:
        assert line["seed"] == started.make.rollout(2, seed=line["seed"]).seed
        assert (started.run_dir.path / line["path"]).is_file()
        assert line["language"] == "Auto"


def test_the_limit_is_that_of_each_step(loop):
    started = loop("tts.keep.train_samples_per_step=1")
    for step in (1, 2):
        started.manager.submit(started.rows(2), "train", step)
        started.manager.collect("train")
        assert len(list(read_jsonl(started.run_dir.samples / "train" / f"step_{step}" / "samples.jsonl"))) == 1


# ------------------------------------------------------------------------------------------------ verl's call


def test_a_batch_of_verls_dataset_becomes_groups(loop):
    from verl.utils import tensordict_utils as tu

    started = loop()
    columns = {
        "raw_prompt": [[{"role": "user", "content": "Hello."}], [{"role": "user", "content": "Bye."}]],
        "data_source": ["test", "test"],
        "reward_model": [{"style": "rule", "ground_truth": text} for text in ("Hello.", "Bye.")],
        "extra_info": [{"id": f"en-{index}", "split": "val", "index": index} for index in range(2)],
    }
    started.manager.generate_sequences(tu.get_tensordict(columns, {"global_steps": 5, "validate": True}))
    groups = started.manager.collect("val")
    assert [(group.row.id, group.row.text) for group in groups] == [("en-0", "Hello."), ("en-1", "Bye.")]
    started.manager.generate_sequences(tu.get_tensordict(columns, {"global_steps": 5}))
    assert [len(group.samples) for group in started.manager.collect("train")] == [GROUP, GROUP]


def test_the_scorer_can_be_asked_who_it_is_before_there_is_a_client(tmp_path, make):
    started = Loop(tmp_path, make)
    assert started.manager.probe().name == f"{__file__}:reward"
    started.manager.close()


# ------------------------------------------------------------------------------------------------ the end


@pytest.mark.parametrize("under_way", ["nothing", "submitted", "collected"])
def test_close_ends_what_is_under_way_and_leaves_no_thread(loop, under_way):
    """Also while the trainer's thread is waiting in ``collect``: the order to end comes from the driver."""
    before = set(threading.enumerate())
    started = loop("tts.keep.train_samples_per_step=-1")
    started.manager.submit(started.rows(1), "train", 1)
    started.manager.collect("train")  # clips were written, on threads

    async def hang(request):
        await asyncio.sleep(60)

    started.client.behave = hang

    def collect() -> None:
        with contextlib.suppress(concurrent.futures.CancelledError):
            started.manager.collect("train")

    waiting = threading.Thread(target=collect)
    if under_way != "nothing":
        started.manager.submit(started.rows(2), "train", 2)
        while len(started.client.requests) < 3 * GROUP:
            time.sleep(0.01)
    if under_way == "collected":
        waiting.start()
        time.sleep(0.05)
    began = time.monotonic()
    started.manager.close()
    if under_way == "collected":
        waiting.join(timeout=5)
    assert time.monotonic() - began < 5
    assert len(started.client.ended) == len(started.client.requests)
    assert set(threading.enumerate()) <= before


def test_a_group_shares_the_voice_that_its_step_draws_and_a_validation_keeps_its_own(loop, tmp_path):
    listed = {"train": {f"c{n}": ["1.wav", "2.wav"] for n in range(20)}, "validation": {"held": ["1.wav"]}}
    (tmp_path / "references.json").write_text(json.dumps(listed))
    running = loop(f"tts.references={tmp_path}/references.json")
    rows = running.rows(2, extra={"ref_audio": "held/1.wav"})
    heard = {}
    for step in (1, 2):
        running.manager.submit(rows, "train", step)
        groups = running.manager.collect("train")
        heard[step] = [{sample.row.extra["ref_audio"] for sample in group.samples} for group in groups]
        assert all(len(voices) == 1 for voices in heard[step])
    assert heard[1] != heard[2]
    assert not {"held/1.wav"} & set().union(*heard[1], *heard[2])
    running.manager.submit(rows, "val", 2)
    validated = running.manager.collect("val")
    assert {sample.row.extra["ref_audio"] for group in validated for sample in group.samples} == {"held/1.wav"}
