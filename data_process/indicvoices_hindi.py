"""Prompts of the Hindi recipe from IndicVoices-R (AI4Bharat, CC-BY-4.0): OUT/{train,validation}.parquet, manifest.json.

    python data_process/indicvoices_hindi.py --out OUT                   from the hub, streaming; the corpus is gated
    python data_process/indicvoices_hindi.py --out OUT --shards DIR      from parquet shards that are here
    python data_process/indicvoices_hindi.py --out OUT --filter strict

The published split: of the first 1,000 rows with scenario Read, those of 1 to 14 s and 20 dB SNR and more are for
training, 863 of them; the next 100 rows that pass are for validation. The text is ``normalized`` where there is one,
else ``text``. ``--filter published`` applies these rules alone and reports what they let through: texts that are the
same after folding (verl_tts/data/folding.py), within a split and across. ``--filter strict`` rejects them.

OUT appears whole or not at all. Exit code 2: the input is wrong, or not the one that was published. 3: OUT cannot be
written, on a full disk for one.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import verl_tts
from verl_tts.data.folding import fold
from verl_tts.data.prepared import write_prepared
from verl_tts.errors import ConfigError, DataError, TTSError
from verl_tts.files import sigterm_cleans_up
from verl_tts.types import PromptRow

PINS = json.loads((Path(verl_tts.__file__).parent / "config" / "hindi_pins.json").read_text(encoding="utf-8"))
COLUMNS = ("text", "normalized", "scenario", "duration", "snr")
SCENARIOS = ("Read", "Extempore")
MIN_SECONDS, MAX_SECONDS = 1.0, 14.0
MIN_SNR_DB = 20.0
FILTERS = ("published", "strict")
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Settings:
    """``read_pool``: rows of scenario Read, passing or not, that training rows are taken from."""

    filter: str = "published"
    read_pool: int = PINS["dataset_train_pool"]
    train_rows: int | None = PINS["dataset_train_rows"]  # None: as many as pass
    validation_rows: int = PINS["dataset_val_rows"]


@dataclass(frozen=True)
class Utterance:
    source_index: int  # of the row in the corpus, from 0, whatever its scenario
    text: str
    raw_text: str

    @property
    def id(self) -> str:
        return PINS["row_id"].format(source_index=self.source_index)

    @property
    def texts(self) -> set[str]:
        return {text for text in (self.text, self.raw_text) if text}

    @property
    def folded(self) -> set[str]:
        return {folded for text in self.texts if (folded := fold(text))}


@dataclass
class Selection:
    """The rows of each split; how many were rejected, by reason; pairs of ids whose texts fold to the same."""

    kept: dict[str, list[Utterance]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    rejected: dict[str, Counter[str]] = field(default_factory=lambda: {split: Counter() for split in SPLITS})
    duplicates: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    overlaps: list[tuple[str, str]] = field(default_factory=list)  # validation, train


# ------------------------------------------------------------------------------------------------- the corpus


def rows_of_shards(folder: Path) -> Iterator[dict[str, Any]]:
    """Rows of the corpus's own parquet files, in the order of their names. The audio is not read."""
    shards = sorted(folder.glob("*.parquet"))
    if not shards:
        raise DataError(f"--shards {folder} has no parquet files")
    for shard in shards:
        try:
            file = pq.ParquetFile(shard)
            if missing := [name for name in COLUMNS if name not in file.schema_arrow.names]:
                raise DataError(f"{shard} lacks the column {missing[0]}; it has {', '.join(file.schema_arrow.names)}")
            for batch in file.iter_batches(batch_size=1024, columns=[*COLUMNS]):
                yield from batch.to_pylist()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{shard} cannot be read as parquet: {' '.join(str(error).split())}") from error


