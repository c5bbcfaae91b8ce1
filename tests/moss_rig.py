"""What the MOSS recipe downloads and is given, made small: model, codec, scorers, voices, a corpus, all in the formats
that are published."""

import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import soundfile

from tests.hub import prepare_from, write_hub_client
from tests.tiny_clap import write_tiny_clap
from tests.tiny_whisper import write_tiny_whisper
from verl_tts.checkpoints.tiny_moss import build_tiny_moss

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/moss_voice_generator"
SPOKEN = ROOT / "tests/unit/scorers/data/open_the_window.flac"
VOICES = 3
SMALL_SPLIT = ("--train-rows", "8", "--validation-rows", "2")
# A file of the corpus is SPEAKER/EMOTION/BURST.json. One text is German and one has no word to speak: both go.
TEXTS = {
    "anna/Relief/sigh.json": ["[sighs] At last, the rain has stopped.", "We can finally go home now."],
    "anna/Anger/growl.json": ["How could you do this to me?", "“Get out of my house!”"],
    "berta/Hope_&_Optimism/laugh.json": ["Tomorrow will be a better day for all of us."],
    "berta/Fear/gasp.json": ["There is somebody behind the door.", "Did you hear that noise outside?"],
    "berta/Sadness/sob.json": ["Ich habe es schon wieder vergessen, es tut mir leid.", "(sobbing)"],
    "carla/Pride/hum.json": ["I have built this whole house with my own hands."],
    "carla/Awe/breath.json": ["I have never seen so many stars at once.", "The valley lies before us like a dream."],
    "carla/Doubt/hm.json": ["Are you sure that this is the right way?", "I do not know what to believe any more."],
}


def make_hub(home: Path) -> Path:
    """``home/hub`` with the repositories, ``emolia`` with the voices, ``shards``, and ``python``, the hub's client."""
    hub = home / "hub"
    build_tiny_moss(hub / "MOSS-VoiceGenerator")
    shutil.move(hub / "MOSS-VoiceGenerator/codec", hub / "MOSS-Audio-Tokenizer")  # published by itself
    write_tiny_clap(hub / "larger_clap_music_and_speech", fusion=False)
    write_tiny_whisper(hub / "whisper-large-v3-turbo")
    ecapa = hub / "spkrec-ecapa-voxceleb"
    subprocess.run([sys.executable, "-m", "tests.random_ecapa", ecapa], cwd=ROOT, check=True)
    write_voices(home / "emolia")
    write_corpus(home / "shards")
    write_hub_client(home)
    return home


def write_voices(folder: Path) -> None:
    """Clusters with two utterances each: one voice at other heights, which is other voices."""
    samples_S, rate_hz = soundfile.read(SPOKEN, dtype="float32")
    for cluster in range(VOICES):
        (folder / f"c{cluster}").mkdir(parents=True)
        heard_at = round(rate_hz * (1 + cluster / 4))
        for utterance, part_S in enumerate(np.array_split(samples_S, 2)):
            soundfile.write(folder / f"c{cluster}/{utterance}.wav", part_S, heard_at)


def write_corpus(folder: Path) -> None:
    """The English tar."""
    folder.mkdir()
    with tarfile.open(folder / "geminittsprompts-output-en.tar", "w") as archive:
        for name, prompts in TEXTS.items():
            content = json.dumps({"prompts": prompts}, ensure_ascii=False).encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def prepare(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """prepare.sh on a folder of ``make_hub``, into ``home/work``."""
    places = {"EMOLIA_DIR": str(home / "emolia"), "SHARDS": str(home / "shards")}
    return prepare_from(home, RECIPE, *words, **places)
