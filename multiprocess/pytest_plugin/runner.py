"""Where a test's body runs: on a pool of clusters, or on the ranks of torchrun."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ..cluster import Cluster
from ..environment import on_torchrun, unsupported
from ..outcomes import RankOutcome
from ..parent.forkserver_client import forkserver
from ..parent.slots import cpu_broker, gpu_broker, visible_gpus
from ..spec import CallOptions, WorldSpec
from .marks import kind_of

if TYPE_CHECKING:
    from ..torchrun import TorchrunCluster

_MOST_IDLE_RANKS = 16


class UnsuitableWorld(Exception):
    """The surroundings cannot give a world like this."""


class Runner(Protocol):
    """Runs a function on every rank of a world like ``spec``."""

    def run(
        self, spec: WorldSpec, options: CallOptions, fn: Callable[..., Any], *args: Any
    ) -> tuple[RankOutcome, ...]:
        """Return one outcome per rank, or raise ``WorldFailure``."""

    def expect(self) -> None:
        """Prepare for worlds to come."""

    def close(self) -> None:
        """End all ranks that this runner started."""


class TorchrunRunner:
    """Runs on the ranks that torchrun made; other sizes are no failure, but a skip."""

    def __init__(self) -> None:
        self._cluster: TorchrunCluster | None = None

    def run(
        self, spec: WorldSpec, options: CallOptions, fn: Callable[..., Any], *args: Any
    ) -> tuple[RankOutcome, ...]:
        """Return one outcome per rank, or raise ``WorldFailure``."""
        made = int(os.environ["WORLD_SIZE"])
        if spec.size != made:
            raise UnsuitableWorld(f"needs {spec.size} ranks, torchrun made {made}")
        if self._cluster is None:
            from ..torchrun import TorchrunCluster

            self._cluster = TorchrunCluster(backend=spec.backend, device=spec.device)
        if (spec.backend, spec.device) != (
            self._cluster.spec.backend,
            self._cluster.spec.device,
        ):
            raise UnsuitableWorld("torchrun's ranks already use another backend")
        return self._cluster.submit(options, fn, *args)

    def expect(self) -> None:
        """Do nothing: the ranks are there."""

    def close(self) -> None:
        """Leave the process group."""
        if self._cluster is not None:
            self._cluster.close()


class PoolRunner:
    """Keeps one warm cluster for each kind of world, the latest used ones."""

    def __init__(self) -> None:
        self._clusters: dict[WorldSpec, Cluster] = {}

    def run(
        self, spec: WorldSpec, options: CallOptions, fn: Callable[..., Any], *args: Any
    ) -> tuple[RankOutcome, ...]:
        """Return one outcome per rank, or raise ``WorldFailure``."""
        with contextlib.ExitStack() as held:
            held.enter_context(cpu_broker().slots(spec.size))
            if spec.device == "cuda":
                names = held.enter_context(_gpus(spec))
                spec = replace(spec, visible_devices=names)
            return self._cluster(kind_of(spec)).submit(options, fn, *args)

    def expect(self) -> None:
        """Have the forkserver import torch while the session goes on."""
        if not unsupported():  # else each test says so
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


def _gpus(spec: WorldSpec) -> AbstractContextManager[tuple[str, ...]]:
    visible = visible_gpus()
    wanted = 1 if spec.share_devices else spec.size
    if len(visible) < wanted:
        raise UnsuitableWorld(f"needs {wanted} CUDA devices, {len(visible)} visible")
    return gpu_broker(visible).slots(wanted)


def default_runner() -> Runner:
    """Return the runner that this process's surroundings ask for."""
    return TorchrunRunner() if on_torchrun() else PoolRunner()
