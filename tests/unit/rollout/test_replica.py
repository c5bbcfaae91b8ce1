"""The sender of weights: one file in shared memory, gone again whatever happens."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from verl_tts.errors import WeightSyncError
from verl_tts.rollout import replica as module
from verl_tts.rollout.replica import PoolClient, WeightSender, servers_of
from verl_tts.rollout.weights import digest

WEIGHTS = {"a": torch.rand(3, 2), "b": torch.rand(4)}


class Server:
    """In place of the rollout server's handle."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.received = error, []
        self.update_weights = SimpleNamespace(remote=self._update_weights)

    async def _update_weights(self, path: str, tensors: int, number: int, step: int | None) -> None:
        self.received.append((load_file(path), tensors, number, step, Path(path)))
        if self.error is not None:
            raise self.error


@pytest.fixture
def sender(monkeypatch, tmp_path):
    def make(
        server: Server, dtype: str = "float32", rank: int = 0, ranks: int = 1, world: int = 4, pool: int = 0
    ) -> WeightSender:
        names: list[str] = []
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
        monkeypatch.setattr(module.ray, "get_actor", lambda name: (names.append(name), server)[1])
        made = object.__new__(WeightSender)
        config = SimpleNamespace(tensor_model_parallel_size=ranks, data_parallel_size=1, dtype=dtype)
        config.engine_kwargs = {"vllm_omni": {"rollout_gpus": pool}}
        monkeypatch.setattr(module.BaseRollout, "__init__", lambda self, config, *_: setattr(self, "config", config))
        made.__init__(config, None, None)
        made.names = names
        return made

    return make


def send(sender: WeightSender, **kwargs) -> None:
    asyncio.run(sender.update_weights(iter(WEIGHTS.items()), global_steps=5, **kwargs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_arrives_is_what_was_exported_in_the_engines_precision(sender, dtype, tmp_path):
    server = Server()
    send(sender(server, dtype))
    ((tensors, count, number, step, path),) = server.received
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in WEIGHTS.items()}
    assert all(torch.equal(tensors[name], expected[name]) for name in WEIGHTS)
    assert (count, number, step) == (2, digest(expected), 5)
    assert path.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_the_file_goes_when_the_server_raises_too(sender, tmp_path):
    with pytest.raises(WeightSyncError, match="digest"):
        send(sender(Server(WeightSyncError("digest differs"))))
    assert list(tmp_path.iterdir()) == []


def test_each_replica_gets_its_weights_from_its_first_rank_and_every_rank_gathers(sender):
    for rank, is_sender, name in ((2, True, "verl_tts_rollout_1"), (3, False, None)):
        server, gathered = Server(), []
        made = sender(server, rank=rank, ranks=2)
        asyncio.run(made.update_weights((gathered.append(name) or (name, t)) for name, t in WEIGHTS.items()))
        assert gathered == ["a", "b"], "gathering is a collective"
        assert len(server.received) == is_sender
        assert made.names == ([name] if is_sender else [])


def test_a_pool_is_shared_among_the_workers_and_each_server_gets_the_same_weights(sender, tmp_path):
    server = Server()
    made = sender(server, rank=1, world=2, pool=6)
    asyncio.run(made.update_weights(iter(WEIGHTS.items()), global_steps=5))
    assert made.names == ["verl_tts_rollout_1", "verl_tts_rollout_3", "verl_tts_rollout_5"]
    assert [(count, number) for _, count, number, _, _ in server.received] == [(2, digest(WEIGHTS))] * 3
    assert list(tmp_path.iterdir()) == []


@given(workers=st.integers(1, 6), share=st.integers(1, 4))
def test_every_server_of_a_pool_belongs_to_one_worker(workers, share):
    ranks = [rank for worker in range(workers) for rank in servers_of(worker, workers, workers * share)]
    assert sorted(ranks) == list(range(workers * share))
    assert [list(servers_of(worker, workers, None)) for worker in range(workers)] == [[w] for w in range(workers)]


def test_the_least_busy_server_of_a_pool_answers_next():
    class Slow:
        def __init__(self) -> None:
            self.seen, self.gate = [], asyncio.Event()
            self.generate = SimpleNamespace(remote=self._generate)

        async def _generate(self, request_id: str, **request) -> str:
            self.seen.append(request_id)
            await self.gate.wait()
            if request.get("fails"):
                raise RuntimeError("gone")
            return request_id

    async def run() -> list[list[str]]:
        servers = [Slow(), Slow()]
        client = PoolClient(servers)
        open_ones = [asyncio.create_task(client.generate(str(n), fails=n == 0)) for n in range(4)]
        await asyncio.sleep(0)
        servers[0].gate.set()
        await asyncio.wait(open_ones[:1])
        await asyncio.sleep(0)
        late = asyncio.create_task(client.generate("late"))
        await asyncio.sleep(0)
        servers[1].gate.set()
        await asyncio.gather(*open_ones, late, return_exceptions=True)
        return [server.seen for server in servers]

    assert asyncio.run(run()) == [["0", "2", "late"], ["1", "3"]]


def test_nothing_exported_is_an_error(sender):
    with pytest.raises(WeightSyncError, match="exported no tensor"):
        asyncio.run(sender(Server()).update_weights(iter(())))


@pytest.mark.parametrize("kwargs", [{"wire_format": "delta_flush"}, {"peft_config": {"r": 8}}])
def test_weights_that_are_not_whole_and_merged_are_refused(sender, kwargs):
    server = Server()
    with pytest.raises(WeightSyncError, match=r"set actor_rollout_ref\.model\.lora\.merge=True"):
        send(sender(server), **kwargs)
    assert server.received == []
