"""``verl-tts tiny``."""

import argparse
from pathlib import Path

import pytest

from verl_tts.commands import tiny


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tiny.add_arguments(parser)
    return parser.parse_args(argv)


def test_writes_a_checkpoint_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tiny"
    assert tiny.run(arguments(str(out))) == 0
    assert (out / "model.safetensors").is_file()
    assert (out / "speech_tokenizer" / "model.safetensors").is_file()
    assert str(out) in capsys.readouterr().out


def test_unknown_model_is_refused_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments("--model", "bark", "out")
    assert "qwen3_tts" in capsys.readouterr().err
