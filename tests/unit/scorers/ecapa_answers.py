"""What ``speaker_similarity`` answers with ECAPA-TDNN of full size and random weights, as JSON.

    python -m tests.unit.scorers.ecapa_answers REFERENCES SPOKEN FOLDER

A process of its own: SpeechBrain leaves modules behind that raise when they are looked at, and hypothesis looks at
every module.
"""

import json
import sys
from pathlib import Path

import numpy as np
import soundfile

from tests.random_ecapa import write_random_ecapa
from verl_tts.errors import ConfigError
from verl_tts.rewards.protocol import Clip
from verl_tts.scorers.speaker_similarity import SpeakerSimilarityScorer
from verl_tts.types import Waveform

NO_CHECKPOINTS = {"empty": b"", "text": b"no pickle", "program": b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00idtR."}


def main(references: str, spoken: str, folder: str) -> dict:
    samples_S, rate_hz = soundfile.read(spoken, dtype="float32")
    own, child = (Waveform(samples_S, factor * rate_hz) for factor in (1, 2))
    silence = Waveform(np.zeros(rate_hz, np.float32), rate_hz)

    model = Path(folder)
    write_random_ecapa(model)
    scorer = SpeakerSimilarityScorer(references=references, backend="ecapa", model=folder, device="cpu")
    clips = [
        Clip(waveform, "Hi.", {"speaker": speaker})
        for waveform, speaker in ((own, "anna"), (own, "voices/child"), (child, "voices/child"), (silence, "anna"))
    ]
    answers = {
        "together": scorer.score_batch(clips),
        "alone": [scorer.score_batch([clip])[0] for clip in clips],
        "refused": {},
    }
    for name, content in NO_CHECKPOINTS.items():
        (model / "embedding_model.ckpt").write_bytes(content)
        try:
            SpeakerSimilarityScorer(references=references, backend="ecapa", model=folder, device="cpu")
        except ConfigError as error:
            answers["refused"][name] = str(error)
    return answers


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
