"""``verl-tts generate``: a model says a text, or a file of them, and the clips are written.

    verl-tts generate --model EXPORTED --ref-audio voice.wav --text "Good morning." --output out.wav
    verl-tts generate --model BASE --adapter PEFT_DIR --ref-audio voice.wav --texts lines.txt --output clips
    verl-tts generate --model MODEL --texts lines.jsonl --output clips

A file of texts has one a line; as .jsonl each line is an object with text and, where they differ from the flags,
ref_audio, emotion, instruction and language. Its clips are clips/0000.wav and so on. One seed gives the same clips.

Exit code 3: a clip has no audio, because the policy ended at once, or the engine failed.
"""

import argparse
import asyncio
import io
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_tts.errors import ConfigError, DataError, RolloutError
from verl_tts.files import sigterm_cleans_up, write_whole

if TYPE_CHECKING:
    from verl_tts.report.console import Say
    from verl_tts.serving.speech import Speech
    from verl_tts.types import CodecRollout, Waveform

FORMATS = {".wav": "WAV", ".flac": "FLAC"}
FIELDS = ("text", "ref_audio", "emotion", "instruction", "language")
MAX_TEXTS = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", type=Path, required=True, help="model directory, an export for one")
    parser.add_argument("--adapter", metavar="DIR", type=Path, help="LoRA adapter, PEFT; merged into a copy first")
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--text", help="what is said")
    texts.add_argument("--texts", metavar="FILE", type=Path, help="one text a line, or objects as .jsonl")
    parser.add_argument(
        "--output", metavar="PATH", type=Path, required=True, help=".wav or .flac to create; of --texts a folder"
    )
    how = parser.add_argument_group("how it is said")
    how.add_argument("--ref-audio", metavar="FILE", type=Path, help="recording of the voice, or an embedding (.json)")
    how.add_argument("--emotion", metavar="NAME", help="one of the names in verl_tts/data/emotions.py")
    how.add_argument("--instruction", metavar="TEXT", help="in place of --emotion, in words of your own")
    how.add_argument("--language", metavar="NAME", default="Auto", help="default: %(default)s")
    sampling = parser.add_argument_group("sampling, as in training unless said otherwise")
    sampling.add_argument("--seed", type=int, default=42, help="default: %(default)s")
    sampling.add_argument("--temperature", type=float, default=1.0, help="default: %(default)g; 0: the likeliest code")
    sampling.add_argument("--top-p", type=float, default=1.0, help="default: %(default)g")
    sampling.add_argument("--top-k", type=int, default=-1, help="default: %(default)s, all")
    sampling.add_argument("--max-frames", type=int, default=360, help="at 12.5 a second; default: %(default)s")
    parser.add_argument(
        "--set", dest="overrides", metavar="KEY=VALUE", nargs="+", action="extend", default=[],
        help="settings of the engine, as for a launcher",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    speeches = read_speeches(args)
    outputs = output_paths(args, len(speeches))
    with sigterm_cleans_up(), model_directory(args.model, args.adapter) as model:
        return generate(args, model, speeches, outputs)


def generate(args: argparse.Namespace, model: Path, speeches: list["Speech"], outputs: list[Path]) -> int:
    from verl_tts.config.compose import environment_with
    from verl_tts.serving.speech import Sampling, check_seed, engine_log, open_model, speak

    sampling = Sampling(args.temperature, args.top_p, args.top_k, max_frames=args.max_frames)
    check_seed(args.seed)
    with engine_log("generate") as (say, _):
        speaker = open_model(
            model, voice=args.ref_audio, language=args.language, max_frames=args.max_frames, overrides=args.overrides
        )
        # All prompts before the engine: a text that is wrong is said at once.
        takes = [(speaker.prompt(speech), take_seed(args.seed, number)) for number, speech in enumerate(speeches)]
        writer = Writer(outputs, args.max_frames, say)
        with environment_with(speaker.environment):
            asyncio.run(speak(speaker, takes, sampling, writer))
    if writer.silent:
        raise RolloutError(
            f"{len(writer.silent)} of {len(outputs)} clips have no audio, {writer.silent[0]} is one; try another --seed"
        )
    return 0


def take_seed(seed: int, number: int) -> int:
    """Of the text of that number: the same alone and among others."""
    from verl_tts.rollout.seeds import sample_seed

    return sample_seed(seed, "generate", str(number), 0, None)


class Writer:
    """Writes each clip whole, and says so."""

    def __init__(self, outputs: list[Path], max_frames: int, say: "Say") -> None:
        self._outputs, self._max_frames, self._say = outputs, max_frames, say
        self.silent: list[Path] = []

    async def __call__(self, number: int, rollout: "CodecRollout", waveform: "Waveform") -> None:
        import soundfile

        path = self._outputs[number]
        if len(waveform.samples_S) == 0:
            self.silent.append(path)
            self._say(f"{path}: the policy ended at once, there is nothing to write")
            return
        clip = io.BytesIO()
        soundfile.write(clip, waveform.samples_S, waveform.sample_rate_hz, format=FORMATS[path.suffix.lower()])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, clip.getvalue())
        except OSError as error:
            raise RolloutError(f"{path} cannot be written: {error.strerror}") from error
        cut = f", cut off at {self._max_frames} frames" if rollout.stop_reason == "length" else ""
        self._say(f"{path}: {waveform.seconds:.2f} s{cut}")


