"""Run directories without a run: lines and clips as training writes them, by the code that writes them.

A policy that gets better at first and then games its scorer: the score rises throughout, the error rate falls until
two thirds of the run and rises after, a held-out probe falls. Clips are short voiced sounds, so that they are real
audio of real length.
"""

from functools import cache

import numpy as np

from verl_tts.report.best import validation_means
from verl_tts.report.history import values_of
from verl_tts.report.run_dir import RunDir
from verl_tts.rewards.manager import mean_parts
from verl_tts.rewards.probes import ProbeWatch
from verl_tts.types import CodecRollout, PromptRow, Score, Waveform

RATE_HZ = 24_000
VOICES = 32
TEXTS = (
    "The river runs past the old mill.",
    "सुबह की चाय के साथ अख़बार पढ़ना अच्छा लगता है।",
    "Please open the window, it is warm in here.",
    "Kannst du mir bitte das Salz reichen?",
    "क्या आप कल मेरे साथ बाज़ार चलेंगे?",
    "Seven ships sailed slowly south.",
    "She read the letter twice and put it away.",
    "बारिश के बाद आसमान बिल्कुल साफ़ हो गया।",
)
# What a prompt may hold, by accident or by design.
HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=alert(1)>",
    "{{ 7 * 7 }} {% raw %}",
    "\u202eright to left\u202c שלום עולם",
    "👩‍👩‍👧‍👦 " * 50,
    "word " * 4000,
    "a" * 3000,
    "&amp; \" ' ` \u2028 \x00",
)


@cache
def voice(number: int) -> np.ndarray:
    """Something that one can tell apart by ear: syllables of a few harmonics at a wandering pitch, float32 (S,)."""
    random = np.random.default_rng(number)
    time_S = np.arange(4 * RATE_HZ) / RATE_HZ
    pitch_S = random.uniform(110, 230) * (1 + 0.12 * np.sin(2 * np.pi * random.uniform(0.7, 1.6) * time_S))
    phase_S = 2 * np.pi * np.cumsum(pitch_S) / RATE_HZ
    tone_S = sum(np.sin(k * phase_S) / k for k in (1, 2, 3, 5))
    syllables_S = np.clip(np.sin(2 * np.pi * random.uniform(2.5, 4.5) * time_S), 0, 1) ** 0.6
    noise_S = 0.01 * random.standard_normal(len(time_S))
    return (0.16 * tone_S * syllables_S + noise_S).astype(np.float32)


def simulate(
    directory,
    *,
    steps: int = 12,
    val_freq: int = 2,
    val_rows: int = 8,
    samples: int = 1,
    train_kept: int = 2,
    seconds: tuple[float, float] = (0.4, 1.2),
    probes: bool = True,
    error_rate: bool = True,
    total_steps: int | None = None,
    config: dict | None = None,
    seed: int = 0,
) -> RunDir:
    """A run of ``steps`` updates with a validation each ``val_freq`` (0: none) and before the first."""
    random = np.random.default_rng(seed)
    run = RunDir(directory)
    run.start(
        config
        or {
            "tts": {"platform": "cpu", "model": "qwen3_tts", "trainable": "full", "reward": {"preset": None}},
            "trainer": {"total_training_steps": total_steps or steps, "save_freq": val_freq},
            "actor_rollout_ref": {"model": {"path": "/models/tiny"}, "actor": {"optim": {"lr": 5e-6}}},
        }
    )
    watch = ProbeWatch()
    rows = [
        PromptRow(
            id=f"row-{index:03d}",
            text=TEXTS[index % len(TEXTS)],
            split="val",
            index=index,
            data_source="simulated",
            ground_truth=TEXTS[index % len(TEXTS)],
        )
        for index in range(max(val_rows, train_kept))
    ]
    taste = random.normal(0, 0.08, len(rows))
    for step in range(steps + 1):
        progress = step / max(1, steps)
        metrics: dict = {}
        if val_freq and step % val_freq == 0:
            clips = [
                (row.id, *_sample(run, random, "val", step, row, k, progress, taste[i], seconds, probes, error_rate))
                for i, row in enumerate(rows[:val_rows])
                for k in range(samples)
            ]
            scores = [(row, score) for row, score, _ in clips]
            metrics["val-core/simulated/reward/mean@1"] = float(np.mean([score.total for _, score in scores]))
            metrics |= validation_means((row, values_of(end, score.total, score.parts)) for row, score, end in clips)
            metrics |= watch.compare(step, scores)[0]
        if step:
            kept = [
                _sample(run, random, "train", step, rows[i], 0, progress, taste[i], seconds, False, error_rate)[0]
                for i in range(train_kept)
            ]
            metrics |= _training(random, progress)
            metrics |= {f"reward/parts/{name}": value for name, value in mean_parts(kept).items()}
        if metrics:
            run.append_metrics(step, metrics)
        if val_freq and step and step % val_freq == 0:
            sealed = run.checkpoints / f"global_step_{step}"
            sealed.mkdir()
            (sealed / "MANIFEST.json").write_text("{}")
    run.close()
    return run


