"""vLLM-Omni's talker of MOSS with what training asks of it; stage 0 loads this class in the place of its parent.

The parent draws codes with settings and a generator that no request can choose, says nothing of their log-probs,
takes one delay token more than the published loop, and embeds a prompt as if it were the first chunk of one. Here a
request brings its prompt's codes, its sampling settings and its seed; a step returns the codes of one position and
their log-probs; and a request that was preempted, or whose prompt comes in chunks, goes on where it was, because what
it has sampled is kept by position.

Shapes: ``B`` request, ``P`` position of a prompt, ``S`` position of a span, ``Q`` codebook, ``H`` hidden, ``V`` code.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import WeightsMapper
from vllm.v1.sample.metadata import SamplingMetadata
from vllm_omni.model_executor.models.moss_tts.modeling_moss_tts_talker import MossTTSDelayTalkerForGeneration
from vllm_omni.model_executor.models.output_templates import OmniOutput

from verl_tts.engine.sampling import truncate
from verl_tts.models.moss_prompt import Cursor, Text, TokenIds
from verl_tts.rollout.float32 import Float32Head, Float32RMSNorm
from verl_tts.rollout.qwen3_tts_talker import invert
from verl_tts.rollout.worker_extension import WeightReceiver

ARCHITECTURE = "MossTTSDelayModel"  # as config.json names it
MOST_CODEBOOKS = 64  # of any model of this family; for the names of weights

Settings = tuple[float, int, float]  # temperature, top-k, top-p


def register() -> None:
    """Has vLLM-Omni load ``Talker``, in this process. To be called before the model is loaded."""
    from vllm_omni.model_executor.models.registry import OmniModelRegistry

    OmniModelRegistry.register_model(ARCHITECTURE, Talker)


class Receiver(WeightReceiver):
    """Mixed into the stage's worker. vLLM loads this module in the talker's process, before the model."""


class Answer:
    """What a request has been given and has sampled so far."""

    def __init__(self, prompt_PQ: Tensor, settings: Settings, generator: Generator) -> None:
        self.codes_SQ = prompt_PQ  # of every position so far
        self.prompt = len(prompt_PQ)
        self.settings, self.generator = settings, generator
        self.cursor = Cursor()
        self.fed = 0  # positions that the model has seen

    def advance(self, tokens: Sequence[int], end: int, ids: TokenIds) -> None:
        """``tokens`` are those of the positions up to ``end``; those of the answer that are new move the cursor."""
        self.fed = end
        new = end - self.prompt - self.cursor.position
        for token in tokens[len(tokens) - new :] if new > 0 else ():
            self.cursor.advance(int(token), ids)

    @property
    def is_complete(self) -> bool:
        """Whether the model has seen all that was sampled: the next position can be drawn."""
        return self.fed == len(self.codes_SQ)


class Talker(MossTTSDelayTalkerForGeneration):
    has_postprocess = False

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "language_model.": "model.",
            "emb_ext.": "audio_embeddings.",
            "lm_heads.0.": "text_lm_head.",
            **{f"lm_heads.{book + 1}.": f"audio_heads.{book}." for book in range(MOST_CODEBOOKS)},
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # Neither class has state of its own.
        self.model.norm.__class__ = Float32RMSNorm
        self.text_lm_head.quant_method = Float32Head()
        self.ids = TokenIds.of(self.config)
        self.reports_processed = vllm_config.model_config.logprobs_mode == "processed_logprobs"
        self._cursors: list[Cursor | None] = []

    # ------------------------------------------------------------------ weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = super().load_weights(weights)
        self.rebuild_caches()
        return loaded

    def rebuild_caches(self) -> None:
        """Computes what was derived from weights when they were loaded. To be called after a weight sync."""
        self._stacked_audio_emb_w = None
        self._stacked_audio_head_w = torch.cat([head.weight[: self.ids.codes] for head in self.audio_heads]).float()

    # ------------------------------------------------------------------ one step

    def preprocess(
        self, input_ids: Tensor, input_embeds: Tensor | None, **info: Any
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """The embeddings of a span of one request: of its prompt, of a token fed back, or of both once more.

        ``info`` is the request's additional information: ``prompt_codes`` (P, Q), ``audio_sampling`` (temperature,
        top-k, top-p) and ``audio_seed``. Raises ``ValueError`` where the codes are not one row a prompt token.
        """
        answer = info.get("answer")
        if answer is None:
            answer = self._begin(info)
        first = int(info["_omni_num_computed_tokens"])
        end = first + len(input_ids)
        answer.advance(input_ids.tolist(), end, self.ids)
        embeds_SH = self._embed(input_ids, answer.codes_SQ[first:end])
        return input_ids, embeds_SH, {"answer": answer}

    def _begin(self, info: Mapping[str, Any]) -> Answer:
        device = self.text_lm_head.weight.device
        codes_PQ = torch.as_tensor(info["prompt_codes"], device=device).view(-1, self.ids.codebooks).long()
        if len(codes_PQ) != info["_omni_prompt_len"]:
            raise ValueError(f"{len(codes_PQ)} rows of prompt codes for {info['_omni_prompt_len']} prompt tokens")
        temperature, top_k, top_p = info["audio_sampling"]
        generator = torch.Generator(device).manual_seed(int(info["audio_seed"][0]))
        return Answer(codes_PQ, (float(temperature), int(top_k), float(top_p)), generator)

    def _embed(self, text_S: Tensor, codes_SQ: Tensor) -> Tensor:
        """(S, H), summed in float32 and rounded once, as the actor sums."""
        text_SH = self.model.embed_tokens(text_S)
        sum_SH = text_SH.float()
        for book, embedding in enumerate(self.audio_embeddings):
            sum_SH = sum_SH + embedding(codes_SQ[:, book]).float()
        return sum_SH.to(text_SH.dtype)

    def make_omni_output(self, model_outputs: Tensor | OmniOutput, **kwargs: Any) -> OmniOutput:
        """Draws the codes of the next position of each request whose span is at its end.

        A step's output holds for each request one row of codes and one of their log-probs, or none.
        """
        if isinstance(model_outputs, OmniOutput):
            self._cursors = []
            return model_outputs
        infos = kwargs.get("model_intermediate_buffer") or []
        answers: list[Answer | None] = [info.get("answer") if isinstance(info, dict) else None for info in infos]
        self._cursors = [None if answer is None else answer.cursor for answer in answers]
        drawing = [(place, answer) for place, answer in enumerate(answers) if answer is not None and answer.is_complete]
        empty = torch.zeros(0, self.ids.codebooks, device=model_outputs.device)
        codes = [empty.long() for _ in answers]
        logprobs = [empty for _ in answers]
        if drawing:
            last = [kwargs["request_token_spans"][place][1] - 1 for place, _ in drawing]
            codes_BQ, logprobs_BQ = self.draw([answer for _, answer in drawing], model_outputs[last])
            for (place, answer), row_Q, logprobs_Q in zip(drawing, codes_BQ, logprobs_BQ, strict=True):
                answer.codes_SQ = torch.cat([answer.codes_SQ, row_Q[None]])
                codes[place], logprobs[place] = row_Q[None], logprobs_Q[None]
        return OmniOutput(
            text_hidden_states=model_outputs,
            multimodal_outputs={"codes": {"audio": codes, "logprobs": logprobs}} if answers else {},
        )

    def draw(self, answers: Sequence[Answer], hidden_BH: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and log-probs of one position, (B, Q) each: the pad code and 0 where a codebook is not under way."""
        assert self._stacked_audio_head_w is not None
        shape = (len(answers), self.ids.codebooks, self.ids.codes)
        logits_BQV = (hidden_BH.float() @ self._stacked_audio_head_w.T).view(shape)
        uniform_BQ = torch.stack(
            [torch.rand(self.ids.codebooks, generator=a.generator, device=a.generator.device) for a in answers]
        )
        codes_BQ, logprobs_BQ = torch.empty(shape[:2], dtype=torch.long), torch.empty(shape[:2])
        codes_BQ, logprobs_BQ = codes_BQ.to(hidden_BH.device), logprobs_BQ.to(hidden_BH.device)
        for settings in {answer.settings for answer in answers}:
            rows = [place for place, answer in enumerate(answers) if answer.settings == settings]
            drawn = draw_codes(logits_BQV[rows], uniform_BQ[rows], settings, self.reports_processed)
            codes_BQ[rows], logprobs_BQ[rows] = drawn
        for place, answer in enumerate(answers):
            books = answer.cursor.active(self.ids)
            for idle in (slice(0, books.start), slice(books.stop, None)):
                codes_BQ[place, idle], logprobs_BQ[place, idle] = self.ids.pad_code, 0.0
        return codes_BQ, logprobs_BQ

    def compute_logits(
        self, hidden_states: Tensor | OmniOutput, sampling_metadata: SamplingMetadata | None = None
    ) -> Tensor | None:
        """Text logits (B, V) in float32, -inf for what may not stand at the position."""
        if isinstance(hidden_states, OmniOutput):
            hidden_states = hidden_states.text_hidden_states
        if hidden_states is None:
            return None
        logits_BV = hidden_states.new_full((len(hidden_states), self.ids.text_vocab), -torch.inf, dtype=torch.float32)
        whole, in_clip = list(range(len(self._cursors), len(hidden_states))), []  # a dry run of vLLM's has no cursors
        banned: list[tuple[int, list[int]]] = []
        for row, cursor in enumerate(self._cursors):
            kind = None if cursor is None else cursor.kind(self.ids)
            if cursor is None or kind is Text.FREE:
                whole.append(row)
                banned.append((row, [] if cursor is None else cursor.banned(self.ids)))
            elif kind is Text.IN_CLIP:
                in_clip.append(row)
            else:
                logits_BV[row, cursor.forced(self.ids)] = 0.0
        if in_clip:
            # Two rows of the head, as the actor has it: most positions are of this kind, and the whole head in float32
            # is more than a gigabyte to write and to read.
            two = [self.ids.gen_slot, self.ids.delay_slot]
            head_2H = self.text_lm_head.weight[two].float()
            logits_BV[torch.tensor(in_clip)[:, None], two] = hidden_states[in_clip].float() @ head_2H.T
        if whole:
            logits_BV[whole] = self.logits_processor(self.text_lm_head, hidden_states[whole])
        for row, tokens in banned:
            logits_BV[row, tokens] = -torch.inf
        return logits_BV


def draw_codes(
    logits_BQV: Tensor, uniform_BQ: Tensor, settings: Settings, reports_processed: bool
) -> tuple[Tensor, Tensor]:
    """Codes and their log-probs, (B, Q) each, by the inverse distribution of numbers in [0, 1).

    Temperature 0 takes the most probable code. The log-probs are those before temperature and truncation, or, where
    processed ones are to be reported, after both.
    """
    temperature, top_k, top_p = settings
    if temperature == 0:
        processed_BQV = logits_BQV
        codes_BQ = logits_BQV.argmax(-1)
    else:
        processed_BQV = truncate(logits_BQV / temperature, top_k, top_p)
        chosen = invert(processed_BQV.softmax(-1).flatten(0, 1), uniform_BQ.flatten()[:, None])
        codes_BQ = chosen.view(uniform_BQ.shape)
    reported_BQV = processed_BQV if reports_processed else logits_BQV
    return codes_BQ, reported_BQV.log_softmax(-1).gather(-1, codes_BQ[..., None])[..., 0]


register()
