"""What we lean on in verl, vLLM and vLLM-Omni, private names above all, exists and is called as we call it.

An upgrade that fails here says which name has moved before a run does. Where a call is cheap it is made; where it
is not, its signature is compared.
"""

import asyncio
import inspect
import json
from dataclasses import fields
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open

from verl_tts.models.qwen3_tts_prompt import TokenIds
from verl_tts.rollout import qwen3_tts as rollout
from verl_tts.rollout.worker_extension import FUSED, WeightReceiver

VERL_FSDP = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
TALKER = "vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker:Qwen3TTSTalkerForConditionalGeneration"
OMNI = "vllm_omni.entrypoints.async_omni:AsyncOmni"

# module:path -> the arguments that we give by name, in this order if positional; () where only the name matters
SYMBOLS = {
    # verl: registration
    "verl.workers.rollout.base:get_rollout_class": ("rollout_name", "mode"),
    "verl.workers.rollout.replica:RolloutReplicaRegistry.register": ("name", "loader"),
    "verl.workers.rollout.replica:RolloutReplicaRegistry.get": ("name",),
    "verl.workers.engine.base:EngineRegistry.register": ("model_type", "backend", "device"),
    "verl.workers.engine.base:EngineRegistry.get_engine_cls": ("model_type", "backend"),
    "verl.plugin.platform:get_platform": (),
    "verl.plugin.platform.platform_manager:PlatformRegistry.register": ("platform",),
    # verl: the actor
    f"{VERL_FSDP}.optimizer_step": (),
    "verl.utils.fsdp_utils:merged_lora_context": ("actor", "backup_adapters"),
    "verl.utils.fsdp_utils:normalize_peft_param_name": ("params",),
    "verl.utils.fsdp_utils:offload_fsdp_model_to_cpu": ("model",),
    "verl.utils.torch_dtypes:PrecisionType.to_dtype": ("precision",),
    "verl.utils.device:get_device_id": (),
    "verl.utils.tensordict_utils:unwrap_non_tensor_data": (),
    "verl.utils.tensordict_utils:get_non_tensor_data": ("data", "key", "default"),
    "verl.utils.tensordict_utils:get": ("tensordict", "key", "default"),
    "verl.utils.tensordict_utils:list_of_dict_to_tensordict": ("list_of_dicts",),
    # verl: the trainer
    "verl.trainer.ppo.padding_utils:upsample_batch_to_divisible_size": ("batch", "batch_multiple", "eos_token_id"),
    "transfer_queue:kv_batch_put": ("keys", "partition_id", "fields", "tags"),
    "transfer_queue:kv_batch_get": ("keys", "partition_id", "select_fields"),
    "transfer_queue:kv_list": ("partition_id",),
    "transfer_queue:kv_clear": ("keys", "partition_id"),
    "transfer_queue:init": ("conf",),
    # vLLM
    "vllm.model_executor.models.utils:AutoWeightsLoader.load_weights": ("self", "weights", "mapper"),
    "vllm.model_executor.models.utils:WeightsMapper.apply_list": ("self", "values"),
    "vllm.v1.engine.exceptions:EngineDeadError": (),
    # vLLM-Omni
    f"{OMNI}.collective_rpc": ("self", "method", "timeout", "args", "stage_ids"),
    f"{OMNI}.generate": ("self", "prompt", "request_id", "sampling_params_list"),
    f"{OMNI}.sleep": ("self", "level"),
    f"{OMNI}.wake_up": ("self", "tags"),
    f"{OMNI}.shutdown": ("self",),
    f"{TALKER}._init_runtime_buffers": ("self",),
    f"{TALKER}._build_stacked_codec_embed": ("self",),
    "vllm_omni.engine.stage_runtime:StageRuntime._replica_init_group_key": ("self", "replica"),
    "vllm_omni.engine.stage_runtime:StageRuntime.initialize": ("self",),
    "vllm_omni.engine.stage_runtime:acquire_device_locks": (),
    "vllm_omni.config.pipeline_registry:register_pipeline": (),
    "vllm_omni.config.pipeline_registry:OMNI_PIPELINES": (),
}


