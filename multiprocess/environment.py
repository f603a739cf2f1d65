"""What this process runs in, told without importing torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def on_torchrun() -> bool:
    """Whether torchrun made this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_reporter() -> bool:
    """Whether this process speaks for the others."""
    return not on_torchrun() or os.environ.get("RANK") == "0"


def unsupported() -> str:
    """Return why no rank can be made on this system; empty where ranks can."""
    if sys.platform == "linux":
        return ""
    return (
        f"ranks need Linux, and this is {sys.platform}: run the tests with "
        "@pytest.mark.world in a container or a virtual machine"
    )


def opened() -> frozenset[str]:
    """Return what this process's descriptors lead to; nothing without ``/proc``.

    Called when the plugin is imported, which must not fail on any system.
    """
    try:
        entries = os.listdir("/proc/self/fd")
    except OSError:
        return frozenset()
    found = []
    for entry in entries:
        try:
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue  # the one that listed them
    return frozenset(found)


def cache_folder() -> Path:
    """Return this user's folder for what runs keep: slots, and the key of the store."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "gradparity"
