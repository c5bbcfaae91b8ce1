"""The rollout engine on its own: real vLLM-Omni stages, no Ray, on the model that a run has exported."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from verl_tts.checkpoints.export import export
from verl_tts.config.model_dir import read_model_config
from verl_tts.data.prompts import read_prompts
from verl_tts.errors import RolloutError
from verl_tts.rollout.server import RolloutServer
from verl_tts.rollout.spec import RolloutSpec
from verl_tts.rollout.weights import digest
from verl_tts.types import CodecRollout, Conditioning, Waveform

from .runs import FP32_LIMIT, Inputs, Run

pytestmark = pytest.mark.loop

RAW = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
TRUNCATED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
FRAMES = 32


@dataclass
class Engine:
    """A started server and the event loop that it lives in."""

    server: RolloutServer
    model: Path
    conditions: Sequence[Conditioning]
    loop: asyncio.AbstractEventLoop

    def call(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    async def sample(self, given: Conditioning, seed: int, sampling: dict[str, Any]) -> tuple[CodecRollout, Waveform]:
        output = await self.server.generate(
            f"{seed}",
            prompt_ids=list(given.text_ids),
            sampling_params=sampling,
            speaker=given.speaker_H,
            language=given.language,
            seed=seed,
            sample_id=f"sample {seed}",
        )
        return output.extra_fields["rollout"], output.extra_fields["waveform"]

    def batch(self, sampling: dict[str, Any], seeds: Sequence[int]) -> list[tuple[CodecRollout, Waveform]]:
        """One sample for each seed, all at once; seed i is of prompt i modulo their number."""

        async def together() -> list[Any]:
            return await asyncio.gather(
                *[self.sample(self.conditions[seed % len(self.conditions)], seed, sampling) for seed in seeds]
            )

        return self.call(together())

    def layout(self, layout: str) -> None:
        self.server.spec = replace(self.server.spec, prompt_layout=layout)


def spec_of(policy: str, model: Path) -> RolloutSpec:
    return RolloutSpec(
        model=policy,
        model_path=str(model),
        external_lib=(),
        dtype="float32",
        max_prompt_tokens=192,
        max_response_tokens=FRAMES,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        gpu_memory_utilization=0.2,
        enforce_eager=True,
        logprobs_mode="raw_logprobs",
        prompt_layout="non_streaming",
        seed=0,
        rpc_timeout_s=120,
        startup_timeout_s=300,
        frees_memory=False,
        executor="uni",
        stages_side_by_side=True,
        attention_backend=None,
    )


@pytest.fixture(scope="module")
def engine(unbroken: Run, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    from transformers import AutoTokenizer

    from verl_tts.rollout.qwen3_tts import Conditioner

    model = tmp_path_factory.mktemp("exported") / "model"
    export(unbroken.checkpoint(4), model, dtype="float32")
    spec = spec_of("qwen3_tts", model)
    conditioner = Conditioner(
        read_model_config(str(model)), AutoTokenizer.from_pretrained(model), str(inputs.speaker), "Auto"
    )
    conditions = [conditioner(row) for row in read_prompts(inputs.train)[:8]]
    loop = asyncio.new_event_loop()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in CPU_ENVIRONMENT.items():
            environment.setenv(name, value)

        async def started() -> RolloutServer:
            server = RolloutServer(spec, 0)
            await server.launch()
            return server

        server = loop.run_until_complete(started())
        yield Engine(server, model, conditions, loop)
        loop.run_until_complete(server.shutdown())
    loop.close()


CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def actor_logprobs(
    weights: dict[str, torch.Tensor], model: Path, given: Conditioning, rollout: CodecRollout, layout: str
) -> np.ndarray:
    """The policy's own log-probs of the sampled tokens, at temperature 1 over the engine's support."""
    from verl_tts.models.qwen3_tts import Qwen3TTSPolicy

    policy = Qwen3TTSPolicy.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    policy.load_state_dict(weights, strict=False)
    return logprobs_of(policy, given, rollout, layout)


def logprobs_of(policy: Any, given: Conditioning, rollout: CodecRollout, layout: str) -> np.ndarray:
    from verl_tts.models.qwen3_tts import support_index

    with torch.no_grad():
        (logits_NV,) = policy(
            text_ids=[torch.tensor(given.text_ids)],
            codes=[torch.tensor(rollout.codes_FQ)],
            speakers=[torch.tensor(given.speaker_H)],
            language_ids=[given.language_id],
            layout=layout,
        )
    labels_N = support_index(policy.config)[torch.tensor(rollout.tokens_T)]
    return logits_NV.log_softmax(-1).gather(-1, labels_N[:, None])[:, 0].numpy()


@pytest.mark.parametrize("layout", ["non_streaming", "streaming"])
@pytest.mark.parametrize("sampling", [RAW, TRUNCATED], ids=["raw", "truncated"])
def test_log_probs_are_those_of_the_exported_policy(engine: Engine, layout: str, sampling: dict[str, Any]) -> None:
    """Named languages and Auto, sequences ended by EOS and cut by the limit."""
    engine.layout(layout)
    seeds = range(8)
    samples = engine.batch(sampling, seeds)
    assert {rollout.stop_reason for rollout, _ in engine.batch(RAW, range(100, 132))} == {"eos", "length"}
    for seed, (rollout, _) in zip(seeds, samples, strict=True):
        given = engine.conditions[seed % len(engine.conditions)]
        ours = actor_logprobs({}, engine.model, given, rollout, layout)
        assert np.abs(ours - rollout.logprobs_T).max() < FP32_LIMIT


def test_a_sample_is_the_same_alone_and_in_a_batch(engine: Engine) -> None:
    engine.layout("non_streaming")
    together = engine.batch(RAW, range(8))
    for seed in (0, 3, 7):
        (alone,) = engine.batch(RAW, [seed])
        rollout, waveform = together[seed]
        assert np.array_equal(alone[0].tokens_T, rollout.tokens_T)
        assert np.array_equal(alone[0].codes_FQ, rollout.codes_FQ)
        assert np.array_equal(alone[1].samples_S, waveform.samples_S)


def test_an_immediate_end_is_a_sample_without_audio(engine: Engine) -> None:
    samples = [sample for sample in engine.batch(RAW, range(200, 328)) if len(sample[0].tokens_T) == 1]
    assert samples, "none of 128 samples ended at once"
    for rollout, waveform in samples:
        assert rollout.stop_reason == "eos"
        assert rollout.codes_FQ.shape == (0, 16)
        assert len(waveform.samples_S) == 0


def test_a_sync_replaces_the_policy_and_proves_it(engine: Engine, tmp_path: Path) -> None:
    engine.layout("non_streaming")
    held = {
        name: tensor
        for name, tensor in load_file(engine.model / "model.safetensors").items()
        if name.startswith(("talker.model.", "talker.codec_head."))
    }
    noise = torch.Generator().manual_seed(0)
    sent = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=noise) for name, tensor in held.items()}
    save_file(sent, tmp_path / "sent.safetensors")
    given = engine.conditions[0]
    try:
        answer = engine.call(
            engine.server.update_weights(str(tmp_path / "sent.safetensors"), len(sent), digest(sent), 7)
        )
        assert answer == {"tensors": len(sent), "digest": digest(sent)}
        received = engine.call(engine.server.read_weights(sorted(sent)))
        assert all(torch.equal(received[name], sent[name]) for name in sent)
        ((rollout, _),) = engine.batch(RAW, [0])
        assert (
            np.abs(actor_logprobs(sent, engine.model, given, rollout, "non_streaming") - rollout.logprobs_T).max()
            < FP32_LIMIT
        )
        assert (
            np.abs(actor_logprobs({}, engine.model, given, rollout, "non_streaming") - rollout.logprobs_T).max() > 1e-2
        )
    finally:
        save_file(held, tmp_path / "held.safetensors")
        engine.call(engine.server.update_weights(str(tmp_path / "held.safetensors"), len(held), digest(held), 8))


def test_a_new_adapter_is_the_base_bit_for_bit_and_a_trained_one_is_heard(engine: Engine, tmp_path: Path) -> None:
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    from verl_tts.models.qwen3_tts import ADAPTER, LORA_PARENTS, Qwen3TTSPolicy

    engine.layout("non_streaming")
    policy = Qwen3TTSPolicy.from_pretrained(engine.model, dtype=torch.float32, attn_implementation="sdpa")
    settings = LoraConfig(r=8, lora_alpha=16, target_modules=ADAPTER.lora_targets([*LORA_PARENTS]))
    policy = inject_adapter_in_model(settings, policy)
    adapted = {name: module for name, module in policy.named_modules() if isinstance(module, LoraLayer)}
    held = {f"{name}.weight": module.base_layer.weight.detach().clone() for name, module in adapted.items()}

    def send(step: int) -> None:
        with torch.no_grad():
            merged = {
                f"{name}.weight": module.base_layer.weight + module.get_delta_weight("default")
                for name, module in adapted.items()
            }
        save_file(merged, tmp_path / "merged.safetensors")
        path = str(tmp_path / "merged.safetensors")
        engine.call(engine.server.update_weights(path, len(merged), digest(merged), step))

    def one_by_one() -> list[tuple[CodecRollout, Waveform]]:
        """Beside others a log-prob may differ in its last bit."""
        return [engine.batch(RAW, [seed])[0] for seed in range(4)]

    base = one_by_one()
    try:
        send(7)
        for (ours, our_clip), (theirs, their_clip) in zip(one_by_one(), base, strict=True):
            for name in ("tokens_T", "codes_FQ", "logprobs_T"):
                assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
            assert np.array_equal(our_clip.samples_S, their_clip.samples_S)

        torch.manual_seed(0)
        for module in adapted.values():
            torch.nn.init.normal_(module.lora_B["default"].weight, std=0.1)
        send(8)
        trained = one_by_one()
        assert any(
            not np.array_equal(ours.tokens_T, theirs.tokens_T)
            for (ours, _), (theirs, _) in zip(trained, base, strict=True)
        )
        for given, (rollout, _) in zip(engine.conditions, trained, strict=False):
            ours = logprobs_of(policy, given, rollout, "non_streaming")  # adapter and base apart, as in training
            assert np.abs(ours - rollout.logprobs_T).max() < FP32_LIMIT
    finally:
        save_file(held, tmp_path / "held.safetensors")
        engine.call(engine.server.update_weights(str(tmp_path / "held.safetensors"), len(held), digest(held), 9))


@pytest.mark.parametrize(
    ("name", "shape"), [("codec_head.weight", (3072, 64)), ("talker.codec_head.weight", (3072, 32))]
)
def test_a_wrong_name_or_shape_is_refused_before_anything_is_loaded(
    engine: Engine, tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    good = {"talker.model.norm.weight": torch.full((64,), 3.0)}
    before = engine.call(engine.server.read_weights([*good]))
    tensors = good | {name: torch.zeros(shape)}
    save_file(tensors, tmp_path / "wrong.safetensors")
    with pytest.raises(Exception, match="nothing was loaded"):
        engine.call(engine.server.update_weights(str(tmp_path / "wrong.safetensors"), 2, digest(tensors), 9))
    after = engine.call(engine.server.read_weights([*good]))
    assert torch.equal(before["talker.model.norm.weight"], after["talker.model.norm.weight"])


def test_a_request_that_does_not_fit_fails_alone_and_names_the_sample(engine: Engine) -> None:
    too_long = replace(engine.conditions[0], text_ids=[*engine.conditions[0].text_ids] * 12)
    with pytest.raises(RolloutError, match="sample 4711"):
        engine.call(engine.sample(too_long, 4711, RAW))
    assert engine.batch(RAW, [1])
