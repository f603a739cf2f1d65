"""Watch a world until every rank has answered, or one certainly will not.

The parent sends the call to all ranks, and waits for their messages, exits and output
at once. The first fault starts a short grace period in which the others may end by
themselves; one deadline holds for the whole world. Ranks that are still running must
then dump their stacks. Observations are only collected here, and evaluated later.
"""

from __future__ import annotations

import math
import re
import selectors
from dataclasses import replace
from typing import Protocol

from .. import linux
from ..messages import Kind, Reply
from ..outcomes import Place
from ..report import ended_without, render_interrupted
from ..spec import CallOptions
from .rank_processes import RankProcess, RankProcesses
from .root_cause import Fact, observed

_CRASH_GRACE_S = 0.25
"""Grace period after a crash. It is short: connections to a dead process break at
once."""

_POLL_S = 0.05
"""Interval at which the store is read for faults of ranks that others watch."""

_LOOK_S = 0.1
"""Interval at which each rank's ``Place`` is read while only some have answered."""

_BEGIN_POLL_S = 0.02
"""Interval of the check that all ranks have imported a test and started it."""

_HARNESS_FRAME = re.compile(
    r'  File "(<string>|.*/multiprocess/rank/(worker|forkserver|endings|unittests)\.py'
    r'|.*/multiprocess/pytest_plugin/\w+\.py|.*/_pytest/\w+\.py|.*/pluggy/\w+\.py)"'
    r", line \d+ "
)
"""Frames below the function under test; equal in every stack, so not shown."""


class OtherRanks(Protocol):
    """Ranks of this world that other processes watch."""

    def failed(self) -> bool:
        """Return True if any rank has failed."""

    def report_fault(self) -> int:
        """Report to the other agents that one of this process's ranks has failed.

        Returns:
            Number of this fault among the faults of all ranks, from 1.
        """


