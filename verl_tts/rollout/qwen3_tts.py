"""Qwen3-TTS in vLLM-Omni: the two stages, what a request says, what comes back.

Stage 0 is the talker with the code predictor, stage 1 is code2wav. Both are final outputs here: tokens,
log-probs and codes are read from stage 0, the waveform from stage 1.

Shapes: ``T`` sampled token, ``F`` codec frame, ``Q`` codebook, ``S`` audio sample, ``R`` row of the engine's
code table. T = F + 1: the last sampled token is never fed back, so it has no residual codes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from omegaconf import DictConfig

from verl_tts.data.speaker import read_speaker, speaker_file
from verl_tts.errors import CheckpointError, RolloutError
from verl_tts.models import qwen3_tts_prompt as prompts
from verl_tts.models.plain_text import encoder
from verl_tts.rollout.seeds import stream_seed
from verl_tts.rollout.spec import RolloutSpec
from verl_tts.rollout.stages import DECODER, TALKER, parts_of, samples_of, two_stages
from verl_tts.types import CodecRollout, Conditioning, PromptRow, Waveform

PIPELINE = "qwen3_tts_rl"
CODE2WAV = DECODER
WEIGHT_STAGES = [TALKER]
CODEC_EOS, CODEBOOK_SIZE = 2150, 2048  # written into vllm-omni 0.24's pipeline; ``check_model`` compares
CLIPS_AT_ONCE = 1
# How the frozen code predictor draws the residual codes: qwen-tts's own defaults.
CODE_PREDICTOR_SAMPLING = {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 1.0}


def register_pipeline() -> None:
    """vLLM-Omni's own Qwen3-TTS pipeline, with stage 0 declared a final output."""
    from vllm_omni.config import pipeline_registry
    from vllm_omni.config.stage_config import PipelineConfig
    from vllm_omni.model_executor.models.qwen3_tts.pipeline import QWEN3_TTS_PIPELINE

    if PIPELINE in pipeline_registry.OMNI_PIPELINES:
        return
    talker, *rest = QWEN3_TTS_PIPELINE.stages
    talker = replace(talker, final_output=True, final_output_type="latent")
    pipeline_registry.register_pipeline(
        PipelineConfig(model_type=PIPELINE, model_arch=QWEN3_TTS_PIPELINE.model_arch, stages=(talker, *rest))
    )


def check_model(config: Mapping[str, Any]) -> None:
    """``CheckpointError`` for a model with other codec ids than those written into vLLM-Omni."""
    ids = prompts.TokenIds.of(config)
    if (ids.codec_eos, ids.codes) != (CODEC_EOS, CODEBOOK_SIZE):
        raise CheckpointError(
            f"the model's codec EOS and codebook size are {ids.codec_eos} and {ids.codes}; vLLM-Omni's Qwen3-TTS "
            f"pipeline works with {CODEC_EOS} and {CODEBOOK_SIZE} alone"
        )


