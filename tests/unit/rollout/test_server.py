"""The rollout server without Ray: what it makes of an engine that answers late, wrongly or not at all."""

import asyncio
import gc
import subprocess
import warnings
from dataclasses import replace
from multiprocessing import resource_tracker
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.unit.rollout.small_spec import SPEC as SMALL
from verl_tts.errors import ProcessDied, RolloutError, WeightSyncError
from verl_tts.rollout.server import RolloutServer, started_here

SPEC = replace(SMALL, model_path="", rpc_timeout_s=0.3)


class Engine:
    """In place of AsyncOmni: ``behave`` is awaited where the engine would work."""

    def __init__(self, behave: Any = None, answer: Any = None) -> None:
        self.behave, self.answer = behave, answer
        self.calls: list[Any] = []

    async def collective_rpc(self, method: str, timeout: float | None = None, args=(), stage_ids=None) -> Any:
        self.calls.append((method, args, stage_ids, timeout))
        if self.behave is not None:
            await self.behave()
        return self.answer

    async def generate(self, **request: Any) -> Any:
        self.calls.append(request)
        if self.behave is not None:
            await self.behave()
        tokens = [7, 9, 2150]
        completion = SimpleNamespace(
            token_ids=tokens,
            logprobs=[{token: SimpleNamespace(logprob=-1.0)} for token in tokens],
            multimodal_output={"codes": {"audio": np.array([[7] * 16, [9] * 16])}},
        )
        clip = SimpleNamespace(multimodal_output={"audio": np.zeros(2 * 1920), "sr": 24_000})
        for stage_id, output in ((0, completion), (1, clip)):
            yield SimpleNamespace(stage_id=stage_id, request_output=SimpleNamespace(outputs=[output]))


@pytest.fixture
def serve(tiny_checkpoint):
    def start(engine: Engine, **settings: Any) -> RolloutServer:
        server = RolloutServer(replace(SPEC, model_path=str(tiny_checkpoint), **settings), replica_rank=3)
        server._engine = engine
        return server

    return start


def generate(server: RolloutServer) -> Any:
    return server.generate(
        "train-1-a-0",
        prompt_ids=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
        sampling_params={"temperature": 1.0, "top_p": 1.0, "top_k": -1},
        speaker=np.zeros(64, np.float32),
        language="Auto",
        seed=11,
        sample_id="a#0",
    )


async def hang() -> None:
    await asyncio.sleep(60)


async def die() -> None:
    raise EngineDeadError


def raises(error: Exception) -> Any:
    async def behave() -> None:
        raise error

    return behave


def test_an_answer_is_what_verl_expects_of_a_server_and_our_types_beside_it(serve):
    server = serve(Engine())
    server.global_steps = 4
    output = asyncio.run(generate(server))
    assert (output.token_ids, output.log_probs) == ([7, 9, 2150], [-1.0, -1.0, -1.0])
    assert output.extra_fields["global_steps"] == 4, "the step whose weights the engine had"
    assert output.extra_fields["rollout"].seed == 11
    assert len(output.extra_fields["waveform"].samples_S) == 2 * 1920


def test_a_call_that_does_not_end_in_time_says_the_process_is_gone(serve):
    for call in (generate, lambda server: server.read_weights(["a"])):
        with pytest.raises(ProcessDied, match=r"replica 3: .* did not end within 0\.3 s \(tts\.rpc_timeout_s\)"):
            asyncio.run(call(serve(Engine(hang))))


def test_a_dead_stage_makes_this_and_every_later_call_say_so(serve):
    engine = Engine(die)
    server = serve(engine)
    with pytest.raises(ProcessDied, match="a stage of the rollout engine died during the rollout of sample a#0"):
        asyncio.run(generate(server))
    engine.behave = None
    with warnings.catch_warnings(record=True) as caught:
        for call in (generate, lambda server: server.update_weights("path", 1, 2, 3)):
            with pytest.raises(ProcessDied, match="died during the rollout of sample a#0"):
                asyncio.run(call(server))
        gc.collect()
    assert caught == [], "no coroutine is left unawaited"
    assert len(engine.calls) == 1, "nothing more was asked of it"


def test_a_request_that_the_engine_refuses_is_a_failed_rollout(serve):
    with pytest.raises(RolloutError, match="replica 3: the rollout of sample a#0 failed: prompt is too long"):
        asyncio.run(generate(serve(Engine(raises(ValueError("prompt is too long"))))))


@pytest.mark.parametrize("answer", [[{"tensors": 2, "digest": 5}], [[{"tensors": 2, "digest": 5}]]])
def test_a_sync_that_arrived_whole_sets_the_step_of_the_weights(serve, answer):
    engine = Engine(answer=answer)
    server = serve(engine)
    assert asyncio.run(server.update_weights("file", 2, 5, 8)) == {"tensors": 2, "digest": 5}
    assert asyncio.run(server.held_weights()) == {"tensors": 2, "digest": 5}
    assert server.global_steps == 8
    assert engine.calls == [("verl_tts_load_weights", ("file",), [0], 0.3)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([{"tensors": 1, "digest": 5}], "sent 2 tensors with digest 5, the engine holds 1 with 5"),
        ([{"tensors": 2, "digest": 6}], "the engine holds 2 with 6"),
        ([{"error": "tensor x is not in the model"}], "tensor x is not in the model"),
        ([[{"supported": False}]], "supported"),
        ([None], "None"),
    ],
)
def test_a_sync_that_did_not_arrive_whole_is_an_error_and_the_step_stays(serve, answer, message):
    server = serve(Engine(answer=answer))
    server.global_steps = 7
    with pytest.raises(WeightSyncError, match=rf"weight sync at step 8, replica 3: .*{message}"):
        asyncio.run(server.update_weights("file", 2, 5, 8))
    assert server.global_steps == 7


def test_what_is_ended_is_every_process_below_but_for_the_tracker_that_ends_with_it():
    resource_tracker.ensure_running()
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) as stage:
        try:
            here = psutil.Process().children()
            tracker = next(child.pid for child in here if "resource_tracker" in " ".join(child.cmdline()))
            while not (below := psutil.Process(stage.pid).children()):
                pass
            ended = {child.pid for child in started_here()}
            assert {stage.pid, below[0].pid} <= ended
            assert tracker not in ended
        finally:
            for child in (*below, psutil.Process(stage.pid)):
                child.kill()
