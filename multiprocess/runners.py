"""Where a test's body runs: on a pool of clusters, or on the ranks of torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from .cluster import Cluster
from .launch import forkserver
from .marks import kind_of
from .outcomes import RankOutcome
from .spec import CallOptions, WorldSpec

_MOST_IDLE_RANKS = 16


class Runner(Protocol):
    """Runs a function on every rank of a world like ``spec``."""

    def run(
        self, spec: WorldSpec, options: CallOptions, fn: Callable[..., Any], *args: Any
    ) -> tuple[RankOutcome, ...]:
        """Return one outcome per rank, or raise ``WorldFailure``."""

    def expect(self, specs: list[WorldSpec]) -> None:
        """Prepare for worlds like these."""

    def close(self) -> None:
        """End all ranks that this runner started."""


class PoolRunner:
    """Keeps one warm cluster for each kind of world, the latest used ones."""

    def __init__(self) -> None:
        self._clusters: dict[WorldSpec, Cluster] = {}

    def run(
        self, spec: WorldSpec, options: CallOptions, fn: Callable[..., Any], *args: Any
    ) -> tuple[RankOutcome, ...]:
        """Return one outcome per rank, or raise ``WorldFailure``."""
        return self._cluster(kind_of(spec)).submit(options, fn, *args)

    def expect(self, specs: list[WorldSpec]) -> None:
        """Have the forkserver import torch while the session goes on."""
        if specs:
            forkserver()

    def close(self) -> None:
        """End all ranks."""
        for cluster in self._clusters.values():
            cluster.close()
        self._clusters.clear()

    def _cluster(self, kind: WorldSpec) -> Cluster:
        cluster = self._clusters.pop(kind, None) or Cluster.of(kind)
        self._clusters[kind] = cluster  # last in order: latest used
        idle = sum(len(c.pids) for c in self._clusters.values() if c is not cluster)
        for other in list(self._clusters.values()):
            if other is not cluster and idle + kind.size > _MOST_IDLE_RANKS:
                idle -= len(other.pids)
                other.close()
        return cluster


def default_runner() -> Runner:
    """Return the runner that this process's surroundings ask for."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from .torchrun import TorchrunRunner

        return TorchrunRunner()
    return PoolRunner()
