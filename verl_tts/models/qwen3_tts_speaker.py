"""The speaker encoder of a Qwen3-TTS Base model: a reference recording becomes a speaker embedding.

Audio is resampled to 24 kHz as qwen-tts does it, and the encoder is qwen-tts's own, so that the embedding is the one
that its voice cloning would use. It is computed in float32, whatever the checkpoint's dtype.

Shapes: ``S`` audio sample, ``H`` hidden size of the talker.
"""

from pathlib import Path

import librosa
import numpy as np
import torch

from verl_tts.checkpoints.export import BaseWeights
from verl_tts.config.model_dir import read_model_config, speaker_size
from verl_tts.errors import CheckpointError
from verl_tts.models.qwen3_tts import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration
from verl_tts.models.qwen3_tts_prompt import SAMPLE_RATE_HZ
from verl_tts.types import Waveform

PREFIX = "speaker_encoder."


def embed_speaker(model: Path, reference: Waveform) -> np.ndarray:
    """``speaker_H``, float32. Raises ``CheckpointError`` for a checkpoint without a speaker encoder."""
    config = read_model_config(str(model))
    weights = BaseWeights(model)
    names = [name for name in weights.names if name.startswith(PREFIX)]
    kind = config.get("tts_model_type")
    if kind != "base" or not names:
        reason = "has no speaker encoder" if kind == "base" else f"is a {kind} model, without a speaker encoder"
        raise CheckpointError(f"{model} {reason}; name a Base model")

    with torch.device("meta"):
        encoder = Qwen3TTSForConditionalGeneration(Qwen3TTSConfig(**config))
    encoder.talker = None  # what is left is the speaker encoder
    state = {name.removeprefix(PREFIX): weights.read(name).float() for name in names}
    try:
        encoder.speaker_encoder.load_state_dict(state, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the speaker encoder of {model} does not fit its config.json: {reason}") from error

    samples_S = reference.samples_S
    if reference.sample_rate_hz != SAMPLE_RATE_HZ:
        samples_S = librosa.resample(samples_S, orig_sr=reference.sample_rate_hz, target_sr=SAMPLE_RATE_HZ)
    speaker_H = encoder.eval().extract_speaker_embedding(samples_S, SAMPLE_RATE_HZ).numpy()
    if len(speaker_H) != speaker_size(config):
        raise CheckpointError(
            f"the speaker encoder of {model} has {len(speaker_H)} outputs, its talker wants {speaker_size(config)}"
        )
    if not np.isfinite(speaker_H).all():
        raise CheckpointError(f"the speaker encoder of {model} computes values that are not finite")
    return speaker_H
