"""A station's own rank of each world: forked, watched and ended here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..messages import Kind, Meeting, Reply, Run, Start
from ..parent.context import current_context
from ..parent.rank_processes import LOST, Crew
from ..parent.watch import Fact, Others, Watch
from ..spec import WorldSpec
from . import store as mail
from .orders import Order

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class OwnRanks:
    """The ranks that are this station's: at most one of each world."""

    def __init__(self, rank: int, local_size: int, hosts: int, run: str) -> None:
        """Begin with none.

        Args:
            rank: Of this station, and of its rank in every world.
            local_size: Stations on this machine.
            hosts: Machines of the run.
            run: Prefix in torchrun's store of all that is this run's.
        """
        self._rank = rank
        self._local_rank = int(os.environ.get("LOCAL_RANK", rank))
        self._local_size = local_size
        self._one_host = hosts == 1
        self._run = run
        self._crews: dict[WorldSpec, tuple[int, Crew]] = {}

    def muster(self, order: Order, others: Others) -> Fact:
        """Have the rank ready; say so, or what became of it."""
        number, crew = self._crews.get(order.spec, (0, None))
        if number == order.world and crew is not None:
            if crew.intact():
                ready = Reply(kind=Kind.READY, ended_at_s=time.time())
                return Fact(rank=self._rank, reply=ready)
            return Fact(rank=self._rank, exit_code=crew.ranks[0].exit_code or LOST)
        self.disband(order.spec)
        crew = Crew(order.spec, (self._rank,))
        self._crews[order.spec] = order.world, crew
        start = Start(
            spec=order.spec,
            rank=self._rank,
            context=current_context(),
            meeting=self._meeting(order.world),
        )
        crew.ranks[0].send(start, order.spec.start_timeout_s)
        return self._watched(crew, order.spec.start_timeout_s, others)

    def carry_out(self, order: Order, others: Others) -> Fact:
        """Have the rank do what is ordered; say what was seen."""
        _, crew = self._crews[order.spec]
        crew.runs += 1
        run = Run(
            payload=order.payload,
            number=crew.runs,
            fresh_group=order.fresh_group,
            context=None,
        )
        crew.ranks[0].send(run, order.options.timeout_s)
        return self._watched(crew, order.options.timeout_s, others)

    def disband(self, spec: WorldSpec) -> None:
        """End the rank of that world, if there is one."""
        _, crew = self._crews.pop(spec, (0, None))
        if crew is not None:
            crew.kill()

    def end(self) -> None:
        """End the ranks of all worlds."""
        for spec in list(self._crews):
            self.disband(spec)

    def _watched(self, crew: Crew, limit_s: float, others: Others) -> Fact:
        (fact,) = Watch(crew, limit_s, crew.spec.grace_s, others).facts()
        if fact.reply is None:
            self.disband(crew.spec)  # nobody will ask for a rank that hangs
        return _on_common_clock(fact)

    def _meeting(self, world: int) -> Meeting:
        return Meeting(
            host=os.environ["MASTER_ADDR"],
            port=int(os.environ["MASTER_PORT"]),
            prefix=f"{self._run}/world{world}",
            local_rank=self._local_rank,
            local_size=self._local_size,
            one_host=self._one_host,
        )


class OthersRanks:
    """The ranks of the other stations, as far as the store tells of them."""

    def __init__(self, store: Store, key: str, check: Callable[[], None]) -> None:
        self._store = store
        self._key = key
        self._check = check
        self._failed = False

    def failed(self) -> bool:
        """Whether one of them has failed; raises when the run is over."""
        self._check()
        self._failed = self._failed or mail.wait(self._store, self._key, 0.0)
        return self._failed

    def tell(self) -> None:
        """Have them know that one of ours has failed."""
        self._failed = True
        mail.flag(self._store, self._key)


def _on_common_clock(fact: Fact) -> Fact:
    """With times that ranks of several machines have in common."""
    ahead_s = time.time() - time.monotonic()
    reply = fact.reply
    if reply is not None:
        reply = replace(reply, ended_at_s=reply.ended_at_s + ahead_s)
    return replace(fact, reply=reply, ended_at_s=fact.ended_at_s + ahead_s)
