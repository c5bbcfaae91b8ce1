"""``verl-tts score-check URL``: seven clips that anybody can rank, and whether the scorer ranks them so.

    verl-tts score-check http://127.0.0.1:18080/score
    verl-tts score-check http://127.0.0.1:18080/score --audio hi.wav --text "..." --wrong-text "..." \
        --metadata speaker=anna --metadata target_seconds=2

Exit codes: 0 the order is sane with our guards, 3 it is not, 2 the scorer cannot be reached or refuses to score.
"""

import argparse
import asyncio
import json

from verl_tts.errors import ConfigError
from verl_tts.types import Scalar

SANE, NOT_SANE = 0, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="full address of the scorer, as in tts.reward.scorer_url")
    parser.add_argument("--audio", metavar="FILE", help="a clip of your own, mono; default: a bundled English sentence")
    parser.add_argument("--text", help="what is said in it")
    parser.add_argument("--wrong-text", help="another sentence of the same language")
    parser.add_argument(
        "--metadata",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help='what the scorer needs of a row; a number, true, false, null and a quoted "7" as in JSON',
    )
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="for one clip (%(default)g)")


def run(args: argparse.Namespace) -> int:
    from verl_tts.config.compose import reward_presets
    from verl_tts.config.reward import ClientConfig, GuardConfig
    from verl_tts.rewards import doctor

    own = (args.audio, args.text, args.wrong_text)
    if any(own) and not all(own):
        raise ConfigError(
            "--audio, --text and --wrong-text go together: a clip, what it says, and what it does not say"
        )
    right = doctor.read_clip(args.audio) if args.audio else doctor.bundled_clip()
    diagnosis = asyncio.run(
        doctor.examine(
            ClientConfig(scorer_url=args.url, timeout_s=args.timeout, max_retries=0, startup_timeout_s=5.0),
            GuardConfig(**reward_presets()["guards"]["guards"]),
            right,
            args.text or doctor.TEXT,
            args.wrong_text or doctor.WRONG_TEXT,
            dict(map(_pair, args.metadata)),
        )
    )
    print(doctor.table(diagnosis))
    return SANE if diagnosis.sane else NOT_SANE


def _pair(word: str) -> tuple[str, Scalar]:
    key, equals, value = word.partition("=")
    if not key or not equals:
        raise ConfigError(f"--metadata {word}: it has to be KEY=VALUE")
    return key, _scalar(value)


def _scalar(word: str) -> Scalar:
    """``2``, ``true`` and ``"2"`` as JSON reads them; every other word is a text as it stands, NaN too."""
    try:
        value = json.loads(word, parse_constant=str)
    except (ValueError, RecursionError):
        return word
    return word if isinstance(value, list | dict) else value
