"""Run functions on N ranks that cannot hang, hide a fault or outlive their parent."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster import Cluster
    from .errors import (
        ForkserverError,
        HarnessError,
        NotPicklableError,
        NotSimulatedError,
        WorldFailure,
    )
    from .outcomes import RankOutcome, RankState
    from .rank.world import World, current_world
    from .simulated import SimulatedCluster
    from .spec import CallOptions, WorldSpec
    from .testcase import TestCase

__all__ = [
    "CallOptions",
    "Cluster",
    "ForkserverError",
    "HarnessError",
    "NotPicklableError",
    "NotSimulatedError",
    "RankOutcome",
    "RankState",
    "SimulatedCluster",
    "TestCase",
    "World",
    "WorldFailure",
    "WorldSpec",
    "current_world",
]

# The pytest plugin lives in this package and is loaded in every session of its
# environment: what it does not use must not be imported.
_HOMES = {
    "CallOptions": "spec",
    "Cluster": "cluster",
    "ForkserverError": "errors",
    "HarnessError": "errors",
    "NotPicklableError": "errors",
    "NotSimulatedError": "errors",
    "RankOutcome": "outcomes",
    "RankState": "outcomes",
    "SimulatedCluster": "simulated",
    "TestCase": "testcase",
    "World": "rank.world",
    "WorldFailure": "errors",
    "WorldSpec": "spec",
    "current_world": "rank.world",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
