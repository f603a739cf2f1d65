"""What a pytest session runs in, told without importing torch."""

from __future__ import annotations

import os


def on_torchrun() -> bool:
    """Whether torchrun made this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_reporter() -> bool:
    """Whether this process speaks for the others."""
    return not on_torchrun() or os.environ.get("RANK") == "0"


def opened() -> frozenset[str]:
    """Return what this process's descriptors lead to."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue  # the one that listed them
    return frozenset(found)
