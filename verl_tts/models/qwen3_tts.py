"""Qwen3-TTS as a policy: teacher-forced replay of codebook 0 in one parallel forward of the talker.

The action is the codebook-0 token. A sample of T = F + 1 sampled tokens has F complete frames, which were
fed back, and a last token (EOS, or the one that the limit cut off), which was not. Its input is

    prompt rows 0..P-1, then one row for each of the F frames            (see qwen3_tts_prompt)

and its logits are read at rows P-1, P, ..., P-1+F: **row k of a sample predicts its sampled token k**, row 0
stands on the prompt's ``start`` slot, row F predicts the EOS or the cut token. So EOS and limit are no special
cases, an immediate EOS has one row, and nothing is shifted by the caller.

Parameters: ``talker.model`` (embeddings, layers, norm) and ``talker.codec_head`` are the policy; the text
projection and the 15 residual embeddings are frozen inputs; what only generates (the code predictor's layers,
the speaker encoder, the speech tokenizer) is not kept in memory.

Shapes: B sample, L padded position, R position of all samples one after another, N logit row of all samples,
F frame of one sample, M frame of all samples, Q codebook, H hidden, V engine support, D speaker embedding = H.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForTextToWaveform

from verl_tts.compat import qwen_tts_transformers5
from verl_tts.engine.sampling import Scoring, score
from verl_tts.errors import CheckpointError
from verl_tts.models.base import LORA_PARENTS, PolicyAdapter
from verl_tts.models.qwen3_tts_facts import is_trainable, lora_targets
from verl_tts.models.qwen3_tts_prompt import (
    MODEL_TYPE,
    NO_CODEC,
    SAMPLE_RATE_HZ,
    SAMPLES_PER_FRAME,
    SPEAKER,
    Layout,
    Prompt,
    TokenIds,
    build_prompt,
)

qwen_tts_transformers5.apply()

from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig  # noqa: E402
from qwen_tts.core.models.modeling_qwen3_tts import (  # noqa: E402
    Qwen3TTSForConditionalGeneration,
    Qwen3TTSPreTrainedModel,
    Qwen3TTSRMSNorm,
)


def support(config: Qwen3TTSConfig) -> Tensor:
    """LongTensor (V,): the ids that the rollout engine can sample, ascending; the columns of the logits."""
    return torch.tensor(TokenIds.of(config).support)


def support_index(config: Qwen3TTSConfig) -> Tensor:
    """LongTensor (codec vocabulary,): the logits column of an id, -1 for an id that the engine cannot sample."""
    ids_V = support(config)
    column = torch.full((TokenIds.of(config).codec_vocab,), -1)
    column[ids_V] = torch.arange(len(ids_V))
    return column


# --------------------------------------------------------------------------------------------------- forward


class Float32RMSNorm(Qwen3TTSRMSNorm):
    """What comes out is float32, not rounded to what came in."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.float())