def find(symbol: str) -> Any:
    module, _, path = symbol.partition(":")
    found = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_a_name_that_we_lean_on_is_there_and_takes_our_arguments(symbol):
    found, wanted = find(symbol), SYMBOLS[symbol]
    if wanted:
        taken = [name for name in inspect.signature(found).parameters if name in wanted or name == "self"]
        assert taken == [name for name in wanted if name in taken], f"{symbol}{inspect.signature(found)}"
        assert set(wanted) - {"self"} <= set(taken), f"{symbol}{inspect.signature(found)}"


# ------------------------------------------------------------------------------------------------ overrides

# Our class -> upstream methods that it overrides. One that is missing here would never be called.
OVERRIDES = {
    "verl_tts.trainer:OmniTrainer": {
        "fit",
        "_init_dataloader",
        "get_llm_client",
        "_build_replay_buffer",
        "_submit_batch_to_rollout",
        "_balance_batch",
        "_compute_old_log_prob",
        "_compute_ref_log_prob",
        "_compute_advantage",
        "_update_actor",
        "step",
        "on_init_end",
        "on_train_begin",
        "on_sample_begin",
        "on_sample_end",
        "on_step_begin",
        "on_step_end",
        "_compute_metrics",
        "_validate",
        "_load_checkpoint",
        "_save_checkpoint",
    },
    "verl_tts.engine.actor:PolicyEngine": {
        "_build_module",
        "_build_lora_module",
        "_build_lr_scheduler",
        "prepare_model_inputs",
        "prepare_model_outputs",
        "train_batch",
        "infer_batch",
        "forward_step",
        "forward_backward_batch",
        "optimizer_step",
        "save_checkpoint",
        "get_per_tensor_param",
        "_merged_lora_per_tensor_param",
    },
    "verl_tts.rollout.replica:OmniReplica": {"launch_servers"},
    "verl_tts.rollout.replica:WeightSender": {"resume", "release", "update_weights"},
}


@pytest.mark.parametrize("symbol", OVERRIDES)
def test_what_we_override_is_there_and_is_called_with_what_we_take(symbol):
    import verl.workers.engine_workers  # noqa: F401  (before the engine, as in a worker)

    ours = find(symbol)
    for name in OVERRIDES[symbol]:
        theirs = next((vars(cls)[name] for cls in ours.__mro__[1:] if name in vars(cls)), None)
        assert theirs is not None, f"{symbol}.{name} overrides nothing"
        assert name in vars(ours), f"{symbol} does not override {name} any more: take it out of the list"
        mine = inspect.signature(vars(ours)[name]).parameters
        kinds = {parameter.kind for parameter in mine.values()}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            continue
        for parameter in inspect.signature(theirs).parameters:
            assert parameter in mine, f"{symbol}.{name} does not take {parameter}"


@pytest.mark.parametrize("symbol", OVERRIDES)
def test_every_method_that_upstream_has_too_is_an_override_on_purpose(symbol):
    import verl.workers.engine_workers  # noqa: F401

    ours = find(symbol)
    names = {name for name, value in vars(ours).items() if inspect.isfunction(value) and not name.startswith("__")}
    both = {name for name in names if any(name in vars(cls) for cls in ours.__mro__[1:])}
    assert both == OVERRIDES[symbol]


def test_the_trainer_calls_our_buffer_and_its_hooks_as_we_expect():
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    step = inspect.getsource(PPOTrainer._step_once)
    for call in (
        "self.replay_buffer.sample(",
        'partition_id="train"',
        "batch_size=sample_batch_size",
        "self._balance_batch(batch, metrics=metrics)",
        "self._compute_old_log_prob(batch, metrics=metrics)",
        "self._compute_advantage(batch, metrics=metrics)",
        "self._update_actor(batch, metrics=metrics)",
    ):
        assert call in step, call
    order = [step.index(f"self.{name}(") for name in ("_balance_batch", "_compute_old_log_prob", "_update_actor")]
    assert order == sorted(order)
    fit = inspect.getsource(PPOTrainer.fit)
    # The end of a step: checkpoint, sync, validation, line. The last step may be moved to an earlier one.
    order = [fit.index(f"self.{name}(") for name in ("on_train_begin", "step", "_save_checkpoint", "on_step_end")]
    assert order == sorted(order)
    assert (
        order[-1] < fit.rindex("self._validate()") < fit.index("self._compute_metrics(batch, metrics, self.timing_raw,")
    )
    assert "and self.global_steps <= self.total_training_steps:" in fit
    assert "self.replay_buffer = self._build_replay_buffer()" in inspect.getsource(PPOTrainer)
    assert "update_weights(self.global_steps)" in inspect.getsource(PPOTrainerSync.on_step_end)
    assert 'register_trainer("sync")' in inspect.getsource(inspect.getmodule(PPOTrainerSync))


