"""The predictor's format, on tiny-random encoders of every class that it may name."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from verl_tts.errors import ConfigError
from verl_tts.scorers.predictor import ENCODERS, PredictorScorer
from verl_tts.types import Waveform

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "conv_dim": [8, 8],
    "conv_kernel": [10, 8],
    "conv_stride": [5, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
CONFIG = {
    "format": "verl_tts_predictor",
    "version": 1,
    "encoder_class": "Wav2Vec2Model",
    "encoder": TINY,
    "pooling": "mean",
    "normalise": True,
    "scale": 2.0,
    "offset": 3.0,
    "low": 1.0,
    "high": 5.0,
}


def write_predictor(folder: Path, *, safetensors: bool = True, **changes) -> Path:
    """A checkpoint written from Transformers' own classes, without the code under test."""
    config = {**CONFIG, **changes}
    encoder_class = getattr(transformers, config["encoder_class"])
    torch.manual_seed(0)
    encoder = encoder_class(encoder_class.config_class(**config["encoder"]))
    width = TINY["hidden_size"] * (2 if config["pooling"] == "mean_std" else 1)
    weights = {f"encoder.{name}": tensor.contiguous() for name, tensor in encoder.state_dict().items()}
    weights |= {"head.weight": torch.linspace(-0.5, 0.5, width)[None], "head.bias": torch.tensor([0.1])}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if safetensors:
        save_file(weights, folder / "model.safetensors")
    else:
        torch.save(weights, folder / "model.pt")
    return folder


def scorer_of(folder: Path) -> PredictorScorer:
    return PredictorScorer(model=str(folder), device="cpu")


def noise(clip, samples: int, seed: int = 0):
    samples_S = np.random.default_rng(seed).normal(0, 0.1, samples).astype(np.float32)
    return replace(clip, waveform=Waveform(samples_S, 16_000))


@pytest.mark.parametrize("encoder_class", ENCODERS)
@pytest.mark.parametrize("pooling", ["mean", "mean_std"])
def test_a_batch_is_scored_as_its_clips_are(tmp_path, spoken, encoder_class, pooling):
    scorer = scorer_of(write_predictor(tmp_path, encoder_class=encoder_class, pooling=pooling))
    clips = [spoken, noise(spoken, 16_000), noise(spoken, 40_000, seed=1)]
    together = scorer.score_batch(clips)
    assert together == [scorer.score_batch([clip])[0] for clip in clips]
    assert len({answer["value"] for answer in together}) == 3


def test_the_value_is_head_and_scale_over_the_mean_of_the_frames(tmp_path, spoken):
    scorer = scorer_of(write_predictor(tmp_path, normalise=False))
    clip = noise(spoken, 16_000)
    torch.manual_seed(0)
    encoder = transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**TINY)).eval()
    with torch.inference_mode():
        frames = encoder(torch.tensor(clip.waveform.samples_S)[None]).last_hidden_state[0]
    expected = 3.0 + 2.0 * (float(frames.mean(dim=0) @ torch.linspace(-0.5, 0.5, 16)) + 0.1)
    (answer,) = scorer.score_batch([clip])
    assert answer["value"] == pytest.approx(expected, abs=1e-5)
    assert answer["score"] == pytest.approx(min(1.0, max(0.0, (expected - 1) / 4)), abs=1e-5)


def test_a_normalised_clip_scores_the_same_at_any_level(tmp_path, spoken):
    scorer = scorer_of(write_predictor(tmp_path))
    quiet = replace(spoken, waveform=Waveform(spoken.waveform.samples_S / 2, spoken.waveform.sample_rate_hz))
    loud, soft = scorer.score_batch([spoken, quiet])
    assert loud["value"] == pytest.approx(soft["value"], abs=1e-3)


@pytest.mark.parametrize(("offset", "score"), [(-100.0, 0.0), (100.0, 1.0)])
def test_a_value_off_its_scale_is_cut_and_shown(tmp_path, spoken, offset, score):
    (answer,) = scorer_of(write_predictor(tmp_path, offset=offset)).score_batch([spoken])
    assert answer["score"] == score
    assert abs(answer["value"]) > 50


@pytest.mark.parametrize("samples", [1, 30, 100])
def test_a_clip_shorter_than_a_frame_is_scored(tmp_path, spoken, samples):
    (answer,) = scorer_of(write_predictor(tmp_path)).score_batch([noise(spoken, samples)])
    assert 0 <= answer["score"] <= 1


def test_a_torch_file_scores_as_safetensors_do(tmp_path, spoken):
    one = scorer_of(write_predictor(tmp_path / "a"))
    other = scorer_of(write_predictor(tmp_path / "b", safetensors=False))
    assert one.score_batch([spoken]) == other.score_batch([spoken])
    assert one.fingerprint() == scorer_of(write_predictor(tmp_path / "c")).fingerprint() != other.fingerprint()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_class": "BertModel"}, "Wav2Vec2Model, HubertModel, WavLMModel"),
        ({"pooling": "max"}, "mean, mean_std"),
        ({"low": 5}, "low=5 must be below high=5.0"),
        ({"scale": "2"}, "scale='2' must be a finite number"),
        ({"scale": float("nan")}, "scale=nan must be a finite number"),
        ({"normalise": 1}, "normalise true or false"),
        ({"version": 2}, "version=2; there are: 1"),
        ({"head": "mlp"}, "exactly these keys"),
        ({"pooling": "mean_std"}, "does not fit config.json"),
        ({"encoder": {**TINY, "hidden_size": 32}}, "does not fit config.json"),
        ({"encoder": {**TINY, "conv_dim": [8]}}, "does not fit config.json"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_one_line(tmp_path, changes, message):
    write_predictor(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(ConfigError, match=message) as refused:
        scorer_of(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_directory_without_weights_or_configuration_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        scorer_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor model\.pt"):
        scorer_of(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
@pytest.mark.parametrize("content", [b"", b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00idtR."])
def test_a_file_that_holds_no_weights_is_refused_and_not_run(tmp_path, name, content):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"does not fit config\.json"):
        scorer_of(tmp_path)
