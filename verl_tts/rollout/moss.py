"""MOSS in vLLM-Omni: the two stages, what a request says, what comes back.

Stage 0 is the talker, stage 1 the codec's decoder. Both are final outputs here: text, codes and log-probs are read
from stage 0, the waveform from stage 1. Between them goes what ``to_codec`` makes of an answer's codes: vLLM-Omni
0.24's own function for a talker that is not streamed has the arguments of an older release, and leaves the delay in.

Shapes: ``T`` sampled position, ``F`` codec frame, ``Q`` codebook, ``C`` channel, ``P`` prompt position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from verl_tts.config.model_dir import codec_dir
from verl_tts.errors import CheckpointError, DataError, RolloutError
from verl_tts.models import moss_prompt as prompts
from verl_tts.models.channels import channel_weights
from verl_tts.models.plain_text import encoder
from verl_tts.rollout.reference import References
from verl_tts.rollout.seeds import stream_seed
from verl_tts.rollout.spec import RolloutSpec
from verl_tts.rollout.stages import DECODER, TALKER, parts_of, samples_of, two_stages
from verl_tts.types import GridRollout, PromptGrid, PromptRow, Waveform

PIPELINE = "moss_tts_rl"
CODEC = DECODER
WEIGHT_STAGES = [TALKER]
ARCHITECTURE = "MossTTSDelayModel"
CODES = 1024  # and the pad code: written into vllm-omni 0.24's stages; ``check_model`` compares


# ------------------------------------------------------------------------------------------------- the stages


def register_pipeline() -> None:
    """vLLM-Omni's own MOSS pipeline, with stage 0 declared a final output and our way from it to stage 1."""
    from vllm_omni.config import pipeline_registry
    from vllm_omni.config.stage_config import PipelineConfig
    from vllm_omni.model_executor.models.moss_tts.pipeline import MOSS_TTS_PIPELINE

    if PIPELINE in pipeline_registry.OMNI_PIPELINES:
        return
    talker, codec = MOSS_TTS_PIPELINE.stages
    talker = replace(talker, final_output=True, final_output_type="latent")
    codec = replace(codec, sync_process_input_func=f"{__name__}.to_codec")
    pipeline_registry.register_pipeline(
        PipelineConfig(model_type=PIPELINE, model_arch=MOSS_TTS_PIPELINE.model_arch, stages=(talker, codec))
    )


def check_model(config: Mapping[str, Any]) -> None:
    """``CheckpointError`` for a model of another architecture, or with other codes than those in vLLM-Omni."""
    named = config.get("architectures") or []
    if ARCHITECTURE not in named:
        raise CheckpointError(
            f"config.json has architectures={[*named]}; the stages of the rollout engine are made for {ARCHITECTURE}"
        )
    ids = prompts.TokenIds.of(config)
    if (ids.codes, ids.pad_code) != (CODES, CODES):
        raise CheckpointError(
            f"the model's codebook size and pad code are {ids.codes} and {ids.pad_code}; vLLM-Omni's MOSS pipeline "
            f"works with {CODES} and {CODES} alone"
        )


