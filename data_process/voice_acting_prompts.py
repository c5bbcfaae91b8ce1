"""Voice-acting prompts (laion/voice-acting-prompts) with voices: OUT/{train,validation}.parquet and two lists beside.

    python data_process/voice_acting_prompts.py --out OUT --references EMOLIA           from the hub, streaming
    python data_process/voice_acting_prompts.py --out OUT --references EMOLIA --shards DIR
    python data_process/voice_acting_prompts.py --out OUT --references EMOLIA --language-rule ascii80

Texts are shuffled with a seed and cleaned of quotes and stage directions; what is not English goes. ``py3langid`` says
what is English; ``ascii80`` is the published rule, 80 % of the characters are ASCII, which German passes. An emotion
becomes an instruction by verl_tts/data/emotions.py. A text gets a voice: CLUSTER/UTTERANCE below the folder of
references, which training draws anew each step (verl_tts/data/voices.py).

Nothing leaks: no text of the two splits is the same after folding (verl_tts/data/folding.py), no file of the corpus has
texts in both, and no cluster has utterances in both. ``references.json`` lists the clusters of each, ``manifest.json``
the hashes, the settings and how many texts were rejected, by reason.

OUT appears whole or not at all. Exit code 2: the input is wrong. 3: OUT cannot be written, on a full disk for one.
"""

import argparse
import json
import random
import re
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

from verl_tts.data import emotions
from verl_tts.data.folding import fold
from verl_tts.data.prepared import write_prepared
from verl_tts.data.reference import MIN_SECONDS
from verl_tts.data.schema import is_speakable
from verl_tts.data.voices import Clusters, list_clusters
from verl_tts.errors import ConfigError, DataError, TTSError
from verl_tts.files import sigterm_cleans_up
from verl_tts.types import PromptRow

DATASET = "laion/voice-acting-prompts"
ENGLISH_TAR = "geminittsprompts-output-en.tar"
TEXT_FIELDS = ("text", "prompt", "texts", "prompts")  # the first that is there, unless --text-field says which
SPLITS = ("train", "validation")
ASCII_SHARE = 0.8
RULES = ("py3langid", "ascii80")

# What is acted and not spoken: [sighs], (softly), *laughs*, <break/>. Each is on one line and short of the next one.
DIRECTION = re.compile(r"\[[^\[\]]*\]|\([^()]*\)|\*[^*\n]*\*|<[^<>]*>")
QUOTES = re.compile('["“”„«»‹›]')
APOSTROPHES = "'‘’"


@dataclass(frozen=True)
class Settings:
    seed: int = 42
    language_rule: str = "py3langid"
    train_rows: int | None = None  # None: as many as pass
    validation_rows: int = 100
    validation_clusters: int | None = None  # None: one of twenty, one at least
    min_words: int = 2
    max_words: int = 80


@dataclass(frozen=True)
class Text:
    """One text of the corpus. ``source`` is the file that it comes from, ``position`` its number in there."""

    raw: str
    emotion: str
    source: str
    position: int

    @property
    def id(self) -> str:
        place = f"{self.source}#{self.position}"
        return f"voice-acting-{sha256(place.encode()).hexdigest()[:16]}"


@dataclass
class Selection:
    kept: dict[str, list[tuple[Text, str]]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    rejected: Counter[str] = field(default_factory=Counter)
    unknown_emotions: Counter[str] = field(default_factory=Counter)


# ------------------------------------------------------------------------------------------------- the corpus


def texts_of_shards(folder: Path, fields: "Fields") -> Iterator[Text]:
    """Texts of tar files as the corpus has them, of JSON lines and of parquet files, in the order of their names."""
    shards = sorted(path for path in folder.glob("*") if path.suffix in READERS)
    if not shards:
        raise DataError(f"--shards {folder} has no file that ends in {', '.join(READERS)}")
    for shard in shards:
        try:
            for source, content in READERS[shard.suffix](shard):
                yield from fields.texts(f"{shard.name}/{source}", content)
        except (pa.ArrowException, tarfile.TarError, OSError, ValueError, EOFError, RecursionError) as error:
            raise DataError(f"{shard} cannot be read: {' '.join(str(error).split())}") from error


def _members(shard: Path) -> Iterator[tuple[str, Any]]:
    with tarfile.open(shard) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".json"):
                yield member.name, json.loads(archive.extractfile(member).read())  # type: ignore[union-attr]
        # tarfile takes a header that is cut for the end; the end of an archive is a block of zeros.
        archive.fileobj.seek(archive.offset)  # type: ignore[union-attr]
        if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # type: ignore[union-attr]
            raise tarfile.ReadError("it is cut: the block of zeros at its end is not there")


