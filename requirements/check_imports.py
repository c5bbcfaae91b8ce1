"""Imports what a run imports, and says in one line what cannot be: the last step of ``make setup``."""

import importlib
import os
import sys
from collections.abc import Callable

UPSTREAM = ("torch", "torchaudio", "transformers", "vllm", "vllm_omni", "verl", "ray", "transfer_queue", "peft")
OURS = ("verl_tts.main_omni", "verl_tts.commands", "verl_tts.scorers.app")


def import_qwen_tts() -> None:
    from verl_tts.compat import qwen_tts_transformers5

    qwen_tts_transformers5.apply()


def main() -> int:
    answer = os.fdopen(os.dup(2), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # banners of packages, some of them printed by programs that an import starts
        os.dup2(nowhere, stream)
    steps: list[tuple[str, Callable[[], object]]] = [
        (name, lambda name=name: importlib.import_module(name)) for name in (*UPSTREAM, *OURS)
    ]
    for name, step in [*steps, ("qwen_tts", import_qwen_tts)]:
        try:
            step()
        except Exception as error:  # noqa: BLE001  an import can raise anything, and each of it is the answer here
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"make setup: {name} cannot be imported: {cause}", file=answer)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