# ------------------------------------------------------------------------------------------------ verl


def test_the_registry_of_rollouts_maps_name_and_mode_to_a_class_path():
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    for key, path in _ROLLOUT_REGISTRY.items():
        assert len(key) == 2
        assert isinstance(path, str)


def test_verls_client_hands_unknown_arguments_on_and_keeps_what_the_server_adds():
    """It adds image_data and video_data, which our server takes and ignores."""
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    received: dict[str, Any] = {}
    released: list[str] = []

    async def generate(**request: Any) -> TokenOutput:
        received.update(request)
        return TokenOutput(token_ids=[1], log_probs=[-1.0], stop_reason="completed", extra_fields={"rollout": object})

    async def acquire(request_id: str, **_: Any) -> tuple[str, Any]:
        return "server", SimpleNamespace(generate=SimpleNamespace(remote=generate))

    client = LLMServerClient(
        SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name="vllm_omni")))
    )
    client._acquire_server = acquire
    client._release_server = lambda server_id, request_id=None: released.append(server_id)
    ours = {"speaker": [0.5], "language": "Auto", "seed": 7, "sample_id": "a#0"}
    output = asyncio.run(client.generate("r", prompt_ids=[1], sampling_params={"temperature": 1.0}, **ours))
    assert {name: received[name] for name in ours} == ours
    assert set(received) == {"request_id", "prompt_ids", "sampling_params", "image_data", "video_data", *ours}
    assert output.extra_fields["rollout"] is object
    assert released == ["server"]

    from verl_tts.rollout.server import RolloutServer

    taken = inspect.signature(RolloutServer.generate).bind(None, **received).arguments["request"]
    assert not {"image_data", "video_data"} & set(taken)
    inspect.signature(RolloutServer.sample).bind(None, "r", **taken)


def test_a_replica_has_what_we_set_and_what_verl_calls_on_its_servers():
    from verl.workers.rollout.replica import RolloutReplica

    from verl_tts.rollout.server import RolloutServer

    set_up = inspect.getsource(RolloutReplica.__init__)
    for name in ("replica_rank", "workers", "servers", "_server_address", "_server_handle"):
        assert f"self.{name}" in set_up, name
    for name in ("sleep", "wake_up"):
        assert f"server.{name}.remote(" in inspect.getsource(getattr(RolloutReplica, name))
        assert inspect.iscoroutinefunction(getattr(RolloutServer, name))


def test_verls_model_configuration_has_the_fields_that_we_read_and_set():
    from verl.workers.config import HFModelConfig

    names = {field.name for field in fields(HFModelConfig)}
    wanted = {"model_type", "external_lib", "target_modules", "lora", "lora_rank", "local_path", "hf_config"}
    assert wanted | {"enable_gradient_checkpointing", "use_remove_padding"} <= names
    assert "import_external_libs(self.external_lib)" in inspect.getsource(HFModelConfig.__post_init__)


def test_the_engine_has_the_attributes_that_our_overrides_read():
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead

    source = inspect.getsource(FSDPEngine) + inspect.getsource(FSDPEngineWithLMHead)
    for name in ("module", "_is_lora", "_is_offload_param", "engine_config", "model_config", "optimizer"):
        assert f"self.{name} = " in source, name
    assert "return self._merged_lora_per_tensor_param(), None" in source
    assert "self.prepare_model_inputs(micro_batch=micro_batch)" in source
    assert "output=raw_output, output_args=output_args, micro_batch=micro_batch, logits_processor_func=" in source


def test_verl_reads_log_probs_one_position_before_their_token():
    """``_at_input_positions`` writes them there."""
    import torch
    from verl.workers.utils.padding import response_from_nested

    def jagged(*rows):
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    values = jagged([0.0, 1.0, 2.0, 9.0], [0.0, 0.0, 3.0, 9.0])  # prompts of 2 and 3 tokens
    read = response_from_nested(values, jagged([1, 1], [1]))
    assert [row.tolist() for row in read.unbind()] == [[1.0, 2.0], [3.0]]


