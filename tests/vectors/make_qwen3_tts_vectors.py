"""Writes qwen3_tts.npz: codebook-0 logits of the tiny checkpoint as qwen-tts itself computes them.

Everything comes out of qwen-tts's own ``generate``, unchanged and under the Transformers that it was written
for: it builds the prompts, pads them on the left, samples step by step with a cache, and a hook on the codec
head writes down what it saw. Needs an environment of its own:

    uv venv --python 3.11 /tmp/qwen-tts && uv pip install --python /tmp/qwen-tts/bin/python \\
        transformers==4.57.3 qwen-tts==0.1.1 torch==2.11.0 torchaudio==2.11.0
    PYTHONPATH=. /tmp/qwen-tts/bin/python tests/vectors/make_qwen3_tts_vectors.py

Shapes: B sample, P text token, F frame, Q codebook, T = F + 1 sampled token, C column kept (every 8th of the
engine's support, and EOS), H hidden. Keys: ``<layout>/<sample>/{text_ids_P,codes_FQ,logits_TC,logsumexp_T}``.
"""

import hashlib
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from qwen_tts.core.models import Qwen3TTSForConditionalGeneration
from transformers import AutoTokenizer

from verl_tts.checkpoints.tiny import build_tiny_qwen3_tts, uniform
from verl_tts.models.qwen3_tts_prompt import TokenIds, assistant_text

OUT = Path(__file__).parent / "qwen3_tts.npz"
SAMPLES = [  # text, language, cut or not is left to the seed
    ("Hello.", "Auto"),
    ("नमस्ते", "English"),
    ("The quick brown fox jumps.", "Chinese"),
]
MAX_NEW_TOKENS = 16
SEED = 23


def main() -> None:
    if transformers.__version__ != "4.57.3":
        sys.exit(f"transformers is {transformers.__version__}, the vectors are those of 4.57.3: see the docstring")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "tiny"
        build_tiny_qwen3_tts(checkpoint)
        weights = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
        model = Qwen3TTSForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    ids = TokenIds.of(model.config)
    columns_C = [*ids.support[::8], ids.codec_eos]
    text_ids = [tokenizer(assistant_text(text))["input_ids"] for text, _ in SAMPLES]
    speakers_BH = np.stack([uniform(f"speaker {i}", (model.config.talker_config.hidden_size,), 1.0) for i in range(3)])
    vectors = {
        "weights_sha256": np.array(weights),
        "columns_C": np.array(columns_C, np.int16),
        "languages": np.array([language for _, language in SAMPLES]),
        "texts": np.array([text for text, _ in SAMPLES]),
        "speakers_BH": speakers_BH,
    }
    endings = set()
    for layout in ("non_streaming", "streaming"):
        codes, logits_TBV = generate(model, text_ids, torch.from_numpy(speakers_BH), layout)
        for i, codes_FQ in enumerate(codes):
            frames = len(codes_FQ)
            endings.add((layout, "limit" if frames == MAX_NEW_TOKENS - 1 else "eos"))
            support_TV = logits_TBV[: frames + 1, i, ids.support]
            vectors[f"{layout}/{i}/text_ids_P"] = np.array(text_ids[i], np.int16)
            vectors[f"{layout}/{i}/codes_FQ"] = codes_FQ.numpy().astype(np.int16)
            vectors[f"{layout}/{i}/logits_TC"] = logits_TBV[: frames + 1, i, columns_C].numpy()
            vectors[f"{layout}/{i}/logsumexp_T"] = support_TV.logsumexp(-1).numpy()
            print(layout, SAMPLES[i], f"{frames} frames")
    if len(endings) != 4:
        sys.exit(f"Only {sorted(endings)}: choose a SEED that ends some samples of each layout and cuts others")
    np.savez_compressed(OUT, **vectors)
    print(OUT, f"{OUT.stat().st_size / 1000:.0f} kB")


@torch.no_grad()
def generate(model, text_ids, speakers_BH, layout):
    """qwen-tts's own sampling; returns the frames of each sample and the logits of every step."""
    steps: list[torch.Tensor] = []
    hook = model.talker.codec_head.register_forward_hook(lambda head, inputs, logits: steps.append(logits[:, -1]))
    torch.manual_seed(SEED)
    codes, _ = model.generate(
        input_ids=[torch.tensor([ids]) for ids in text_ids],
        languages=[language for _, language in SAMPLES],
        voice_clone_prompt={
            "ref_code": None,
            "ref_spk_embedding": [*speakers_BH],
            "x_vector_only_mode": [True] * len(text_ids),
            "icl_mode": [False] * len(text_ids),
        },
        non_streaming_mode=layout == "non_streaming",
        max_new_tokens=MAX_NEW_TOKENS,
        temperature=1.0,
        top_k=0,
        repetition_penalty=1.0,
    )
    hook.remove()
    return codes, torch.stack(steps)


if __name__ == "__main__":
    main()
