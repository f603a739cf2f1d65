"""Run functions on N ranks that cannot hang, hide a fault or outlive their parent."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster import Cluster as Cluster
    from .errors import ForkserverError as ForkserverError
    from .errors import HarnessError as HarnessError
    from .errors import NotPicklableError as NotPicklableError
    from .errors import NotSimulatedError as NotSimulatedError
    from .errors import WorldError as WorldError
    from .outcomes import Collective as Collective
    from .outcomes import Left as Left
    from .outcomes import Place as Place
    from .outcomes import RankOutcome as RankOutcome
    from .outcomes import RankState as RankState
    from .rank.world import World as World
    from .rank.world import current_world as current_world
    from .simulated import SimulatedCluster as SimulatedCluster
    from .spec import WorldSpec as WorldSpec
    from .testcase import TestCase as TestCase
    from .torchrun import TorchrunCluster as TorchrunCluster

# The pytest plugin lives in this package and is loaded in every session of its
# environment: what it does not use must not be imported.
_EXPORTS = {
    "cluster": ("Cluster",),
    "errors": (
        "ForkserverError",
        "HarnessError",
        "NotPicklableError",
        "NotSimulatedError",
        "WorldError",
    ),
    "outcomes": ("Collective", "Left", "Place", "RankOutcome", "RankState"),
    "rank.world": ("World", "current_world"),
    "simulated": ("SimulatedCluster",),
    "spec": ("WorldSpec",),
    "testcase": ("TestCase",),
    "torchrun": ("TorchrunCluster",),
}

__all__ = sorted(name for names in _EXPORTS.values() for name in names)


def __getattr__(name: str) -> Any:
    for module, names in _EXPORTS.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
