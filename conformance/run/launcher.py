"""Place: where ranks come from, a pool of processes or torchrun.

[Note: One process]
References and checks of a workload train, draw and seed on one process. This process is
a separate rank, and never the process of the session. The reasons: torch's global
generator, default dtype and autocast are shared by all threads of a process, and user
code may crash. That rank stays warm, so its caches survive. The modules of its
functions are imported before it is forked, by ``run/session.py``.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ...fixtures import WorkloadError, shortened
from ...multiprocess import Cluster, RankOutcome, RankState, WorldError
from ...multiprocess.cluster import BaseCluster
from ..rank.devices import Devices, device_names, visible_gpus
from ..report.records import Launcher
from ..status import UsageError, rank_list

if TYPE_CHECKING:
    from ...multiprocess.elastic.agent import Agent

__all__ = [
    "AloneError",
    "Place",
    "Pool",
    "Torchrun",
    "place_of",
    "root_cause",
    "waiting_place",
]

T = TypeVar("T")
LOST = {RankState.KILLED, RankState.EXITED}
"""States of a rank that say nothing about the scaler."""
TRAININGS = 16
"""Time limit of a call on one process, as a multiple of a scenario's limit. A case has
up to 11 references, and each does the work of all ranks."""


class AloneError(Exception):
    """The separate rank did not answer: it crashed, or exceeded its time limit."""


class Place:
    """Creates worlds and keeps one of each size; a context manager that ends them."""

    def __init__(self, devices: Devices, timeout_s: float) -> None:
        self.devices = devices
        self.timeout_s = timeout_s
        self._worlds: dict[int, BaseCluster] = {}
        self._stack = ExitStack()
        self._remove: Callable[[], object] = lambda: None
        """Removes the folder of ``files``, if it was created."""
        self._alone = {False: self._one(default_group=False)}
        """Clusters of one process, by key: True if the process has a process group of
        one rank, False if it has none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._remove()  # no rank is left that writes

    @cached_property
    def files(self) -> str:
        """Folder for checkpoints of ranks; removed when the place is closed."""
        folder = tempfile.mkdtemp(prefix="gradparity-")
        # also removed if nobody closes the place
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def ranks(self, world: int) -> BaseCluster:
        """Return the cluster of this size; create it if needed."""
        if world not in self._worlds:
            self._worlds[world] = self._make(world)
        return self._worlds[world]

    def alone(
        self,
        function: Callable[..., T],
        *args: Any,
        in_group: bool = False,
        trainings: int = TRAININGS,
    ) -> T:
        """Call a function on one process; see [Note: One process].

        Args:
            function: importable function; only one call runs at a time.
            *args: arguments, which are pickled.
            in_group: true to call it in a process group of one rank.
            trainings: number of trainings for which the call may take the time limit.

        Raises:
            Exception: what the function raised.
            AloneError: if its process was lost.
        """
        if in_group not in self._alone:
            self._alone[in_group] = self._one(default_group=in_group)
        try:
            (result,) = (
                self._alone[in_group]
                .with_options(timeout_s=trainings * self.timeout_s)
                .run(function, *args)
            )
        except WorldError as failure:
            if failure.root.exception is None:
                text = f"on one process, without other ranks: {root_cause(failure)}"
                raise AloneError(text) from failure
            raise failure.root.exception from failure
        return result

    def gpu_names(self) -> list[str]:
        """Return the names of this machine's GPUs; empty if ranks are on the CPU."""
        if self.devices.device == "cpu":
            return []
        try:
            (names,) = self.ranks(1).run(device_names)
        except WorldError:
            return []  # each case will say why
        return list(names)

    @property
    def threads(self) -> int:
        """Intra-op threads of each rank."""
        return self.devices.spec(1, self.timeout_s).threads

    def check(self, worlds: Iterable[int]) -> None:
        """Raise if the devices cannot run these worlds.

        Args:
            worlds: world sizes of the run.

        Raises:
            ValueError: names the available devices and an alternative.
        """
        raise NotImplementedError

    def not_runnable(self, world: int) -> str:
        """Return why a world of this size cannot run here; "" if it can."""
        raise NotImplementedError

    def launcher(self) -> Launcher:
        """Return the launcher field of the report's header."""
        raise NotImplementedError

    def _one(self, *, default_group: bool) -> Cluster:
        spec = Devices().spec(1, self.timeout_s)
        preload = (*spec.preload, f"{__package__}.session")
        spec = replace(spec, default_group=default_group, preload=preload)
        return self._stack.enter_context(closing(Cluster.of(spec)))

    def _make(self, world: int) -> BaseCluster:
        raise NotImplementedError


