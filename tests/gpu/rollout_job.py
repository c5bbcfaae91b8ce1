"""One rung with the rollout engine, without Ray: ``python rollout_job.py MODEL OUT.json cpu|cuda RUNG``.

The server is the one of a run, with its two stages as children; the actor is in this process, on the same GPU.

Shapes: ``T`` sampled token, ``F`` codec frame, ``Q`` codebook, ``S`` audio sample.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from actor_job import LEARNING_RATE, as_one_rank, with_learning
from engine_cases import ROWS, TEMPERATURE, Case
from engine_job import actor, export, log_probs, update
from safetensors.torch import save_file
from transformers import AutoTokenizer
from verl.utils.device import get_torch_device

from verl_tts.config.compose import compose
from verl_tts.data.quickstart import invented_speaker, quickstart_rows
from verl_tts.models.base import get_policy
from verl_tts.models.qwen3_tts_prompt import SAMPLES_PER_FRAME
from verl_tts.rollout.agent_loop import Sample
from verl_tts.rollout.groups import to_fields
from verl_tts.rollout.qwen3_tts import Conditioner
from verl_tts.rollout.server import SHARED_MEMORY, RolloutServer
from verl_tts.rollout.spec import RolloutSpec
from verl_tts.rollout.stages import talker_kv_bytes
from verl_tts.rollout.weights import digest
from verl_tts.types import Score

FRAMES = 32
SETTINGS = {"temperature": TEMPERATURE, "top_p": 0.95, "top_k": 50}


class Clips:
    """A server, and the same few clips of it again and again."""

    def __init__(self, model: Path, platform: str) -> None:
        sleeps = str(platform == "cuda").lower()
        self.config = compose([
            f"tts.platform={platform}",
            f"actor_rollout_ref.model.path='{model}'",
            f"actor_rollout_ref.rollout.free_cache_engine={sleeps}",
            "data.max_prompt_length=192",
            f"data.max_response_length={FRAMES}",
        ])  # fmt: skip
        self.spec = RolloutSpec.from_config(self.config)
        self.server = RolloutServer(self.spec, 0)
        self.model_json = json.loads((model / "config.json").read_text())
        self._folder = tempfile.TemporaryDirectory()
        speaker = Path(self._folder.name, "speaker.json")
        speaker.write_text(json.dumps(invented_speaker(self.model_json["talker_config"]["hidden_size"])))
        self._conditioner = Conditioner(self.model_json, AutoTokenizer.from_pretrained(model), str(speaker), "Auto")
        self._rounds = 0

    async def make(self, number: int = ROWS) -> list[Sample]:
        self._rounds += 1
        return await asyncio.gather(
            *[self._one(index, row) for index, row in enumerate(quickstart_rows()["val"][:number])]
        )

    async def _one(self, index: int, row: Any) -> Sample:
        given = self._conditioner(row)
        output = await self.server.generate(
            f"{self._rounds}-{index}",
            prompt_ids=given.text_ids,
            sampling_params=SETTINGS,
            speaker=given.speaker_H,
            language=given.language,
            seed=index,
            sample_id=row.id,
        )
        fields = output.extra_fields
        return Sample(row, given, fields["rollout"], fields["waveform"], Score(0.0), None)


def rows_of(samples: list[Sample]) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    return [with_learning(to_fields(sample, uid="group"), random) for sample in samples]


def gap(samples: list[Sample], worker: Any) -> dict[str, float]:
    """Of the engine's log-probs to the actor's, over all sampled tokens."""
    own = np.concatenate([row["gate_log_probs"] for row in log_probs(worker, rows_of(samples))])
    differences = np.abs(np.concatenate([sample.rollout.logprobs_T for sample in samples]) - own)
    return {"mean_abs": float(differences.mean()), "max_abs": float(differences.max())}


def actor_beside(model: Path, platform: str) -> tuple[Any, Any]:
    # Both in one process, as they never are in a run: vLLM-Omni has put its own configuration in ours' place.
    get_policy("qwen3_tts").register()
    return actor(Case("actor", 1, (f"tts.platform={platform}", LEARNING_RATE)), model)


def used_gib() -> float:
    free, total = get_torch_device().mem_get_info()
    return (total - free) / 2**30


async def clip(clips: Clips, model: Path, platform: str) -> dict[str, Any]:
    (sample,) = await clips.make(1)
    rollout, waveform = sample.rollout, sample.waveform
    return {
        "frames": len(rollout.codes_FQ),
        "samples_per_frame": len(waveform.samples_S) / max(1, len(rollout.codes_FQ)),
        "expected_samples_per_frame": SAMPLES_PER_FRAME,
        "peak_amplitude": float(np.abs(waveform.samples_S).max()),
        "logprobs_finite": bool(np.isfinite(rollout.logprobs_T).all()),
        "stop_reason": rollout.stop_reason,
    }


async def agreement(clips: Clips, model: Path, platform: str) -> dict[str, Any]:
    worker, _ = actor_beside(model, platform)
    return gap(await clips.make(), worker)


async def sleep(clips: Clips, model: Path, platform: str) -> dict[str, Any]:
    before, awake_gib = await clips.make(), used_gib()
    await clips.server.sleep()
    asleep_gib = used_gib()
    await clips.server.wake_up(["weights"])
    await clips.server.wake_up(["kv_cache"])
    after = await clips.make()
    tokens = clips.spec.max_prompt_tokens + clips.spec.max_response_tokens
    return {
        "kv_cache_gib": talker_kv_bytes(clips.spec, clips.model_json["talker_config"], tokens) / 2**30,
        "given_back_gib": awake_gib - asleep_gib,
        "awake_again_gib": used_gib(),
        "clips_with_other_codes": differing(before, after, lambda sample: sample.rollout.codes_FQ),
        "clips_with_other_samples": differing(before, after, lambda sample: sample.waveform.samples_S),
    }


def differing(before: list[Sample], after: list[Sample], part: Any) -> int:
    return sum(not np.array_equal(part(one), part(other)) for one, other in zip(before, after, strict=True))


async def sync(clips: Clips, model: Path, platform: str) -> dict[str, Any]:
    """As verl does it around an update: sleep, train, wake the weights, sync, wake the cache."""
    samples = await clips.make()
    await clips.server.sleep()
    (old, _), (worker, config) = actor_beside(model, platform), actor_beside(model, platform)
    update(worker, config, rows_of(samples))
    sent = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in export(worker).items()}
    await clips.server.wake_up(["weights"])
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY, suffix=".safetensors") as file:
        save_file(sent, file.name)
        arrived = await clips.server.update_weights(file.name, len(sent), digest(sent), 1)
    await clips.server.wake_up(["kv_cache"])
    again = await clips.make()
    return {
        "sent": len(sent),
        "arrived": arrived["tensors"],
        "same_digest": arrived["digest"] == digest(sent),  # of the engine's own parameters
        "to_new_weights": gap(again, worker),
        "to_old_weights": gap(again, old),
    }


RUNGS = {"clip": clip, "agreement": agreement, "sleep": sleep, "sync": sync}


async def run(model: Path, platform: str, rung: str) -> dict[str, Any]:
    clips = Clips(model, platform)
    await clips.server.launch()
    try:
        return await RUNGS[rung](clips, model, platform)
    finally:
        await clips.server.shutdown()


def main(model: str, out: str, platform: str, rung: str) -> None:
    with tempfile.TemporaryDirectory() as meeting:
        as_one_rank(meeting)
        found = asyncio.run(run(Path(model), platform, rung))
        if dist.is_initialized():
            dist.destroy_process_group()
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