def _sample(run, random, split, step, row, k, progress, taste, seconds, probes, error_rate) -> tuple[Score, str]:
    error = float(
        np.clip(0.45 - 0.4 * min(progress, 0.66) + 0.5 * max(0, progress - 0.66) + random.normal(0, 0.06), 0, 1)
    )
    total = float(np.clip(0.35 + 0.4 * progress + taste + random.normal(0, 0.06), 0, 1))
    ended = random.random() < 0.7 + 0.25 * progress
    length = random.uniform(*seconds)
    frames = 0 if random.random() < 0.01 else max(1, round(length * 12.5))
    parts = {"clip/seconds": frames / 12.5, "clip/rms": random.uniform(0.05, 0.1), "guard/silence": 0.0}
    notes: dict = {"scorer_latency_s": 0.02}
    if error_rate:
        parts |= {"cer": error, "cer_capped": min(error, 1.0)}
        notes["asr_text"] = row.text[: max(0, int(len(row.text) * (1 - error)))]
    if probes:
        parts["probe/naturalness"] = float(3.2 - 0.5 * progress + taste + random.normal(0, 0.08))
    rollout = CodecRollout(
        tokens_T=np.zeros(frames + 1, np.int64),
        codes_FQ=np.zeros((frames, 16), np.int64),
        logprobs_T=np.zeros(frames + 1, np.float32),
        stop_reason="eos" if ended else "length",
        seed=int(random.integers(2**40)),
    )
    waveform = Waveform(voice(int(random.integers(VOICES)))[: frames * 1920], RATE_HZ)
    score = Score(total, parts, notes)
    run.save_sample(row, rollout, waveform, score, split=split, step=step, sample=k, language="Auto", speaker=None)
    return score, rollout.stop_reason


def _training(random: np.random.Generator, progress: float) -> dict[str, float]:
    step_s = float(random.uniform(38, 46))
    return {
        "reward/mean": 0.35 + 0.4 * progress + float(random.normal(0, 0.02)),
        "reward/std": 0.12 - 0.05 * progress,
        "reward/flat_group_rate": float(random.uniform(0, 0.1)),
        "reward/violation_rate": float(random.uniform(0, 0.05)),
        "rollout/eos_rate": 0.7 + 0.25 * progress,
        "rollout/frames/mean": 40 + 20 * progress + float(random.normal(0, 2)),
        "actor/kl_loss": 0.3 * progress + float(random.uniform(0, 0.01)),
        "actor/grad_norm": float(random.uniform(0.3, 0.6)),
        "actor/entropy": 3.0 - progress,
        "actor/pg_clipfrac": float(random.uniform(0, 0.02)),
        "gate/logprob_max_abs": float(random.uniform(0.01, 0.03)),
        "gate/logprob_mean_abs": float(random.uniform(0.001, 0.002)),
        "reward/scorer/latency_p50_s": float(random.uniform(0.2, 0.4)),
        "reward/scorer/latency_p95_s": float(random.uniform(0.6, 0.9)),
        "reward/scorer/requests": 32,
        "reward/scorer/retries": 0,
        "speed/steps_per_hour": 3600 / step_s,
        "timing_s/gen": 0.55 * step_s,
        "timing_s/old_log_prob": 0.1 * step_s,
        "timing_s/ref": 0.08 * step_s,
        "timing_s/update_actor": 0.2 * step_s,
        "timing_s/update_weights": 0.05 * step_s,
        "timing_s/step": step_s,
    }
