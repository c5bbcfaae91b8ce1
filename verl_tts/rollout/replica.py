"""What verl holds of the rollout: a replica in the trainer, and the sender of weights in each actor worker."""

import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import DictConfig
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from verl_tts.errors import WeightSyncError
from verl_tts.gates import CLOCK
from verl_tts.rollout.server import SHARED_MEMORY, RolloutServer
from verl_tts.rollout.spec import RolloutSpec
from verl_tts.rollout.weights import digest

MAX_CONCURRENCY = 4096  # calls that one server may have open; the engine queues beyond max_num_seqs


def server_name(replica_rank: int) -> str:
    return f"verl_tts_rollout_{replica_rank}"


def start_server(spec: RolloutSpec, replica_rank: int, **options: Any) -> ActorHandle:
    """The server actor of a replica, made now or found running."""
    return (
        ray.remote(RolloutServer)
        .options(
            name=server_name(replica_rank),
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=MAX_CONCURRENCY,
            **options,
        )
        .remote(spec, replica_rank)
    )


def servers_of(replica_rank: int, actor_workers: int, servers: int | None) -> range:
    """The servers that an actor worker sends its weights to: its own, or its share of a pool.

    ``list(servers_of(0, 1, 6)) == [0, 1, 2, 3, 4, 5]``, ``list(servers_of(1, 2, 4)) == [1, 3]``
    """
    return range(replica_rank, actor_workers if servers is None else servers, actor_workers)


class PoolClient:
    """What verl's client of the rollout servers is to one server a worker, for a pool: the least busy one answers."""

    def __init__(self, servers: Sequence[Any]) -> None:
        self._servers, self._open = servers, [0] * len(servers)

    async def generate(self, request_id: str, **request: Any) -> Any:
        number = self._open.index(min(self._open))
        self._open[number] += 1
        try:
            return await self._servers[number].generate.remote(request_id, **request)
        finally:
            self._open[number] -= 1


class OmniReplica(RolloutReplica):
    """The rollout servers that one actor worker feeds: one on its own device, or a share of a pool on theirs."""

    spec: RolloutSpec  # set by ``verl_tts.trainer`` before verl makes replicas

    async def launch_servers(self) -> None:
        node_id, devices = await self.workers[0].__ray_call__.remote(_placement)
        if self.spec.servers is not None:
            # Ray finds each a GPU that no worker has. Servers that were started early need none, and are only found.
            options = {"num_gpus": 1, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}
            ranks = servers_of(self.replica_rank, self.spec.actor_workers, self.spec.servers)
            self.servers = [start_server(self.spec, rank, **options) for rank in ranks]
            await asyncio.gather(*[server.launch.remote() for server in self.servers])
            self._server_handle = self.servers[0]
            self._server_address = f"{server_name(self.replica_rank)}:0"
            return
        server = start_server(
            self.spec,
            self.replica_rank,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": devices}},
        )
        await server.launch.remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, f"{server_name(self.replica_rank)}:0"


def _placement(worker: Any) -> tuple[str, str]:
    """Runs in the actor worker: where its rollout server has to live."""
    return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "")


class WeightSender(BaseRollout):
    """Lives in an actor worker; verl calls it after an update.

    Tensors go through one safetensors file in shared memory, which works on every platform and leaves the
    engine's process to map it. Every rank takes part in gathering them; the first rank of a replica sends.
    """

    def __init__(self, config: DictConfig, model_config: DictConfig, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        ranks = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        rank = int(os.environ["RANK"])
        self.replica_rank, self.is_sender = rank // ranks, rank % ranks == 0
        settings = (self.config.engine_kwargs or {}).get("vllm_omni") or {}
        self.servers = servers_of(
            self.replica_rank, int(os.environ["WORLD_SIZE"]) // ranks, settings.get("rollout_gpus") or None
        )
        self.dtype = getattr(torch, {"bfloat16": "bfloat16", "float32": "float32"}[self.config.dtype])

    async def resume(self, tags: list[str]) -> None:
        if self.is_sender:
            await asyncio.gather(*[server.wake_up.remote(tags) for server in self._handles()])

    async def release(self) -> None:
        if self.is_sender:
            await asyncio.gather(*[server.sleep.remote() for server in self._handles()])

    def _handles(self) -> list[Any]:
        return [ray.get_actor(server_name(rank)) for rank in self.servers]

    async def update_weights(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if wire_format != "named_tensors" or peft_config is not None:
            raise WeightSyncError(
                f"the rollout engine takes merged full tensors, not {wire_format} with peft_config={peft_config}: "
                "set actor_rollout_ref.model.lora.merge=True"
            )
        tensors = {name: tensor.to("cpu", self.dtype).contiguous() for name, tensor in weights}
        if not self.is_sender:
            return
        if not tensors:
            raise WeightSyncError("weight sync: the actor exported no tensor")
        handle, path = tempfile.mkstemp(prefix="verl-tts-weights-", suffix=".safetensors", dir=SHARED_MEMORY)
        os.close(handle)
        try:
            try:
                await asyncio.to_thread(save_file, tensors, path)
            except (OSError, SafetensorError) as error:
                size_mib = sum(tensor.nbytes for tensor in tensors.values()) >> 20
                raise WeightSyncError(
                    f"weight sync: {size_mib} MiB of weights do not fit into {SHARED_MEMORY}: {error}; give the "
                    "machine or container more shared memory (docker run --shm-size)"
                ) from error
            with CLOCK.running():
                sent = digest(tensors)
            await asyncio.gather(
                *[server.update_weights.remote(path, len(tensors), sent, global_steps) for server in self._handles()]
            )
        finally:
            Path(path).unlink()
