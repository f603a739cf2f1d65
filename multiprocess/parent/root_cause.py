"""Root cause and victims: from facts to outcomes, pure functions."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from .. import linux
from ..errors import WorldFailure
from ..messages import Kind, Reply
from ..outcomes import RankOutcome, RankState
from ..report import find_odd_rank
from .watch import Fact

# What gloo, the store and NCCL say of a connection that broke. gloo raises a plain
# RuntimeError, so only the text tells it from the rank's own error.
_LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|closed by peer"
    r"|broken pipe|socket (closed|timeout)|recvvalue failed|sendbytes failed"
    r"|remote process exited|connectfullmesh failed|no error message from remote",
    re.IGNORECASE,
)
_RAISED = re.compile(r"^\s*(RuntimeError|torch\.distributed\.\S+): ", re.MULTILINE)
"""Where a traceback names an exception of torch, also one that led to another."""
_IN_TORCH = re.compile(
    r'File "[^"]*/(torch/(distributed|_ops|utils/_contextlib)'
    r"|multiprocess/rank/flight_recorder\.py)"  # around methods of a group, and waits
)
_AT_THE_END = re.compile(r'/multiprocess/rank/world\.py", line \d+ in all_agree$')
"""A rank is done with its test and waits for what the others say of theirs."""

_FIRST_FRAME = re.compile(r'^  File "[^"]+", line \d+ in .*$', re.MULTILINE)


def outcomes_of(facts: Sequence[Fact]) -> tuple[tuple[RankOutcome, ...], int | None]:
    """Judge one call.

    Returns:
        One outcome per rank, and the rank that failed first (None: all returned).
    """
    first = [_outcome(fact) for fact in facts]
    root = _root(first)
    if root is None:
        return tuple(first), None
    # All ranks that hang wait in a collective: find the odd one.
    if waits_in_collective(first[root].stacks) and not _stopped(first[root]):
        found = find_odd_rank({o.rank: o.collectives for o in first})
        if found is not None and _hangs(first[found[0]]):
            root, how = found
            message = f"{first[root].message}: {how}"
            first[root] = replace(first[root], message=message)
    return tuple(_as_victim(o, first[root]) for o in first), root


def outcomes_or_raise(facts: Sequence[Fact]) -> tuple[RankOutcome, ...]:
    """Judge one call; return every rank's outcome if all ranks returned.

    Raises:
        WorldFailure: They did not.
    """
    outcomes, root = outcomes_of(facts)
    if root is not None:
        raise WorldFailure(outcomes, outcomes[root])
    return outcomes


def waits_in_collective(stacks: str) -> bool:
    """Whether dumped stacks show a main thread inside ``torch.distributed``."""
    return _IN_TORCH.search(_innermost_frame(stacks)) is not None


def _is_done(stacks: str) -> bool:
    return _AT_THE_END.search(_innermost_frame(stacks)) is not None


def _hangs(outcome: RankOutcome) -> bool:
    return outcome.state is RankState.HUNG and not _is_done(outcome.stacks)


def _waits_for_others(outcome: RankOutcome) -> bool:
    if _stopped(outcome):
        return False
    return waits_in_collective(outcome.stacks) or _is_done(outcome.stacks)


def _stopped(outcome: RankOutcome) -> bool:
    return outcome.state is RankState.HUNG and outcome.signal is not None


def _innermost_frame(stacks: str) -> str:
    # faulthandler writes the main thread last, as "Thread 0x" or "Current thread 0x".
    main_thread = stacks.rpartition("hread 0x")[2]
    frame = _FIRST_FRAME.search(main_thread)
    return "" if frame is None else frame.group()


def lost_peer(outcome: RankOutcome) -> bool:
    """Whether a rank raised only because its connection to another one broke.

    What it raised may be torch's error or one that was raised because of it.
    """
    if outcome.state is not RankState.RAISED:
        return False
    text = f"{outcome.error_type}: {outcome.message}\n{outcome.traceback or ''}"
    raised = _RAISED.split(text)[2::2]  # what follows each name, up to the next one
    # Without the frames: a line of a test's code may have such words.
    return any(_LOST_PEER.search(part.split("\n  File ")[0]) for part in raised)


def _outcome(fact: Fact) -> RankOutcome:
    blank = RankOutcome(
        rank=fact.rank,
        state=RankState.OK,
        output=fact.output,
        stacks=fact.stacks,
        collectives=fact.collectives,
        ended_at_s=fact.ended_at_s,
    )
    if fact.reply is not None:
        return _answered(blank, fact.reply)
    code = fact.exit_code
    if code is not None and code < 0:
        name = linux.signal_name(-code)
        return replace(blank, state=RankState.KILLED, signal=name, message=name)
    if code is not None:
        message = f"exit code {code}"
        return replace(blank, state=RankState.EXITED, exit_code=code, message=message)
    what = "still running"
    if fact.stopped:
        what = "stopped by a signal"
    elif waits_in_collective(fact.stacks):
        what = "waiting in a collective"
    elif _is_done(fact.stacks):
        what = "done, waiting for the others to be"
    return replace(
        blank,
        state=RankState.HUNG,
        signal="SIGSTOP" if fact.stopped else None,
        message=f"{what} after {fact.waited_s:.1f} s",
    )


def _answered(blank: RankOutcome, reply: Reply) -> RankOutcome:
    blank = replace(blank, ended_at_s=reply.ended_at_s, took_s=reply.took_s)
    if reply.kind is Kind.RAISED:
        exception = None
        if reply.exception is not None:
            # Its type, text and traceback have come as text.
            with suppress(Exception):
                exception = pickle.loads(reply.exception)
        return replace(
            blank,
            state=RankState.RAISED,
            exception=exception,
            error_type=reply.error_type,
            message=reply.message,
            traceback=reply.traceback,
        )
    try:
        value = pickle.loads(reply.value) if reply.value else None
    except Exception as error:
        return replace(
            blank,
            state=RankState.RAISED,
            error_type=type(error).__qualname__,
            message=f"the result cannot be unpickled in the parent: {error}",
        )
    return replace(blank, value=value)


def _root(outcomes: Sequence[RankOutcome]) -> int | None:
    failed = [o for o in outcomes if not o.ok]
    hung = [o for o in failed if o.state is RankState.HUNG]
    ended = [o for o in failed if o.state is not RankState.HUNG]
    own = [o for o in ended if not lost_peer(o)]
    stopped = [o for o in hung if _stopped(o)]
    stuck = [o for o in hung if not _waits_for_others(o)]
    late = [o for o in hung if _hangs(o)]
    # [Note: Which rank is the root cause]
    # The first group with a rank in it, and in that the rank that ended first. What can
    # be the effect of another rank's fault comes after what cannot:
    # 1. stopped by a signal: no fault of another rank does that, while the error of
    #    another may be that it has waited long enough for this one;
    # 2. raised, exited or killed by itself: explains the ranks that waited for it;
    # 3. hangs outside of a collective: explains those that wait inside of one;
    # 4. ended since a connection broke: only where nothing above explains the break;
    # 5. hangs in a collective: `outcomes_of` then looks for the odd one by the records;
    # 6. is done with its test, and waits for the others to say so.
    for group in (stopped, own, stuck, ended, late, hung):  # the first with a rank
        if group:
            return min(group, key=lambda o: o.ended_at_s).rank
    return None


def _as_victim(outcome: RankOutcome, root: RankOutcome) -> RankOutcome:
    if outcome.rank == root.rank or not _suffered(outcome, root):
        return outcome
    message = outcome.message
    if outcome.state is RankState.HUNG:
        message = f"{message}; killed because rank {root.rank} failed"
    return replace(outcome, state=RankState.VICTIM, message=message)


def _suffered(outcome: RankOutcome, root: RankOutcome) -> bool:
    if outcome.state is not RankState.HUNG:
        return lost_peer(outcome)
    if root.state is not RankState.HUNG:
        return True
    if _is_done(outcome.stacks):
        return not _is_done(root.stacks)
    return _waits_for_others(outcome) and not _waits_for_others(root)
