"""What the Hindi recipe downloads, made small: weights, an adapter, a recogniser, a corpus in the published formats."""

import json
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

from tests.hub import prepare_from, write_hub_client
from tests.tiny_whisper import write_tiny_whisper
from verl_tts.checkpoints.lora import HINDI_PINS
from verl_tts.checkpoints.tiny import build_tiny_qwen3_tts
from verl_tts.files import sha256_of
from verl_tts.models.qwen3_tts import LORA_PARENTS

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/hindi_sft_lora"
REFERENCE = ROOT / "tests/unit/scorers/data/open_the_window.flac"
PINS = json.loads(HINDI_PINS.read_text())
LAYERS = {"talker.model": 2, "talker.code_predictor.model": 2}
RANK = 8
SENTENCES = 24
# Two of the first ten that are read are too short or too noisy.
SMALL_SPLIT = ("--read-pool", "10", "--train-rows", "8", "--validation-rows", "4")


def make_hub(home: Path) -> Path:
    """``home/hub`` with the repositories, ``shards``, pins that fit them, and ``python``, whose hub is that folder."""
    base, adapter, whisper = (
        home / "hub" / PINS[name].split("/")[1] for name in ("base_model", "adapter", "scorer_model")
    )
    build_tiny_qwen3_tts(base)
    halves = write_adapter(base, adapter)
    write_tiny_whisper(whisper)
    files = {str(path.relative_to(base)): sha256_of(path) for path in base.rglob("*") if path.is_file()}
    pins = PINS | {
        "base_files_sha256": files,
        "base_dtype": "float32",
        "adapter_sha256": sha256_of(adapter / PINS["adapter_file"]),
        "adapter_tensors": halves,
        "adapter_layers": LAYERS,
    }
    (home / "pins.json").write_text(json.dumps(pins))
    write_corpus(home / "shards")
    write_hub_client(home)
    return home


def write_adapter(base: Path, folder: Path) -> int:
    """An MLX adapter of the published topology on every layer of the base; returns the number of its tensors."""
    weights = load_file(base / "model.safetensors")
    halves = {}
    torch.manual_seed(1)
    for stack, layers in LAYERS.items():
        for layer in range(layers):
            for leaf, parent in LORA_PARENTS.items():
                module = f"{stack}.layers.{layer}.{parent}.{leaf}"
                out, into = weights[f"{module}.weight"].shape
                halves[f"{module}.lora_a"] = torch.randn(RANK, into) / 8
                halves[f"{module}.lora_b"] = torch.randn(out, RANK) / 8
    folder.mkdir(parents=True)
    save_file(halves, folder / PINS["adapter_file"])
    return len(halves)


def write_corpus(folder: Path) -> None:
    """Shards as IndicVoices-R has them: read and spoken sentences, too short and too noisy ones among them."""
    audio = {"bytes": b"RIFF", "path": "a.wav"}
    rows = [
        {"text": f"यह वाक्य क्रमांक {n} है", "scenario": "Read", "duration": 4.0, "snr": 30.0, "audio": audio}
        for n in range(SENTENCES)
    ]
    rows.insert(2, rows[0] | {"text": "बोला हुआ", "scenario": "Extempore"})
    rows.insert(5, rows[0] | {"text": "बहुत छोटा", "duration": 0.5})
    rows.insert(7, rows[0] | {"text": "बहुत शोर", "snr": 3.0})
    rows[1] |= {"normalized": "यह दूसरा वाक्य है"}
    kinds = {"text": pa.string(), "normalized": pa.string(), "scenario": pa.string()}
    kinds |= {"duration": pa.float64(), "snr": pa.float64()}
    kinds |= {"audio": pa.struct([("bytes", pa.binary()), ("path", pa.string())])}
    folder.mkdir()
    half = len(rows) // 2
    for number, part in enumerate((rows[:half], rows[half:])):
        name = f"train-{number:05d}-of-00002.parquet"
        pq.write_table(pa.Table.from_pylist(part, schema=pa.schema(kinds)), folder / name)


def prepare(hub: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """prepare.sh on a folder of ``make_hub``, into ``hub/work``."""
    places = {"PINS": str(hub / "pins.json"), "SHARDS": str(hub / "shards")}
    return prepare_from(hub, RECIPE, *words, **places | environment)
