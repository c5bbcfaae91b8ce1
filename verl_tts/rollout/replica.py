"""What verl holds of the rollout: a replica in the trainer, and the sender of weights in each actor worker."""

import asyncio
import os
import tempfile
from collections.abc import Iterator
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


class OmniReplica(RolloutReplica):
    """One rollout server beside one actor worker, on the same devices."""

    spec: RolloutSpec  # set by ``verl_tts.trainer`` before verl makes replicas

    async def launch_servers(self) -> None:
        node_id, devices = await self.workers[0].__ray_call__.remote(_placement)
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
        self.dtype = getattr(torch, {"bfloat16": "bfloat16", "float32": "float32"}[self.config.dtype])

    async def resume(self, tags: list[str]) -> None:
        if self.is_sender:
            await ray.get_actor(server_name(self.replica_rank)).wake_up.remote(tags)

    async def release(self) -> None:
        if self.is_sender:
            await ray.get_actor(server_name(self.replica_rank)).sleep.remote()

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
            server = ray.get_actor(server_name(self.replica_rank))
            await server.update_weights.remote(path, len(tensors), sent, global_steps)
        finally:
            Path(path).unlink()
