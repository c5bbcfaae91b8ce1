"""The rollout engine alone, no Ray: ``python engine.py MODEL DATA OUT.json ROUNDS [OVERRIDE ...]``.

A round is all prompts with all their samples, in flight at once. The environment is the one of a run's workers.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from loop import FRAMES, PROMPTS, SAMPLES, SETTINGS
from transformers import AutoTokenizer

from verl_tts.config.compose import compose
from verl_tts.data.prompts import read_prompts
from verl_tts.rollout.qwen3_tts import Conditioner
from verl_tts.rollout.server import RolloutServer
from verl_tts.rollout.spec import RolloutSpec


async def measure(model: Path, data: Path, rounds: int, overrides: list[str]) -> dict:
    config = compose([*SETTINGS, *overrides, f"actor_rollout_ref.model.path='{model}'"])
    rollout = config.actor_rollout_ref.rollout
    settings = {name: rollout[name] for name in ("temperature", "top_p", "top_k")}
    conditioner = Conditioner(
        json.loads((model / "config.json").read_text()),
        AutoTokenizer.from_pretrained(model),
        str(data / "speaker.json"),
        config.tts.language,
    )
    rows = read_prompts(str(data / "train.parquet"))[:PROMPTS]
    server = RolloutServer(RolloutSpec.from_config(config), 0)
    start_s = await server.launch()

    async def frames(row_number: int, sample: int) -> int:
        row = rows[row_number]
        given = conditioner(row)
        output = await server.generate(
            f"{row_number}-{sample}",
            prompt_ids=given.text_ids,
            sampling_params=settings,
            speaker=given.speaker_H,
            language=given.language,
            seed=1000 * row_number + sample,
            sample_id=f"{row.id}#{sample}",
        )
        return len(output.extra_fields["rollout"].codes_FQ)

    found = []
    try:
        for _ in range(1 + rounds):
            began = time.perf_counter()
            made = await asyncio.gather(*[frames(p, k) for p in range(PROMPTS) for k in range(SAMPLES)])
            found.append({"frames": sum(made), "seconds": time.perf_counter() - began})
    finally:
        await server.shutdown()
    return {"start_s": start_s, "dtype": rollout.dtype, "limit": FRAMES, "rounds": found[1:]}  # the first is cold


if __name__ == "__main__":
    model, data, out, rounds, *overrides = sys.argv[1:]
    result = asyncio.run(measure(Path(model), Path(data), int(rounds), overrides))
    Path(out).write_text(json.dumps(result))
