"""``verl-tts listen``: which of two steps do people prefer, when they do not know which is which?

    verl-tts listen outputs/run --a 0 --b 40 --n 20
    verl-tts listen --score answers_*.json --key run.listen.key.json

The first writes a page to send to listeners and a key to keep; each listener sends back a file of answers. The second
reads the answers. Exit code 2: an answer belongs to another page.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, nargs="?", help="OUTPUT_DIR of the run")
    parser.add_argument("--a", metavar="STEP", type=int, help="a validated step, the one to compare with")
    parser.add_argument("--b", metavar="STEP", type=int, help="another one: a win is a vote for it")
    parser.add_argument("--n", metavar="PAIRS", type=int, default=20, help="pairs of clips (%(default)d)")
    parser.add_argument("--seed", type=int, help="which pairs, in which order; default: drawn, and noted in the key")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="the page; default: <name of RUN_DIR>.listen.html here"
    )
    parser.add_argument("--score", metavar="ANSWERS", type=Path, nargs="+", help="files of answers")
    parser.add_argument("--key", metavar="FILE", type=Path, help="the key that was written with the page")


def run(args: argparse.Namespace) -> int:
    from verl_tts.errors import ConfigError

    if args.score:
        from verl_tts.report.votes import read_ballots, read_key, table, tally

        if args.key is None:
            raise ConfigError("--score needs --key FILE: the key that was written beside the page")
        key = read_key(args.key)
        print(table(key, tally(key, read_ballots(args.score, key))))
        return 0

    from verl_tts.report.listening import write_listening

    if args.run_dir is None or args.a is None or args.b is None:
        raise ConfigError(
            "name RUN_DIR, --a STEP and --b STEP for a page, or --score ANSWERS --key FILE to read answers"
        )
    out = args.out or Path(f"{args.run_dir.absolute().name}.listen.html")
    key_file = write_listening(args.run_dir, out, a=args.a, b=args.b, pairs=args.n, seed=args.seed)
    print(f"page  {out}, {out.stat().st_size / 1e6:.1f} MB: send it to listeners")
    print(f"key   {key_file}: keep it to yourself until all have answered")
    return 0