def topology(spec: RolloutSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """The stage configuration as vLLM-Omni reads it from YAML."""
    predictor = {"subtalker_sampling_params": CODE_PREDICTOR_SAMPLING}
    return two_stages(spec, PIPELINE, config["talker_config"], codebooks=prompts.NUM_CODEBOOKS, talker=predictor)


class Conditioner:
    """A row's text, speaker and language as the policy takes them. Speaker embeddings are read once each."""

    def __init__(self, config: Mapping[str, Any], tokenizer: Any, speaker_path: str, language: str) -> None:
        self._config, self._ids, self._encode = config, prompts.TokenIds.of(config), encoder(tokenizer)
        self._speaker_path, self._language = speaker_path, language
        self._speakers: dict[str | None, np.ndarray] = {}

    def length(self, row: PromptRow) -> int:
        """Tokens of the row's prompt; raises as a call does."""
        return len(self(row).text_ids)

    def __call__(self, row: PromptRow) -> Conditioning:
        """Raises ``DataError`` or ``ConfigError``: an unknown speaker or language, an embedding of another size."""
        if row.speaker not in self._speakers:
            path = speaker_file(self._speaker_path, row.speaker)
            self._speakers[row.speaker] = read_speaker(path, self._config["talker_config"]["hidden_size"])
        language = row.language or self._language
        return Conditioning(
            text_ids=prompts.text_ids_of(self._ids, self._encode, row.text),
            speaker_H=self._speakers[row.speaker],
            language=language,
            language_id=prompts.language_id(self._config, language),
        )


def conditioner(config: DictConfig, model_config: Mapping[str, Any], tokenizer: Any) -> Conditioner:
    """As a run's configuration says."""
    return Conditioner(model_config, tokenizer, config.tts.speaker_path, config.tts.language)


def ask(
    spec: RolloutSpec,
    config: Mapping[str, Any],
    text_ids: Sequence[int],
    settings: Mapping[str, Any],
    seed: int,
    *,
    speaker: np.ndarray,
    language: str,
) -> tuple[dict[str, Any], list[Any]]:
    """The engine's prompt and the sampling parameters of both stages; the last two are ``Conditioning.request``."""
    return request(config, spec.prompt_layout, text_ids, speaker, language), sampling(spec, settings, seed)


def request(
    config: Mapping[str, Any], layout: str, text_ids: Sequence[int], speaker_H: np.ndarray, language: str
) -> dict[str, Any]:
    """The engine's prompt; ``config`` is the model's config.json.

    Its token ids are placeholders of the right number: stage 0 builds the embeddings. The text goes as the ids
    that the actor replays, so that it is tokenised once.
    """
    language_id = prompts.language_id(config, language)
    length = prompts.prompt_length(config, layout, text_ids, language_id)
    return {
        "prompt_token_ids": [prompts.TokenIds.of(config).codec_pad] * length,
        "additional_information": {
            "task_type": ["Base"],
            "_qwen3_tts_text_ids": [list(text_ids)],
            "language": [language],
            "x_vector_only_mode": [True],
            "non_streaming_mode": [layout == "non_streaming"],
            "voice_clone_prompt": [
                {"ref_spk_embedding": np.asarray(speaker_H, np.float32).tolist(), "icl_mode": False}
            ],
        },
    }


def sampling(spec: RolloutSpec, settings: Mapping[str, Any], seed: int) -> list[Any]:
    """Sampling parameters of both stages. ``settings``: temperature, top_p, top_k, as they were configured."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    talker = SamplingParams(
        temperature=settings["temperature"],
        top_p=settings["top_p"],
        top_k=settings["top_k"],
        repetition_penalty=1.0,
        max_tokens=spec.max_response_tokens,
        seed=stream_seed(seed, "codebook0"),
        logprobs=0,  # of the sampled token alone
        stop_token_ids=[CODEC_EOS],
        ignore_eos=True,  # the text tokenizer's end is a token of another vocabulary
        detokenize=False,
        extra_args={"tts_local_seed": stream_seed(seed, "residual")},
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    code2wav = SamplingParams(
        temperature=0.0,
        max_tokens=prompts.NUM_CODEBOOKS * spec.max_response_tokens,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    return [talker, code2wav]


def read(outputs: Mapping[int, Any], seed: int, sample_id: str, *_: Any) -> tuple[CodecRollout, Waveform]:
    """The engine's last output of each stage, as our types.

    Raises ``RolloutError``, naming the sample, where the parts do not fit together.
    """
    if TALKER not in outputs:
        raise RolloutError(f"sample {sample_id}: the talker returned nothing")
    completion = outputs[TALKER].request_output.outputs[0]
    tokens = [int(token) for token in completion.token_ids]
    if not tokens:
        raise RolloutError(f"sample {sample_id}: the talker sampled no token")
    if not completion.logprobs or len(completion.logprobs) != len(tokens):
        found = len(completion.logprobs or ())
        raise RolloutError(f"sample {sample_id}: {found} log-probs for {len(tokens)} sampled tokens")
    logprobs_T = np.array([step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)])

    codes = parts_of(completion).get("codes") or {}
    table = codes.get("audio")
    table_RQ = np.zeros((0, prompts.NUM_CODEBOOKS), np.int64) if table is None else np.asarray(table, np.int64)
    rollout = CodecRollout(
        tokens_T=np.array(tokens, np.int64),
        codes_FQ=align_codes(table_RQ, tokens, sample_id),
        logprobs_T=logprobs_T.astype(np.float32),
        stop_reason="eos" if tokens[-1] == CODEC_EOS else "length",
        seed=seed,
    )
    return rollout, _waveform(outputs.get(CODE2WAV), len(rollout.codes_FQ), sample_id)


def align_codes(table_RQ: np.ndarray, tokens: Sequence[int], sample_id: str) -> np.ndarray:
    """The rows of the engine's code table that belong to the sampled tokens, (F, Q).

    The table starts with a row of zeros per prompt position and may be longer; codebook 0 of the rows must
    equal the sampled tokens but the last. No place, or more than one, where it does is a ``RolloutError``.

    >>> table = np.zeros((5, 16), np.int64); table[3:, 0] = 7, 9
    >>> align_codes(table, [7, 9, 2150], "a")[:, 0].tolist()
    [7, 9]
    """
    if table_RQ.ndim != 2 or table_RQ.shape[1] != prompts.NUM_CODEBOOKS:
        raise RolloutError(
            f"sample {sample_id}: the code table has shape {table_RQ.shape}, not (rows, {prompts.NUM_CODEBOOKS})"
        )
    frames = np.asarray(tokens[:-1], np.int64)
    if len(frames) == 0:
        return table_RQ[:0].copy()
    places: list[int] = []
    if len(table_RQ) >= len(frames):
        windows = np.lib.stride_tricks.sliding_window_view(table_RQ[:, 0], len(frames))
        places = np.flatnonzero((windows == frames).all(axis=1)).tolist()
    if len(places) != 1:
        fault = "do not contain" if not places else f"contain {len(places)} times"
        raise RolloutError(
            f"sample {sample_id}: the {len(table_RQ)} rows of residual codes {fault} the {len(frames)} sampled ids"
        )
    codes_FQ = table_RQ[places[0] : places[0] + len(frames)].copy()
    outside = codes_FQ[(codes_FQ < 0) | (codes_FQ >= CODEBOOK_SIZE)]
    if len(outside):
        raise RolloutError(f"sample {sample_id}: a residual code is {outside[0]}, outside [0, {CODEBOOK_SIZE})")
    return codes_FQ


def _waveform(output: Any, frames: int, sample_id: str) -> Waveform:
    parts = {} if output is None else parts_of(output.request_output.outputs[0])
    samples_S, rate = samples_of(parts, frames, prompts.SAMPLES_PER_FRAME, sample_id), parts.get("sr")
    return Waveform(samples_S, prompts.SAMPLE_RATE_HZ if rate is None else int(np.asarray(rate).reshape(-1)[0]))
