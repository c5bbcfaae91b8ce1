"""qwen-tts's own ``generate`` on the same clips: ``python upstream.py MODEL DATA OUT.json ROUNDS [OVERRIDE ...]``.

Batches of 8, the samples of one prompt, with the sampling settings of a run, and each clip decoded as qwen-tts does.
The dtype and the number of threads that are fastest here are found first, by a batch each.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from loop import FRAMES, PROMPTS, SAMPLES, SETTINGS
from transformers import AutoTokenizer

from verl_tts.compat import qwen_tts_transformers5
from verl_tts.config.compose import compose
from verl_tts.data.prompts import read_prompts
from verl_tts.models.qwen3_tts_prompt import assistant_text

qwen_tts_transformers5.apply()

from qwen_tts.core.models import Qwen3TTSForConditionalGeneration  # noqa: E402


@dataclass
class Spent:
    frames: int = 0
    generate_s: float = 0.0
    decode_s: float = 0.0


@torch.no_grad()
def batch(model, text_ids, speaker_H, language, config, spent: Spent) -> None:
    """Adds the samples of one prompt; the waveforms are thrown away."""
    rollout, device = config.actor_rollout_ref.rollout, config.trainer.device
    began = time.perf_counter()
    codes, _ = model.generate(
        input_ids=[torch.tensor([text_ids], device=device)] * SAMPLES,
        languages=[language] * SAMPLES,
        voice_clone_prompt={
            "ref_code": None,
            "ref_spk_embedding": [speaker_H] * SAMPLES,
            "x_vector_only_mode": [True] * SAMPLES,
            "icl_mode": [False] * SAMPLES,
        },
        non_streaming_mode=config.tts.prompt_layout == "non_streaming",
        max_new_tokens=FRAMES + 1,
        temperature=rollout.temperature,
        top_k=max(rollout.top_k, 0),
        top_p=rollout.top_p,
        repetition_penalty=1.0,
    )
    codes = [codes_FQ.cpu() for codes_FQ in codes]  # a GPU has really finished
    generated = time.perf_counter()
    model.speech_tokenizer.decode([{"audio_codes": codes_FQ} for codes_FQ in codes])
    spent.frames += sum(map(len, codes))
    spent.generate_s += generated - began
    spent.decode_s += time.perf_counter() - generated


def measure(path: Path, data: Path, rounds: int, overrides: list[str]) -> dict:
    config = compose([*SETTINGS, *overrides, f"actor_rollout_ref.model.path='{path}'"])
    tokenizer, rows = AutoTokenizer.from_pretrained(path), read_prompts(str(data / "train.parquet"))[:PROMPTS]
    prompts = [(tokenizer(assistant_text(row.text))["input_ids"], row.language) for row in rows]
    speaker_H = torch.tensor(json.loads((data / "speaker.json").read_text()), device=config.trainer.device)
    models = {
        dtype: Qwen3TTSForConditionalGeneration.from_pretrained(path, dtype=dtype).to(config.trainer.device).eval()
        for dtype in (torch.float32, torch.bfloat16)
    }

    def seconds(dtype: torch.dtype, threads: int) -> float:
        torch.set_num_threads(threads)
        spent = Spent()
        batch(models[dtype], prompts[0][0], speaker_H, prompts[0][1], config, spent)
        return spent.generate_s

    seconds(torch.float32, 1)  # what is made once
    cores = len(os.sched_getaffinity(0))
    tried = {choice: seconds(*choice) for choice in product(models, sorted({1, cores}))}
    dtype, threads = min(tried, key=tried.__getitem__)
    torch.set_num_threads(threads)
    found = []
    for _ in range(rounds):
        spent = Spent()
        for text_ids, language in prompts:
            batch(models[dtype], text_ids, speaker_H, language, config, spent)
        found.append(asdict(spent))
    return {"dtype": str(dtype).removeprefix("torch."), "threads": threads, "rounds": found}


if __name__ == "__main__":
    model, data, out, rounds, *overrides = sys.argv[1:]
    Path(out).write_text(json.dumps(measure(Path(model), Path(data), int(rounds), overrides)))
