"""``verl-tts speaker``: a recording becomes the speaker embedding that ``tts.speaker_path`` names.

verl-tts speaker --model BASE --audio reference.wav --out speaker.json
verl-tts speaker --model BASE --audio asha.flac --out speakers/asha.json    rows name their speaker: asha
"""

import argparse
import json
from pathlib import Path

from verl_tts.errors import ConfigError
from verl_tts.files import write_whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", type=Path, required=True, help="a Base model: others cannot listen")
    parser.add_argument("--audio", metavar="REF", type=Path, required=True, help="one second and more, 16 kHz and up")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="JSON file to create")


def run(args: argparse.Namespace) -> int:
    if args.out.exists():
        raise ConfigError(f"{args.out} exists already; name another file or remove it")

    from verl_tts.data.reference import read_reference

    reference = read_reference(args.audio)
    # Imported after that: it takes seconds, and a wrong recording is answered at once.
    from verl_tts.models.qwen3_tts_speaker import embed_speaker

    speaker_H = embed_speaker(args.model, reference)
    content = {
        "embedding": [float(value) for value in speaker_H],
        "model": str(args.model),
        "audio": str(args.audio),
        "seconds": round(reference.seconds, 3),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(args.out, json.dumps(content) + "\n")
    print(f"speaker embedding of {reference.seconds:.1f} s, {len(speaker_H)} values: {args.out}")
    return 0
