"""Facts about this process and machine, without importing torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

AGENT_VARIABLE = "GRADPARITY_AGENT"
"""Environment variable that is set in an agent of torchrun, and so in its children,
which do not become agents."""


WORLD_VARIABLE = "GRADPARITY_WORLD"
"""Environment variable that is set on every rank, and so in its children."""


def on_torchrun() -> bool:
    """Return True if torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def needs_agent() -> bool:
    """Return True if torchrun started this process and it has no agent yet."""
    return on_torchrun() and AGENT_VARIABLE not in os.environ


def hosts() -> int:
    """Return the number of machines on which ranks of this process run."""
    agent = os.environ.get(AGENT_VARIABLE) == str(os.getpid())
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) if agent else 1


def unsupported() -> str:
    """Return why this system cannot run ranks; empty if it can."""
    if sys.platform == "linux":
        return ""
    return (
        f"ranks need Linux, and this is {sys.platform}: run the tests with "
        "@pytest.mark.world in a container or a virtual machine"
    )


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # exists on Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cache_folder() -> Path:
    """Return this user's folder for permanent files: slots, and the store's secret."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "gradparity"
