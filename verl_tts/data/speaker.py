"""Speaker embeddings: JSON files with a list of numbers, or with {"embedding": [...]}.

Shapes: ``H`` hidden size of the talker; an embedding is one position of its prompt.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from verl_tts.errors import DataError
from verl_tts.files import write_whole


def read_speaker(path: str | Path, hidden_size: int | None) -> np.ndarray:
    """``speaker_H``, float32. Raises ``DataError``: no such file, no numbers, another length, a NaN.

    ``hidden_size`` None: the model is not known, any length will do.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"the speaker embedding {path} does not exist") from error
    except (OSError, ValueError) as error:
        raise DataError(f"the speaker embedding {path} cannot be read as JSON: {error}") from error
    values = content.get("embedding") if isinstance(content, dict) else content
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise DataError(f'{path} has to be a list of numbers, or {{"embedding": [...]}} with one')
    if hidden_size is not None and len(values) != hidden_size:
        raise DataError(f"{path} has {len(values)} values, but the model's speaker embedding has {hidden_size}")
    with np.errstate(over="ignore"):  # a value beyond float32 becomes inf, which the next check names
        speaker_H = np.asarray(values, dtype=np.float32)
    if not np.isfinite(speaker_H).all():
        index = int(np.flatnonzero(~np.isfinite(speaker_H))[0])
        raise DataError(f"{path} has {speaker_H[index]} at index {index}; every value has to be finite")
    return speaker_H


def write_speaker(path: Path, speaker_H: np.ndarray, **origin: str | float) -> None:
    """A file that ``read_speaker`` reads bit for bit, in float32; ``origin`` says where the voice is from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"embedding": [float(value) for value in speaker_H], **origin}) + "\n")


def speaker_file(speaker_path: str | Path, name: str | None) -> Path:
    """The file of a row's speaker: ``tts.speaker_path`` itself, or NAME.json where that is a folder.

    Raises ``DataError``: a row without a name but a folder of speakers, a name but only one file, a name
    that leads out of the folder.
    """
    path = Path(speaker_path)
    if name is None:
        if path.is_dir():
            raise DataError(f"tts.speaker_path={path} is a folder, so extra_info.speaker has to name one of its files")
        return path
    if not path.is_dir():
        raise DataError(
            f"extra_info.speaker={name}, but tts.speaker_path={path} is not a folder with {name}.json in it"
        )
    if not name or Path(name).name != name:
        raise DataError(f"extra_info.speaker={name} has to be a plain name, without folders")
    file = path / f"{name}.json"
    if not file.resolve().is_relative_to(path.resolve()):
        raise DataError(
            f"extra_info.speaker={name}: {file} leads out of the folder, to {file.resolve()}; copy it there"
        )
    return file


def read_speakers(
    speaker_path: str | Path, names: Iterable[str | None], hidden_size: int
) -> dict[str | None, np.ndarray]:
    """``speaker_H`` of every name that the rows use; None is the run's own. Raises ``DataError``."""
    return {name: read_speaker(speaker_file(speaker_path, name), hidden_size) for name in names}
