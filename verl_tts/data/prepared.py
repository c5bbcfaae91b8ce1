"""What a data script leaves: OUT/{train,validation}.parquet and manifest.json, whole or not at all."""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from verl_tts.data.prompts import read_prompts, write_prompts
from verl_tts.data.schema import to_columns
from verl_tts.files import sha256_of, staged
from verl_tts.types import PromptRow


def write_prepared(
    out: Path,
    splits: Mapping[str, Sequence[PromptRow]],
    about: Mapping[str, Any],
    beside: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """Creates ``out`` and returns the manifest: ``about`` and, under ``files``, rows and hashes of each split.

    ``beside`` writes whatever else belongs there into the folder that it is given, before ``out`` appears. Raises
    ``DataError`` for rows that no run would take, ``ConfigError`` for a place that cannot be, ``RunStopped`` for one
    that cannot be written, such as a full disk.
    """
    with staged(out) as folder:
        files = {}
        for split, rows in splits.items():
            path = folder / f"{split}.parquet"
            write_prompts(rows, path)
            columns = [to_columns(row) for row in read_prompts(path)]
            content = json.dumps(columns, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
            files[split] = {
                "path": path.name,
                "rows": len(columns),
                "content_sha256": sha256(content.encode()).hexdigest(),
                "parquet_sha256": sha256_of(path),
            }
        if beside is not None:
            beside(folder)
        manifest = {**about, "files": files}
        (folder / "manifest.json").write_text(
            json.dumps(manifest, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
        )
    return manifest