def topology(spec: RolloutSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """The stage configuration as vLLM-Omni reads it from YAML."""
    overrides = {
        "architectures": list(config["architectures"]),
        "codec_model_name_or_path": str(codec_dir(spec.model_path, dict(config), spec.codec_path).resolve()),
    }
    return two_stages(
        spec,
        PIPELINE,
        config["language_config"],
        codebooks=prompts.TokenIds.of(config).codebooks,
        receiver="verl_tts.rollout.moss_talker.Receiver",
        both={"hf_overrides": overrides},
    )


def to_codec(source_outputs: Sequence[Any], *_: Any) -> list[Any]:
    """In the orchestrator, when an answer is done: stage 1's prompt, its frames codebook after codebook, (Q * F,)."""
    from vllm_omni.inputs.data import OmniTokensPrompt

    prompts_of_codec = []
    for output in source_outputs:
        if output.finished:
            rows = _codes(output.outputs[0]).get("audio")
            frames_FQ = np.zeros((0, 1)) if rows is None else prompts.frames_of_codes(np.asarray(rows, np.int64), CODES)
            prompts_of_codec.append(OmniTokensPrompt(prompt_token_ids=frames_FQ.T.reshape(-1).tolist()))
    return prompts_of_codec


def _codes(completion: Any) -> Mapping[str, Any]:
    return parts_of(completion).get("codes") or {}


# ------------------------------------------------------------------------------------------------ the request


class Conditioner:
    """A row's text, instruction, language and reference as a prompt of text and codes."""

    def __init__(
        self,
        config: Mapping[str, Any],
        tokenizer: Any,
        references: References,
        *,
        language: str = "Auto",
        reference_format: str = "in_context",
    ) -> None:
        self.ids = prompts.TokenIds.of(config)
        self._encode, self._references = encoder(tokenizer), references
        self._language, self._format = language, reference_format

    def length(self, row: PromptRow) -> int:
        """Positions of the row's prompt, without encoding its reference. Raises ``DataError`` as a call does."""
        reference = row.extra.get("ref_audio")
        frames = self._references.frames(str(reference)) if reference else 0
        stand_in = np.zeros((frames, self.ids.codebooks), np.int64) if reference else None
        return len(self._prompt(row, stand_in).text_P)

    def __call__(self, row: PromptRow) -> PromptGrid:
        """Raises ``DataError``: a reference that is not there, or is no recording."""
        reference = row.extra.get("ref_audio")
        codes_FQ = self._references.codes(str(reference)) if reference else None
        prompt = self._prompt(row, codes_FQ)
        return PromptGrid(prompt.text_P, prompt.codes_PQ, row.language or self._language)

    def _prompt(self, row: PromptRow, reference_FQ: np.ndarray | None) -> prompts.Prompt:
        language, instruction = row.language or self._language, row.extra.get("instruction")
        return prompts.build_prompt(
            self.ids,
            self._encode,
            row.text,
            instruction=None if instruction is None else str(instruction),
            language=None if language.lower() == "auto" else language,
            reference_FQ=reference_FQ,
            reference_format=self._format,
        )


def conditioner(config: DictConfig, model_config: Mapping[str, Any], tokenizer: Any) -> Conditioner:
    """As a run's configuration says."""
    tts = config.tts
    references = References(
        codec_dir(config.actor_rollout_ref.model.path, dict(model_config), tts.codec_path),
        Path(tts.reference_dir or "."),
        codebooks=model_config["n_vq"],
        max_seconds=tts.reference_seconds,
    )
    return Conditioner(
        model_config, tokenizer, references, language=tts.language, reference_format=tts.reference_format
    )


def ask(
    spec: RolloutSpec,
    config: Mapping[str, Any],
    text_ids: Sequence[int],
    settings: Mapping[str, Any],
    seed: int,
    *,
    codes: np.ndarray,
) -> tuple[dict[str, Any], list[Any]]:
    """The engine's prompt and the sampling parameters of both stages. ``codes`` are the prompt's, (P, Q).

    ``settings``: temperature, top_p, top_k of the codes. The text has a temperature of its own and is never
    truncated: a frame ends its clip with a few percent probability, which a top-p of 0.8 would never let through.
    """
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ids = prompts.TokenIds.of(config)
    prompt = {
        "prompt_token_ids": list(text_ids),
        "additional_information": {
            "prompt_codes": torch.tensor(np.asarray(codes, np.int64)),  # a copy: what came by Ray is not writable
            "audio_sampling": [float(settings["temperature"]), int(settings["top_k"]), float(settings["top_p"])],
            "audio_seed": [stream_seed(seed, "residual")],
        },
    }
    talker = SamplingParams(
        temperature=spec.text_temperature if settings["temperature"] > 0 else 0.0,
        top_p=1.0,
        top_k=-1,
        repetition_penalty=1.0,
        max_tokens=spec.max_response_tokens,
        seed=stream_seed(seed, "codebook0"),
        logprobs=0,  # of the sampled token alone
        stop_token_ids=[ids.im_end],
        ignore_eos=True,  # said once, by stop_token_ids
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    codec = SamplingParams(
        temperature=0.0,
        max_tokens=ids.codebooks * spec.max_response_tokens,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    return prompt, [talker, codec]


# ------------------------------------------------------------------------------------------------- the answer


def read(
    outputs: Mapping[int, Any], seed: int, sample_id: str, spec: RolloutSpec, config: Mapping[str, Any]
) -> tuple[GridRollout, Waveform]:
    """The engine's last output of each stage, as our types.

    Raises ``RolloutError``, naming the sample, where the parts do not fit together.
    """
    ids = prompts.TokenIds.of(config)
    if TALKER not in outputs:
        raise RolloutError(f"sample {sample_id}: the talker returned nothing")
    completion = outputs[TALKER].request_output.outputs[0]
    tokens = [int(token) for token in completion.token_ids]
    found = len(completion.logprobs or ())
    if not tokens or found != len(tokens):
        raise RolloutError(f"sample {sample_id}: {found} log-probs for {len(tokens)} sampled tokens")
    text_T = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
    tables = _codes(completion)
    empty = np.zeros((0, ids.codebooks))
    grid_TQ = np.asarray(tables.get("audio", empty), np.int64)
    codes_logprobs_TQ = np.asarray(tables.get("logprobs", empty), np.float32)
    if not len(grid_TQ) == len(codes_logprobs_TQ) == len(tokens):
        raise RolloutError(
            f"sample {sample_id}: {len(grid_TQ)} rows of codes and {len(codes_logprobs_TQ)} of their log-probs for "
            f"{len(tokens)} sampled tokens"
        )
    try:
        frames_FQ = prompts.frames_of(ids, tokens, grid_TQ)
        sampled_TC = prompts.plan(ids, tokens).sampled_TC
    except DataError as error:
        raise RolloutError(f"sample {sample_id}: {error}") from error
    # A forced token has log-prob 0 as the engine says it, up to rounding.
    channels_TC = np.concatenate([np.array(text_T, np.float32)[:, None], codes_logprobs_TQ], axis=1) * sampled_TC
    weights_TC = channel_weights(spec.channel_reduction, spec.channel_weights, sampled_TC)
    rollout = GridRollout(
        tokens_T=np.array(tokens, np.int64),
        codes_FQ=frames_FQ,
        logprobs_T=(weights_TC * channels_TC).sum(axis=1, dtype=np.float32),
        stop_reason="eos" if tokens[-1] == ids.im_end else "length",
        seed=seed,
        grid_TQ=grid_TQ,
        channel_logprobs_TC=channels_TC,
        weights_TC=weights_TC,
    )
    return rollout, _waveform(outputs.get(CODEC), len(frames_FQ), sample_id)


def _waveform(output: Any, frames: int, sample_id: str) -> Waveform:
    parts = {} if output is None else parts_of(output.request_output.outputs[0])
    return Waveform(samples_of(parts, frames, prompts.SAMPLES_PER_FRAME, sample_id), prompts.SAMPLE_RATE_HZ)
