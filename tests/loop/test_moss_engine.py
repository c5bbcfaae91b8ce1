"""MOSS in the rollout engine on its own: real vLLM-Omni stages, no Ray, on the tiny checkpoint."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file, save_file

from verl_tts.checkpoints.tiny_moss import build_tiny_moss
from verl_tts.config.model_dir import read_model_config
from verl_tts.config.tts import REDUCTIONS
from verl_tts.engine.model_config import PolicySettings
from verl_tts.engine.sampling import Scoring
from verl_tts.models.moss import MossPolicy, lora_targets, replay_inputs, score_replay
from verl_tts.rollout.reference import References, load_codec
from verl_tts.rollout.server import RolloutServer
from verl_tts.rollout.weights import digest
from verl_tts.types import GridRollout, PromptGrid, PromptRow, Waveform

from .runs import FP32_LIMIT
from .test_engine import CPU_ENVIRONMENT, RAW, TRUNCATED, spec_of

pytestmark = pytest.mark.loop

POSITIONS = 48
ROWS = ({}, {"instruction": "In a warm voice."}, {"ref_audio": "voice.wav"}, {"ref_audio": "short.wav"})


@dataclass
class Engine:
    server: RolloutServer
    model: Path
    prompts: Sequence[PromptGrid]
    loop: asyncio.AbstractEventLoop

    def call(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def batch(self, sampling: dict[str, Any], seeds: Sequence[int]) -> list[tuple[GridRollout, Waveform]]:
        """One sample for each seed, all at once; seed i is of prompt i modulo their number."""

        async def sample(seed: int) -> Any:
            given = self.prompts[seed % len(self.prompts)]
            return await self.server.sample(
                f"{seed}",
                prompt_ids=list(given.text_ids),
                sampling_params=sampling,
                seed=seed,
                sample_id=f"sample {seed}",
                **given.request(),
            )

        async def together() -> list[Any]:
            return await asyncio.gather(*[sample(seed) for seed in seeds])

        return self.call(together())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    from transformers import AutoTokenizer

    from verl_tts.rollout.moss import Conditioner

    folder = tmp_path_factory.mktemp("moss")
    model = folder / "model"
    build_tiny_moss(model)
    noise = np.random.default_rng(0).normal(scale=0.1, size=32_000).astype(np.float32)
    soundfile.write(folder / "voice.wav", noise, 16_000)
    soundfile.write(folder / "short.wav", noise[:4000], 16_000)
    references = References(model / "codec", folder, codebooks=16, max_seconds=1.0)
    conditioner = Conditioner(read_model_config(str(model)), AutoTokenizer.from_pretrained(model), references)
    rows = [PromptRow(f"{i}", "Once upon a time.", "train", i, "x", "", extra=more) for i, more in enumerate(ROWS)]
    prompts = [conditioner(row) for row in rows]
    assert [len(prompt.text_ids) for prompt in prompts] == [conditioner.length(row) for row in rows]
    spec = replace(spec_of("moss", model), max_prompt_tokens=512, max_response_tokens=POSITIONS)
    loop = asyncio.new_event_loop()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in CPU_ENVIRONMENT.items():
            environment.setenv(name, value)

        async def started() -> RolloutServer:
            server = RolloutServer(spec, 0)
            await server.launch()
            return server

        server = loop.run_until_complete(started())
        yield Engine(server, model, prompts, loop)
        loop.run_until_complete(server.shutdown())
    loop.close()


def actors(engine: Engine, weights: dict[str, torch.Tensor], rollouts: Sequence[GridRollout], reduction: str) -> Any:
    """The policy's own log-probs at temperature 1 over all codes, sample by sample."""
    policy = MossPolicy.from_pretrained(engine.model, dtype=torch.float32, attn_implementation="sdpa")
    policy.load_state_dict(weights, strict=False)
    given = [engine.prompts[seed % len(engine.prompts)] for seed in range(len(rollouts))]
    columns = {
        "prompts": [torch.tensor(list(prompt.text_ids)) for prompt in given],
        "responses": [torch.tensor(rollout.tokens_T) for rollout in rollouts],
    }
    for name in ("tts_prompt_codes", "tts_codes"):
        parts = [{**prompt.columns(), **rollout.columns()} for prompt, rollout in zip(given, rollouts, strict=True)]
        columns[name] = [torch.tensor(part[name]) for part in parts]
    with torch.no_grad():
        output = policy(**replay_inputs(policy.config, columns.__getitem__, ""))
        scoring = Scoring(PolicySettings(channel_reduction=reduction), 1.0, gate=True)
        said = score_replay(policy.config, output, columns.__getitem__, scoring)["gate"]
    return [part.numpy() for part in said.split([len(rollout.tokens_T) for rollout in rollouts])]


