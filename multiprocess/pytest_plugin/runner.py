"""Run tests on a pool of clusters, of this process or of torchrun's agents."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ..cluster import BaseCluster, Cluster, LastCall
from ..environment import unsupported
from ..errors import HarnessError, WorldError
from ..outcomes import RankOutcome
from ..parent.forkserver_client import forkserver
from ..parent.slots import cpu_slots, gpu_slots, visible_gpus
from ..spec import CallOptions, WorldSpec
from .rank_session import ItemId, ItemOrder, end_fixtures, end_session, run_item

if TYPE_CHECKING:
    from ..elastic.agent import Agent

# Each idle rank keeps 5 to 13 MiB that it does not share (docs/harness-inside.md).
_MAX_IDLE_RANKS = 16


Report = Callable[[pytest.Item, WorldError], None]
"""Function that reports an error of fixtures that outlived a test on ranks."""


class UnsuitableWorld(Exception):
    """A world of these settings cannot be run here."""


class Runner:
    """Runs tests on clusters that stay warm."""

    def __init__(self, agent: Agent | None, live: bool, report: Report) -> None:
        """Start with no cluster.

        Args:
            agent: Agent of rank 0 under torchrun, whose ranks run the tests; else None.
            live: True to show the ranks' output while they run.
            report: Called between two tests with the last test of a cluster, if
                fixtures that outlived it fail.
        """
        self._agent = agent
        self.live = live
        self._report = report
        self._late: list[tuple[pytest.Item, WorldError]] = []
        self._clusters: dict[WorldSpec, BaseCluster] = {}
        """Clusters by kind of world; the least recently used one comes first."""

        self._kept_nodes: dict[WorldSpec, list[object]] = {}
        """Kind of world -> nodes whose fixtures its ranks keep for the next test."""

        if agent is None and not unsupported():  # otherwise each test reports it
            forkserver()  # it imports torch while the session goes on

    def _cluster(self, spec: WorldSpec) -> AbstractContextManager[BaseCluster]:
        """Hold the cluster of a world for a call, with the resources of its ranks."""
        if self._agent is None:
            return self._own_cluster(spec)
        return self._cluster_of_agents(self._agent, spec)

    @contextlib.contextmanager
    def _own_cluster(self, spec: WorldSpec) -> Iterator[BaseCluster]:
        with contextlib.ExitStack() as slots:
            slots.enter_context(cpu_slots().hold(spec.world_size))
            if spec.device == "cuda":
                names = slots.enter_context(_gpus(spec, self._warm_gpus(spec.kind)))
                spec = replace(spec, visible_devices=names)
            yield self._of_kind(
                spec.kind, Cluster.of, _MAX_IDLE_RANKS, lambda kind: kind.world_size
            )

    @contextlib.contextmanager
    def _cluster_of_agents(
        self, agent: Agent, spec: WorldSpec
    ) -> Iterator[BaseCluster]:
        if spec.world_size > agent.size:
            raise UnsuitableWorld(
                f"needs {spec.world_size} ranks, torchrun made {agent.size}"
            )
        from ..elastic.agent import AgentCluster, Ended
        from ..elastic.local_rank import MAX_WORLDS

        make = partial(AgentCluster, agent)
        try:
            # Beyond this number agents end ranks, and leave their fixtures unended.
            yield self._of_kind(spec.kind, make, MAX_WORLDS, lambda spec: 1)
        except (Ended, HarnessError) as error:  # no world can be started any more
            pytest.exit(f"{error}", returncode=3)

    def _warm_gpus(self, kind: WorldSpec) -> tuple[str, ...]:
        """Return the GPUs on which a world of this kind ran last."""
        seen = (other.visible_devices for other in reversed(self._clusters))
        like = (n for n in seen if replace(kind, visible_devices=n) in self._clusters)
        return next(like, ())

    def _of_kind(
        self,
        kind: WorldSpec,
        make: Callable[[WorldSpec], BaseCluster],
        most: int,
        weight: Callable[[WorldSpec], int],
    ) -> BaseCluster:
        """Return the cluster of a kind; end others if too many would be warm."""
        cluster = self._clusters.pop(kind, None) or make(kind)
        warm = [other for other in self._clusters.values() if other.is_warm]
        total = sum(weight(each.spec) for each in (cluster, *warm))
        for other in warm:
            if total > most:
                total -= weight(other.spec)
                other.close()
        self._clusters[kind] = cluster
        return cluster

    def run(
        self, spec: WorldSpec, options: CallOptions, fn: Callable[..., Any], *args: Any
    ) -> tuple[RankOutcome, ...]:
        """Return the outcome of each rank, or raise ``WorldError``."""
        with self._cluster(spec) as cluster:
            return cluster.submit(options, fn, *args)

    def run_item(
        self,
        spec: WorldSpec,
        options: CallOptions,
        order: ItemOrder,
        item: pytest.Item,
        following: pytest.Item | None,
    ) -> tuple[RankOutcome, ...]:
        """Run a test; first end fixtures that were kept for a test that did not run.

        Args:
            spec: Settings of its world.
            options: Options of the call.
            order: Order to the ranks.
            item: The test.
            following: Next test on the same ranks.

        Returns:
            The outcome of each rank.

        Raises:
            WorldError: At least one rank failed.
        """
        with self._cluster(spec) as cluster:
            cluster.end_lost()
            if options.isolation != "process":  # these ranks keep no fixture
                nodes = item.listchain()
                kept_nodes = self._kept_nodes.get(cluster.spec, [])
                if nodes[: len(kept_nodes)] != kept_nodes and cluster.is_warm:
                    _end_fixtures(cluster, options, order.test)
                next_nodes = [] if following is None else following.listchain()
                pairs = zip(nodes, next_nodes, strict=False)
                self._kept_nodes[cluster.spec] = [a for a, b in pairs if a is b]
                cluster.last_call = LastCall(end_session, partial(self._keep, item))
            return cluster.submit(options, run_item, order)

    def _keep(self, item: pytest.Item, failure: WorldError) -> None:
        self._late.append((item, failure))

    def report_late(self) -> None:
        """Report errors of fixtures that outlived their tests."""
        while self._late:
            self._report(*self._late.pop(0))

    def close(self) -> None:
        """End the pytest sessions of all ranks, and the ranks."""
        # An agent may be lost; the ranks end with their agents.
        may_be_lost = () if self._agent is None else (Exception,)
        with contextlib.suppress(*may_be_lost):
            for cluster in self._clusters.values():
                cluster.close()


def _end_fixtures(cluster: BaseCluster, options: CallOptions, test: ItemId) -> None:
    """End the fixtures on ranks that their next test does not use."""
    # The ranks may have to import the test first.
    limit_s = max(options.timeout_s, cluster.spec.start_timeout_s)
    try:
        cluster.submit(
            CallOptions(timeout_s=limit_s, live=options.live), end_fixtures, test
        )
    except WorldError as failure:
        assert cluster.last_call is not None  # ranks with fixtures have had a test
        cluster.last_call.report(failure)


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
    from ..elastic.agent import Agent

    with Agent() as agent:
        try:
            return agent.serve(lambda text: print(text, file=sys.stderr))
        except KeyboardInterrupt:
            return int(pytest.ExitCode.INTERRUPTED)
