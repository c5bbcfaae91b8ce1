"""The rollout server around vLLM-Omni's engine: one Ray actor per replica, or a plain object in an evaluation.

It is ours and not verl's HTTP server: that one starts a single-stage engine. Every call has a time limit, and a
stage that is gone makes this and every later call raise ``ProcessDied``.
"""

import asyncio
import importlib
import json
import os
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import psutil
import yaml

from verl_tts import stacks
from verl_tts.errors import ProcessDied, RolloutError, WeightSyncError
from verl_tts.rollout.spec import RolloutSpec
from verl_tts.types import CodecRollout, Waveform

SHARED_MEMORY = Path("/dev/shm")
STAGE_GRACE_S = 1.0  # that a stage may take to end by itself
STAGE_END_S = 10.0  # that a killed one may take to be gone

T = TypeVar("T")


class RolloutServer:
    """Lives in its own process. The engine's stages are its children."""

    def __init__(self, spec: RolloutSpec, replica_rank: int) -> None:
        stacks.register("rollout-server")
        for module in spec.external_lib:
            importlib.import_module(module)
        self.spec, self.replica_rank = spec, replica_rank
        self.adapter = importlib.import_module(f"verl_tts.rollout.{spec.model}")
        self.model_json = json.loads(Path(spec.model_path, "config.json").read_text())
        self.global_steps: int | None = None
        self.held: dict[str, Any] = {}
        """What the last weight sync left in the engine: ``tensors``, their ``digest``, ``proof_s`` it took to see."""
        self.dead: str | None = None
        self._engine: Any = None
        self._launching = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._scratch = TemporaryDirectory(prefix="verl-tts-rollout-")

    # ------------------------------------------------------------------ life

    async def launch(self) -> float:
        """Starts the engine, once however often it is asked. Returns the seconds that it took."""
        async with self._launching:
            if self._engine is not None:
                return 0.0
            began = time.monotonic()
            self.adapter.check_model(self.model_json)
            self.adapter.register_pipeline()
            if self.spec.stages_side_by_side:
                from verl_tts.compat import vllm_omni_parallel_stages

                vllm_omni_parallel_stages.apply()
            from vllm_omni.entrypoints.async_omni import AsyncOmni

            stages = Path(self._scratch.name, "stages.yaml")
            stages.write_text(yaml.safe_dump(self.adapter.topology(self.spec, self.model_json), sort_keys=False))
            limit_s = int(self.spec.startup_timeout_s)
            self._engine = AsyncOmni(
                model=self.spec.model_path, deploy_config=str(stages), stage_init_timeout=limit_s, init_timeout=limit_s
            )
            return time.monotonic() - began

    async def shutdown(self) -> None:
        """Ends the stages, and removes the semaphores that they leave in shared memory by being ended."""
        if self._engine is not None:
            children = started_here()
            # vllm-omni 0.24 ends one stage after the other, and gives each five seconds, which none of them heeds.
            kill = threading.Timer(STAGE_GRACE_S, _kill, [children])
            kill.start()
            self._engine.shutdown()
            self._engine = None
            kill.join()
            psutil.wait_procs(children, timeout=STAGE_END_S)
            for child in children:
                for semaphore in SHARED_MEMORY.glob(f"sem.loky-{child.pid}-*"):
                    semaphore.unlink(missing_ok=True)
        self._scratch.cleanup()

    # ------------------------------------------------------------------ rollouts

    async def generate(self, request_id: str, *, image_data: Any = None, video_data: Any = None, **request: Any) -> Any:
        """``sample`` as verl's ``TokenOutput``; ``extra_fields`` carries ``rollout`` and ``waveform``."""
        from verl.workers.rollout.replica import TokenOutput

        rollout, waveform = await self.sample(request_id, **request)
        return TokenOutput(
            token_ids=rollout.tokens_T.tolist(),
            log_probs=rollout.logprobs_T.tolist(),
            stop_reason="completed",
            extra_fields={"global_steps": self.global_steps, "rollout": rollout, "waveform": waveform},
        )

    async def sample(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        seed: int,
        sample_id: str,
        **given: Any,
    ) -> tuple[CodecRollout, Waveform]:
        """What the policy draws for one prompt, and how it sounds. Neither Ray nor verl takes part.

        ``given`` is what the policy's adapter wants beside the prompt's ids: ``Given.request``.
        """

        async def run() -> dict[int, Any]:
            prompt, sampling = self.adapter.ask(self.spec, self.model_json, prompt_ids, sampling_params, seed, **given)
            outputs: dict[int, Any] = {}
            async for output in self._engine.generate(
                prompt=prompt, sampling_params_list=sampling, request_id=request_id
            ):
                outputs[output.stage_id] = output
            return outputs

        outputs = await self._limited(run(), f"the rollout of sample {sample_id}")
        return self.adapter.read(outputs, seed, sample_id, self.spec, self.model_json)

    # ------------------------------------------------------------------ weights

    async def update_weights(self, path: str, tensors: int, digest: int, global_steps: int | None) -> dict[str, Any]:
        """Loads a safetensors file into the talker; raises ``WeightSyncError`` unless all of it arrived."""
        async with self._updating:
            answer = await self._call_stage("verl_tts_load_weights", path)
            if not isinstance(answer, dict) or "digest" not in answer:
                reason = answer.get("error", answer) if isinstance(answer, dict) else answer
                raise WeightSyncError(f"weight sync at step {global_steps}, replica {self.replica_rank}: {reason}")
            if (answer["tensors"], answer["digest"]) != (tensors, digest):
                raise WeightSyncError(
                    f"weight sync at step {global_steps}, replica {self.replica_rank}: sent {tensors} tensors with "
                    f"digest {digest:x}, the engine holds {answer['tensors']} with {answer['digest']:x}"
                )
            self.global_steps, self.held = global_steps, answer
            return answer

    async def held_weights(self) -> dict[str, Any]:
        return self.held

    async def read_weights(self, names: list[str]) -> dict[str, Any]:
        """The talker's live parameters under their published names, as tensors on the host."""
        from safetensors.torch import load_file

        path = Path(self._scratch.name, "held.safetensors")
        await self._call_stage("verl_tts_save_weights", str(path), names)
        return load_file(path)

    async def _call_stage(self, method: str, *args: Any) -> Any:
        """One method of the weight stage's worker; the answer of its only rank."""
        answers = await self._limited(
            self._engine.collective_rpc(
                method, args=args, stage_ids=self.adapter.WEIGHT_STAGES, timeout=self.spec.rpc_timeout_s
            ),
            f"{method} on the talker stage",
        )
        answer = answers[0]
        while isinstance(answer, list):  # one entry per replica of the stage, then one per rank
            answer = answer[0]
        return answer

    async def _limited(self, call: Coroutine[Any, Any, T], what: str) -> T:
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.dead:
            call.close()
            raise ProcessDied(self.dead)
        try:
            return await asyncio.wait_for(call, self.spec.rpc_timeout_s)
        except TimeoutError as error:
            raise ProcessDied(
                f"replica {self.replica_rank}: {what} did not end within {self.spec.rpc_timeout_s:g} s "
                "(tts.rpc_timeout_s)"
            ) from error
        except EngineDeadError as error:
            self.dead = f"replica {self.replica_rank}: a stage of the rollout engine died during {what}"
            raise ProcessDied(self.dead) from error
        except (ValueError, RuntimeError) as error:
            raise RolloutError(f"replica {self.replica_rank}: {what} failed: {error}") from error

    # ------------------------------------------------------------------ memory; verl's replica calls these

    async def sleep(self) -> None:
        if self.spec.frees_memory:
            self._require_success(await self._limited(self._engine.sleep(level=1), "sleep"), "sleep")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        if self.spec.frees_memory:
            self._require_success(await self._limited(self._engine.wake_up(tags=tags), "wake-up"), "wake-up")

    def _require_success(self, answers: list[Any], what: str) -> None:
        """vLLM-Omni's workers report a failed sleep or wake-up in their answer."""
        for answer in answers:
            if answer.status != "SUCCESS":
                raise ProcessDied(f"replica {self.replica_rank}: {what} failed on stage {answer.stage_id}: {answer}")


def started_here() -> list[psutil.Process]:
    """Every process below this one, to be ended, but for its own tracker of shared memory, which ends with it: Python
    would start another one in its place, which knows of nothing and complains about it at the end."""
    return [child for child in psutil.Process().children(recursive=True) if not _is_own_tracker(child)]


def _is_own_tracker(child: psutil.Process) -> bool:
    try:
        return child.ppid() == os.getpid() and "resource_tracker" in " ".join(child.cmdline())
    except psutil.NoSuchProcess:
        return False


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
