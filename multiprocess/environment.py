"""The environment of this process, without importing torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

AGENT_VARIABLE = "GRADPARITY_AGENT"
"""Environment variable: set in a process of torchrun that is the agent of its rank, and
so in all its children, none of which is an agent again."""


WORLD_VARIABLE = "GRADPARITY_WORLD"
"""Environment variable: set on every rank, and so in all its children."""


def on_torchrun() -> bool:
    """True if torchrun made this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def needs_agent() -> bool:
    """True if torchrun made this process, and it is not the agent of its rank yet."""
    return on_torchrun() and AGENT_VARIABLE not in os.environ


def hosts() -> int:
    """Return the number of machines on which this process has ranks."""
    agent = os.environ.get(AGENT_VARIABLE) == str(os.getpid())
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) if agent else 1


def unsupported() -> str:
    """Return why no rank can be made on this system; empty where ranks can."""
    if sys.platform == "linux":
        return ""
    return (
        f"ranks need Linux, and this is {sys.platform}: run the tests with "
        "@pytest.mark.world in a container or a virtual machine"
    )


def cores() -> int:
    """Return how many CPU cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cache_folder() -> Path:
    """Return this user's folder for files that stay: slots, and the store's key."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "gradparity"
