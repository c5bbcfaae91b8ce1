"""``verl-tts COMMAND``: one file per command, imported only when it is called, so that --help is quick."""

import argparse
import errno
import importlib
import sys
from collections.abc import Sequence

from verl_tts.errors import TTSError

# A command is a module of this package, named with underscores, with add_arguments(parser) and run(args) -> exit code.
COMMANDS = {
    "doctor": "say what would go wrong, before a run is started",
    "screen": "let the starting policy speak some prompts, and say whether there is something to learn",
    "tiny": "build a tiny-random checkpoint, for tests and for trying the loop",
    "score": "start a scorer server",
    "score-check": "does a scorer rank clips that anybody can rank",
    "export": "turn a training checkpoint into a model directory",
    "check-data": "say what is in prompt files, and what a run would refuse",
    "speaker": "compute a speaker embedding from a recording",
    "merge-lora": "merge a LoRA adapter, PEFT or MLX, into its base model",
    "generate": "let a model speak a text, or a file of them",
    "serve": "serve a model: OpenAI's speech endpoint, and the form POST /generate",
    "evaluate": "let a policy speak a prompt file, score it, compare it with another evaluation",
    "report": "show a run, and let it be heard, in one HTML file",
    "listen": "blind A/B listening between two steps of a run: the page, and the count of the votes",
}

# A path on the command line that cannot be what it is named for.
PATH_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
PATH_ERRNOS = (errno.ENAMETOOLONG, errno.ELOOP)  # which Python has no class of its own for


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; a ``TTSError`` is one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="verl-tts", description="Tools around a verl_tts run.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    called = next((word for word in words if not word.startswith("-")), None)
    for name, help_line in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help_line, description=help_line)
        if name == called:
            module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
            module.add_arguments(subparser)
    args, rest = parser.parse_known_args(words)
    if rest and (not hasattr(args, "settings") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes KEY=VALUE words up to the first option alone
        args.settings += rest
    try:
        return module.run(args)
    except TTSError as error:
        print(f"verl-tts {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if not (isinstance(error, PATH_ERRORS) or error.errno in PATH_ERRNOS):
            raise
        print(f"verl-tts {args.command}: {error.filename}: {error.strerror}; name another path", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
