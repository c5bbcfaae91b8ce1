"""Imports what a run imports, and says in one line what cannot be: the last step of ``make setup``."""

import importlib
import logging
import os
import sys
import warnings

MODULES = (
    *("torch", "torchaudio", "transformers", "vllm", "vllm_omni", "verl", "ray", "transfer_queue", "tensordict", "peft"),
    *("verl_tts.main_omni", "verl_tts.commands", "verl_tts.scorers.app", "faster_whisper"),
)


def import_all() -> None:
    """Raises what an import raises; the note that comes with it names the module."""
    from verl_tts.compat import qwen_tts_transformers5

    for name in MODULES:
        with naming(name):
            importlib.import_module(name)
    with naming("qwen_tts"):
        qwen_tts_transformers5.apply()
        importlib.import_module("qwen_tts")


class naming:  # noqa: N801  reads as a statement
    def __init__(self, module: str) -> None:
        self.module = module

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            sys.exit(f"make setup: {self.module} cannot be imported: {cause}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    import_all()
