"""MOSS-VoiceGenerator as a policy: teacher-forced replay of text and codes in one parallel forward.

The action is one position of the answer: a text token, where there was a choice, and a code of each codebook that
is under way there (moss_prompt). Position t is drawn from the hidden state of the position before it, so an answer
of T positions adds T - 1 rows to its prompt's P, and **row P - 1 + t predicts position t**. What is fed in is what
the engine fed back, text and codes; codes packed anew by the format of prompts would differ by one text token.

Parameters carry the published names: ``language_model`` is Transformers' own Qwen3 without a head, ``emb_ext.{q}``
embeds codebook q, ``lm_heads.0`` predicts the text and ``lm_heads.{q + 1}`` codebook q.

Shapes: B sample, L padded position, R position of all samples one after another, T answered position of a sample,
N of all samples, P prompt position, Q codebook, C channel, H hidden, V code or token.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForTextToWaveform, PreTrainedConfig, PreTrainedModel
from transformers.models.qwen3 import Qwen3Config, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from verl_tts.engine.sampling import Scoring, score
from verl_tts.errors import CheckpointError
from verl_tts.models.base import LORA_PARENTS, PolicyAdapter
from verl_tts.models.channels import channel_weights
from verl_tts.models.moss_facts import is_trainable, lora_targets
from verl_tts.models.moss_prompt import MODEL_TYPE, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME, Plan, Text, TokenIds, plan


class MossConfig(PreTrainedConfig):
    """config.json of ``MossTTSDelayModel``, with the published defaults."""

    model_type = MODEL_TYPE
    sub_configs = {"language_config": Qwen3Config}

    def __init__(
        self,
        language_config: dict[str, Any] | Qwen3Config | None = None,
        n_vq: int = 32,
        audio_vocab_size: int = 1024,
        audio_pad_code: int = 1024,
        sampling_rate: int = SAMPLE_RATE_HZ,
        pad_token_id: int = 151643,
        im_start_token_id: int = 151644,
        im_end_token_id: int = 151645,
        audio_start_token_id: int = 151652,
        audio_end_token_id: int = 151653,
        audio_user_slot_token_id: int = 151654,
        audio_assistant_gen_slot_token_id: int = 151656,
        audio_assistant_delay_slot_token_id: int = 151662,
        **kwargs: Any,
    ) -> None:
        if not isinstance(language_config, Qwen3Config):
            language_config = Qwen3Config(**(language_config or {}))
        self.language_config: Qwen3Config = language_config
        self.n_vq = n_vq
        self.audio_vocab_size, self.audio_pad_code, self.sampling_rate = audio_vocab_size, audio_pad_code, sampling_rate
        self.im_start_token_id, self.im_end_token_id = im_start_token_id, im_end_token_id
        self.audio_start_token_id, self.audio_end_token_id = audio_start_token_id, audio_end_token_id
        self.audio_user_slot_token_id = audio_user_slot_token_id
        self.audio_assistant_gen_slot_token_id = audio_assistant_gen_slot_token_id
        self.audio_assistant_delay_slot_token_id = audio_assistant_delay_slot_token_id
        super().__init__(**({"tie_word_embeddings": False} | kwargs))
        self.pad_token_id = pad_token_id

    def get_text_config(self, *_: Any, **__: Any) -> Qwen3Config:
        return self.language_config


# --------------------------------------------------------------------------------------------------- forward


class Float32RMSNorm(Qwen3RMSNorm):
    """What comes out is float32, not rounded to what came in."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.float())


