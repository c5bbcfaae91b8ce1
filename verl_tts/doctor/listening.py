"""The rollout engine: does it speak, and do its log-probs agree with the actor's?

Shapes: ``T`` sampled token, ``N`` sampled token of all samples, ``V`` the support.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from omegaconf import DictConfig, OmegaConf

from verl_tts.config.compose import tts_config
from verl_tts.config.tts import Levels
from verl_tts.doctor.findings import Finding
from verl_tts.rollout.alone import Clip
from verl_tts.types import Waveform

if TYPE_CHECKING:
    import torch

FEW_ENDS = 0.5  # share of clips that end by themselves, below which there is a warning


def synthesis(config: DictConfig, clips: Sequence[Clip]) -> Iterator[Finding]:
    """Loudness and ends. A broken stack loads without a word and writes near-silence up to the limit."""
    ends = sum(clip.rollout.stop_reason == "eos" for clip in clips)
    loudness = [rms(clip.waveform) for clip in clips if len(clip.waveform.samples_S)]
    frames = [len(clip.rollout.codes_FQ) for clip in clips]
    low, high = min(loudness, default=0.0), max(loudness, default=0.0)
    said = (
        f"{ends} of {len(clips)} clips ended by themselves, {min(frames)} to {max(frames)} frames "
        f"(data.max_response_length={config.data.max_response_length}), RMS {low:.2g} to {high:.2g}"
    )
    silent = tts_config(config).reward.guards.min_rms
    if not loudness:
        yield Finding("synthesis", "fail", f"{said}: no clip has a frame", "the model ends before it speaks")
    elif high < silent:
        remedy = f"all are below {silent:g}: silence. Codec and policy do not fit, or Transformers and qwen-tts do not"
        yield Finding("synthesis", "fail", said, remedy)
    elif ends == 0:
        remedy = "raise data.max_response_length; a model that never ends is one that did not load as it was saved"
        yield Finding("synthesis", "fail", said, remedy)
    elif ends < FEW_ENDS * len(clips):
        yield Finding("synthesis", "warn", said, "most are cut off: raise data.max_response_length")
    else:
        yield Finding("synthesis", "ok", said)


def rms(waveform: Waveform) -> float:
    """About the mean, full scale = 1."""
    return float(waveform.samples_S.std(dtype=np.float64))


def agreement(config: DictConfig, clips: Sequence[Clip]) -> Iterator[Finding]:
    """The actor's log-probs of the same tokens, against the levels at which the gates of a run would stop it."""
    is_action_N = np.concatenate([clip.rollout.is_action_T for clip in clips])
    engine_N = np.concatenate([clip.rollout.logprobs_T for clip in clips]).astype(np.float64)[is_action_N]
    actor_N = actor_logprobs(config, clips).double().numpy()[is_action_N]
    inside_N = ~np.isneginf(actor_N)
    gap_N = np.abs(engine_N[inside_N] - actor_N[inside_N])
    limits = tts_config(config).gates
    said = (
        f"engine and actor differ by {gap_N.max(initial=0):.2g} nats at most, {gap_N.mean():.2g} in the mean, over "
        f"{len(engine_N)} tokens"
    )
    beyond = [
        f"{name}={_stop(getattr(limits, name)):g}"
        for name, value in (("logprob_max_abs", gap_N.max(initial=0)), ("logprob_mean_abs", gap_N.mean()))
        if not value <= _stop(getattr(limits, name))
    ]
    if not inside_N.all():
        said += f", {(~inside_N).sum()} of them outside of what the actor's own truncation allows"
    if beyond:
        remedy = "versions, masks or precision differ: the policy that samples is not the one that would be trained"
        yield Finding("log-probs", "fail", f"{said}; tts.gates.{', tts.gates.'.join(beyond)}", remedy)
    else:
        yield Finding("log-probs", "ok", said)


def _stop(levels: Levels) -> float:
    return math.inf if levels.stop is None else levels.stop


def actor_logprobs(config: DictConfig, clips: Sequence[Clip]) -> "torch.Tensor":
    """(N,) as ``logprobs_mode`` reports them, of the policy in the precision that the actor computes in."""
    import torch

    from verl_tts.engine.sampling import GATE, Scoring
    from verl_tts.models.base import get_policy

    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    precision = config.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    device = "cuda" if config.tts.platform == "cuda" else "cpu"
    adapter = get_policy(model.model_type)
    adapter.register()
    attention = model.override_config.get("attn_implementation") or "sdpa"
    policy = adapter.policy.from_pretrained(model.path, dtype=dtype, attn_implementation=attention).to(device).eval()
    columns = [
        {
            "prompts": clip.given.text_ids,
            "responses": clip.rollout.tokens_T,
            **clip.rollout.columns(),
            **clip.given.columns(),
        }
        for clip in clips
    ]

    def rows(name: str) -> list[torch.Tensor]:
        return [torch.as_tensor(column[name], device=device) for column in columns]

    settings = OmegaConf.create(OmegaConf.to_container(model.policy, resolve=True))
    scoring = Scoring(settings, temperature=rollout.temperature, gate=True)
    with torch.no_grad():
        output = policy(**adapter.replay_inputs(policy.config, rows, config.tts.prompt_layout))
        return adapter.score(policy.config, output, rows, scoring)[GATE].float().cpu()
