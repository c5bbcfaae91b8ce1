"""What is in prompt files, what a run would refuse, and what it would train on without a word.

Refused: files, rows and columns that cannot be read; an id twice in a file; unknown speakers and languages. Warned of:
texts that are the same after folding, in one file and across files, and files that cannot be read as one.
"""

import dataclasses
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_tts.config.model_dir import language_tags, speaker_size, takes_speakers
from verl_tts.data.folding import fold
from verl_tts.data.prompts import read_columns
from verl_tts.data.schema import COLUMNS, to_prompt_row
from verl_tts.data.speaker import read_speaker, speaker_file
from verl_tts.errors import DataError
from verl_tts.types import PromptRow

OWN = "(the run's)"  # of a row that names no language or no speaker
# Arrow cannot hold more text than this in one array, and readers cannot cut a nested column into several: "Nested data
# conversions not implemented for chunked array outputs".
NESTED_LIMIT_BYTES = 2**31 - 1


@dataclasses.dataclass
class Checked:
    """One file. ``rows`` are those that a run would take."""

    path: Path
    rows: list[PromptRow] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    @property
    def lengths(self) -> tuple[int, float, int]:
        """Characters of the shortest, the middle and the longest text."""
        lengths = [len(row.text) for row in self.rows]
        return (min(lengths), median(lengths), max(lengths)) if lengths else (0, 0, 0)

    @property
    def scripts(self) -> Counter[str]:
        return Counter("+".join(scripts_of(row.text)) for row in self.rows)

    @property
    def languages(self) -> Counter[str]:
        return Counter(row.language or OWN for row in self.rows)

    @property
    def speakers(self) -> Counter[str]:
        return Counter(row.speaker or OWN for row in self.rows)


def scripts_of(text: str) -> list[str]:
    """``scripts_of("नमस्ते world 1") == ["Devanagari", "Latin"]``: the scripts of its letters; ["none"] without any."""
    names = {unicodedata.name(letter, "unnamed").split()[0].title() for letter in text if letter.isalpha()}
    return sorted(names) or ["none"]


def check_files(
    paths: Sequence[Path], speakers: Path | None = None, model_config: Mapping[str, Any] | None = None
) -> tuple[list[Checked], list[str]]:
    """Each file, and what is to be said about pairs of them.

    ``speakers`` is what ``tts.speaker_path`` would be; without it speakers are only counted. ``model_config`` is
    config.json of the model; without it neither languages nor the lengths of embeddings are compared.
    """
    files = [check_file(path, speakers, model_config) for path in paths]
    across = [warning for one, other in combinations(files, 2) for warning in _across(one, other)]
    return files, across


def check_file(path: Path, speakers: Path | None, model_config: Mapping[str, Any] | None) -> Checked:
    checked = Checked(path)
    try:
        stored = read_columns(path)
        checked.refused += unreadable_columns(path)
    except DataError as error:
        checked.refused.append(str(error))
        return checked
    for number, columns in enumerate(stored):
        try:
            checked.rows.append(to_prompt_row(columns))
        except DataError as error:
            checked.refused.append(f"{path}, row {number}: {error}")
    ids = Counter(row.id for row in checked.rows)
    checked.refused += [f"{path}: the id {name} is that of {count} rows" for name, count in ids.items() if count > 1]
    if speakers:
        checked.refused += [f"{path}: {reason}" for reason in _unknown_speakers(checked.rows, speakers, model_config)]
    if model_config and (tags := language_tags(dict(model_config))) is not None:
        known = ["auto", *tags]
        checked.refused += [
            f"{path}: {count} rows have extra_info.language={name}; the model knows {', '.join(known)}"
            for name, count in checked.languages.items()
            if name != OWN and name.lower() not in known
        ]
    for text, twins in _by_folded_text(checked.rows).items():
        if len(twins) > 1:
            checked.warnings.append(f"{path}: {', '.join(twins)} read the same after folding: {text}")
    return checked


def unreadable_columns(path: Path) -> Iterator[str]:
    """Columns that verl's reader, which reads all of them, stumbles over. Raises nothing that reading does not."""
    for column in pq.read_schema(path):
        if any(pa.types.is_map(kind) for kind in _kinds(column.type)):
            yield f"{path}: the column {column.name} is a map ({column.type}), which datasets cannot read; use a struct"
    metadata = pq.read_metadata(path)
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(index)
            name, size = chunk.path_in_schema, chunk.total_uncompressed_size
            if "." in name and size > NESTED_LIMIT_BYTES:
                yield (
                    f"{path}: {name} has {size} bytes in one row group, nested columns can be read up to "
                    f"{NESTED_LIMIT_BYTES}; write smaller row groups"
                )


def _kinds(kind: pa.DataType) -> Iterator[pa.DataType]:
    yield kind
    for index in range(kind.num_fields):
        yield from _kinds(kind.field(index).type)


def _unknown_speakers(
    rows: Iterable[PromptRow], speakers: Path, model_config: Mapping[str, Any] | None
) -> Iterator[str]:
    size = speaker_size(dict(model_config)) if model_config and takes_speakers(dict(model_config)) else None
    for name, count in Counter(row.speaker for row in rows).items():
        try:
            read_speaker(speaker_file(speakers, name), size)
        except DataError as error:
            yield f"{count} rows: {error}"


def _by_folded_text(rows: Iterable[PromptRow]) -> dict[str, list[str]]:
    ids = defaultdict(list)
    for row in rows:
        ids[fold(row.text)].append(row.id)
    return ids


def _across(one: Checked, other: Checked) -> Iterator[str]:
    here, there = _by_folded_text(one.rows), _by_folded_text(other.rows)
    for text in here:
        if text in there:
            ids = ", ".join(here[text]), ", ".join(there[text])
            yield f"{ids[0]} of {one.path}, {ids[1]} of {other.path} read the same: {text}"
    if one.rows and other.rows:
        schemas = [pq.read_schema(file.path) for file in (one, other)]
        for name in COLUMNS:
            for place, *kinds in _conflicts(name, *(schema.field(name).type for schema in schemas)):
                yield (
                    f"{place} is {kinds[0]} in {one.path} and {kinds[1]} in {other.path}: "
                    "they cannot be in one list of data.train_files"
                )


def _conflicts(name: str, one: pa.DataType, other: pa.DataType) -> Iterator[tuple[str, pa.DataType, pa.DataType]]:
    """Where two types of a column cannot be aligned; a field that only one of them has can."""
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        there = {field.name: field.type for field in other}
        for field in one:
            if field.name in there:
                yield from _conflicts(f"{name}.{field.name}", field.type, there[field.name])
    elif pa.types.is_list(one) and pa.types.is_list(other):
        yield from _conflicts(name, one.value_type, other.value_type)
    elif one != other and not (pa.types.is_null(one) or pa.types.is_null(other)):
        yield name, one, other
