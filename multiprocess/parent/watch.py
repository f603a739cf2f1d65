"""Watch a world until every rank has answered, or one rank certainly will not.

The parent sends the call to all ranks, and waits for their messages, exits and output
at once. The first fault starts a short grace period in which the others may end by
themselves; one deadline holds for the whole world. Ranks that are still running must
then dump their stacks. Observations are only collected here, and evaluated later.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Protocol

from .. import linux
from ..messages import Kind, Reply
from ..outcomes import Place
from ..rank.frames import is_of_harness
from ..report import (
    ended_without,
    ended_without_sending,
    render_interrupted,
)
from ..spec import CallOptions
from .rank_processes import Capture, RankProcess, RankProcesses
from .root_cause import Fact, observed

_CRASH_GRACE_S = 0.25
"""Grace period after a crash; short, because connections to a dead process break at
once."""

_POLL_S = 0.05
"""Interval at which the store is read for faults of ranks on other agents."""

_LOOK_S = 0.1
"""Interval at which ranks are examined while only some have answered, or only some have
begun the test."""

_FRAME = re.compile(r'  File "(.*)", line \d+ ')


class OtherRanks(Protocol):
    """Ranks of this world that other processes watch."""

    def failed(self) -> bool:
        """Return True if any of these ranks has failed."""

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
        self._begun: set[int] = set()
        """Ranks that have imported the test."""

        self._replies: dict[int, Reply] = {}
        self._failing: dict[int, Reply] = {}
        """Rank -> its failure, for ranks that still run their teardown. The teardown
        may never end."""
        self._failed_at_s: dict[int, float] = {}
        """Rank -> time of its first failure."""

        self._failed_parts: dict[int, list[Reply]] = {}
        """Rank -> parts of the test, such as subtests, that raised there."""

        self._order = 0
        self._left_by: dict[int, str] = {}
        """Waiting rank -> description of the rank that it waits for in vain."""

        for rank in processes.ranks:
            rank.output.show(f"rank {rank.rank}: " if options.live else None)

    def facts(self) -> tuple[Fact, ...]:
        """Wait for the end of the call; return the facts in rank order.

        An exception that interrupts the wait, such as Ctrl-C, gets a note that says
        where each rank was.
        """
        try:
            self._wait()
        except BaseException as error:
            now = [observed(fact) for fact in self._look()]
            if self._live:  # the output has been shown
                now = [replace(outcome, output="") for outcome in now]
            error.add_note(render_interrupted(now))
            raise
        left = self._unfinished()
        facts = self._look()
        if left and self._processes.has_run:  # otherwise they are still joining
            # Under torchrun, connections to ranks of other agents stay open until the
            # call is evaluated. A rank that waits on one cannot leave its function, so
            # it is not asked to.
            if self._others is not None:
                stuck = {fact.rank for fact in facts if fact.place.waits}
                left = [rank for rank in left if rank.rank not in stuck]
            self._processes.end_call(left, self._grace_s)
            # Keep the facts, and add what teardown wrote and returned.
            facts = [
                replace(
                    fact,
                    output=fact.output + self._text(rank.output),
                    late=rank.last_reply,
                )
                for rank, fact in zip(self._processes.ranks, facts, strict=True)
            ]
        return tuple(facts)

    def _look(self) -> list[Fact]:
        """Return the current facts, with the stacks of the ranks that are running."""
        ranks = self._processes.ranks
        # Look before asking for stacks, which continues a stopped rank.
        facts = [self._fact(rank) for rank in ranks]
        if left := self._unfinished():
            self._processes.dump_stacks(left)
        return [
            replace(
                fact,
                stacks=_without_harness(self._text(rank.stacks)),
                output=self._text(rank.output),
            )
            for rank, fact in zip(ranks, facts, strict=True)
        ]

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
                left_s = min(left_s, _LOOK_S)
            if self._replies and not self._left_by:
                left_s = min(left_s, _LOOK_S)
                self._look_for_waits_without_end()
            if self._failing:
                left_s = min(left_s, _LOOK_S)
                self._look_for_waits_in_teardown()
            # no descriptor becomes ready for faults of other hosts
            if self._others is not None:
                left_s = min(left_s, _POLL_S)
            self._processes.read(left_s)
            self._take()
            # A fault on another host gives our ranks the same grace as one here.
            if self._others is not None and self._others.failed():
                self._end_within(self._grace_s)

    def _take(self) -> None:
        """Evaluate the replies and ends of ranks that have been read."""
        for rank in self._processes.ranks:
            while rank.replies:
                reply = rank.replies.pop(0)
                if reply.part:
                    self._failed_parts.setdefault(rank.rank, []).append(reply)
                    continue
                if reply.kind is Kind.RAISED:
                    self._failed_at_s.setdefault(rank.rank, reply.ended_at_s)
                if reply.kind is Kind.BEGUN:
                    self._begun.add(rank.rank)
                elif reply.tears_down:
                    self._failing[rank.rank] = reply
                else:
                    self._replies[rank.rank] = reply
                    if reply.kind is Kind.RAISED:
                        self._fault(self._grace_s)
            # A rank may end after its answer without harm to this call.
            if not rank.alive and rank.rank not in self._replies:
                self._fault(min(_CRASH_GRACE_S, self._grace_s))

    def _look_for_waits_without_end(self) -> None:
        """Start the grace period if a rank waits for a rank that has ended the call."""
        ended = {rank: self._processes.collectives(rank) for rank in self._replies}
        for waiting in self._unfinished():
            call = self._processes.current_collective(waiting.rank)
            if call is None:
                continue
            lacks, without = "issuing", ended_without(call, ended)
            if call.op == "recv":
                issued = self._processes.collectives(waiting.rank)
                lacks = "sending"
                without = ended_without_sending(call, waiting.rank, issued, ended)
            if without is not None:
                text = f"rank {without} has ended without {lacks} it"
                self._left_by[waiting.rank] = text
                self._end_within(self._grace_s)

    def _look_for_waits_in_teardown(self) -> None:
        """Start the grace period if a rank that has failed waits for others."""
        for rank in self._failing.keys() - self._replies.keys():
            if self._processes.place(rank).waits:
                self._fault(self._grace_s)

    def _look_for_the_begin(self) -> None:
        """Start the clock of the call once each rank begins the test or is stopped."""
        if all(
            rank.rank in self._begun or _is_stopped(rank) for rank in self._unfinished()
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
        imports = self._prepares and rank not in self._begun
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
        return Fact(
            rank=rank.rank,
            reply=self._replies.get(rank.rank) or self._failing.get(rank.rank),
            exit_code=rank.exit_code,
            ended_at_s=rank.ended_at_s,
            failed_at_s=self._failed_at_s.get(rank.rank),
            failed_parts=tuple(self._failed_parts.get(rank.rank, ())),
            order=self._order,
            # Not of ranks with a reply: looking at them all takes as long as a call.
            stopped=rank.rank not in self._replies and _is_stopped(rank),
            waited_s=linux.now_s() - self._began,
            place=self._place(rank.rank),
            left_by=self._left_by.get(rank.rank, ""),
            collectives=self._processes.collectives(rank.rank),
        )

    @staticmethod
    def _text(capture: Capture) -> str:
        # Also read what came after the last read, or while no process read the pipe.
        capture.drain()
        return capture.take()


def _is_stopped(rank: RankProcess) -> bool:
    return rank.alive and linux.process_state(rank.pid) == "T"


def _without_harness(stacks: str) -> str:
    """Leave out the frames of the harness, which are the same in every stack."""
    lines = []
    for line in stacks.splitlines():
        frame = _FRAME.match(line)
        if frame is None or not (frame[1] == "<string>" or is_of_harness(frame[1])):
            lines.append(line)
    return "\n".join(lines)
