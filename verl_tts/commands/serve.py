"""``verl-tts serve DIR``: a model behind HTTP, in two forms, on one port.

    verl-tts serve EXPORTED --references voices --ref-audio voices/anna/1.wav

    POST /v1/audio/speech   vLLM-Omni's, as OpenAI's: {"input": TEXT, "ref_audio": "file:///...", ...} -> audio
    POST /generate          as published for MOSS: {"text": TEXT, "audio_data": "anna/1.wav", ...} -> base64 of a WAV
    GET  /v1/models         the model's name
    GET  /health            200 once it answers

It serves until SIGTERM or SIGINT, on this machine alone unless --host says otherwise: it asks for no password.
"""

import argparse
from pathlib import Path

from verl_tts.errors import ConfigError
from verl_tts.files import sigterm_cleans_up

PORT = 30000  # the published one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="DIR", type=Path, help="model directory, an export for one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    parser.add_argument("--port", type=int, default=PORT, help="0 takes a free one; default: %(default)s")
    parser.add_argument(
        "--references", metavar="DIR", type=Path, help="folder that a request may name recordings of; without: none"
    )
    parser.add_argument("--ref-audio", metavar="FILE", type=Path, help="voice of requests that name none; or .json")
    parser.add_argument(
        "--language", metavar="NAME", default="Auto", help="of requests that name none; default: %(default)s"
    )
    parser.add_argument(
        "--max-frames", type=int, default=4096, help="longest clip, at 12.5 a second; default: %(default)s"
    )
    parser.add_argument(
        "--set", dest="overrides", metavar="KEY=VALUE", nargs="+", action="extend", default=[],
        help="settings of the engine, as for a launcher",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from verl_tts.config.compose import environment_with
    from verl_tts.serving.speech import Sampling, Speech, engine_log, open_model

    Sampling(max_frames=args.max_frames)  # checks it
    if args.references is not None and not args.references.is_dir():
        raise ConfigError(f"--references {args.references} is no folder")
    with sigterm_cleans_up(), engine_log("serve") as (say, log):
        speaker = open_model(
            args.model,
            voice=args.ref_audio,
            language=args.language,
            max_frames=args.max_frames,
            overrides=args.overrides,
        )
        if args.ref_audio is not None:
            speaker.prompt(Speech("Hello."))  # a voice or a language that is wrong is said at once
        with environment_with(speaker.environment):
            from verl_tts.serving.server import address, listen, serve

            with listen(args.host, args.port) as listener:
                forms = "POST /v1/audio/speech, POST /generate"
                line = f"serving {args.model} on {address(listener)}: {forms}; log {log}"
                serve(speaker, listener, args.references, ready=lambda: say(line), log=log)
    return 0
