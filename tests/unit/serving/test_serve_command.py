import pytest

from verl_tts.commands import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--references", "gone"), "--references gone is no folder"),
        (("--max-frames", "0"), "max_frames=0 has to be between 1 and 4096"),
        (("--ref-audio", "gone.wav"), "the recording gone.wav does not exist"),
        (("--ref-audio", "gone.json"), "gone.json does not exist"),
        (("--port", "70000"), "--port 70000 has to be a whole number from 0 to 65535"),
        (("--set", "tts.engine.no=1"), "there is no setting tts.engine.no"),
    ],
)
def test_a_wrong_word_is_one_line_before_the_engine_starts(
    tiny_checkpoint, capfd, monkeypatch, tmp_path, words, message
):
    monkeypatch.chdir(tmp_path)
    assert main(["serve", str(tiny_checkpoint), *words]) == 2
    captured = capfd.readouterr()
    assert message in captured.err
    assert (captured.err.count("\n"), captured.out) == (1, "")


def test_a_model_that_is_none_is_one_line(capfd, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for place, message in ((tmp_path / "gone", "is not a directory"), (tmp_path, "holds a model of type llama")):
        assert main(["serve", str(place)]) == 2
        assert message in capfd.readouterr().err
