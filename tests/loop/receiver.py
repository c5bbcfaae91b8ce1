"""A receiver of weights that fails after it has read the file, as a full device or a bug would."""

from typing import Any

from verl_tts.rollout.worker_extension import WeightReceiver


class RaisingReceiver(WeightReceiver):
    def verl_tts_load_weights(self, path: str) -> dict[str, Any]:
        raise MemoryError("the receiver fails in a test")
