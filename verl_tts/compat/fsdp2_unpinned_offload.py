"""Pinned memory needs a CUDA driver.

verl 0.9.1 gives every forward-only FSDP2 engine, the reference, ``CPUOffloadPolicy(pin_memory=True)``
(workers/engine/fsdp/transformer_impl.py); torch 2.11 then pins, and finds no driver. On the CPU platform the
policy is made without pinning, which changes where memory comes from and nothing else. Needed until verl takes
the choice from the platform.
"""


def apply() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    original = CPUOffloadPolicy.__init__
    if getattr(original, "_verl_tts", False):
        return

    def init(self: CPUOffloadPolicy, pin_memory: bool = False) -> None:
        original(self, pin_memory=False)

    init._verl_tts = True  # type: ignore[attr-defined]
    CPUOffloadPolicy.__init__ = init  # type: ignore[method-assign]
