"""``verl-tts speaker``: a recording becomes the speaker embedding that ``tts.speaker_path`` names.

verl-tts speaker --model BASE --audio reference.wav --out speaker.json
verl-tts speaker --model BASE --audio asha.flac --out speakers/asha.json    rows name their speaker: asha
"""

import argparse
import os
from pathlib import Path

from verl_tts.errors import CheckpointError, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", type=Path, required=True, help="a Base model: others cannot listen")
    parser.add_argument("--audio", metavar="REF", type=Path, required=True, help="one second and more, 16 kHz and up")
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="JSON file to create")


def run(args: argparse.Namespace) -> int:
    from verl_tts.config.model_dir import policy_of, read_model_config, takes_speakers
    from verl_tts.data.reference import read_reference
    from verl_tts.data.speaker import write_speaker
    from verl_tts.report.console import output_to

    if args.out.exists():
        raise ConfigError(f"{args.out} exists already; name another file or remove it")
    config = read_model_config(str(args.model))
    if not takes_speakers(config):
        raise CheckpointError(
            f"{args.model} is a model of {policy_of(config)}, which is given the recording itself; "
            "name a Qwen3-TTS Base model"
        )
    reference = read_reference(args.audio)
    with output_to(Path(os.devnull)) as say:  # qwen-tts and its parts have much to say when they are imported
        # Imported after all that: it takes seconds, and a wrong path is answered at once.
        from verl_tts.models.qwen3_tts_speaker import embed_speaker

        speaker_H = embed_speaker(args.model, reference)
        seconds = round(reference.seconds, 3)
        write_speaker(args.out, speaker_H, model=str(args.model), audio=str(args.audio), seconds=seconds)
        say(f"speaker embedding of {reference.seconds:.1f} s, {len(speaker_H)} values: {args.out}")
    return 0
