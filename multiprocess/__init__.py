"""Run functions on N ranks that cannot hang, hide a fault or outlive their parent."""

from .cluster import Cluster
from .errors import ForkserverError, HarnessError, NotPicklableError, WorldFailure
from .outcomes import RankOutcome, RankState
from .spec import WorldSpec
from .world import World, current_world

__all__ = [
    "Cluster",
    "ForkserverError",
    "HarnessError",
    "NotPicklableError",
    "RankOutcome",
    "RankState",
    "World",
    "WorldFailure",
    "WorldSpec",
    "current_world",
]