# ------------------------------------------------------------------------------------------------ vLLM, vLLM-Omni


def test_the_engine_is_started_with_arguments_that_it_reads():
    """AsyncOmni takes any keyword: a renamed one would be swallowed."""
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    sources = "".join(inspect.getsource(inspect.getmodule(cls)) for cls in AsyncOmni.__mro__[:-1])
    from vllm_omni.engine import async_omni_engine

    sources += inspect.getsource(async_omni_engine)
    for name in ("deploy_config", "stage_init_timeout", "init_timeout"):
        assert name in sources, name


def test_a_time_limit_reaches_the_stage_that_is_called():
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    calls: list[dict[str, Any]] = []

    async def collective_rpc_async(**kwargs: Any) -> list[Any]:
        calls.append(kwargs)
        return [{"digest": 1}]

    omni = object.__new__(AsyncOmni)
    omni.engine = SimpleNamespace(collective_rpc_async=collective_rpc_async)
    answer = asyncio.run(omni.collective_rpc("verl_tts_load_weights", args=("path",), stage_ids=[0], timeout=3.0))
    assert answer == [{"digest": 1}]
    assert calls[0] | {"kwargs": None} == {
        "method": "verl_tts_load_weights",
        "timeout": 3.0,
        "args": ("path",),
        "kwargs": None,
        "stage_ids": [0],
    }


def test_the_talker_maps_every_trained_name_and_keeps_their_order(tiny_checkpoint):
    from verl_tts.models.qwen3_tts import is_trainable

    mapper = find(TALKER).hf_to_vllm_mapper
    with safe_open(tiny_checkpoint / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if is_trainable(name, "full")]  # noqa: SIM118
    mapped = mapper.apply_list(names)
    assert len(mapped) == len(names), "none is dropped"
    assert len(set(mapped)) == len(names)
    expected = {
        "talker.codec_head.weight": "lm_head.weight",
        "talker.model.codec_embedding.weight": "model.embed_tokens.weight",
        "talker.model.layers.0.self_attn.q_proj.weight": "model.layers.0.self_attn.q_proj.weight",
    }
    assert {name: mapped[names.index(name)] for name in expected} == expected


def test_vllm_fuses_the_linear_layers_that_we_take_apart_in_the_same_order():
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    assert {name: tuple(parts) for name, parts in Qwen3ForCausalLM.packed_modules_mapping.items()} == FUSED


def test_what_the_engine_derives_from_weights_is_still_these_two_tensors():
    """``WeightReceiver`` derives them anew after a sync, as the talker does after loading."""
    talker = find(TALKER)
    load = inspect.getsource(talker.load_weights)
    assert "self._init_runtime_buffers()" in load
    assert "self._build_stacked_codec_embed()" in load
    assert load.count("self._init_") + load.count("self._build_") == 2, "there is a third"


def test_our_worker_extension_hides_nothing_of_a_stage_worker():
    """vLLM refuses an extension that does."""
    from verl_tts.platforms.vllm_omni_cpu_worker import CpuARWorker

    ours = {name for name in dir(WeightReceiver) if not name.startswith("__")}
    assert ours & set(dir(CpuARWorker)) == set()


def test_the_pipeline_has_the_two_stages_and_the_end_that_we_write_down(tiny_checkpoint):
    from vllm_omni.config import pipeline_registry
    from vllm_omni.model_executor.models.qwen3_tts import pipeline

    stages = pipeline.QWEN3_TTS_PIPELINE.stages
    assert [stage.stage_id for stage in stages] == [rollout.TALKER, rollout.CODE2WAV]
    assert stages[rollout.CODE2WAV].final_output_type == "audio"
    assert not stages[rollout.TALKER].final_output, "upstream hands out codes now: register_pipeline can go"
    assert f'"stop_token_ids": [{rollout.CODEC_EOS}]' in inspect.getsource(pipeline)
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    assert TokenIds.of(config).codec_eos == rollout.CODEC_EOS
    for _ in range(2):
        rollout.register_pipeline()
    registered = pipeline_registry.OMNI_PIPELINES[rollout.PIPELINE]
    assert registered.stages[rollout.TALKER].final_output
    assert not stages[rollout.TALKER].final_output, "the original stays as it was"


