import re
import subprocess
import sys
import time

import pytest

from verl_tts.commands import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"verl-tts {command}" in capsys.readouterr().out


def test_help_names_all_commands_and_imports_none_of_them():
    program = (
        "import sys; from verl_tts.commands import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in sys.modules if name.startswith('verl_tts.commands.') or name in ('numpy', 'torch')])"
    )
    seconds = []
    for _ in range(3):  # the best of three: the machine has other things to do
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - started)
    assert done.stdout.endswith("[]\n")
    assert all(re.search(rf"^    {command}\s", done.stdout, flags=re.MULTILINE) for command in COMMANDS)
    assert min(seconds) < 0.5


@pytest.mark.parametrize("words", [[], ["sing"], ["tiny"], ["tiny", "--colour", "red", "out"]])
def test_a_wrong_command_line_ends_with_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: verl-tts" in capsys.readouterr().err


def test_a_users_mistake_is_one_line_and_its_exit_code(tmp_path, capsys):
    assert main(["score", "--config", str(tmp_path / "gone.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("verl-tts score: --config")
    assert error.count("\n") == 1


def test_a_command_runs(tmp_path):
    assert main(["tiny", str(tmp_path / "tiny")]) == 0
    assert (tmp_path / "tiny" / "config.json").is_file()
