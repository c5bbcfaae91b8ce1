"""ECAPA-TDNN with random weights, in SpeechBrain's file; of full size, as no other is read.

    python -m tests.random_ecapa FOLDER

A process of its own: SpeechBrain leaves modules behind that raise when they are looked at, and hypothesis looks at
every module.
"""

import sys
from pathlib import Path

import torch
from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

from verl_tts.scorers.speaker_similarity import Ecapa


def write_random_ecapa(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    network = ECAPA_TDNN(Ecapa.MEL_BANDS, lin_neurons=Ecapa.EMBEDDING_SIZE, channels=list(Ecapa.CHANNELS))
    torch.save(network.state_dict(), folder / "embedding_model.ckpt")


if __name__ == "__main__":
    write_random_ecapa(Path(sys.argv[1]))
