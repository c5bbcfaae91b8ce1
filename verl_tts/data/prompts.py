"""Prompt files: parquet -> ``PromptRow`` and back. A bad row is named by its file and its number, from 0."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_tts.data.schema import COLUMNS, to_columns, to_prompt_row
from verl_tts.errors import DataError
from verl_tts.types import PromptRow


def read_prompts(*paths: str | Path) -> list[PromptRow]:
    """All rows of the parquet files, in their order; an id occurs once. Raises ``DataError`` at the first bad row."""
    rows: list[PromptRow] = []
    first_seen: dict[str, str] = {}
    for path in paths:
        for number, columns in enumerate(read_columns(path)):
            place = f"{path}, row {number}"
            try:
                row = to_prompt_row(columns)
            except DataError as error:
                raise DataError(f"{place}: {error}") from error
            if row.id in first_seen:
                raise DataError(f"{place}: the id {row.id} is also that of {first_seen[row.id]}")
            first_seen[row.id] = place
            rows.append(row)
    return rows


def read_columns(path: str | Path) -> list[dict[str, Any]]:
    """The rows of one file as they are stored, ``COLUMNS`` alone. Raises ``DataError``: no file, column or row."""
    try:
        schema = pq.read_schema(path)
        missing = [name for name in COLUMNS if name not in schema.names]
        if missing:
            raise DataError(f"{path} lacks the column {missing[0]}; it has {', '.join(schema.names)}")
        columns = pq.read_table(path, columns=list(COLUMNS)).to_pylist()
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from error
    if not columns:
        raise DataError(f"{path} has no rows")
    return columns


def write_prompts(rows: Iterable[PromptRow], path: str | Path, style: str = "model") -> None:
    """Writes one parquet file that ``read_prompts`` and verl read. ``style`` goes into ``reward_model``."""
    pq.write_table(pa.Table.from_pylist([to_columns(row, style) for row in rows]), path)
