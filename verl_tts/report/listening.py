"""Paired, blinded listening: a page that anybody can open, and the key that only the one who asks has.

The page holds texts and clips, in an order drawn for it, and nothing that tells the two steps apart: no step, no
score, no file name; both clips of a pair are coded alike. Which is which stands in a key file beside it. A page that
held its own key, hidden or enciphered, would need a secret that it holds too; and who reads the answers needs the
scores of the clips anyway, to ask whether the scorer agrees with people.

As many pairs begin with one step as with the other, but for an odd one: who tends to prefer what comes first, or
last, moves the win rate no way, and the size of that tendency can be told.
"""

import json
import random
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from verl_tts.errors import ConfigError
from verl_tts.files import write_whole
from verl_tts.report.clips import Sound, encode
from verl_tts.report.history import Clip, History, read_history
from verl_tts.report.page import check_place, render_page

Side = Literal["a", "b"]
FORMAT = 1
MOST_PAIRS = 200
FINE = 0.1  # what is judged should not be the coder


@dataclass(frozen=True)
class KeyPair:
    """``first`` is the side that is played first. ``values_a`` are the score and parts of the clip of step a."""

    id: str
    row_id: str
    sample: int
    text: str
    first: Side
    values_a: dict[str, float]
    values_b: dict[str, float]


@dataclass(frozen=True)
class Key:
    page: str
    run: str
    a: int  # step
    b: int
    seed: int
    pairs: Sequence[KeyPair]
    format: int = FORMAT


def write_listening(run_dir: Path, out: Path, *, a: int, b: int, pairs: int, seed: int | None = None) -> Path:
    """Writes page and key; returns the key's path. A page or key that is there already is not replaced.

    Raises ConfigError: no such validation, or fewer than ``pairs`` pairs of clips in it.
    """
    check_place(out)
    key_file = out.with_name(f"{out.name.removesuffix('.html')}.key.json")
    for file in (out, key_file):
        if file.exists():
            raise ConfigError(f"{file} is there already, and its answers would be lost; name another --out")
    if not 1 <= pairs <= MOST_PAIRS:
        raise ConfigError(f"--n {pairs} has to be between 1 and {MOST_PAIRS}: nobody listens to more in one sitting")
    if a == b:
        raise ConfigError(f"--a {a} and --b {b} are the same step; name two")
    # Drawn where nobody asks for one: with a seed that everybody knows, so is the order.
    seed = secrets.randbelow(2**32) if seed is None else seed
    history = read_history(run_dir)
    draw = random.Random(seed)
    firsts = _orders(pairs, draw)
    sounds: dict[str, Sound] = {}
    shown: list[dict[str, str]] = []
    known: list[KeyPair] = []
    for clip_a, clip_b in _candidates(history, a, b, draw):
        first = firsts[len(known)]
        one, other = (_sound(clip) for clip in ((clip_a, clip_b) if first == "a" else (clip_b, clip_a)))
        if one is None or other is None or one.data_uri == other.data_uri:
            continue  # nothing to hear, or nothing to tell apart
        number = len(known) + 1
        names = {"first": f"c{2 * number - 1}", "second": f"c{2 * number}"}
        sounds |= {names["first"]: one, names["second"]: other}
        shown.append({"id": f"p{number}", "text": clip_a.text, **names})
        values = dict(clip_a.values), dict(clip_b.values)
        known.append(KeyPair(f"p{number}", clip_a.row_id, clip_a.sample, clip_a.text, first, *values))
        if len(known) == pairs:
            break
    else:
        raise ConfigError(
            f"steps {a} and {b} have {len(known)} pairs of clips that both can be heard and differ, "
            f"--n {pairs} asks for more; lower it"
        )
    page = sha256(json.dumps([shown, [sounds[name].data_uri for name in sounds]]).encode()).hexdigest()[:12]
    test = {"format": FORMAT, "page": page, "pairs": shown}
    html = render_page("listen.html.j2", ("players.js", "listen.js"), sounds, {"page": page, "test": test})
    key = Key(page, history.name, a, b, seed, known)
    write_whole(key_file, json.dumps(asdict(key), ensure_ascii=False, indent=1) + "\n")
    write_whole(out, html)
    return key_file


def _orders(pairs: int, draw: random.Random) -> list[Side]:
    """Which side comes first in each pair: each as often as the other, but for an odd one."""
    sides: list[Side] = ["a", "b"]
    draw.shuffle(sides)
    orders = (sides * (pairs // 2 + 1))[:pairs]
    draw.shuffle(orders)
    return orders


def _candidates(history: History, a: int, b: int, draw: random.Random) -> list[tuple[Clip, Clip]]:
    """Clips of the same row and sample number in a random order, every row once before any comes again."""
    for option, step in (("--a", a), ("--b", b)):
        if step not in history.val:
            steps = ", ".join(map(str, history.val_steps)) or "none"
            raise ConfigError(
                f"{option} {step}: that step has no validation clips in {history.path}; those are: {steps}"
            )
    of_a, of_b = ({clip.key: clip for clip in history.val[step]} for step in (a, b))
    keys = sorted(of_a.keys() & of_b.keys())
    draw.shuffle(keys)
    seen: dict[str, int] = {}
    turns = []
    for key in keys:
        seen[key[0]] = seen.get(key[0], 0) + 1
        turns.append((seen[key[0]], key))
    return [(of_a[key], of_b[key]) for _, key in sorted(turns, key=lambda turn: turn[0])]


def _sound(clip: Clip) -> Sound | None:
    return None if clip.path is None else encode(clip.path, fineness=FINE)
