"""What the forkserver imports once, so that no rank has to."""

from __future__ import annotations

PRELOAD = (
    "torch",
    "torch.distributed",
    f"{__package__}.flight_recorder",
    f"{__package__}.global_state",
    f"{__package__}.world",
)
"""What every rank needs."""

COSTLY = (
    "_pytest.assertion.rewrite",
    "coverage",
    "hypothesis",
    "numpy",
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
)
"""What some ranks need and takes long to import: preloaded when the parent has it, or
when ranks turned out to need it."""