class MossPolicy(PreTrainedModel):
    """Backbone, embeddings and heads. From the last norm on it computes in float32, as the rollout engine does."""

    config_class = MossConfig
    language_model: Any  # indexed and called as what it is
    lm_heads: Any
    base_model_prefix = ""
    _no_split_modules = ["Qwen3DecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    supports_gradient_checkpointing = True

    def __init__(self, config: MossConfig) -> None:
        super().__init__(config)
        language = config.get_text_config()
        hidden, codes = language.hidden_size, config.audio_vocab_size + 1
        self.language_model = Qwen3Model(language)
        self.language_model.norm.__class__ = Float32RMSNorm
        self.emb_ext = nn.ModuleList(nn.Embedding(codes, hidden) for _ in range(config.n_vq))
        sizes = [language.vocab_size, *[codes] * config.n_vq]
        self.lm_heads = nn.ModuleList(nn.Linear(hidden, size, bias=False) for size in sizes)
        self.post_init()

    @classmethod
    def from_pretrained(cls, path: str | Path, **kwargs: Any) -> "MossPolicy":
        """Loads a checkpoint directory and proves that it arrived; keyword arguments are those of Transformers.

        Raises ``CheckpointError``.
        """
        if not Path(path).is_dir():  # Transformers would look for a model of this name on the hub
            raise CheckpointError(f"{path} is not a directory: download the checkpoint and name its directory")
        model = super().from_pretrained(str(path), **kwargs)
        model._check_loaded(Path(path))
        return model

    def _check_loaded(self, path: Path) -> None:
        in_memory, in_files = self.state_dict(), set()
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                names = sorted(tensors.keys())
                in_files.update(names)
                known = [name for name in names if name in in_memory]
                for name in {*known[:: max(1, len(known) // 8)], *known[-1:]}:
                    if not torch.equal(tensors.get_tensor(name).to(in_memory[name].dtype), in_memory[name].cpu()):
                        raise CheckpointError(f"{name} in memory differs from {file}")
        if missing := sorted(in_memory.keys() - in_files):
            raise CheckpointError(f"{path} lacks {len(missing)} tensors of a MOSS model, {missing[0]} among them")

    def forward(
        self,
        *,
        prompts: Sequence[Tensor],
        prompt_codes: Sequence[Tensor],
        tokens: Sequence[Tensor],
        codes: Sequence[Tensor],
        kinds: Sequence[Tensor],
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of every position of B answers.

        ``prompts``: B LongTensors (P,), ``prompt_codes``: B LongTensors (P, Q), as ``build_prompt`` has them.
        ``tokens``: B LongTensors (T,), the text of the answers, ``codes``: B LongTensors (T, Q). ``kinds``: B
        LongTensors (T,) of ``moss_prompt.Text``. Other keyword arguments are ignored: PEFT passes some.

        Returns, in float32, the codebooks' logits (N, Q, V) without the pad code; those of {gen_slot, delay_slot}
        at the ``IN_CLIP`` positions, (., 2); and those of the whole text vocabulary at the ``FREE`` ones, (., V). A
        tuple, because FSDP2 only finds tensors in a pytree.
        """
        lengths_B = [len(prompt) + len(answer) - 1 for prompt, answer in zip(prompts, tokens, strict=True)]
        embeds_RH = self._embed(_fed(prompts, tokens), _fed(prompt_codes, codes))
        embeds_BLH = pad_sequence(embeds_RH.split(lengths_B), batch_first=True)
        # No attention mask: padding is on the right, where causal attention never looks.
        hidden_BLH = self.language_model(inputs_embeds=embeds_BLH, use_cache=False).last_hidden_state

        padded, device = hidden_BLH.shape[1], hidden_BLH.device
        read_N = [
            sample * padded + len(prompt) - 1 + position
            for sample, (prompt, answer) in enumerate(zip(prompts, tokens, strict=True))
            for position in range(len(answer))
        ]
        hidden_NH = hidden_BLH.flatten(0, 1).index_select(0, torch.tensor(read_N, device=device))
        kinds_N, ids = torch.cat([*kinds]), TokenIds.of(self.config)
        text_head_VH = self.lm_heads[0].weight
        clip_head_2H = text_head_VH.index_select(0, torch.tensor([ids.gen_slot, ids.delay_slot], device=device))
        heads_VH = torch.cat([head.weight[: ids.codes] for head in self.lm_heads[1:]])
        with torch.autocast(device.type, enabled=False):
            codes_NQV = (hidden_NH @ heads_VH.float().T).unflatten(1, (ids.codebooks, ids.codes))
            in_clip = hidden_NH[kinds_N == Text.IN_CLIP] @ clip_head_2H.float().T
            free = hidden_NH[kinds_N == Text.FREE] @ text_head_VH.float().T
        return codes_NQV, in_clip, free

    def _embed(self, text_R: Tensor, codes_RQ: Tensor) -> Tensor:
        """(R, H). The sum of 1 + Q embeddings is float32, rounded once at the end."""
        text_RH = self.language_model.embed_tokens(text_R)
        sum_RH = text_RH.float()
        for book, embedding in enumerate(self.emb_ext):
            sum_RH = sum_RH + embedding(codes_RQ[:, book]).float()
        return sum_RH.to(text_RH.dtype)

    def prepare_inputs_for_generation(self, *_: Any, **__: Any) -> None:
        """PEFT takes this method of a causal language model, which verl calls every policy; it is never called."""
        raise NotImplementedError("the rollout engine generates")

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_heads[0]


def _fed(prompts: Sequence[Tensor], answers: Sequence[Tensor]) -> Tensor:
    """What the engine was fed: of each sample the prompt and the answer without its last position."""
    return torch.cat([part for pair in zip(prompts, answers, strict=True) for part in (pair[0], pair[1][:-1])])


# ------------------------------------------------------------------------------------- what the actor engine asks


Rows = Callable[[str], list[Tensor]]


def replay_inputs(config: MossConfig, rows: Rows, layout: str) -> dict[str, Any]:
    """``forward``'s arguments from columns of the transfer queue (rollout/moss.py writes them)."""
    tokens = rows("responses")
    kinds = [torch.from_numpy(planned.kind_T).to(tokens[0].device) for planned in _plans(config, tokens)]
    return {
        "prompts": rows("prompts"),
        "prompt_codes": rows("tts_prompt_codes"),
        "tokens": tokens,
        "codes": rows("tts_codes"),
        "kinds": kinds,
    }


def score_replay(
    config: MossConfig, output: tuple[Tensor, Tensor, Tensor], rows: Rows, scoring: Scoring
) -> dict[str, Tensor]:
    """Log-probs, entropies and gate log-probs of the N positions: those of the channels, weighed.

    A codebook is drawn at ``scoring.temperature``, truncated; the text at its own temperature, never truncated.
    """
    codes_NQV, in_clip, free = output
    ids, device = TokenIds.of(config), codes_NQV.device
    plans = _plans(config, rows("responses"))
    tokens_N, codes_NQ = torch.cat(rows("responses")), torch.cat(rows("tts_codes"))
    kinds_N = torch.cat([torch.from_numpy(planned.kind_T) for planned in plans]).to(device)
    sampled_NC = torch.cat([torch.from_numpy(planned.sampled_TC) for planned in plans])
    settings = scoring.settings
    weights_NC = torch.from_numpy(
        channel_weights(settings.channel_reduction, settings.channel_weights, sampled_NC.numpy())
    ).to(device)
    sampled_NC = sampled_NC.to(device)

    labels_NQ = codes_NQ.masked_fill(~sampled_NC[:, 1:], 0)  # a stand-in, weighed with 0
    by_code = score(codes_NQV.flatten(0, 1), labels_NQ.flatten(), scoring)
    text = scoring.untruncated(settings.text_temperature)
    early = torch.cat([torch.from_numpy(planned.banned_end_T) for planned in plans]).to(device)[kinds_N == Text.FREE]
    banned = free.new_zeros(free.shape, dtype=torch.bool)
    banned[:, [ids.text_pad, ids.gen_slot, ids.delay_slot, ids.audio_end]] = True
    banned[:, ids.im_end] = early
    by_clip = score(in_clip, (tokens_N[kinds_N == Text.IN_CLIP] == ids.delay_slot).long(), text)
    by_free = score(free.masked_fill(banned, -torch.inf), tokens_N[kinds_N == Text.FREE], text)

    columns = {}
    for name, values in by_code.items():
        text_N = torch.zeros(len(tokens_N), device=device)
        text_N = text_N.masked_scatter(kinds_N == Text.IN_CLIP, by_clip[name])
        text_N = text_N.masked_scatter(kinds_N == Text.FREE, by_free[name])
        values_NC = torch.cat([text_N[:, None], values.view_as(labels_NQ)], dim=1)
        # What was not sampled may be -inf, which no weight of 0 takes away.
        columns[name] = (weights_NC * values_NC.masked_fill(weights_NC == 0, 0.0)).sum(-1)
    return columns


def _plans(config: MossConfig, tokens: Sequence[Tensor]) -> list[Plan]:
    ids = TokenIds.of(config)
    return [plan(ids, tokens_T.tolist()) for tokens_T in tokens]


# ---------------------------------------------------------------------------------------------- registration


def register() -> None:
    """Teaches ``AutoConfig`` and ``AutoModelForTextToWaveform`` the model type. Idempotent."""
    AutoConfig.register(MODEL_TYPE, MossConfig, exist_ok=True)
    AutoModelForTextToWaveform.register(MossConfig, MossPolicy, exist_ok=True)


ADAPTER = PolicyAdapter(
    model_type=MODEL_TYPE,
    sample_rate_hz=SAMPLE_RATE_HZ,
    samples_per_frame=SAMPLES_PER_FRAME,
    policy=MossPolicy,
    register=register,
    replay_inputs=replay_inputs,
    score=score_replay,
    is_trainable=is_trainable,
    lora_targets=lora_targets,
    lora_prefix="language_model",
)

__all__ = ["ADAPTER", "LORA_PARENTS", "MossConfig", "MossPolicy"]