class Qwen3TTSPolicy(Qwen3TTSForConditionalGeneration):
    """The talker with a ``forward`` of its own. FSDP wraps the root, so the embeddings are looked up inside it.

    From the last norm on it computes in float32, whatever the rest computes in, and so does the rollout engine
    (verl_tts/rollout/qwen3_tts_talker.py): bfloat16 rounds a logit of 8 and more by up to 1/32, and a hidden channel
    that a logit leans on by as much.
    """

    _no_split_modules = ["Qwen3TTSTalkerDecoderLayer"]

    def __init__(self, config: Qwen3TTSConfig) -> None:
        super().__init__(config)
        self.talker.model.norm.__class__ = Float32RMSNorm

    @classmethod
    def from_pretrained(cls, path: str | Path, **kwargs: Any) -> "Qwen3TTSPolicy":
        """Loads the trainable part of a checkpoint directory, proves that it arrived, drops what is never run.

        Keyword arguments are those of Transformers: ``dtype`` (without it, Transformers 5 takes the file's),
        ``config``, ``attn_implementation``. Cast by ``dtype`` and not by ``.to(dtype)`` afterwards, which would
        round the rotary frequencies too. Raises ``CheckpointError``.
        """
        if not Path(path).is_dir():  # Transformers would look for a model of this name on the hub
            raise CheckpointError(f"{path} is not a directory: download the checkpoint and name its directory")
        # Not the class's own from_pretrained, which also loads the speech tokenizer.
        model = Qwen3TTSPreTrainedModel.from_pretrained.__func__(cls, str(path), **kwargs)
        model._check_loaded(Path(path))
        model._drop_generation_only()
        return model

    def _check_loaded(self, path: Path) -> None:
        """Loading fails without a sound when qwen-tts and Transformers do not fit: compare with the file."""
        in_memory = self.state_dict()
        in_files: set[str] = set()
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                names = sorted(tensors.keys())
                in_files.update(names)
                known = [name for name in names if name in in_memory]
                for name in {*known[:: max(1, len(known) // 8)], *known[-1:]}:
                    if not torch.equal(tensors.get_tensor(name).to(in_memory[name].dtype), in_memory[name].cpu()):
                        raise CheckpointError(f"{name} in memory differs from {file}: reinstall qwen-tts as pinned")
        if missing := sorted(in_memory.keys() - in_files):
            raise CheckpointError(f"{path} lacks {len(missing)} tensors of a Qwen3-TTS model, {missing[0]} among them")
        if self.talker.model.rotary_emb.inv_freq[0] != 1:
            raise CheckpointError(
                "The rotary frequencies of the talker were not restored: reinstall qwen-tts as pinned"
            )

    def _drop_generation_only(self) -> None:
        self.speaker_encoder = None
        predictor = self.talker.code_predictor
        predictor.model.layers = nn.ModuleList()
        predictor.model.norm = nn.Identity()
        predictor.lm_head = nn.ModuleList()
        predictor.small_to_mtp_projection = nn.Identity()

    def forward(
        self,
        *,
        text_ids: Sequence[Tensor],
        codes: Sequence[Tensor],
        speakers: Sequence[Tensor],
        language_ids: Sequence[int | None],
        layout: Layout,
        **_: Any,
    ) -> tuple[Tensor]:
        """Logits of every sampled token of B samples.

        ``text_ids``: B LongTensors, token ids of ``assistant_text(text)``. ``codes``: B LongTensors (F, Q), the
        complete frames, F may be 0. ``speakers``: B tensors (H,). ``language_ids``: B ids, None for "Auto".
        Other keyword arguments are ignored: PEFT passes some.

        Returns ``(logits_NV,)``: N = sum of F + 1, sample after sample, V = ``support(config)``, in float32. A
        tuple, because FSDP2 only finds tensors in a pytree.

        Every module is called once, whatever the data: with more than one rank, each call is a collective.
        """
        frames_B = [len(codes_FQ) for codes_FQ in codes]
        ids = TokenIds.of(self.config)
        prompts = [
            build_prompt(ids, layout, text.tolist(), language)
            for text, language in zip(text_ids, language_ids, strict=True)
        ]
        lengths_B = [len(prompt) + frames for prompt, frames in zip(prompts, frames_B, strict=True)]

        embeds_RH = self._embed(prompts, frames_B, torch.cat([*codes]), torch.stack([*speakers]))
        embeds_BLH = pad_sequence(embeds_RH.split(lengths_B), batch_first=True)
        # No attention mask: padding is on the right, where causal attention never looks.
        hidden_BLH = self.talker.model(inputs_embeds=embeds_BLH, use_cache=False).last_hidden_state

        padded = hidden_BLH.shape[1]
        read_N = [
            sample * padded + len(prompt) - 1 + k
            for sample, (prompt, frames) in enumerate(zip(prompts, frames_B, strict=True))
            for k in range(frames + 1)
        ]
        device = hidden_BLH.device
        hidden_NH = hidden_BLH.flatten(0, 1).index_select(0, torch.tensor(read_N, device=device))
        # Only the columns that the engine can sample.
        head_VH = self.talker.codec_head.weight.index_select(0, support(self.config).to(device))
        with torch.autocast(device.type, enabled=False):
            return (hidden_NH @ head_VH.float().T,)

    def _embed(self, prompts: list[Prompt], frames_B: list[int], codes_MQ: Tensor, speakers_BD: Tensor) -> Tensor:
        """The input rows of all samples one after another, (R, H). Sums are float32, rounded once at the end."""
        text_R: list[int] = []
        codec_R: list[int] = []
        frame_rows: list[int] = []
        for prompt, frames in zip(prompts, frames_B, strict=True):
            text_R += [*prompt.text_P, *prompt.text_of_frames(frames)]
            codec_R += prompt.codec_P
            frame_rows += range(len(codec_R), len(codec_R) + frames)
            codec_R += [NO_CODEC] * frames
        speaker_rows = [row for row, codec in enumerate(codec_R) if codec == SPEAKER]
        token_rows = [row for row, codec in enumerate(codec_R) if codec not in (NO_CODEC, SPEAKER)]

        talker, device = self.talker, codes_MQ.device
        unique_text, text_place_R = torch.tensor(text_R, device=device).unique(return_inverse=True)
        text_UH = talker.text_projection(talker.model.text_embedding(unique_text))
        tokens = torch.tensor([codec_R[row] for row in token_rows], device=device)
        # One call of this table: the codec tokens of the prompts, then codebook 0 of the frames.
        codebook0_H = talker.model.codec_embedding(torch.cat([tokens, codes_MQ[:, 0]]))
        tokens_H, frames_MH = codebook0_H.float().split([len(tokens), len(codes_MQ)])
        for book, embedding in enumerate(talker.code_predictor.model.codec_embedding, start=1):
            frames_MH = frames_MH + embedding(codes_MQ[:, book]).float()
        codec_part = torch.cat([tokens_H, frames_MH, speakers_BD.float()])
        rows = torch.tensor([*token_rows, *frame_rows, *speaker_rows], device=device)
        embeds_RH = text_UH.float().index_select(0, text_place_R).index_add(0, rows, codec_part)
        return embeds_RH.to(codebook0_H.dtype)

    def get_input_embeddings(self) -> nn.Module:
        return self.talker.model.codec_embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.talker.codec_head


# ------------------------------------------------------------------------------------- what the actor engine asks


def replay_inputs(config: Qwen3TTSConfig, rows: Callable[[str], list[Tensor]], layout: str) -> dict[str, Any]:
    """``forward``'s arguments from columns of the transfer queue (rollout/qwen3_tts.py writes them)."""
    languages = torch.cat(rows("tts_language")).tolist()
    return {
        "text_ids": rows("prompts"),
        "codes": [codes_TQ[:-1] for codes_TQ in rows("tts_codes")],
        "speakers": rows("tts_speaker"),
        "language_ids": [None if language < 0 else language for language in languages],
        "layout": layout,
    }


def score_replay(
    config: Qwen3TTSConfig, output: tuple[Tensor], rows: Callable[[str], list[Tensor]], scoring: Scoring
) -> dict[str, Tensor]:
    """Log-probs, entropies and gate log-probs of the N sampled tokens, over the engine's support."""
    tokens_N = torch.cat(rows("responses"))
    labels_N = support_index(config).to(tokens_N.device)[tokens_N]
    assert bool((labels_N >= 0).all()), "a token that the rollout engine cannot sample is in the batch"
    logits_NV = output[0].float()
    assert len(logits_NV) == len(labels_N), f"{len(logits_NV)} rows of logits for {len(labels_N)} sampled tokens"
    return score(logits_NV, labels_N, scoring)


# ---------------------------------------------------------------------------------------------- registration


def register() -> None:
    """Teaches ``AutoConfig`` and ``AutoModelForTextToWaveform`` the model type. Idempotent."""
    AutoConfig.register(MODEL_TYPE, Qwen3TTSConfig, exist_ok=True)
    AutoModelForTextToWaveform.register(Qwen3TTSConfig, Qwen3TTSPolicy, exist_ok=True)


ADAPTER = PolicyAdapter(
    model_type=MODEL_TYPE,
    sample_rate_hz=SAMPLE_RATE_HZ,
    samples_per_frame=SAMPLES_PER_FRAME,
    policy=Qwen3TTSPolicy,
    register=register,
    replay_inputs=replay_inputs,
    score=score_replay,
    is_trainable=is_trainable,
    lora_targets=lora_targets,
    lora_prefix="talker.model",
)

__all__ = ["ADAPTER", "LORA_PARENTS", "Qwen3TTSPolicy"]