def test_mosss_codec_waits_for_its_prompt_and_for_nothing_beside_it():
    """``to_codec`` is all that goes to it from the talker: a stage that waited for more would wait forever."""
    from vllm_omni.config import pipeline_registry
    from vllm_omni.core.sched.omni_scheduling_coordinator import uses_full_payload_input_coordinator
    from vllm_omni.model_executor.models.moss_tts.pipeline import MOSS_TTS_PIPELINE

    from verl_tts.rollout import moss

    def waits(stage: Any, arch: str) -> bool:
        return uses_full_payload_input_coordinator(
            SimpleNamespace(stage_id=stage.stage_id, async_chunk=False, model_arch=arch, model_stage=stage.model_stage)
        )

    moss.register_pipeline()
    talker, codec = pipeline_registry.OMNI_PIPELINES[moss.PIPELINE].stages
    assert talker.final_output
    assert not MOSS_TTS_PIPELINE.stages[moss.TALKER].final_output, "upstream hands out codes now"
    assert codec.sync_process_input_func == "verl_tts.rollout.moss.to_codec"
    assert not waits(codec, codec.model_arch)
    assert waits(SimpleNamespace(stage_id=1, model_stage="code2wav"), "Qwen3TTSCode2Wav"), "as that of Qwen3-TTS does"


def test_the_adapter_that_the_openai_form_replaces_still_runs_the_checkpoints_code():
    """Once it does not, vLLM-Omni's own may do."""
    from vllm_omni.entrypoints.openai.serving_speech import OmniOpenAIServingSpeech as Serving
    from vllm_omni.entrypoints.openai.tts_adapters import moss_tts

    assert moss_tts.MossTTSAdapter.name == "moss_tts"
    assert "_build_moss_tts_params" in inspect.getsource(moss_tts.MossTTSAdapter.build)
    assert "self._get_moss_processor()" in inspect.getsource(Serving._build_moss_tts_params)
    assert "trust_remote_code=True" in inspect.getsource(Serving._get_moss_processor)


def test_the_requests_keys_are_those_that_the_engine_reads():
    from vllm_omni.model_executor.models.qwen3_tts import prompt_embeds_builder as builder
    from vllm_omni.worker import gpu_model_runner

    source = inspect.getsource(builder) + inspect.getsource(inspect.getmodule(find(TALKER)))
    assert builder.PRECOMPUTED_TEXT_IDS_KEY == "_qwen3_tts_text_ids"
    said = ("task_type", "language", "x_vector_only_mode", "non_streaming_mode", "voice_clone_prompt")
    for key in (*said, "ref_spk_embedding", "icl_mode"):
        assert f'"{key}"' in source, key
    assert '"tts_local_seed"' in inspect.getsource(gpu_model_runner)


def test_the_v1_trainer_hands_gdpo_no_components():
    """Once it does, a group z-score of components is algorithm.gdpo_reward_keys, and validate() can let it through."""
    import numpy as np
    import torch
    from verl import DataProto
    from verl.trainer.config.algorithm import AlgoConfig
    from verl.trainer.ppo.v1 import trainer_base
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    assert {"gdpo_reward_keys", "gdpo_reward_weights"} <= {field.name for field in fields(AlgoConfig)}
    assert "gdpo" not in inspect.getsource(trainer_base.PPOTrainer._compute_advantage)
    # What the trainer makes of a batch: tensors, and the uid alone beside them.
    ones = torch.ones(2, 3)
    columns = {name: ones for name in ("prompts", "attention_mask", "token_level_rewards", "response_mask")}
    data = DataProto.from_dict(columns, non_tensors={"uid": np.array(["a", "a"], dtype=object)})
    with pytest.raises(AssertionError, match="GDPO reward key 'accuracy' not found in non_tensor_batch"):
        compute_advantage_for_multi_trajectories(
            data, ["a_0_0", "a_1_0"], adv_estimator="gdpo", config=AlgoConfig(gdpo_reward_keys=["accuracy"])
        )
    assert "reward_extra_info" not in inspect.getsource(trainer_base.PPOTrainer._compute_advantage)
