"""An agent's own rank of each world: forked, watched and ended here."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

from .. import linux
from ..messages import Context, Kind, Rendezvous, Reply
from ..outcomes import LOST
from ..parent.rank_processes import RankProcesses, current_context
from ..parent.root_cause import Fact
from ..parent.watch import OtherRanks, Watch
from ..spec import CallOptions, WorldSpec
from .store import SignedStore

MAX_WORLDS = 6
"""Largest number of worlds in which an agent keeps a rank; beyond it the agent ends
its rank in the least recently used world."""

_SENT = re.compile(r"\w*PATH|(CUDA|GLOO|MKL|NCCL|OMP|TORCH)_\w+")
"""Variables whose change is sent to the ranks of other agents. They go through
torchrun's store, which others can read, so no name here holds a password."""


@dataclass(frozen=True, kw_only=True)
class ContextChange:
    """Settings of the leader that changed since it began to lead, for all ranks.

    Only changes are sent: folders and variables may differ from host to host.
    """

    cwd: str | None = None
    path: tuple[str, ...] = ()
    """Entries added to the import path."""

    env: dict[str, str | None] = field(default_factory=dict)
    """Variables like PATH or OMP_NUM_THREADS that were set, or removed (None)."""

    modules: dict[str, str] = field(default_factory=dict)
    """Name -> file of modules whose asserts pytest rewrote."""

    @classmethod
    def between(cls, before: Context, now: Context) -> Self:
        """Return the differences of two contexts."""
        names = filter(_SENT.fullmatch, {*before.env, *now.env})
        return cls(
            cwd=None if now.cwd == before.cwd else now.cwd,
            path=tuple(entry for entry in now.path if entry not in before.path),
            env={
                name: now.env.get(name)
                for name in names
                if now.env.get(name) != before.env.get(name)
            },
            modules=now.modules,
        )

    def applied_to(self, own: Context) -> Context:
        """Return an agent's own context with the leader's changes."""
        env = {**own.env, **self.env}
        return replace(
            own,
            cwd=self.cwd or own.cwd,
            path=(*(p for p in self.path if p not in own.path), *own.path),
            env={name: value for name, value in env.items() if value is not None},
            modules=self.modules,
        )


@dataclass(frozen=True, kw_only=True)
class CallRequest:
    """Request of the leader to the agents whose rank is in a world."""

    spec: WorldSpec
    options: CallOptions
    payload: bytes
    """Pickled ``(fn, args, kwargs)``."""

    world: int
    """Id of the world, a number; a new id asks for new ranks."""

    context: ContextChange = field(default_factory=ContextChange)


class LocalRanks:
    """Ranks of this agent: at most one of each world."""

    def __init__(
        self, rank: int, local_size: int, hosts: int, run: str, env: dict[str, str]
    ) -> None:
        """Begin with no ranks.

        Args:
            rank: Rank of this agent, and of its rank process in every world.
            local_size: Number of agents on this machine.
            hosts: Number of machines of the run.
            run: Prefix of this run's keys in torchrun's store.
            env: Environment when this process became an agent. Ranks do not get
                variables that the leader sets later, unless it sends them.
        """
        self._rank = rank
        self._local_rank = int(os.environ.get("LOCAL_RANK", rank))
        self._local_size = local_size
        self._one_host = hosts == 1
        self._run = run
        self._env = env
        self._worlds: dict[int, RankProcesses] = {}
        """This agent's rank in each world, by the world's id; the least recently used
        first."""

    def start(self, request: CallRequest, others: OtherRanks) -> Fact:
        """Start the rank; return a fact that says if it is ready or how it ended."""
        spec, number = request.spec, request.world
        if (warm := self._worlds.pop(number, None)) is not None:
            self._worlds[number] = warm
            if warm.intact():
                ready = Reply(kind=Kind.READY, ended_at_s=linux.now_s())
                return Fact(rank=self._rank, reply=ready)
            return Fact(rank=self._rank, exit_code=warm.ranks[0].exit_code or LOST)
        for other in [n for n, old in self._worlds.items() if old.spec == spec]:
            self.end(other)  # the leader has replaced it
        # The leader gets no message about this. If it asks for one of these ranks, the
        # answer is that the rank is lost, and all agents make a new one.
        while len(self._worlds) >= MAX_WORLDS:
            self.end(next(iter(self._worlds)))
        processes = self._worlds[number] = RankProcesses(spec, (self._rank,))
        rendezvous = Rendezvous(
            host=os.environ["MASTER_ADDR"],
            port=int(os.environ["MASTER_PORT"]),
            prefix=f"{self._run}/world{number}",
            local_rank=self._local_rank,
            local_size=self._local_size,
            one_host=self._one_host,
        )
        processes.join(self._context(request), rendezvous)
        options = CallOptions(timeout_s=spec.start_timeout_s)
        return self._watched(number, options, others)

    def run(self, request: CallRequest, others: OtherRanks) -> Fact:
        """Run the call of a request on this rank; return what was observed."""
        context = self._context(request)
        self._worlds[request.world].call(request.payload, request.options, context)
        return self._watched(request.world, request.options, others)

    def _context(self, request: CallRequest) -> Context:
        own = replace(current_context(), env=self._env)
        return request.context.applied_to(own)

    def end(self, number: int) -> None:
        """End the rank of this world, if there is one."""
        processes = self._worlds.pop(number, None)
        if processes is not None:
            processes.kill()

    def end_all(self) -> None:
        """End the ranks of all worlds."""
        for number in list(self._worlds):
            self.end(number)

    def _watched(self, number: int, options: CallOptions, others: OtherRanks) -> Fact:
        (fact,) = Watch(self._worlds[number], options, others).facts()
        if fact.reply is None:
            self.end(number)  # a rank that hangs is not used again
        return fact


class RemoteRanks:
    """Ranks of the other agents, as observed through the store."""

    def __init__(self, store: SignedStore, key: str, check: Callable[[], None]) -> None:
        self._store = store
        self._key = key
        self._check = check
        self._failed = False

    def failed(self) -> bool:
        """Return True if another agent's rank has failed; raise if the run is over."""
        self._check()
        self._failed = self._failed or self._store.wait(self._key, 0.0)
        return self._failed

    def report_fault(self) -> int:
        """Tell other agents that this agent's rank failed.

        Returns:
            Number of this fault among the faults of all ranks, from 1.
        """
        self._failed = True
        return self._store.set_flag(self._key)
