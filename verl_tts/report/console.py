"""What a person at the terminal sees, and where everything else goes.

A run is a dozen processes that each have something to say. Their output, this process's included, is appended to
``train.log``; the terminal gets the lines below.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Say = Callable[[str], None]


@contextmanager
def output_to(log: Path) -> Iterator[Say]:
    """Sends the process's and its children's output to ``log``; yields a way to speak to the terminal."""
    with log.open("ab") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        terminal, errors = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

    def say(line: str) -> None:
        data = f"{line}\n".encode()
        os.write(terminal, data)
        os.write(1, data)

    try:
        yield say
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(terminal, 1)
        os.dup2(errors, 2)
        os.close(terminal)
        os.close(errors)


def step_line(step: int, last_step: int, metrics: Mapping[str, Any]) -> str:
    """One training step: ``step 12/40  reward 0.412  frames 28.6  eos 94 %  kl 0.003  gate 2.1e-06  11.2 s``."""
    parts = [
        f"step {step}/{last_step}",
        f"reward {metrics['reward/mean']:.3f}",
        f"frames {metrics['rollout/frames/mean']:.1f}",
        f"eos {100 * metrics['rollout/eos_rate']:.0f} %",
    ]
    if "actor/kl_loss" in metrics:
        parts.append(f"kl {metrics['actor/kl_loss']:.2g}")
    parts.append(f"log-prob gap {metrics['gate/logprob_max_abs']:.2g}")
    parts.append(f"{metrics['timing_s/step']:.1f} s")
    if dropped := metrics["rollout/groups_dropped"]:
        parts.append(f"{dropped:.0f} group(s) dropped")
    return "  ".join(parts)


def validation_line(step: int, metrics: Mapping[str, Any]) -> str:
    """One validation: the mean of the reward, per data source."""
    # val-core/SOURCE/reward/mean@4; best@4 and maj@4 stand beside it.
    parts = [
        (name.removeprefix("val-core/").rsplit("/", 2), value)
        for name, value in metrics.items()
        if name.startswith("val-core/") and "/mean@" in name
    ]
    means = {source: value for (source, *_), value in parts}
    return f"validation at step {step}  " + "  ".join(f"{source} {value:.3f}" for source, value in means.items())
