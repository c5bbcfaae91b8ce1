"""``verl-tts score``: start a scorer server.

    verl-tts score --scorer duration
    verl-tts score --scorer whisper_cer --model /models/whisper-large-v3-turbo-ct2 --language hi --device cuda
    verl-tts score --config scorer.yaml

The file holds what the flags hold:

    scorer: whisper_cer
    options: {model: /models/whisper-large-v3-turbo-ct2, language: hi}
    server: {port: 18080, batch_size: 16}

or several scorers, of which the first gives the score; one that comes twice needs a name of its own:

    scorers:
      - {scorer: whisper_cer, options: {model: /models/whisper-large-v3-turbo-ct2, language: hi}}
      - {scorer: clap, name: emotion, options: {model: /models/clap}}
      - {scorer: clap, name: recording, options: {model: /models/clap, text: "High Quality Recording"}}
"""

import argparse
import os
from pathlib import Path

from verl_tts.errors import ConfigError

# Flags of the scorer and of the server. None: not given, the default of the scorer or server counts.
_SCORER_FLAGS = ("model", "revision", "device", "dtype", "language", "allow_download")
_SERVER_FLAGS = ("host", "port", "token_env", "max_queue", "batch_size", "batch_wait_ms")
MIN_QUEUE = 64  # the protocol: accept at least so many before saying 429


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--scorer", metavar="NAME", help="constant, duration, whisper_cer, ...; docs/scorers.md has them all"
    )
    source.add_argument(
        "--config", metavar="FILE", type=Path, help="YAML with scorer and options, or scorers, and server"
    )

    server = parser.add_argument_group("server")
    server.add_argument("--host", help="address to listen on (127.0.0.1)")
    server.add_argument("--port", type=int, help="port to listen on, 0 takes a free one (18080)")
    server.add_argument("--token-env", metavar="NAME", help="variable with the bearer token to require (SCORER_TOKEN)")
    server.add_argument("--max-queue", type=int, help=f"requests accepted before 429, at least {MIN_QUEUE} (256)")
    server.add_argument("--batch-size", type=int, help="clips scored together (16)")
    server.add_argument("--batch-wait-ms", type=float, help="how long a batch that is not full waits for more (5)")

    scorer = parser.add_argument_group("scorer")
    scorer.add_argument("--model", help="directory or name of the model")
    scorer.add_argument("--revision", help="revision of a model that is named, not a directory")
    scorer.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    scorer.add_argument("--dtype", help="auto, float32, float16 or bfloat16")
    scorer.add_argument("--language", help="language code that the recogniser expects, such as en or hi")
    scorer.add_argument("--allow-download", action="store_true", default=None, help="fetch a model that is not here")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    # Imported here: FastAPI and the scorers are an extra, and --help does not need them.
    from verl_tts.scorers import build_scorer, build_scorers
    from verl_tts.scorers.app import DEFAULT_PORT, ServerSettings, serve

    file = _read_file(args.config) if args.config else {"scorer": args.scorer, "options": {}, "server": {}}
    flags = _given(args, _SCORER_FLAGS)
    server = {"host": "127.0.0.1", "port": DEFAULT_PORT, **file["server"], **_given(args, _SERVER_FLAGS)}
    host, port = server.pop("host"), server.pop("port")
    variable = server.pop("token_env", "SCORER_TOKEN")
    if not isinstance(variable, str):
        raise ConfigError(f"token_env={variable!r} must be the name of a variable")
    token = os.environ.get(variable, "")
    settings = ServerSettings(token=token, **server)
    if settings.max_queue < MIN_QUEUE:
        raise ConfigError(f"max_queue={settings.max_queue} must be at least {MIN_QUEUE}, as the protocol promises")
    if "scorers" in file:
        if flags:
            raise ConfigError(f"--config {args.config} has several scorers; put {', '.join(flags)} into their options")
        scorer = build_scorers(file["scorers"])
    else:
        scorer = build_scorer(file["scorer"], {**file["options"], **flags})
    serve(scorer, settings, host, port)
    return 0


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, object]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _read_file(path: Path) -> dict:
    """``scorer`` and ``options``, or ``scorers``; and ``server``; checked for names that nobody reads."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from error
    if isinstance(content, dict) and "scorers" in content:
        file = _checked(path, "the file", content, required="scorers", optional=("server",))
        entries = file["scorers"]
        if not isinstance(entries, list) or not entries:
            raise ConfigError(f"--config {path}: scorers must be a list of at least one")
        file["scorers"] = [
            _checked(path, f"scorers[{i}]", entry, required="scorer", optional=("name", "options"))
            for i, entry in enumerate(entries)
        ]
    else:
        file = _checked(path, "the file", content, required="scorer", optional=("options", "server"))
    for key in file["server"]:
        if key not in _SERVER_FLAGS:
            raise ConfigError(f"--config {path}: unknown key server.{key}; there are: {', '.join(_SERVER_FLAGS)}")
    return file


def _checked(path: Path, what: str, node: object, required: str, optional: tuple[str, ...]) -> dict:
    """``node`` as a mapping of these keys; ``options`` and ``server`` are mappings and there."""
    if not isinstance(node, dict) or required not in node:
        raise ConfigError(f"--config {path}: {what} must be a mapping with the key {required}")
    known = (required, *optional)
    for key in node:
        if key not in known:
            raise ConfigError(f"--config {path}: unknown key {key!r} in {what}; there are: {', '.join(known)}")
    for key in ("scorer", "name"):
        if key in node and not isinstance(node[key], str):
            raise ConfigError(f"--config {path}: {key}={node[key]!r} in {what} must be a text")
    filled = {**{key: {} for key in ("options", "server") if key in known}, **node}
    for key in ("options", "server"):
        if key in known and not isinstance(filled[key], dict):
            raise ConfigError(f"--config {path}: {key} in {what} must be a mapping")
    return filled