class Watch:
    """Observes one call on the ranks of a world."""

    def __init__(
        self,
        processes: RankProcesses,
        options: CallOptions,
        others: OtherRanks | None = None,
    ) -> None:
        spec = processes.spec
        self._processes = processes
        self._others = others
        self._limit_s = options.timeout_s
        self._prepares = options.is_test
        self._live = options.live
        self._began = linux.now_s()
        self._until = self._began + (
            spec.start_timeout_s if self._prepares else self._limit_s
        )
        self._grace_until = math.inf
        """End of the grace period; known once a rank has failed."""
        self._grace_s = spec.grace_s
        self._replies: dict[int, Reply] = {}
        self._failing: dict[int, Reply] = {}
        """Rank -> failure, while it runs its teardown, which may never end."""
        self._stopped: set[int] = set()
        self._order = 0
        self._left_by: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        for rank in processes.ranks:
            rank.output.show(f"rank {rank.rank}: " if options.live else None)
            writes = selectors.EVENT_WRITE if rank.outbox.pending else 0
            self._selector.register(rank.sock, selectors.EVENT_READ | writes, rank)
            # Output, too, because a rank with a full pipe waits for a reader and seems
            # to hang.
            for fd in (rank.exit_fd, rank.output.fd):
                self._selector.register(fd, selectors.EVENT_READ, rank)

    def facts(self) -> tuple[Fact, ...]:
        """Wait for the end of the call; return the facts in rank order.

        An exception that interrupts the wait, such as Ctrl-C, gets a note that says
        where each rank was.
        """
        with self._selector:
            try:
                self._wait()
            except BaseException as error:
                now = [observed(fact) for fact in self._look(self._unfinished())]
                if self._live:  # without live ranks, the output has been shown
                    now = [replace(outcome, output="") for outcome in now]
                error.add_note(render_interrupted(now))
                raise
        left = self._unfinished()
        facts = self._look(left)
        if left and self._processes.runs:  # ranks that do not run yet are still joining
            # Under torchrun, connections to ranks of other agents stay open until the
            # call is evaluated. A rank that waits on one cannot leave its function, so
            # it is not asked to.
            able = self._others is None
            left = [r for r in left if able or not self._places[r.rank].waits]
            self._processes.end_call(left, self._grace_s)
            # Keep the facts, and add what teardown wrote.
            facts = [
                replace(fact, output=fact.output + self._output(rank))
                for rank, fact in zip(self._processes.ranks, facts, strict=True)
            ]
        return tuple(facts)

    def _look(self, left: list[RankProcess]) -> list[Fact]:
        ranks = self._processes.ranks
        self._places = {r.rank: self._place(r.rank) for r in ranks}
        if left:
            # Look before asking for stacks, which continues a stopped rank.
            self._stopped = {rank.rank for rank in left if _is_stopped(rank)}
            self._processes.dump_stacks(left)
        return [self._fact(rank) for rank in ranks]

    def _wait(self) -> None:
        while self._unfinished():
            if self._prepares:
                self._look_for_the_begin()
            left_s = min(self._until, self._grace_until) - linux.now_s()
            if left_s <= 0:
                if self._debugs():
                    self._until = self._grace_until = linux.now_s() + self._grace_s
                    continue
                return
            if self._prepares:
                left_s = min(left_s, _BEGIN_POLL_S)
            if self._replies and not self._left_by:
                left_s = min(left_s, _LOOK_S)
                self._look_for_waits_without_end()
            if self._failing:
                left_s = min(left_s, _LOOK_S)
                self._look_for_waits_in_teardown()
            # no descriptor becomes ready for faults of other hosts
            if self._others is not None:
                left_s = min(left_s, _POLL_S)
            for key, events in self._selector.select(left_s):
                if events & selectors.EVENT_WRITE:
                    self._send(key)
                if events & selectors.EVENT_READ:
                    self._take(key)
            # A fault on another host gives our ranks the same grace as one here.
            if self._others is not None and self._others.failed():
                self._end_within(self._grace_s)

    def _send(self, key: selectors.SelectorKey) -> None:
        rank: RankProcess = key.data
        rank.outbox.flush()
        if not rank.outbox.pending:
            self._selector.modify(rank.sock, selectors.EVENT_READ, rank)

    def _take(self, key: selectors.SelectorKey) -> None:
        rank: RankProcess = key.data
        if key.fd == rank.exit_fd:
            self._read_reply(rank)  # the rank may have answered before it ended
            rank.read_exit()
            self._selector.unregister(rank.exit_fd)
            # A rank may end after its answer without harm to this call.
            if rank.rank not in self._replies:
                self._fault(min(_CRASH_GRACE_S, self._grace_s))
        elif key.fd == rank.output.fd:
            # the rank has closed it, so it would stay ready
            if not rank.output.drain():
                self._selector.unregister(key.fd)
        elif not self._read_reply(rank):
            self._selector.unregister(key.fd)

    def _read_reply(self, rank: RankProcess) -> bool:
        for reply in rank.inbox.poll():
            if reply.tears_down:
                self._failing[rank.rank] = reply
                continue
            self._replies[rank.rank] = reply
            if reply.kind is Kind.RAISED:
                self._fault(self._grace_s)
        return not rank.inbox.closed

    def _look_for_waits_without_end(self) -> None:
        """Start the grace period if a rank waits for a rank that has ended the call."""
        ended = {rank: self._processes.collectives(rank) for rank in self._replies}
        for waiting in self._unfinished():
            call = self._processes.current_collective(waiting.rank)
            without = None if call is None else ended_without(call, ended)
            if without is not None:
                self._left_by[waiting.rank] = without
                self._end_within(self._grace_s)

    def _look_for_waits_in_teardown(self) -> None:
        """Start the grace period if a rank that has failed waits for others."""
        for rank in self._failing.keys() - self._replies.keys():
            if self._processes.place(rank).waits:
                self._fault(self._grace_s)

    def _look_for_the_begin(self) -> None:
        """Start the clock of the call once all ranks are prepared or stopped."""
        if all(
            self._processes.has_begun(rank.rank) or _is_stopped(rank)
            for rank in self._unfinished()
        ):
            self._prepares = False
            self._began = linux.now_s()
            self._until = self._began + self._limit_s

    def _fault(self, grace_s: float) -> None:
        self._end_within(grace_s)
        if self._others is not None:
            self._order = self._order or self._others.report_fault()

    def _end_within(self, grace_s: float) -> None:
        self._grace_until = min(self._grace_until, linux.now_s() + grace_s)

    def _place(self, rank: int) -> Place:
        place = self._processes.place(rank)
        imports = self._prepares and not self._processes.has_begun(rank)
        return Place.IMPORTING if imports and place is Place.BODY else place

    def _debugs(self) -> bool:
        """Return True while a user debugs a rank."""
        ranks = self._unfinished()
        return any(self._processes.place(r.rank) is Place.DEBUGGER for r in ranks)

    def _unfinished(self) -> list[RankProcess]:
        return [
            rank
            for rank in self._processes.ranks
            if rank.alive and rank.rank not in self._replies
        ]

    def _fact(self, rank: RankProcess) -> Fact:
        rank.stacks.drain()
        return Fact(
            rank=rank.rank,
            reply=self._replies.get(rank.rank) or self._failing.get(rank.rank),
            exit_code=rank.exit_code,
            ended_at_s=rank.ended_at_s,
            order=self._order,
            stopped=rank.rank in self._stopped,
            waited_s=linux.now_s() - self._began,
            place=self._places[rank.rank],
            left_by=self._left_by.get(rank.rank),
            stacks=_without_harness(rank.stacks.take()),
            collectives=self._processes.collectives(rank.rank),
            output=self._output(rank),
        )

    @staticmethod
    def _output(rank: RankProcess) -> str:
        # Also read what came after the last read, or while no process read the pipe.
        rank.output.drain()
        return rank.output.take()


def _is_stopped(rank: RankProcess) -> bool:
    return linux.process_state(rank.pid) == "T"


def _without_harness(stacks: str) -> str:
    lines = stacks.splitlines()
    return "\n".join(line for line in lines if not _HARNESS_FRAME.match(line))
