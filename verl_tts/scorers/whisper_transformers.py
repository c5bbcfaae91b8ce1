"""Whisper run by Transformers (Apache-2.0), on a GPU or a CPU, many clips at once. Legend: ``S`` audio sample.

Audio beyond 30 s is cut where it is quiet and read window by window. Decoding is greedy, without timestamps and
without text from the window before. A transcript does not depend on its batch, up to the rounding of
matrix products: in float32 that has never been seen to change a token, in half precision a tie may fall either way.

The likelihood of a text is that of the decoder when it is given the text itself, one clip at a time: it is a real
number, which a neighbour in the batch would move in its last digits. In a clip of several windows each token counts
under the window that makes it likeliest; silent windows are left out.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version as package_version
from pathlib import Path

import numpy as np
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from verl_tts.errors import ConfigError
from verl_tts.rewards.protocol import excerpt
from verl_tts.scorers.audio import is_silent, windows
from verl_tts.scorers.base import BadRequestError, sha256_of_files
from verl_tts.scorers.pretrained import LOAD_ERRORS, load_whole, torch_device, torch_dtype

WINDOW_S = 30.0  # what Whisper's encoder takes
WINDOWS_AT_ONCE = 16  # bounds the memory that a long clip takes


class TransformersWhisper:
    rate_hz = 16_000

    def __init__(self, scorer: str, folder: Path, device: str, dtype: str, language: str) -> None:
        self._device = torch_device(scorer, device)
        self._dtype = torch_dtype(scorer, dtype, self._device)
        try:
            self._processor = WhisperProcessor.from_pretrained(folder, local_files_only=True)
        except LOAD_ERRORS as error:
            raise ConfigError(f"{scorer}: {folder} does not load as Whisper: {excerpt(error)}") from error
        self._whisper = load_whole(scorer, WhisperForConditionalGeneration, folder, self._dtype)
        self._whisper.to(self._device).eval()

        languages = getattr(self._whisper.generation_config, "lang_to_id", None)
        if languages:
            self._prompt = {"language": language, "task": "transcribe"}
            known = [token.strip("<|>") for token in languages]
            choice = ", ".join(known)
        else:  # an English-only model has no language token to be told by
            self._prompt = {}
            known, choice = ["en"], "English only, as its generation_config.json has no lang_to_id"
        if language not in known:
            raise ConfigError(f"{scorer}: {folder} does not know the language {language!r}; it knows: {choice}")
        self._start = self._start_tokens(language)
        self.identity: Mapping[str, object] = {
            "backend": "transformers",
            "backend_version": package_version("transformers"),
            "dtype": str(self._dtype).removeprefix("torch."),
            "language": language,
            "decoding": {"greedy": True, "timestamps": False, "window_s": WINDOW_S},
            "model_files": sha256_of_files(folder),
        }

    def _start_tokens(self, language: str) -> list[int]:
        """What every transcript begins with: start, language, task, no timestamps."""
        generation = self._whisper.generation_config
        told = []
        if self._prompt:
            told = [generation.lang_to_id[f"<|{language}|>"], generation.task_to_id["transcribe"]]
        return [generation.decoder_start_token_id, *told, generation.no_timestamps_token_id]

    def transcribe(self, clips_S: Sequence[np.ndarray]) -> list[str]:
        cut = [
            (clip, window_S)
            for clip, samples_S in enumerate(clips_S)
            for window_S in windows(samples_S, self.rate_hz, WINDOW_S)
            if not is_silent(window_S)
        ]
        texts: list[list[str]] = [[] for _ in clips_S]
        for start in range(0, len(cut), WINDOWS_AT_ONCE):
            batch = cut[start : start + WINDOWS_AT_ONCE]
            for (clip, _), text in zip(batch, self._read([window_S for _, window_S in batch]), strict=True):
                texts[clip].append(text.strip())
        return [" ".join(text).strip() for text in texts]

    def check_length(self, text: str) -> None:
        count, limit = len(self._text_tokens(text)), self._whisper.config.max_target_positions - len(self._start)
        if count > limit:
            raise BadRequestError("prompt", f"{count} tokens after normalisation, Whisper takes {limit} at once")

    @torch.inference_mode()
    def nll(self, samples_S: np.ndarray, text: str) -> float:
        pieces = windows(samples_S if len(samples_S) else np.zeros(1, np.float32), self.rate_hz, WINDOW_S)
        heard = [window_S for window_S in pieces if not is_silent(window_S)] or pieces[:1]
        asked = torch.tensor(self._text_tokens(text), device=self._device)
        given = torch.tensor([*self._start, *asked[:-1]], device=self._device)[None]
        likeliest = torch.full(asked.shape, -torch.inf, device=self._device)
        for window_S in heard:
            logits = self._whisper(**self._features([window_S]), decoder_input_ids=given).logits[0, -len(asked) :]
            logprobs = logits.float().log_softmax(-1).gather(-1, asked[:, None])[:, 0]
            likeliest = torch.maximum(likeliest, logprobs)
        return max(0.0, -float(likeliest.mean()))

    def _text_tokens(self, text: str) -> list[int]:
        """As Whisper writes it, after a space, and with the token that says that no more comes."""
        tokens = self._processor.tokenizer(f" {text}", add_special_tokens=False).input_ids
        return [*tokens, self._processor.tokenizer.eos_token_id]

    def _features(self, windows_S: list[np.ndarray]) -> dict[str, torch.Tensor]:
        features = self._processor.feature_extractor(
            windows_S, sampling_rate=self.rate_hz, return_tensors="pt", return_attention_mask=True
        ).to(self._device, self._dtype)
        return {"input_features": features.input_features, "attention_mask": features.attention_mask}

    @torch.inference_mode()
    def _read(self, windows_S: list[np.ndarray]) -> list[str]:
        tokens = self._whisper.generate(
            **self._features(windows_S),
            do_sample=False,
            num_beams=1,
            return_timestamps=False,
            **self._prompt,
        )
        return self._processor.batch_decode(tokens, skip_special_tokens=True)