def read_speeches(args: argparse.Namespace) -> list["Speech"]:
    """What the flags and the file say. Raises ``DataError`` that names the line, or ``ConfigError``."""
    from verl_tts.serving.speech import Speech

    flags = {"emotion": args.emotion, "instruction": args.instruction}
    if args.text is not None:
        return [Speech(args.text, **flags)]
    try:
        lines = args.texts.read_text(encoding="utf-8").split("\n")  # a line of JSON may hold what else ends a line
    except UnicodeDecodeError as error:
        raise DataError(f"--texts {args.texts} is not UTF-8: {error}") from error
    speeches = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            own = _object(line) if args.texts.suffix == ".jsonl" else {"text": line.strip()}
            common = {} if own.keys() & flags.keys() else flags
            speeches.append(Speech(**common | own))
        except (DataError, ConfigError) as error:
            raise type(error)(f"{args.texts}, line {number}: {error}") from error
    if not 0 < len(speeches) <= MAX_TEXTS:
        raise DataError(f"--texts {args.texts} has {len(speeches)} texts; it needs 1 to {MAX_TEXTS}")
    return speeches


def _object(line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"it is not JSON: {error}") from error
    if not isinstance(content, dict) or "text" not in content:
        raise DataError("it has to be an object with the key text")
    for key, value in content.items():
        if key not in FIELDS:
            raise DataError(f"unknown key {key!r}; there are: {', '.join(FIELDS)}")
        if not isinstance(value, str):
            raise DataError(f"{key}={value!r} has to be a text")
    return content | ({"ref_audio": Path(content["ref_audio"])} if "ref_audio" in content else {})


def output_paths(args: argparse.Namespace, count: int) -> list[Path]:
    """Where the clips go. Raises ``ConfigError``: another format, something is there already."""
    if args.output.exists():
        raise ConfigError(f"--output {args.output} exists already; name another one or remove it")
    folder = next(place for place in args.output.absolute().parents if place.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--output {args.output} cannot be created in {folder}; name another one")
    if args.texts is not None:
        return [args.output / f"{number:04d}.wav" for number in range(count)]
    if args.output.suffix.lower() not in FORMATS:
        raise ConfigError(f"--output {args.output} has to end in {' or '.join(FORMATS)}")
    return [args.output]


@contextmanager
def model_directory(model: Path, adapter: Path | None) -> Iterator[Path]:
    """The model itself; with an adapter, a merge in a temporary directory."""
    if adapter is None:
        yield model
        return
    from verl_tts.config.model_dir import read_model_config
    from verl_tts.report.console import output_to

    read_model_config(str(model))
    with tempfile.TemporaryDirectory(prefix="verl-tts-generate-") as scratch:
        merged = Path(scratch, "model")
        with output_to(Path(os.devnull)):  # libraries have much to say when they are imported
            from verl_tts.checkpoints.lora import Scaling, merge

            merge(model, adapter, merged, given=Scaling(), layout=None, pins=None)
        yield merged
