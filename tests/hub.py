"""The hub that a recipe downloads from, as a folder: ``HOME/hub/NAME`` is a repository, ``HOME/python`` its client."""

import os
import subprocess
import sys
from pathlib import Path

# Stands in for the hub's client: "downloads" are copies of folders of the same name. Everything else is real.
HUB = """#!/usr/bin/env bash
if [[ "$1" == */recipes/download.py ]]; then
  echo "${*:2}" >>"$SEEN/downloads"
  mkdir -p "$(dirname "$4")" && cp -r "$SEEN/hub/$(basename "$2")/." "$4"
else
  exec "$PYTHON" "$@"
fi
"""


def write_hub_client(home: Path) -> None:
    """``home/python``, a Python whose hub is the folder ``home/hub``; it notes downloads in ``home/downloads``."""
    (home / "python").write_text(HUB)
    (home / "python").chmod(0o755)


def prepare_from(home: Path, recipe: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """prepare.sh of a recipe, into ``home/work``."""
    places = {"SEEN": str(home), "PYTHON": sys.executable, "PYTHON_BIN": str(home / "python")}
    places |= {"WORK": str(home / "work"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", recipe / "prepare.sh", *words],
        env={**os.environ, **places, **environment}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
