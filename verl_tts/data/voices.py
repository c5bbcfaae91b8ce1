"""The voices that a policy is to speak with: recordings in clusters, one a speaker, and which of them a sample gets.

    FOLDER/CLUSTER/UTTERANCE.wav    as a user has them
    references.json                 {"train": {CLUSTER: [UTTERANCE, ...]}, "validation": {...}}, as a data script
                                    lists them; no cluster is in both

``extra_info.ref_audio`` is CLUSTER/UTTERANCE. In validation it stays what the row says. In training it is drawn anew
in each step, a cluster first and an utterance of it then, so that a cluster of many utterances is no likelier than
one of few; all samples of a group share it, or they would differ by their voice and not by the policy.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from verl_tts.errors import DataError
from verl_tts.rollout.seeds import reference_seed
from verl_tts.types import PromptRow

SUFFIXES = (".wav", ".flac", ".mp3", ".ogg")
SPLITS = ("train", "validation")

Clusters = Mapping[str, Sequence[str]]  # cluster to its utterances, both sorted


@dataclass(frozen=True)
class References:
    train: Clusters
    validation: Clusters


def reference_file(folder: Path, name: str) -> Path:
    """The recording that ``extra_info.ref_audio`` names. Raises ``DataError`` for one that leads out of the folder."""
    file = folder / name
    if not file.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"extra_info.ref_audio={name} leads out of tts.reference_dir={folder}; copy it there")
    return file


def list_clusters(folder: Path) -> dict[str, list[str]]:
    """The clusters of a folder, sorted. Raises ``DataError``: no folder, no cluster with a recording in it."""
    if not folder.is_dir():
        raise DataError(f"the references {folder} are no folder; it has to hold one folder a speaker")
    clusters = {place.name: sorted(_recordings(place)) for place in sorted(folder.iterdir()) if place.is_dir()}
    found = {name: utterances for name, utterances in clusters.items() if utterances}
    if not found:
        raise DataError(
            f"{folder} has no CLUSTER/UTTERANCE recording; cluster folders hold files that end in {', '.join(SUFFIXES)}"
        )
    return found


def _recordings(place: Path) -> Iterator[str]:
    return (path.name for path in place.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())


def read_references(path: str | Path) -> References:
    """references.json, checked. Raises ``DataError``: not of this form, an empty cluster, a name that leads out of it,
    a cluster of both splits."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"the list of references {path} does not exist") from error
    except (OSError, ValueError) as error:
        raise DataError(f"the list of references {path} cannot be read as JSON: {error}") from error
    clusters = {}
    for split in SPLITS:
        node = content.get(split) if isinstance(content, dict) else None
        if not isinstance(node, dict) or not node:
            raise DataError(f'{path} has to be {{"train": {{CLUSTER: [UTTERANCE, ...]}}, "validation": {{...}}}}')
        for cluster, utterances in node.items():
            if not isinstance(utterances, list) or not utterances:
                raise DataError(f"{path}: {split}.{cluster} has to be a list of one recording or more")
            for name in (cluster, *utterances):
                if not isinstance(name, str) or not _is_plain(name):
                    raise DataError(f"{path}: {split}.{cluster} has {name!r}, which is no plain file name")
        clusters[split] = {cluster: sorted(node[cluster]) for cluster in sorted(node)}
    if shared := clusters["train"].keys() & clusters["validation"].keys():
        raise DataError(f"{path}: the cluster {min(shared)} is in train and in validation; a voice belongs to one")
    return References(**clusters)


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and PurePosixPath(name).name == name


def draw_reference(clusters: Clusters, run_seed: int, row_id: str, step: int) -> str:
    """CLUSTER/UTTERANCE for all samples of a row in one training step: a function of its arguments alone."""
    names = sorted(clusters)
    cluster = names[reference_seed(run_seed, row_id, step, "cluster") % len(names)]
    utterances = sorted(clusters[cluster])
    return f"{cluster}/{utterances[reference_seed(run_seed, row_id, step, 'utterance') % len(utterances)]}"


def with_reference(row: PromptRow, references: References, run_seed: int, step: int | None) -> PromptRow:
    """The row as a step sees it; ``step`` None is a validation, which keeps the row's own reference.

    The scorer reads ``ref_audio`` of the row that comes back, so that it compares with the voice that was given.
    """
    if step is None:
        return row
    drawn = draw_reference(references.train, run_seed, row.id, step)
    return replace(row, extra={**row.extra, "ref_audio": drawn})
