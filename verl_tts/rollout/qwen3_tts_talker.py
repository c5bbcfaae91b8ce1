"""vLLM-Omni's talker of Qwen3-TTS with what training asks of it; stage 0 loads this class in the place of its parent.

The policy that is sampled from has to be the policy that is trained: float32 from the last norm to the logits, as in
the actor, and inputs summed in float32 and rounded once, to the engine's dtype. And residual codes are most of a
rollout's time: vLLM-Omni computes all 17 rows of the code predictor at each of its 15 steps, here a step computes the
one that is new.

Shapes: ``B`` request, ``S`` row of the code predictor, ``Q`` codebook, ``H`` hidden, ``D`` head, ``V`` token or code.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from vllm.config import VllmConfig
from vllm_omni.model_executor.models.common.qwen3_code_predictor import CodePredictorAttention, _rotate_half
from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_code_predictor_vllm import (
    Qwen3TTSTalkerCodePredictorForConditionalGenerationVLLM,
)
from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker import Qwen3TTSTalkerForConditionalGeneration

from verl_tts.rollout.float32 import Float32Head, Float32RMSNorm

# The runners of vLLM-Omni look for this name, so the class is registered under it and not under one of its own.
ARCHITECTURE = "Qwen3TTSTalkerForConditionalGeneration"

BLOCK = 8  # codes

Generators = Sequence[Generator | None]


def register() -> None:
    """Has vLLM-Omni load ``Talker``, in this process. To be called before the model is loaded."""
    from vllm_omni.model_executor.models.registry import OmniModelRegistry

    OmniModelRegistry.register_model(ARCHITECTURE, Talker)


class Talker(Qwen3TTSTalkerForConditionalGeneration):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Neither class has state of its own.
        self.model.norm.__class__ = Float32RMSNorm
        self.lm_head.quant_method = Float32Head()
        self.code_predictor.__class__ = CodePredictor
        for part in (self, self._prompt_builder):  # vllm-omni 0.24 writes bfloat16 here whatever the engine's dtype
            part._embedding_dtype = vllm_config.model_config.dtype

    def rebuild_caches(self) -> None:
        """Computes what was derived from weights when they were loaded. To be called after a weight sync."""
        self._init_runtime_buffers()
        self._build_stacked_codec_embed()

    @torch.inference_mode()
    def talker_mtp(
        self,
        input_ids: Tensor,
        input_embeds: Tensor,
        last_talker_hidden: Tensor,
        text_step: Tensor,
        **sampling: Any,
    ) -> tuple[Tensor, Tensor]:
        """The next input row of each request, (B, H), and the codes of the frame that it stands for, (B, Q).

        ``input_ids`` (B,): sampled tokens; ``input_embeds`` (B, H): their embeddings; ``last_talker_hidden`` (B, H):
        what they were sampled from; ``text_step`` (B, H): the text's share of the next row.
        """
        codes_BQ = self.code_predictor(input_ids[:, None], input_embeds, last_talker_hidden, **sampling)
        # A request whose last token is EOS is still in the batch. Its row is never used; its ids have to be codes.
        codes_BQ = torch.where(codes_BQ[:, :1] < self._codebook_vocab_size, codes_BQ, 0)
        if self._stacked_codec_embed is None:
            self._build_stacked_codec_embed()
        books = torch.arange(codes_BQ.shape[1] - 1, device=codes_BQ.device)
        residual_BQH = self._stacked_codec_embed[books, codes_BQ[:, 1:]]
        row_BH = input_embeds.float() + residual_BQH.float().sum(1) + text_step.float()
        return row_BH.to(self._embedding_dtype), codes_BQ


class CodePredictor(Qwen3TTSTalkerCodePredictorForConditionalGenerationVLLM):
    """The frozen code predictor, one new row a step, with the keys and values of the rows before it kept.

    Where vLLM-Omni has captured its steps as device graphs, these are replayed instead: a replay of all rows is
    quicker than launching the kernels of one.
    """

    @torch.inference_mode()
    def forward(
        self,
        layer0_code: Tensor,
        layer0_embed: Tensor,
        last_talker_hidden: Tensor,
        do_sample: bool = True,
        temperature: float = 0.9,
        top_k: int = 50,
        top_p: float = 1.0,
        generator: Generator | None = None,
        generators: Generators | None = None,
    ) -> Tensor:
        """The codes of a frame, (B, Q): codebook 0 as given, (B, 1), and the residual ones, drawn.

        ``layer0_embed`` and ``last_talker_hidden``: (B, H), the talker's. ``generators``: one a request;
        ``generator``: that of a request alone in its batch. ``top_p`` other than 1 is a ``NotImplementedError``.
        """
        self._setup_compile()
        if self._device_graphs or top_p != 1.0:
            return super().forward(
                layer0_code,
                layer0_embed,
                last_talker_hidden,
                do_sample,
                temperature,
                top_k,
                top_p,
                generator,
                generators,
            )
        steps = self._num_groups - 1
        uniform_BQ = uniform(len(layer0_code), steps, generator, generators, layer0_code.device)
        rows_BSH = torch.stack([last_talker_hidden.flatten(1), layer0_embed.flatten(1)], dim=1).to(self._model_dtype)
        positions_1S = torch.arange(steps + 1, device=rows_BSH.device)[None]
        rotary = [part_1SD.unsqueeze(1) for part_1SD in self.model.rotary_emb(rows_BSH, positions_1S)]
        cache = [KeyValues() for _ in self.model.layers]
        codes = [layer0_code.long()]
        for step in range(steps):
            hidden_BH = self._step(self.small_to_mtp_projection(rows_BSH), rotary, cache)
            logits_BV = self.lm_head[step](hidden_BH)
            if do_sample and temperature > 0:
                codes.append(draw(logits_BV, uniform_BQ[:, step, None], temperature, top_k))
            else:
                codes.append(logits_BV.argmax(-1, keepdim=True))
            if step + 1 < steps:
                rows_BSH = self.model.codec_embedding[step](codes[-1])
        return torch.cat(codes, dim=1)

    def _step(self, rows_BSH: Tensor, rotary: Sequence[Tensor], cache: "list[KeyValues]") -> Tensor:
        """The last of the new rows after all layers, (B, H). ``rotary``: cosine and sine of all rows, (1, 1, S, D)."""
        new = slice(cache[0].rows, cache[0].rows + rows_BSH.shape[1])
        rotary = [part[:, :, new] for part in rotary]
        for layer, kept in zip(self.model.layers, cache, strict=True):
            rows_BSH = rows_BSH + attend(layer.self_attn, layer.input_layernorm(rows_BSH), rotary, kept)
            rows_BSH = rows_BSH + layer.mlp(layer.post_attention_layernorm(rows_BSH))
        return self.model.norm(rows_BSH[:, -1])

    @staticmethod
    def _multinomial(probs: Tensor, generator: Generator | None, generators: Generators | None) -> Tensor:
        """How the parent draws a code for each row of ``probs`` (B, V)."""
        return invert(probs, uniform(len(probs), 1, generator, generators, probs.device))


class KeyValues:
    """Keys and values of one layer, (B, heads, rows so far, D)."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None

    @property
    def rows(self) -> int:
        return 0 if self._kept is None else self._kept[0].shape[2]

    def add(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self._kept is not None:
            keys, values = torch.cat([self._kept[0], keys], 2), torch.cat([self._kept[1], values], 2)
        self._kept = keys, values
        return self._kept


def attend(attention: CodePredictorAttention, rows_BSH: Tensor, rotary: Sequence[Tensor], kept: KeyValues) -> Tensor:
    """``CodePredictorAttention.forward`` for rows that follow those in ``kept``, (B, S, H)."""
    cos, sin = rotary
    requests, new, _ = rows_BSH.shape
    heads = (requests, new, -1, attention.head_dim)
    queries = attention.q_norm(attention.q_proj(rows_BSH).view(heads)).transpose(1, 2)
    keys = attention.k_norm(attention.k_proj(rows_BSH).view(heads)).transpose(1, 2)
    values = attention.v_proj(rows_BSH).view(heads).transpose(1, 2)
    queries, keys = (part * cos + _rotate_half(part) * sin for part in (queries, keys))
    is_first = kept.rows == 0  # and then the only call with more rows than one
    keys, values = kept.add(keys, values)
    mixed = F.scaled_dot_product_attention(
        queries, keys, values, scale=attention.scaling, is_causal=is_first, enable_gqa=attention.is_gqa
    )
    return attention.o_proj(mixed.transpose(1, 2).reshape(requests, new, -1))


def draw(logits_BV: Tensor, uniform_B1: Tensor, temperature: float, top_k: int) -> Tensor:
    """One code a row, (B, 1), from the softmax over its ``top_k`` largest logits, or over all where it is 0.

    The largest are looked for in the ``top_k`` blocks with the largest maxima, where they must be: three times as
    fast as among all codes. Of codes that tie with the last of the largest, those in these blocks stay in.
    """
    scaled_BV = logits_BV * (1.0 / temperature)
    codes = scaled_BV.shape[1]
    if top_k <= 0 or codes % BLOCK or codes // BLOCK <= top_k:
        return invert(_softmax_of_largest(scaled_BV, top_k), uniform_B1)
    blocks_BKW = scaled_BV.unflatten(1, (-1, BLOCK))
    chosen_BK = blocks_BKW.amax(-1).topk(top_k, sorted=False).indices.sort(-1).values
    candidates_BC = blocks_BKW.gather(1, chosen_BK[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
    place_B1 = invert(_softmax_of_largest(candidates_BC, top_k), uniform_B1)
    return chosen_BK.gather(1, place_B1 // BLOCK) * BLOCK + place_B1 % BLOCK


def _softmax_of_largest(logits_BV: Tensor, top_k: int) -> Tensor:
    if 0 < top_k < logits_BV.shape[1]:
        least_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, float("-inf"))
    return logits_BV.softmax(dim=-1, dtype=torch.float32)


def uniform(
    rows: int, draws: int, generator: Generator | None, generators: Generators | None, device: torch.device
) -> Tensor:
    """(rows, draws) numbers in [0, 1), each row from its own generator, whatever shares its batch.

    vLLM-Omni hands over the generator of a request alone in its batch as ``generator``.
    """
    if generators is None:
        return torch.rand(rows, draws, generator=generator, device=device)
    return torch.cat([torch.rand(1, draws, generator=row, device=device) for row in generators])


def invert(probs_BV: Tensor, uniform_B1: Tensor) -> Tensor:
    """One index a row, (B, 1), distributed as ``probs_BV`` for uniform numbers in [0, 1): by the inverse distribution.

    One call for all rows in the place of a ``multinomial`` for each, which was a quarter of the talker's time.
    """
    cumulative_BV = probs_BV.cumsum(dim=-1)
    # Right of every entry that is not above the number: an index of probability 0 is never chosen.
    index_B1 = torch.searchsorted(cumulative_BV, uniform_B1 * cumulative_BV[:, -1:], right=True)
    last_B1 = torch.searchsorted(cumulative_BV, cumulative_BV[:, -1:].contiguous())
    return torch.minimum(index_B1, last_B1)