class Pool(Place):
    """Place whose ranks this process starts, as many as a scenario needs."""

    def check(self, worlds: Iterable[int]) -> None:
        """See :meth:`Place.check`."""
        way_out = "choose another --topology or --world-size"
        gpus = 0 if self.devices.device == "cpu" else visible_gpus()
        self.devices.check(max(worlds), gpus, way_out)

    def not_runnable(self, world: int) -> str:
        """See :meth:`Place.not_runnable`."""
        try:
            self.check([world])
        except UsageError as error:
            return f"not runnable here: {error}"
        return ""

    def launcher(self) -> Launcher:
        """See :meth:`Place.launcher`."""
        return Launcher(name="pool")

    def _make(self, world: int) -> BaseCluster:
        cluster = Cluster.of(self.devices.spec(world, self.timeout_s))
        return self._stack.enter_context(cluster)


class Torchrun(Place):
    """Place whose ranks torchrun started; a smaller world uses the first of them."""

    def __init__(self, devices: Devices, timeout_s: float, agent: Agent) -> None:
        super().__init__(devices, timeout_s)
        self.agent = agent

    def check(self, worlds: Iterable[int]) -> None:
        """See :meth:`Place.check`; every machine of the job is checked separately."""
        for member in self.agent.members():
            way_out = f"start with --nproc-per-node {max(1, member.gpus)}"
            self.devices.check(member.local_size, member.gpus, way_out)

    def not_runnable(self, world: int) -> str:
        """See :meth:`Place.not_runnable`."""
        n_ranks = self.agent.size
        if world <= n_ranks:
            return ""
        return f"not runnable here: needs {world} ranks, torchrun made {n_ranks}"

    def launcher(self) -> Launcher:
        """See :meth:`Place.launcher`."""
        return Launcher(
            name="torchrun",
            ranks=self.agent.size,
            hosts=self.agent.hosts,
            run=os.environ.get("TORCHELASTIC_RUN_ID", ""),
            attempt=self.agent.attempt,
        )

    def _make(self, world: int) -> BaseCluster:
        # imported here, because most sessions have no torchrun
        from ...multiprocess.elastic.agent import AgentCluster

        spec = self.devices.spec(world, self.timeout_s)
        return AgentCluster(self.agent, spec)


def place_of(devices: Devices, timeout_s: float, agent: Agent | None) -> Place:
    """Return torchrun's ranks as the place if there is an agent, else a pool."""
    if agent is None:
        return Pool(devices, timeout_s)
    return Torchrun(devices, timeout_s, agent)


_FRAME = re.compile(r'^  File "([^"]+)", line (\d+) in (.+)$', re.MULTILINE)
_NOT_THE_CALLER = re.compile("/torch/|/multiprocess/")
"""Files whose stack frames do not show which code waits."""


def waiting_place(outcome: RankOutcome) -> str:
    """Return the function and line in which a killed rank waited; "" if unknown."""
    # faulthandler writes the main thread last, its innermost frame first
    frames = _FRAME.findall(outcome.stacks.rpartition("hread 0x")[2])
    places = [
        f"{function} ({Path(file).name}:{line})"
        for file, line, function in frames
        if not _NOT_THE_CALLER.search(file)
    ]
    return next(iter(places), "")


def _waiting_places(failure: WorldError) -> str:
    """Describe where ranks waited when they were killed; "" if no place is known."""
    ranks_by_place: dict[str, list[int]] = {}
    for outcome in failure.outcomes:
        if place := waiting_place(outcome):
            ranks_by_place.setdefault(place, []).append(outcome.rank)
    places = [f"{rank_list(ranks)} in {p}" for p, ranks in ranks_by_place.items()]
    return f"; waiting: {', '.join(places)}" if places else ""


def root_cause(failure: WorldError) -> str:
    """Describe in one line why a world failed: rank, call, error, last output."""
    root = failure.root
    # a WorkloadError already names rank and call
    own = isinstance(root.exception, WorkloadError)
    text = shortened(str(root.exception) if own else root.headline, 600)
    if root.state is RankState.HUNG:
        text += _waiting_places(failure)
    # a library that aborts says why, as gloo does for ranks that send unequal sizes
    last = root.output.split("\n") if root.state in LOST else []
    last_words = [" ".join(line.split()) for line in last if line.strip()]
    if not last_words:
        return text
    return f"{text}; its last line: {shortened(last_words[-1], 300)}"
