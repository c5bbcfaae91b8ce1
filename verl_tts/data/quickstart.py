"""Data for a first run without a download: ``python -m verl_tts.data.quickstart OUT --model DIR``.

OUT/{train,val}.parquet hold 48 and 16 everyday sentences, English and Hindi in turn, and OUT/speaker.json an
invented voice of the model's size. The targets of the ``duration`` scorer differ by language, so that the two
halves have to move apart: a policy that ignores the text cannot meet both.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_tts.config.model_dir import policy_of, read_model_config, speaker_size
from verl_tts.data.prompts import write_prompts
from verl_tts.errors import TTSError
from verl_tts.types import PromptRow

SENTENCES = Path(__file__).with_name("quickstart_sentences.json")
TAG = {"English": "English", "Hindi": "Auto"}  # the model has no token for Hindi
ID_PREFIX = {"English": "en", "Hindi": "hi"}
TARGET_SECONDS = {"English": 0.8, "Hindi": 2.4}
VAL_PER_LANGUAGE = 8
SPEAKER_SEED = 42


def quickstart_rows() -> dict[str, list[PromptRow]]:
    """``{"train": 48 rows, "val": 16 rows}``."""
    sentences: dict[str, list[str]] = json.loads(SENTENCES.read_text(encoding="utf-8"))
    rows: dict[str, list[PromptRow]] = {"train": [], "val": []}
    for position, texts in enumerate(zip(*sentences.values(), strict=True)):
        split = "val" if position < VAL_PER_LANGUAGE else "train"
        for name, text in zip(sentences, texts, strict=True):
            row = PromptRow(
                id=f"{ID_PREFIX[name]}-{position:02d}",
                text=text,
                split=split,
                index=len(rows[split]),
                data_source="quickstart",
                ground_truth=text,
                language=TAG[name],
                extra={"target_seconds": TARGET_SECONDS[name]},
            )
            rows[split].append(row)
    return rows


def invented_speaker(hidden_size: int, seed: int = SPEAKER_SEED) -> list[float]:
    """``hidden_size`` values of mean 0 and variance 1, the same on every machine."""
    draw = random.Random(seed).random
    return [round((2 * draw() - 1) * math.sqrt(3), 6) for _ in range(hidden_size)]


def write_quickstart(out: Path, model: Path) -> None:
    """Writes the files into ``out``. Raises ``CheckpointError`` if ``model`` is no checkpoint."""
    config = read_model_config(str(model))
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in quickstart_rows().items():
        write_prompts(rows, out / f"{split}.parquet")
    if policy_of(config) == "qwen3_tts":  # another policy has its voice from elsewhere
        (out / "speaker.json").write_text(json.dumps(invented_speaker(speaker_size(config))), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl_tts.data.quickstart", description=__doc__.splitlines()[0])
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write into")
    parser.add_argument("--model", metavar="DIR", type=Path, required=True, help="the checkpoint to be trained")
    args = parser.parse_args(argv)
    try:
        write_quickstart(args.out, args.model)
    except TTSError as error:
        print(f"verl_tts.data.quickstart: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
