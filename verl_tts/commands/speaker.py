"""``verl-tts speaker``: a recording becomes the speaker embedding that ``tts.speaker_path`` names.

verl-tts speaker --model BASE --audio reference.wav --out speaker.json
verl-tts speaker --model BASE --audio asha.flac --out speakers/asha.json    rows name their speaker: asha
"""

import argparse
from pathlib import Path

from verl_tts.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", type=Path, required=True, help="a Base model: others cannot listen")
    parser.add_argument("--audio", metavar="REF", type=Path, required=True, help="one second and more, 16 kHz and up")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="JSON file to create")


def run(args: argparse.Namespace) -> int:
    if args.out.exists():
        raise ConfigError(f"{args.out} exists already; name another file or remove it")

    from verl_tts.data.reference import read_reference
    from verl_tts.data.speaker import write_speaker

    reference = read_reference(args.audio)
    # Imported after that: it takes seconds, and a wrong recording is answered at once.
    from verl_tts.models.qwen3_tts_speaker import embed_speaker

    speaker_H = embed_speaker(args.model, reference)
    seconds = round(reference.seconds, 3)
    write_speaker(args.out, speaker_H, model=str(args.model), audio=str(args.audio), seconds=seconds)
    print(f"speaker embedding of {reference.seconds:.1f} s, {len(speaker_H)} values: {args.out}")
    return 0
