"""Runners of tests on ranks: a pool of clusters, or torchrun's ranks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ..cluster import BaseCluster, Cluster
from ..environment import unsupported
from ..errors import HarnessError, WorldError
from ..outcomes import RankOutcome
from ..parent.forkserver_client import forkserver
from ..parent.slots import cpu_slots, gpu_slots, visible_gpus
from ..spec import CallOptions, WorldSpec

if TYPE_CHECKING:
    from ..elastic.agent import Agent, AgentCluster

# Each idle rank keeps 5 to 13 MiB that it does not share (docs/harness-inside.md).
_MAX_IDLE_RANKS = 16


Report = Callable[[WorldError], None]
"""Function that reports ranks whose pytest session did not end."""


class UnsuitableWorld(Exception):
    """A world of these settings cannot be run here."""


class AgentRunner:
    """Runs tests on the ranks of torchrun's agents; larger worlds are skipped."""

    def __init__(self, agent: Agent, live: bool, report: Report) -> None:
        """Use the ranks of torchrun's agents.

        Args:
            agent: The agent of rank 0.
            live: True to show the ranks' output while they run.
            report: Called if the sessions of ranks do not end.
        """
        self.live = live
        self._report = report
        self._agent = agent
        self._clusters: dict[WorldSpec, AgentCluster] = {}

    def run(
        self, spec: WorldSpec, options: CallOptions, fn: Callable[..., Any], *args: Any
    ) -> tuple[RankOutcome, ...]:
        """Return the outcome of each rank, or raise ``WorldError``."""
        torchrun_size = self._agent.size
        if spec.world_size > torchrun_size:
            raise UnsuitableWorld(
                f"needs {spec.world_size} ranks, torchrun made {torchrun_size}"
            )
        from ..elastic.agent import AgentCluster, Ended

        kind = spec.kind
        if kind not in self._clusters:
            self._clusters[kind] = AgentCluster(self._agent, kind)
        try:
            return self._clusters[kind].submit(options, fn, *args)
        except (Ended, HarnessError) as error:  # no world can be started any more
            pytest.exit(f"{error}", returncode=3)

    def close(self) -> None:
        """End the pytest sessions of the ranks; the ranks end with their agents."""
        with contextlib.suppress(Exception):
            for cluster in self._clusters.values():
                _end_session(cluster, self.live, self._report)


class PoolRunner:
    """Keeps a warm cluster for each kind of world; ends the least recently used."""

    def __init__(self, live: bool, report: Report) -> None:
        self.live = live
        self._report = report
        self._clusters: dict[WorldSpec, Cluster] = {}
        if not unsupported():  # otherwise each test reports it
            forkserver()  # it imports torch while the session goes on

    def run(
        self, spec: WorldSpec, options: CallOptions, fn: Callable[..., Any], *args: Any
    ) -> tuple[RankOutcome, ...]:
        """Return the outcome of each rank, or raise ``WorldError``."""
        with contextlib.ExitStack() as slots:
            slots.enter_context(cpu_slots().hold(spec.world_size))
            if spec.device == "cuda":
                names = slots.enter_context(_gpus(spec, self._warm_gpus(spec.kind)))
                spec = replace(spec, visible_devices=names)
            return self._cluster(spec.kind).submit(options, fn, *args)

    def _warm_gpus(self, kind: WorldSpec) -> tuple[str, ...]:
        """Return the GPUs on which a world of this kind ran last."""
        seen = (other.visible_devices for other in reversed(self._clusters))
        like = (n for n in seen if replace(kind, visible_devices=n) in self._clusters)
        return next(like, ())

    def close(self) -> None:
        """End the ranks of all clusters."""
        for cluster in self._clusters.values():
            self._close(cluster)
        self._clusters.clear()

    def _cluster(self, kind: WorldSpec) -> Cluster:
        cluster = self._clusters.pop(kind, None) or Cluster.of(kind)
        # Warm ranks take memory, so end those that were used longest ago.
        self._clusters[kind] = cluster  # order: least recently used first
        idle = sum(len(c.pids) for c in self._clusters.values() if c is not cluster)
        for other in list(self._clusters.values()):
            if other is not cluster and idle + kind.world_size > _MAX_IDLE_RANKS:
                idle -= len(other.pids)
                self._close(other)
        return cluster

    def _close(self, cluster: Cluster) -> None:
        if cluster.pids:
            _end_session(cluster, self.live, self._report)
        cluster.close()


Runner = PoolRunner | AgentRunner
"""Runs a function on every rank of a world."""


def _end_session(cluster: BaseCluster, live: bool, report: Report) -> None:
    """End the remaining fixtures on the ranks; report their errors."""
    from .rank_session import end_session

    try:
        options = CallOptions(timeout_s=cluster.spec.timeout_s, live=live)
        cluster.submit(options, end_session)
    except WorldError as failure:
        report(failure)


def _gpus(
    spec: WorldSpec, warm: tuple[str, ...]
) -> AbstractContextManager[tuple[str, ...]]:
    # Devices with warm ranks come first. Otherwise each tuple of devices would get its
    # own ranks.
    usable = spec.visible_devices or visible_gpus()
    visible = sorted(usable, key=lambda name: name not in warm)
    wanted = 1 if spec.share_devices else spec.world_size
    if len(visible) < wanted:
        raise UnsuitableWorld(f"needs {wanted} CUDA devices, {len(visible)} visible")
    return gpu_slots(visible).hold(wanted)


def follow() -> int:
    """Serve rank 0's session with this process's ranks; return the exit code."""
    from ..elastic.agent import Agent, Ended

    with Agent() as agent:
        try:
            return agent.follow()
        except HarnessError as error:
            print(f"gradparity: rank {agent.rank}: {error}", file=sys.stderr)
        except Ended as ended:
            if not agent.takes_over():
                return agent.wait_for_the_end()
            print(f"gradparity: {ended}", file=sys.stderr)
            agent.reported()
        except KeyboardInterrupt:
            return int(pytest.ExitCode.INTERRUPTED)
    return int(pytest.ExitCode.INTERNAL_ERROR)


def finish(agent: Agent, code: int) -> None:
    """End the session's ranks, and tell the other agents to exit."""
    with agent, contextlib.suppress(HarnessError):  # torchrun's own agent may be gone
        agent.reported()
        agent.finish(code)
