"""The trackers that ``trainer.logger`` names: which there are, what each needs, and which of them take audio.

verl opens them and logs the numbers. TensorBoard writes to OUTPUT_DIR/tensorboard; a validation's clips go to those
that can play them.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = {
    "console": None,
    "file": None,
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "swanlab": "swanlab",
    "mlflow": "mlflow",
    "clearml": "clearml",
    "trackio": "trackio",
    "vemlp_wandb": "volcengine_ml_platform",
    "rl_insight": "rl_insight",
}
"""verl's trackers -> the package that each imports."""

CLIPS = 8  # of a validation: the first ones, the same prompts each time


def is_installed(name: str) -> bool:
    """Whether verl could open this one of ``PACKAGES``."""
    package = PACKAGES[name]
    return package is None or importlib.util.find_spec(package) is not None


def prepare_tensorboard(directory: Path, step: int) -> None:
    """Tells verl to write there, and TensorBoard to forget what an earlier attempt has written of later steps."""
    from torch.utils.tensorboard import SummaryWriter

    os.environ["TENSORBOARD_DIR"] = str(directory)
    if directory.exists():
        SummaryWriter(str(directory), purge_step=step + 1).close()


class Heard(NamedTuple):
    """A clip for the trackers."""

    name: str  # row and number: hi-7#0
    path: Path
    text: str
    score: float


def log_audio(loggers: Mapping[str, Any], clips: Sequence[Heard], step: int) -> None:
    """The first clips of a validation, to each open tracker that takes audio. ``loggers`` is ``Tracking.logger``."""
    for name, logger in loggers.items():
        if name in AUDIO:
            for clip in clips[:CLIPS]:
                AUDIO[name](logger, clip, step)


def _heard(clip: Heard) -> tuple[Any, int]:
    import soundfile  # here: whoever only asks which trackers there are does not wait for it

    return soundfile.read(clip.path, dtype="float32")


def _tensorboard(logger: Any, clip: Heard, step: int) -> None:
    samples_S, sample_rate_hz = _heard(clip)
    logger.writer.add_audio(f"validation/{clip.name}", samples_S[None], step, sample_rate=sample_rate_hz)
    logger.writer.add_text(f"validation/{clip.name}", f"{clip.text} ({clip.score:.3f})", step)


def _media(package: str) -> Callable[[Any, Heard, int], None]:
    """wandb and swanlab: an Audio object made from a file, logged like a number."""

    def log(logger: Any, clip: Heard, step: int) -> None:
        caption = f"{clip.text} ({clip.score:.3f})"
        samples_S, sample_rate_hz = _heard(clip)
        audio = importlib.import_module(package).Audio(samples_S, sample_rate=sample_rate_hz, caption=caption)
        logger.log({f"validation/{clip.name}": audio}, step=step)

    return log


AUDIO: dict[str, Callable[[Any, Heard, int], None]] = {
    "tensorboard": _tensorboard,
    "wandb": _media("wandb"),
    "swanlab": _media("swanlab"),
}