def gap(engine: Engine, weights: dict[str, torch.Tensor], rollouts: Sequence[GridRollout], reduction: str) -> float:
    own = actors(engine, weights, rollouts, reduction)
    return max(float(np.abs(a - r.logprobs_T).max()) for a, r in zip(own, rollouts, strict=True))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("sampling", [RAW, TRUNCATED], ids=["raw", "truncated"])
def test_log_probs_are_the_actors(engine: Engine, reduction: str, sampling: dict[str, Any]) -> None:
    """With and without a reference, answers that ended and answers that were cut."""
    engine.server.spec = replace(engine.server.spec, channel_reduction=reduction)
    rollouts = [rollout for rollout, _ in engine.batch(sampling, range(12))]
    assert {rollout.stop_reason for rollout in rollouts} == {"eos", "length"}
    assert gap(engine, {}, rollouts, reduction) < FP32_LIMIT


def test_a_seed_repeats_bit_for_bit_alone_and_in_a_batch_and_others_differ(engine: Engine) -> None:
    together = engine.batch(RAW, range(8))
    for seed in (0, 3):
        ((rollout, waveform),) = engine.batch(RAW, [seed])
        assert np.array_equal(rollout.tokens_T, together[seed][0].tokens_T)
        assert np.array_equal(rollout.grid_TQ, together[seed][0].grid_TQ)
        assert np.array_equal(rollout.logprobs_T, together[seed][0].logprobs_T)
        assert np.array_equal(waveform.samples_S, together[seed][1].samples_S)
    assert not np.array_equal(together[0][0].grid_TQ[:3], together[4][0].grid_TQ[:3]), "the same prompt, another seed"


def test_a_clip_is_what_the_codec_makes_of_the_frames(engine: Engine) -> None:
    codec = load_codec(engine.model / "codec")
    heard = [sample for sample in engine.batch(RAW, range(6)) if len(sample[0].codes_FQ)]
    assert heard
    for rollout, waveform in heard:
        codes_QF = torch.tensor(rollout.codes_FQ.T.copy())
        expected = codec.batch_decode(codes_list=[codes_QF], num_quantizers=16).audio.reshape(-1).detach().numpy()
        assert np.allclose(waveform.samples_S, expected, atol=1e-6)


def test_a_sync_of_the_merged_backbone_replaces_the_policy_and_touches_nothing_else(
    engine: Engine, tmp_path: Path
) -> None:
    import re

    published = load_file(engine.model / "model.safetensors")
    linear = re.compile(rf"{lora_targets('all-linear')}\.weight")
    held = {name: tensor for name, tensor in published.items() if linear.fullmatch(name)}
    noise = torch.Generator().manual_seed(0)
    sent = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=noise) for name, tensor in held.items()}
    save_file(sent, tmp_path / "sent.safetensors")
    save_file(held, tmp_path / "held.safetensors")
    engine.server.spec = replace(engine.server.spec, channel_reduction="sum")
    try:
        path = str(tmp_path / "sent.safetensors")
        assert engine.call(engine.server.update_weights(path, len(sent), digest(sent), 7))["tensors"] == 14
        now = engine.call(engine.server.read_weights(sorted(published)))
        for name, tensor in published.items():
            assert torch.equal(now[name], sent.get(name, tensor)), name
        rollouts = [rollout for rollout, _ in engine.batch(RAW, range(8))]
        assert gap(engine, sent, rollouts, "sum") < FP32_LIMIT
        assert gap(engine, {}, rollouts, "sum") > 1e-2, "and no longer the old policy"
    finally:
        path = str(tmp_path / "held.safetensors")
        engine.call(engine.server.update_weights(path, len(held), digest(held), 8))


def test_every_head_and_embedding_can_be_synced_under_its_published_name(engine: Engine, tmp_path: Path) -> None:
    published = load_file(engine.model / "model.safetensors")
    sent = {name: tensor * 1.01 for name, tensor in published.items() if name.startswith(("lm_heads.", "emb_ext."))}
    for tensors, step in ((sent, 9), ({name: published[name] for name in sent}, 10)):
        save_file(tensors, tmp_path / f"{step}.safetensors")
        path = str(tmp_path / f"{step}.safetensors")
        assert engine.call(engine.server.update_weights(path, len(tensors), digest(tensors), step))["tensors"] == 33
        rollouts = [rollout for rollout, _ in engine.batch(RAW, range(4))]
        assert gap(engine, tensors, rollouts, engine.server.spec.channel_reduction) < FP32_LIMIT


def test_a_wrong_name_is_refused_before_anything_is_loaded(engine: Engine, tmp_path: Path) -> None:
    tensors = {"lm_heads.17.weight": torch.zeros(1025, 64)}
    save_file(tensors, tmp_path / "wrong.safetensors")
    with pytest.raises(Exception, match="nothing was loaded"):
        engine.call(engine.server.update_weights(str(tmp_path / "wrong.safetensors"), 1, digest(tensors), 9))
