"""Derive the root cause and the victims of a failed call, by pure functions.

Error texts are not read. Each rank notes where it waits for others (``Place``), and
reports for an exception whether it came out of such a wait.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from .. import linux
from ..errors import WorldError
from ..messages import Kind, Reply
from ..outcomes import LOST, Collective, Left, Place, RankOutcome, RankState
from ..report import ended_without, find_odd_rank


@dataclass(frozen=True, kw_only=True)
class Fact:
    """Observations of one rank in one call, before they are evaluated."""

    rank: int
    reply: Reply | None = None
    exit_code: int | None = None
    ended_at_s: float = 0.0
    failed_at_s: float | None = None
    """Time of the rank's first failure, before its teardown; None if it reported no
    failure."""

    failed_parts: tuple[Reply, ...] = ()
    """Parts of the test, such as subtests, that raised although the test went on."""

    late: Reply | None = None
    """Reply of a rank that was ended with the call, after its teardown."""

    order: int = 0
    """Number of this fault, from 1, in the order in which several parents reported
    faults. Clocks of different machines cannot be compared. 0 without a fault, or if
    one parent has all ranks."""

    stopped: bool = False
    waited_s: float = 0.0
    place: Place = Place.BODY
    left_by: str = ""
    """Description of the rank that ended without its part of the collective in which
    this rank waits; else empty."""

    stacks: str = ""
    collectives: tuple[Collective, ...] = ()
    output: str = ""

    @property
    def answered(self) -> bool:
        """True if the rank has ended the call, including its teardown."""
        return self.reply is not None and not self.reply.tears_down


_DOING = {
    Place.BODY: "still running",
    Place.COLLECTIVE: "waiting in a collective",
    Place.JOINING: "making a process group",
    Place.STORE: "waiting for a key of a store",
    Place.DONE: "done, waiting for other ranks",
    Place.DEBUGGER: "in a debugger",
    Place.IMPORTING: "still importing the test",
}


def outcomes_of(facts: Sequence[Fact]) -> tuple[tuple[RankOutcome, ...], int | None]:
    """Evaluate one call.

    Returns:
        The outcome of each rank, and the rank that failed first (None: all returned).
    """
    outcomes, root = _evaluate(facts)
    if root is None or not _waited(outcomes[root], facts[root]):
        return outcomes, root
    # A part that raised, such as a subtest, may have left out a collective.
    return _evaluate(_by_failed_parts(facts))


def _evaluate(
    facts: Sequence[Fact],
) -> tuple[tuple[RankOutcome, ...], int | None]:
    """Evaluate one call like ``outcomes_of``, but ignore failed parts of the test."""
    first = [observed(fact) for fact in facts]
    lost = [_left_a_wait(fact) for fact in facts]
    waiting = _waiting(first)
    root = _root(first, facts, waiting)
    followed = root is None or root in waiting or lost[root]
    if followed and _divided(first):
        first = [_as_raised(outcome) for outcome in first]
        root = _root(first, facts, waiting)
    if root is None:
        return tuple(first), None
    # All ranks that hang wait for others: find the odd one by their collectives.
    if root in waiting:
        odd = find_odd_rank({o.rank: o.collectives for o in first})
        if odd is not None and first[odd[0]].state is RankState.HUNG:
            root, how = odd
            message = f"{first[root].message}: {how}"
            first[root] = replace(first[root], message=message)
    top = first[root]
    return tuple(_as_victim(o, top, lost[o.rank], waiting) for o in first), root


def _waited(outcome: RankOutcome, fact: Fact) -> bool:
    """Return True if a rank failed while it waited for other ranks."""
    is_hung = outcome.state is RankState.HUNG and not _stopped(outcome)
    return _left_a_wait(fact) or (is_hung and outcome.place.waits)


def _by_failed_parts(facts: Sequence[Fact]) -> list[Fact]:
    """Return the facts as if each rank had ended at its first part that raised.

    A part that raised on all ranks does not count, because it cannot explain why ranks
    differ. A part that raised in a wait for other ranks does not count either.
    """
    names = [{part.part for part in fact.failed_parts} for fact in facts]
    on_all = set.intersection(*names)
    changed = []
    for fact in facts:
        own = (p for p in fact.failed_parts if p.part not in on_all)
        part = next((p for p in own if not p.left_a_wait), None)
        if part is not None:
            value = b"" if fact.reply is None else fact.reply.value
            message = f"in {part.part}: {part.message}"
            reply = replace(part, value=value, message=message, reusable=False)
            fact = replace(fact, reply=reply, failed_at_s=part.ended_at_s)
        changed.append(fact)
    return changed


def outcomes_or_raise(facts: Sequence[Fact]) -> tuple[RankOutcome, ...]:
    """Evaluate one call; return the outcomes if all ranks returned.

    Raises:
        WorldError: At least one rank did not return.
    """
    outcomes, root = outcomes_of(facts)
    if root is not None:
        raise WorldError(outcomes, outcomes[root])
    return outcomes


def _waiting(outcomes: Sequence[RankOutcome]) -> frozenset[int]:
    """Return the ranks that hang and wait for others."""
    hung = [o for o in outcomes if o.state is RankState.HUNG and not _stopped(o)]
    # On a GPU a collective returns when it is queued, and any later line may wait for
    # it. So a rank in its body waits if another rank there has not issued the same
    # collectives.
    in_body = {o.rank: o.collectives for o in hung if not o.place.waits}
    ahead = {
        rank
        for rank, issued in in_body.items()
        for last in {call.group: call for call in issued}.values()
        if ended_without(last, in_body) is not None
    }
    return frozenset(o.rank for o in hung if o.place.waits or o.rank in ahead)


def _stopped(outcome: RankOutcome) -> bool:
    return outcome.state is RankState.HUNG and outcome.signal is not None


def _divided(outcomes: Sequence[RankOutcome]) -> bool:
    """Return True if only some ranks ended the test early, such as by a skip."""
    ways = {o.value.kind if isinstance(o.value, Left) else "" for o in outcomes}
    return len(ways) > 1


def _as_raised(outcome: RankOutcome) -> RankOutcome:
    left = outcome.value
    if not outcome.ok or not isinstance(left, Left) or not left.kind:
        return outcome
    return replace(
        outcome, state=RankState.RAISED, error_type=left.name, message=left.reason
    )


def observed(fact: Fact) -> RankOutcome:
    """Return the outcome of one rank by its own facts only.

    The rank may still be running.
    """
    blank = RankOutcome(
        rank=fact.rank,
        state=RankState.OK,
        output=fact.output,
        place=fact.place,
        stacks=fact.stacks,
        collectives=fact.collectives,
        ended_at_s=fact.ended_at_s,
    )
    if fact.late is not None and fact.late.value:
        with suppress(Exception, SystemExit):
            blank = replace(blank, late=pickle.loads(fact.late.value))
    if fact.reply is not None and fact.answered:
        return _answered(blank, fact.reply)
    code = fact.exit_code
    if code is not None and code < 0:
        name = linux.signal_name(-code)
        blank = replace(blank, state=RankState.KILLED, signal=name, message=name)
    elif code is not None:
        message = f"exit code {code}"
        if code == LOST:
            message = "its forkserver has ended (killed, or crashed)"
        blank = replace(blank, state=RankState.EXITED, exit_code=code, message=message)
    if fact.reply is not None:  # the rank had failed, and its teardown did not end
        return _answered(blank, fact.reply)
    if code is not None:
        return blank
    what = "stopped by a signal" if fact.stopped else _DOING[fact.place]
    message = f"{what} after {fact.waited_s:.1f} s"
    if fact.place is Place.IMPORTING:
        message += "; start_timeout_s limits this"
    if fact.left_by:
        message += f"; {fact.left_by}"
    return replace(
        blank,
        state=RankState.HUNG,
        signal="SIGSTOP" if fact.stopped else None,
        message=message,
    )


def _answered(blank: RankOutcome, reply: Reply) -> RankOutcome:
    blank = replace(blank, ended_at_s=reply.ended_at_s)
    if reply.kind is Kind.RAISED:
        exception = None
        if reply.exception is not None:
            # The type, text and traceback have come as text.
            with suppress(Exception, SystemExit):
                exception = pickle.loads(reply.exception)
        value = None
        if reply.value:
            with suppress(Exception, SystemExit):
                value = pickle.loads(reply.value)
        return replace(
            blank,
            state=RankState.RAISED,
            value=value,
            exception=exception,
            error_type=reply.error_type,
            message=reply.message,
            traceback=reply.traceback,
        )
    try:
        value = pickle.loads(reply.value) if reply.value else None
    except (Exception, SystemExit) as error:
        return replace(
            blank,
            state=RankState.RAISED,
            error_type=type(error).__qualname__,
            message=f"the result cannot be unpickled in the parent: {error}",
        )
    return replace(blank, value=value)


def _left_a_wait(fact: Fact) -> bool:
    return fact.reply is not None and fact.reply.left_a_wait


def _root(
    outcomes: Sequence[RankOutcome], facts: Sequence[Fact], waiting: frozenset[int]
) -> int | None:
    failed = [o for o in outcomes if not o.ok]
    hung = [o for o in failed if o.state is RankState.HUNG]
    ended = [o for o in failed if o.state is not RankState.HUNG]
    # [Note: Which rank is the root cause]
    # The rank that failed first, in the first of these groups that has a rank. Failures
    # that may be effects of another rank's fault are in later groups:
    groups = (
        # 1. stopped by a signal: a fault of another rank cannot cause that, while
        #    another rank may have failed because its wait for this one timed out;
        [o for o in hung if _stopped(o)],
        # 2. raised in its own code, exited or killed: explains those that wait for it;
        [o for o in ended if not _left_a_wait(facts[o.rank])],
        # 3. its wait for other ranks failed: an observed fault, while a rank that is
        #    still in its body was only ended with the call;
        ended,
        # 4. imports the test: the limit of the others has not begun;
        [o for o in hung if o.place is Place.IMPORTING],
        # 5. hangs in its body: explains those that wait for it in a collective;
        [o for o in hung if o.rank not in waiting],
        # 6. hangs in a collective: `outcomes_of` looks for the odd one by the records;
        [o for o in hung if o.place is not Place.DONE],
        # 7. is done with its test, and waits for the other ranks.
        hung,
    )
    for group in groups:
        if group:
            return min(group, key=lambda o: _failed_at(o, facts[o.rank])).rank
    return None


def _failed_at(outcome: RankOutcome, fact: Fact) -> tuple[int, float]:
    """Return a key that sorts ranks by the time of their first failure.

    The rank that failed first may be the last to end, if its teardown is slow.
    """
    at_s = outcome.ended_at_s if fact.failed_at_s is None else fact.failed_at_s
    return fact.order, at_s


def _as_victim(
    outcome: RankOutcome, root: RankOutcome, lost: bool, waiting: frozenset[int]
) -> RankOutcome:
    if outcome.rank == root.rank or not _suffered(outcome, root, lost, waiting):
        return outcome
    message = outcome.message
    if outcome.state is RankState.HUNG:
        message = f"{message}; killed because rank {root.rank} failed"
    return replace(outcome, state=RankState.VICTIM, message=message)


def _suffered(
    outcome: RankOutcome, root: RankOutcome, lost: bool, waiting: frozenset[int]
) -> bool:
    if outcome.state is not RankState.HUNG:
        return outcome.state is RankState.RAISED and lost
    if root.state is not RankState.HUNG:
        return not _stopped(outcome)
    if root.place is Place.IMPORTING:
        return outcome.place is not Place.IMPORTING
    if outcome.place is Place.DONE:
        return root.place is not Place.DONE
    return outcome.rank in waiting and root.rank not in waiting
