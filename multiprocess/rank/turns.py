"""Threads that take turns: one runs until it waits for the others.

So what ranks do is the same in every run, each has the process's settings as it left
them, and it is seen at once when all that are left wait for each other.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType

import torch.distributed

from .global_state import State, put_state, taken_state

_UNWIND_S = 1.0
_DISTRIBUTED = os.path.dirname(torch.distributed.__file__) + os.sep


class Abandoned(BaseException):
    """Raised where a rank waits for what will never come."""


class Expired(Exception):
    """No thread is left that could end a wait with a limit."""


# [Note: Turns]
# One thread runs at a time, and it gives up its turn only where it waits for another
# rank. So:
# - the order of all that ranks do is the same in every run, and so is a failure;
# - settings of the process (generators, environment, streams) are swapped when the turn
#   passes, and each rank seems to have its own;
# - when no rank can go on, that is a deadlock, found at once and not by a time limit.
#   The waiting threads are then unwound, so that their `finally` blocks run.
# The price: a rank that loops without waiting keeps the turn. Only the limit ends that,
# and the thread, which cannot be unwound, ends with its process.
class RankThread:
    """One simulated rank."""

    def __init__(self, rank: int, state: State) -> None:
        self.rank = rank
        self.done = False
        self.ended_at_s = 0.0
        self.stacks = ""
        self.state = state
        """Settings of the process and generators, as this rank left them."""

        self._turn = threading.Semaphore(0)
        self._ready: Callable[[], bool] | None = None
        self._may_expire = False
        self._expired = False
        self._abandoned = False
        self.thread: threading.Thread | None = None

    def runnable(self) -> bool:
        """Whether it could go on now."""
        return not self.done and (self._ready is None or self._ready())


class Turns:
    """Runs a function on every rank, one rank at a time."""

    def __init__(self, states: Sequence[State]) -> None:
        """Make the ranks.

        Args:
            states: What :func:`taken_state` returns, for each rank at its start.
        """
        self.ranks = [RankThread(rank, state) for rank, state in enumerate(states)]
        self.current = self.ranks[0]
        self.in_time = True
        self._over = threading.Event()

    def run(self, body: Callable[[int], None], limit_s: float) -> float:
        """Run ``body(rank)`` on every rank; return when no rank can go on.

        Args:
            body: Raises nothing but :class:`Abandoned`.
            limit_s: For the rank whose turn it is, and so for all.

        Returns:
            How long it took. A rank that is not done then waits, or had its turn when
            the limit was over; its ``stacks`` say where.
        """
        began = time.monotonic()
        for rank in self.ranks:
            rank.thread = threading.Thread(
                target=self._run_rank, args=(rank, body), daemon=True
            )
            rank.thread.start()
        self.current._turn.release()
        in_time = self.in_time = self._over.wait(limit_s)
        took_s = time.monotonic() - began
        left = [rank for rank in self.ranks if not rank.done]
        frames = sys._current_frames()
        for rank in left:
            assert rank.thread is not None
            waits = rank._ready is not None
            rank.stacks = _stack(frames.get(rank.thread.ident or 0), waits)
        # Over the limit the rank whose turn it is still runs: no other may have one.
        if in_time:
            for rank in left:
                self._unwind(rank)
        return took_s

    def wait(self, ready: Callable[[], bool], *, may_expire: bool = False) -> None:
        """Have others run until ``ready``.

        Raises:
            Abandoned: That will never be.
            Expired: The same, of a wait that ``may_expire``.
        """
        me = self.current
        if me._abandoned:
            raise Abandoned
        if ready():
            return
        me._ready, me._may_expire = ready, may_expire
        me.state = taken_state()
        self._pass_on(me)
        me._turn.acquire()
        put_state(me.state)
        me._ready, me._may_expire = None, False
        if me._abandoned:
            raise Abandoned
        if me._expired:
            me._expired = False
            raise Expired

    def _run_rank(self, rank: RankThread, body: Callable[[int], None]) -> None:
        rank._turn.acquire()
        put_state(rank.state)
        try:
            body(rank.rank)
            rank.done = True
        except Abandoned:
            return  # whoever abandoned it waits for its thread
        finally:
            rank.ended_at_s = time.monotonic()
        self._pass_on(rank)

    def _pass_on(self, after: RankThread) -> None:
        start = after.rank + 1
        order = self.ranks[start:] + self.ranks[:start]
        found = next((rank for rank in order if rank.runnable()), None)
        if found is None:
            # A wait with a limit would now last until it is over: it expires at once.
            found = next((r for r in order if not r.done and r._may_expire), None)
            if found is not None:
                found._expired = True
        if found is None:
            self._over.set()
            return
        self.current = found
        found._turn.release()

    def _unwind(self, rank: RankThread) -> None:
        """Let a waiting rank's finalizers run."""
        assert rank.thread is not None
        rank._abandoned = True
        self.current = rank
        rank._turn.release()
        rank.thread.join(_UNWIND_S)


def _stack(frame: FrameType | None, waits: bool) -> str:
    """Return a stack as faulthandler writes it; of one that waits, from there on."""
    found = traceback.extract_stack(frame)[::-1] if frame is not None else []
    if waits:
        found = [f for f in found if f.filename not in (__file__, threading.__file__)]
        inside = [n for n, f in enumerate(found) if _DISTRIBUTED in f.filename]
        found = found[inside[0] :] if inside else found
    lines = [f'  File "{f.filename}", line {f.lineno} in {f.name}' for f in found]
    return "\n".join(["Thread 0x0 (most recent call first):", *lines])