def _lines(shard: Path) -> Iterator[tuple[str, Any]]:
    # Not splitlines: JSON lets U+2028 and U+0085 stand inside a text.
    for number, line in enumerate(shard.read_text(encoding="utf-8").split("\n")):
        if line.strip():
            yield str(number), json.loads(line)


def _rows(shard: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    for batch in pq.ParquetFile(shard).iter_batches(batch_size=1024):
        for row in batch.to_pylist():
            yield str(number), row
            number += 1


READERS: Mapping[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".tar": _members,
    ".jsonl": _lines,
    ".parquet": _rows,
}


def texts_of_hub(revision: str, fields: "Fields") -> Iterator[Text]:
    """The corpus's English tar from the hub, streaming. Raises ``DataError`` where it cannot be read."""
    import httpx  # here: neither is needed for shards
    from datasets import load_dataset

    try:
        corpus = load_dataset(DATASET, data_files=ENGLISH_TAR, split="train", streaming=True, revision=revision)
        for number, row in enumerate(corpus):
            content = row.get("json", row)
            source = str(row.get("__key__", number))
            yield from fields.texts(source, json.loads(content) if isinstance(content, str | bytes) else content)
    except (OSError, httpx.HTTPError, ValueError) as error:
        raise DataError(f"{DATASET} cannot be read from the hub: {' '.join(str(error).split())}") from error


@dataclass(frozen=True)
class Fields:
    """Where in a file of the corpus its texts and its emotion are."""

    text: str | None
    emotion: str

    def texts(self, source: str, content: Any) -> Iterator[Text]:
        """One file may hold a text or a list of them. Its emotion is a field or the folder that the file is in."""
        if not isinstance(content, Mapping):
            raise DataError(f"{source} has to be a JSON object with a text, but is {str(content)[:60]!r}")
        names = TEXT_FIELDS if self.text is None else (self.text,)
        name = next((name for name in names if name in content), None)
        if name is None:
            raise DataError(
                f"{source} has none of the fields {', '.join(names)}, it has {', '.join(map(str, content))}; "
                "name the one with the text by --text-field"
            )
        emotion = content.get(self.emotion)
        if emotion is None:
            emotion = PurePosixPath(source).parent.name
        found = content[name]
        for position, raw in enumerate(found if isinstance(found, list) else [found]):
            if not isinstance(raw, str):
                raise DataError(f"{source}: {name}[{position}] has to be a text, but is {str(raw)[:60]!r}")
            for value in (source, raw, str(emotion)):
                if not is_unicode(value):
                    raise DataError(
                        f"{source!a}, {name}[{position}]: {value[:60]!a} is no Unicode text; mend or remove it"
                    )
            yield Text(raw, str(emotion), source, position)


def is_unicode(text: str) -> bool:
    """False with half a surrogate pair in it, as ``"\\ud83d"`` in JSON or a file name that is not in UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


# ------------------------------------------------------------------------------------------------- the rules


def clean(raw: str) -> str:
    """``clean('[sighs] “Oh, (softly) it\'s you.”') == "Oh, it's you."``; what is clean stays as it is."""
    spoken = raw
    while (cleaner := _cleaner(spoken)) != spoken:  # one direction inside another, or inside quotes
        spoken = cleaner
    return spoken


def _cleaner(text: str) -> str:
    text = " ".join(QUOTES.sub(" ", DIRECTION.sub(" ", text)).split())
    if len(text) > 1 and text[0] in APOSTROPHES and text[-1] in APOSTROPHES:
        text = text[1:-1].strip()
    return re.sub(r"\s+([,.!?;:…])", r"\1", text)


def language_rule(name: str) -> Callable[[str], bool]:
    """Whether a cleaned text is English."""
    if name == "ascii80":
        return lambda text: sum(character.isascii() for character in text) >= ASCII_SHARE * len(text)
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)  # the model is in its package
    return lambda text: identifier.classify(text)[0] == "en"


def select(texts: Iterable[Text], settings: Settings) -> Selection:
    """Shuffles, applies the rules, and splits. Raises ``DataError``: a file comes twice, too few texts pass."""
    selection = Selection()
    is_english = language_rule(settings.language_rule)
    shuffled = sorted(texts, key=lambda text: (text.source, text.position))
    for one, other in pairwise(shuffled):
        if (one.source, one.position) == (other.source, other.position):
            raise DataError(f"{one.source} is in the corpus twice, and its texts would have the same ids; remove one")
    random.Random(settings.seed).shuffle(shuffled)
    passing, seen = [], set()
    for text in shuffled:
        spoken = clean(text.raw)
        reason = _judge(text, spoken, settings, is_english)
        if reason is None and fold(spoken) in seen:
            reason = "duplicate"
        if reason is not None:
            selection.rejected[reason] += 1
            if reason == "emotion":
                selection.unknown_emotions[text.emotion] += 1
            continue
        seen.add(fold(spoken))
        passing.append((text, spoken))
    validation = passing[: settings.validation_rows]
    held_out = {text.source for text, _ in validation}
    train = [(text, spoken) for text, spoken in passing[len(validation) :] if text.source not in held_out]
    selection.rejected["file of a validation text"] = len(passing) - len(validation) - len(train)
    selection.kept = {"train": train[: settings.train_rows], "validation": validation}
    wanted = settings.train_rows or 1
    if len(validation) < settings.validation_rows or len(train) < wanted:
        raise DataError(
            f"{len(train)} texts for training and {len(validation)} for validation pass, wanted are {wanted} and "
            f"{settings.validation_rows}; rejected: {_listed(selection.rejected)}"
        )
    return selection


def _judge(text: Text, spoken: str, settings: Settings, is_english: Callable[[str], bool]) -> str | None:
    """Why a text is rejected; None: it passes."""
    if emotions.canonical(text.emotion) is None:
        return "emotion"
    if not is_speakable(spoken):
        return "nothing to speak"
    if not settings.min_words <= len(spoken.split()) <= settings.max_words:
        return "length"
    return None if is_english(spoken) else "language"


def usable(folder: Path, clusters: Clusters) -> tuple[Clusters, Counter[str]]:
    """The recordings that are long enough, by their headers, and how many are not, by reason. Raises ``DataError``."""
    kept: dict[str, list[str]] = {}
    rejected: Counter[str] = Counter()
    for cluster, utterances in clusters.items():
        for utterance in utterances:
            if not is_unicode(cluster + utterance):
                rejected["with a name that is not in UTF-8"] += 1
                continue
            try:
                seconds = soundfile.info(folder / cluster / utterance).duration
            except (soundfile.LibsndfileError, OSError):
                rejected["unreadable"] += 1
                continue
            if seconds < MIN_SECONDS:
                rejected["short"] += 1
            else:
                kept.setdefault(cluster, []).append(utterance)
    if not kept:
        raise DataError(f"{folder} has no usable recording; rejected: {_listed(rejected)}")
    return kept, rejected


def split_clusters(clusters: Clusters, settings: Settings) -> dict[str, dict[str, Sequence[str]]]:
    """Which voices are for which split. Raises ``DataError``: not one for each."""
    wanted = settings.validation_clusters or max(1, len(clusters) // 20)
    if len(clusters) <= wanted:
        raise DataError(
            f"{len(clusters)} clusters of references cannot give {wanted} to validation and one to training"
        )
    names = sorted(clusters)
    random.Random(settings.seed).shuffle(names)
    parts = {"train": names[wanted:], "validation": names[:wanted]}
    return {split: {name: clusters[name] for name in sorted(part)} for split, part in parts.items()}


# ------------------------------------------------------------------------------------------------- the files


def prompt_rows(
    selection: Selection, clusters: Mapping[str, Clusters], settings: Settings
) -> dict[str, list[PromptRow]]:
    """Voices are dealt out in turn, so that no validation voice is heard twice before all were heard once."""
    rows: dict[str, list[PromptRow]] = {}
    for split, kept in selection.kept.items():
        names = sorted(clusters[split])
        random.Random(f"{settings.seed} {split}").shuffle(names)
        rows[split] = []
        for index, (text, spoken) in enumerate(kept):
            cluster = names[index % len(names)]
            utterances = clusters[split][cluster]
            extra = {
                "emotion": emotions.phrase(text.emotion),
                "instruction": emotions.instruction(text.emotion),
                "ref_audio": f"{cluster}/{utterances[index // len(names) % len(utterances)]}",
                "emotion_name": emotions.canonical(text.emotion),
            }
            rows[split].append(
                PromptRow(
                    id=text.id,
                    text=spoken,
                    split=split,
                    index=index,
                    data_source=DATASET,
                    ground_truth=spoken,
                    extra=extra,
                )
            )
    return rows


def write(
    selection: Selection, references: Path, out: Path, settings: Settings, source: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes ``out`` whole or not at all and returns the manifest."""
    clusters, rejected = usable(references, list_clusters(references))
    voices = split_clusters(clusters, settings)
    listed = json.dumps(voices, ensure_ascii=False, indent=1) + "\n"
    about = {
        "dataset": DATASET,
        "license": "read the dataset's page and that of the references before you train on them",
        "source": source,
        "settings": asdict(settings),
        "rejected": dict(sorted(selection.rejected.items())),
        "unknown_emotions": dict(sorted(selection.unknown_emotions.items())),
        "references": {
            "path": "references.json",
            "sha256": sha256(listed.encode()).hexdigest(),
            "rejected": dict(sorted(rejected.items())),
            **{
                split: {"clusters": len(voices[split]), "utterances": sum(map(len, voices[split].values()))}
                for split in SPLITS
            },
        },
    }
    return write_prepared(
        out,
        prompt_rows(selection, voices, settings),
        about,
        beside=lambda folder: (folder / "references.json").write_text(listed, encoding="utf-8"),
    )


def report(manifest: Mapping[str, Any]) -> Iterator[str]:
    for split in SPLITS:
        voices = manifest["references"][split]
        yield (
            f"{split}: {manifest['files'][split]['rows']} rows; "
            f"{voices['clusters']} clusters of references with {voices['utterances']} utterances"
        )
    yield f"rejected: {_listed(manifest['rejected'])}"
    if manifest["references"]["rejected"]:
        yield f"recordings rejected: {_listed(manifest['references']['rejected'])}"
    if manifest["unknown_emotions"]:
        yield f"emotions without an instruction: {_listed(manifest['unknown_emotions'])}"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()) if count) or "none"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="voice_acting_prompts.py", description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="directory to create")
    parser.add_argument(
        "--references", metavar="DIR", type=Path, required=True, help="folder with one folder of recordings a speaker"
    )
    parser.add_argument("--shards", metavar="DIR", type=Path, help="tar, jsonl or parquet files, in place of the hub")
    parser.add_argument("--revision", default="main", help="of the corpus on the hub; default: %(default)s")
    parser.add_argument("--language-rule", choices=RULES, default=Settings.language_rule, help="default: %(default)s")
    parser.add_argument("--seed", metavar="N", type=int, default=Settings.seed, help="default: %(default)s")
    parser.add_argument("--train-rows", metavar="N", type=int, default=0, help="0: as many as pass, the default")
    parser.add_argument(
        "--validation-rows", metavar="N", type=int, default=Settings.validation_rows, help="default: %(default)s"
    )
    parser.add_argument("--validation-clusters", metavar="N", type=int, default=0, help="0: one of twenty, the default")
    parser.add_argument("--min-words", metavar="N", type=int, default=Settings.min_words, help="default: %(default)s")
    parser.add_argument("--max-words", metavar="N", type=int, default=Settings.max_words, help="default: %(default)s")
    parser.add_argument(
        "--text-field", metavar="NAME", help=f"where a file has its text; default: {', '.join(TEXT_FIELDS)}, the first"
    )
    parser.add_argument(
        "--emotion-field", metavar="NAME", default="emotion", help="without it the folder of a file is its emotion"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        for name, low in (("train_rows", 0), ("validation_rows", 1), ("validation_clusters", 0), ("min_words", 1)):
            if getattr(args, name) < low:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} has to be {low} or more")
        if args.max_words < args.min_words:
            raise ConfigError(f"--max-words {args.max_words} has to be --min-words {args.min_words} or more")
        if args.out.exists():
            raise ConfigError(f"{args.out} exists already; name another directory or remove it")
        settings = Settings(
            seed=args.seed,
            language_rule=args.language_rule,
            train_rows=args.train_rows or None,
            validation_rows=args.validation_rows,
            validation_clusters=args.validation_clusters or None,
            min_words=args.min_words,
            max_words=args.max_words,
        )
        list_clusters(args.references)  # a wrong folder is answered before the corpus is read
        fields = Fields(args.text_field, args.emotion_field)
        if args.shards:
            texts = texts_of_shards(args.shards, fields)
            source = {"shards": sorted(path.name for path in args.shards.glob("*") if path.suffix in READERS)}
        else:
            texts = texts_of_hub(args.revision, fields)
            source = {"hub": DATASET, "file": ENGLISH_TAR, "revision": args.revision}
        with sigterm_cleans_up():
            manifest = write(select(texts, settings), args.references, args.out, settings, source)
    except TTSError as error:
        print(f"voice_acting_prompts.py: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join([*report(manifest), f"wrote {args.out}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
