"""``verl-tts speaker``, held against what qwen-tts's own voice cloning computes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file, save_file

from verl_tts.commands import main
from verl_tts.config.inputs import check_inputs
from verl_tts.data.speaker import read_speaker
from verl_tts.models.qwen3_tts import Qwen3TTSForConditionalGeneration  # makes qwen-tts importable

SIZE = 64  # of a speaker embedding of the tiny model


def clip(path: Path, rate_hz: int = 24_000, seconds: float = 1.5, channels: int = 1, level: float = 0.1) -> Path:
    """Noise under a swelling tone, the same for the same arguments; the channels differ."""
    samples = round(rate_hz * seconds)
    time_S = np.arange(samples) / rate_hz
    noise_SC = np.random.default_rng(0).normal(0, 1, (samples, channels))
    tone_S1 = (np.sin(2 * np.pi * 220 * time_S) * time_S)[:, None]
    soundfile.write(
        path, level * (0.3 * noise_SC + tone_S1) / 2, rate_hz, subtype="FLOAT" if path.suffix == ".wav" else None
    )
    return path


def speaker(model: Path, audio: Path, out: Path) -> int:
    return main(["speaker", "--model", str(model), "--audio", str(audio), "--out", str(out)])


@pytest.fixture(scope="module")
def qwen_tts(tiny_checkpoint):
    from qwen_tts import Qwen3TTSModel

    return Qwen3TTSModel.from_pretrained(str(tiny_checkpoint), dtype=torch.float32)


@pytest.mark.parametrize(
    ("rate_hz", "channels", "kind"),
    [(24_000, 1, "wav"), (16_000, 1, "wav"), (44_100, 2, "flac"), (48_000, 2, "wav"), (22_050, 1, "flac")],
)
def test_the_embedding_is_the_one_of_qwen_tts(rate_hz, channels, kind, qwen_tts, tiny_checkpoint, tmp_path):
    audio = clip(tmp_path / f"ref.{kind}", rate_hz=rate_hz, channels=channels)
    assert speaker(tiny_checkpoint, audio, tmp_path / "speaker.json") == 0
    (prompt,) = qwen_tts.create_voice_clone_prompt(str(audio), x_vector_only_mode=True)
    assert np.array_equal(read_speaker(tmp_path / "speaker.json", SIZE), prompt.ref_spk_embedding.numpy())


def test_two_voices_have_two_embeddings_and_the_file_says_where_they_are_from(tiny_checkpoint, tmp_path, capfd):
    for name, seconds in (("asha", 1.0), ("ravi", 3.0)):
        assert (
            speaker(tiny_checkpoint, clip(tmp_path / f"{name}.wav", seconds=seconds), tmp_path / f"s/{name}.json") == 0
        )
    captured = capfd.readouterr()
    assert "speaker embedding of 3.0 s, 64 values" in captured.out
    assert (captured.out.count("\n"), captured.err) == (2, ""), "a line each, and nothing of any library's"
    asha, ravi = (read_speaker(tmp_path / f"s/{name}.json", SIZE) for name in ("asha", "ravi"))
    assert not np.allclose(asha, ravi, atol=1e-3)
    content = json.loads((tmp_path / "s/ravi.json").read_text())
    assert content["audio"] == str(tmp_path / "ravi.wav")
    assert content["seconds"] == 3.0


def test_a_bfloat16_checkpoint_is_computed_in_float32(tiny_checkpoint, tmp_path):
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    weights = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    assert speaker(tmp_path / "model", clip(tmp_path / "a.wav"), tmp_path / "speaker.json") == 0
    model = Qwen3TTSForConditionalGeneration.from_pretrained(tmp_path / "model", dtype=torch.float32)
    samples_S, _ = soundfile.read(tmp_path / "a.wav", dtype="float32")
    expected_H = model.extract_speaker_embedding(samples_S, 24_000).numpy()
    assert np.array_equal(read_speaker(tmp_path / "speaker.json", SIZE), expected_H)


# ---------------------------------------------------------------- what is refused


def refused(message: str, model: Path, audio: Path, tmp_path: Path, capsys) -> None:
    assert speaker(model, audio, tmp_path / "speaker.json") == 2
    error = capsys.readouterr().err.splitlines()
    assert [line for line in error if line.startswith("verl-tts speaker: ") and message in line], error
    assert not (tmp_path / "speaker.json").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seconds": 0.99}, "lasts 0.99 s; a reference needs 1.0 s or more"),
        ({"rate_hz": 8_000}, "has a rate of 8000 Hz; a reference needs 16000 Hz or more"),
        ({"level": 0.0}, "is silent"),
        ({"level": 1e-5}, "is silent"),
        ({"level": float("nan")}, "not finite"),
    ],
)
def test_a_recording_that_says_too_little_is_refused(settings, message, tiny_checkpoint, tmp_path, capsys):
    refused(message, tiny_checkpoint, clip(tmp_path / "ref.wav", **settings), tmp_path, capsys)


def test_what_is_no_audio_is_refused(tiny_checkpoint, tmp_path, capsys):
    (tmp_path / "text.wav").write_text("hello")
    refused("text.wav cannot be read as audio", tiny_checkpoint, tmp_path / "text.wav", tmp_path, capsys)
    refused("gone.wav does not exist", tiny_checkpoint, tmp_path / "gone.wav", tmp_path, capsys)


def without_speaker_encoder(model: Path, kind: str) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tts_model_type": kind}))
    weights = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("speaker_encoder.")}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("base", "has no speaker encoder; name a Base model"),
        ("custom_voice", "is a custom_voice model, without a speaker encoder; name a Base model"),
    ],
)
def test_a_checkpoint_without_a_speaker_encoder_is_refused(kind, message, tiny_checkpoint, tmp_path, capsys):
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    without_speaker_encoder(tmp_path / "model", kind)
    refused(message, tmp_path / "model", clip(tmp_path / "ref.wav"), tmp_path, capsys)


def test_a_model_that_takes_the_recording_itself_is_refused_before_anything_is_loaded(tmp_path, capsys):
    from verl_tts.checkpoints.tiny_moss import build_tiny_moss

    build_tiny_moss(tmp_path / "moss")
    message = "is a model of moss, which is given the recording itself; name a Qwen3-TTS Base model"
    refused(message, tmp_path / "moss", clip(tmp_path / "ref.wav"), tmp_path, capsys)


def test_a_speaker_encoder_that_is_not_whole_is_refused(tiny_checkpoint, tmp_path, capsys):
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    del weights["speaker_encoder.fc.bias"]
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    refused("does not fit its config.json", tmp_path / "model", clip(tmp_path / "ref.wav"), tmp_path, capsys)


def test_an_existing_file_is_not_replaced(tiny_checkpoint, tmp_path, capsys):
    (tmp_path / "speaker.json").write_text("[1]")
    assert speaker(tiny_checkpoint, clip(tmp_path / "ref.wav"), tmp_path / "speaker.json") == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "speaker.json").read_text() == "[1]"


# ---------------------------------------------------------------- several speakers in a run


def test_a_folder_of_embeddings_serves_the_rows_that_name_their_speaker(tiny_checkpoint, tmp_path):
    from verl_tts.config.compose import compose
    from verl_tts.data.prompts import write_prompts
    from verl_tts.errors import DataError
    from verl_tts.types import PromptRow

    def rows(*names: str) -> str:
        file = tmp_path / f"{'-'.join(names)}.parquet"
        write_prompts(
            [PromptRow(f"{name}-1", "Hello.", "train", 0, "demo", "Hello.", speaker=name) for name in names], file
        )
        return str(file)

    for name in ("asha", "ravi"):
        speaker(tiny_checkpoint, clip(tmp_path / f"{name}.wav"), tmp_path / "speakers" / f"{name}.json")
    words = [
        f"actor_rollout_ref.model.path={tiny_checkpoint}",
        f"tts.speaker_path={tmp_path / 'speakers'}",
        "data.train_batch_size=1",
    ]
    check_inputs(compose([*words, f"data.train_files={rows('asha', 'ravi')}", f"data.val_files={rows('asha')}"]))
    with pytest.raises(DataError, match=r"speakers/meera\.json does not exist"):
        check_inputs(compose([*words, f"data.train_files={rows('asha')}", f"data.val_files={rows('meera')}"]))
