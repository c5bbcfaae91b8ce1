"""``verl-tts check-data``: what is in prompt files, and what a run would refuse.

    verl-tts check-data train.parquet validation.parquet
    verl-tts check-data train.parquet --speakers speakers --model BASE

Exit code 2: a run would refuse something. Warnings alone are 0.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_tts.data.check import Checked

SHOWN = 20  # findings of a kind; the rest is counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help="prompt file, parquet")
    parser.add_argument("--speakers", metavar="PATH", type=Path, help="what tts.speaker_path would be")
    parser.add_argument("--model", metavar="DIR", type=Path, help="compare languages and lengths of embeddings with it")


def run(args: argparse.Namespace) -> int:
    from verl_tts.config.model_dir import read_model_config
    from verl_tts.data.check import check_files

    model_config = read_model_config(str(args.model)) if args.model else None
    files, across = check_files(args.files, args.speakers, model_config)
    refused = [reason for file in files for reason in file.refused]
    warnings = [warning for file in files for warning in file.warnings] + across
    sections = [_listed("refused", refused)]
    if read := [file for file in files if file.rows or not file.refused]:
        sections = [table(read), *sections, _listed("warnings", warnings)]
    print("\n\n".join(sections))
    return 2 if refused else 0


def _listed(title: str, findings: Sequence[str]) -> str:
    more = [f"  and {len(findings) - SHOWN} more"] if len(findings) > SHOWN else []
    return "\n".join([f"{title}: {len(findings) or 'none'}", *(f"  {finding}" for finding in findings[:SHOWN]), *more])


def table(files: Iterable["Checked"]) -> str:
    """A line for each file, columns aligned."""
    lines = [["file", "rows", "characters", "scripts", "languages", "speakers"]]
    for file in files:
        shortest, middle, longest = file.lengths
        counts = (_counts(counter) for counter in (file.scripts, file.languages, file.speakers))
        lines.append([str(file.path), str(len(file.rows)), f"{shortest}-{longest}, median {middle:g}", *counts])
    return "\n".join(_aligned(lines))


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common(4)) + ", ..." * (len(counter) > 4)


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