def rows_of_hub() -> Iterator[dict[str, Any]]:
    """The pinned revision from the hub, streaming. Raises ``DataError`` without access to the corpus."""
    import httpx  # here: neither is needed for shards
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import GatedRepoError, LocalTokenNotFoundError

    name = PINS["dataset"]
    try:
        corpus = load_dataset(
            name, PINS["dataset_config"], split="train", streaming=True, revision=PINS["dataset_revision"], token=True
        )
        yield from corpus.select_columns([*COLUMNS])
    except (OSError, httpx.HTTPError, ValueError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        denied = isinstance(error, DatasetNotFoundError | GatedRepoError | LocalTokenNotFoundError)
        if denied or status in (401, 403):
            raise DataError(
                f"no access to {name}: accept its terms at https://huggingface.co/datasets/{name}, then `hf auth login`"
            ) from error
        raise DataError(f"{name} cannot be read from the hub: {' '.join(str(error).split())}") from error


# ------------------------------------------------------------------------------------------------- the rules


def select(rows: Iterable[Mapping[str, Any]], settings: Settings) -> Selection:
    """Applies the rules; reads no further than needed. Raises ``DataError``: a bad row, too few rows."""
    selection = Selection()
    first_id: dict[str, dict[str, str]] = {split: {} for split in SPLITS}  # folded text -> the id that had it first
    read = 0
    for source_index, row in enumerate(rows):
        if row["scenario"] not in SCENARIOS:
            raise DataError(f"row {source_index}: scenario={row['scenario']!r} has to be {' or '.join(SCENARIOS)}")
        if row["scenario"] != "Read":
            continue
        read += 1
        split = "train" if read <= settings.read_pool else "validation"
        utterance, reason = judge(row, source_index)
        if utterance is not None:
            twins = {
                name: sorted({first_id[name][key] for key in utterance.folded & first_id[name].keys()})
                for name in SPLITS
            }
            leaked = twins["train"] if split == "validation" else []
            selection.duplicates[split] += [(utterance.id, twin) for twin in twins[split]]
            selection.overlaps += [(utterance.id, twin) for twin in leaked]
            if settings.filter == "strict":
                found = {"text": not fold(utterance.text), "overlap": leaked, "duplicate": twins[split]}
                reason = next((name for name, is_so in found.items() if is_so), None)
        if utterance is None or reason is not None:
            selection.rejected[split][str(reason)] += 1
            continue
        for key in utterance.folded:
            first_id[split].setdefault(key, utterance.id)
        selection.kept[split].append(utterance)
        if len(selection.kept["validation"]) == settings.validation_rows:
            break
    check_counts(selection, read, settings)
    return selection


def judge(row: Mapping[str, Any], source_index: int) -> tuple[Utterance | None, str | None]:
    """The utterance, or the reason why it is rejected: duration, snr or text."""
    seconds = number(row, "duration", source_index)
    if seconds is None or not MIN_SECONDS <= seconds <= MAX_SECONDS:
        return None, "duration"
    snr_db = number(row, "snr", source_index)
    if snr_db is None or snr_db < MIN_SNR_DB:
        return None, "snr"
    for name in ("text", "normalized"):
        if not isinstance(row[name], str | None):
            raise DataError(f"row {source_index}: {name}={row[name]!r} has to be a text or null")
    raw_text = (row["text"] or "").strip()
    text = (row["normalized"] or raw_text).strip()
    return (Utterance(source_index, text, raw_text), None) if text else (None, "text")


def number(row: Mapping[str, Any], name: str, source_index: int) -> float | None:
    """A finite number; None for null, NaN and infinity. Raises ``DataError`` for anything else."""
    value = row[name]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise DataError(f"row {source_index}: {name}={value!r} has to be a number or null")
    return float(value) if math.isfinite(value) else None


def check_counts(selection: Selection, read: int, settings: Settings) -> None:
    train, validation = (selection.kept[split] for split in SPLITS)
    if read < settings.read_pool:
        raise DataError(
            f"the corpus has {read} rows of scenario Read, the training rows are among {settings.read_pool}"
        )
    if settings.train_rows is not None and len(train) != settings.train_rows:
        raise DataError(
            f"{len(train)} training rows pass, expected are {settings.train_rows}: not the published corpus"
        )
    if len(validation) != settings.validation_rows:
        raise DataError(f"{len(validation)} validation rows pass, {settings.validation_rows} are needed")
    if settings.filter == "strict":
        return
    trained = {text: utterance.id for utterance in train for text in utterance.texts}
    for utterance in validation:  # a rule of the published split, letter by letter
        if shared := utterance.texts & trained.keys():
            twin = trained[min(shared)]
            raise DataError(f"{utterance.id} of validation has the text of {twin} of train; use --filter strict")


# ------------------------------------------------------------------------------------------------- the files


def prompt_rows(selection: Selection) -> dict[str, list[PromptRow]]:
    return {
        split: [
            PromptRow(
                id=utterance.id,
                text=utterance.text,
                split=split,
                index=index,
                data_source=PINS["dataset"],
                ground_truth=utterance.text,
            )
            for index, utterance in enumerate(utterances)
        ]
        for split, utterances in selection.kept.items()
    }


def write(selection: Selection, out: Path, settings: Settings, source: Mapping[str, Any]) -> dict[str, Any]:
    """Writes ``out`` whole or not at all and returns the manifest. Raises ``DataError`` for rows no run would take."""
    about = {
        "dataset": PINS["dataset"],
        "config": PINS["dataset_config"],
        "license": "CC-BY-4.0, AI4Bharat, IndicVoices-R",
        "source": source,
        "settings": {
            **vars(settings),
            "seconds": [MIN_SECONDS, MAX_SECONDS],
            "min_snr_db": MIN_SNR_DB,
        },
        "rejected": {split: dict(sorted(selection.rejected[split].items())) for split in SPLITS},
        "duplicates": selection.duplicates,
        "overlaps": selection.overlaps,
    }
    return write_prepared(out, prompt_rows(selection), about)


def report(manifest: Mapping[str, Any]) -> Iterator[str]:
    what = "rejected" if manifest["settings"]["filter"] == "strict" else "kept, as published"
    for split in SPLITS:
        rejected = ", ".join(f"{count} {reason}" for reason, count in manifest["rejected"][split].items()) or "none"
        yield f"{split}: {manifest['files'][split]['rows']} rows; rejected: {rejected}"
    for split in SPLITS:
        for one, other in manifest["duplicates"][split]:
            yield f"duplicate in {split}, {what}: {one} reads like {other}"
    for one, other in manifest["overlaps"]:
        yield f"overlap, {what}: {one} of validation reads like {other} of train"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="indicvoices_hindi.py", description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="directory to create")
    parser.add_argument("--shards", metavar="DIR", type=Path, help="parquet shards of the corpus, in place of the hub")
    parser.add_argument("--filter", choices=FILTERS, default="published", help="default: %(default)s")
    small = parser.add_argument_group("another corpus than the published one")
    small.add_argument("--read-pool", metavar="N", type=int, default=Settings.read_pool, help="default: %(default)s")
    small.add_argument(
        "--train-rows", metavar="N", type=int, help="rows that have to pass, 0: any; default: 863, with strict any"
    )
    small.add_argument(
        "--validation-rows", metavar="N", type=int, default=Settings.validation_rows, help="default: %(default)s"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    train_rows = args.train_rows
    if train_rows is None:
        train_rows = Settings.train_rows if args.filter == "published" else 0
    settings = Settings(args.filter, args.read_pool, train_rows or None, args.validation_rows)
    try:
        if args.out.exists():
            raise ConfigError(f"{args.out} exists already; name another directory or remove it")
        if args.shards:
            rows = rows_of_shards(args.shards)
            source = {"shards": sorted(path.name for path in args.shards.glob("*.parquet"))}
        else:
            rows = rows_of_hub()
            source = {"hub": PINS["dataset"], "revision": PINS["dataset_revision"]}
        with sigterm_cleans_up():
            manifest = write(select(rows, settings), args.out, settings, source)
    except TTSError as error:
        print(f"indicvoices_hindi.py: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join([*report(manifest), f"wrote {args.out}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
