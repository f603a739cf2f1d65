"""What a pytest session runs in, told without importing torch."""

from __future__ import annotations

import os


def on_torchrun() -> bool:
    """Whether torchrun made this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_reporter() -> bool:
    """Whether this process speaks for the others."""
    return not on_torchrun() or os.environ.get("RANK") == "0"
