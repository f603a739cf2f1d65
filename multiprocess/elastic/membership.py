"""Agents of a run: which are present, which are gone, and why.

Each agent stores a ``Member`` record when it joins, and then sends a heartbeat once a
second. An agent that torchrun asks to end sets the flag ``here/RANK``. An agent that
fails stores its error under ``cause/RANK``.

All records together identify the run. Each record has a new random number, so agents
reject values that were signed for another run.

A broken network link gives no signal: a connection over it waits for a quarter of an
hour before it fails. So each side has its own limit:

- the leader, on the host of torchrun's store, notices that an agent that is cut off
  sends no heartbeats;
- for an agent that is cut off, the kernel closes the connection to the store if nothing
  is acknowledged (``rank.worker.connect`` sets this).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from .. import linux
from ..errors import HarnessError
from .store import SignedStore, answering, pack, unpack

if TYPE_CHECKING:
    from torch.distributed import Store

MEET_S = 600.0
"""Seconds that agents wait for each other at the start."""

ANSWER_S = 2.0
"""Seconds in which an agent must answer that it is still present."""

# As `worker.ACKNOWLEDGED_S`, so that both sides of a cut link end at the same time.
SILENCE_S = 15.0
"""Seconds without a heartbeat after which an agent counts as lost."""

_TOGETHER_S = 5.0
"""Largest time between the last heartbeats of agents that were lost together."""

_INTERVAL_S = 1.0
_MAX_BETWEEN_POLLS_S = 2.0
"""Largest time that one poll adds to the silence of an agent. If more has passed, the
leader itself was suspended."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """Record that an agent writes when it joins."""

    place: str
    """Id of the kernel and its process namespace; equal for agents that can see each
    other's processes."""

    pid: int
    gpus: int
    """Number of visible CUDA devices."""

    local_size: int
    """Number of ranks on the agent's machine."""

    host: str = "?"
    """Name of the agent's machine, from torchrun and the kernel."""

    nonce: str = ""
    """Random number of this record."""


class Membership:
    """Agents of one run, as seen by one of them."""

    def __init__(self, store: SignedStore, size: int) -> None:
        self._store = store
        self._rank = store.rank
        self._size = size
        self._member_by_rank: dict[int, Member] = {}
        self._run: SignedStore | None = None
        self._meet_until = linux.now_s() + MEET_S

    def join(self, gpus: int, local_size: int) -> None:
        """Store this agent's record."""
        node = os.environ.get("GROUP_RANK", "0")
        member = Member(
            place=_place(),
            pid=os.getpid(),
            gpus=gpus,
            local_size=local_size,
            host=f"{node} ({socket.gethostname()})",
            nonce=secrets.token_hex(16),
        )
        # This agent never reads its own record from the store.
        self._member_by_rank[self._rank] = member
        self._store.put(f"member/{self._rank}", pack(member))

    def members(self, check: Callable[[], None]) -> list[Member]:
        """Return every agent's record in rank order; call ``check`` while waiting.

        Raises:
            HarnessError: An agent did not join.
        """
        members = []
        for rank in range(self._size):
            left_s = max(ANSWER_S, self._meet_until - linux.now_s())
            member = self._member(rank, left_s, check)
            if member is None:
                raise HarnessError(
                    f"rank {rank} did not join within {MEET_S:g} s: its process has "
                    "ended, runs another program, or cannot reach torchrun's store; "
                    "see its own output"
                )
            members.append(member)
        return members

    def run_store(self, check: Callable[[], None]) -> SignedStore:
        """Return the store for values of this run; wait for every agent's record.

        Raises:
            HarnessError: An agent did not join.
        """
        if self._run is None:
            met = hashlib.sha256(pack(self.members(check)))
            self._run = self._store.of_run(met.hexdigest())
        return self._run

    def why_ended(self) -> str:
        """Post that this agent is present; describe the agents that did not post this.

        Called when torchrun has asked this process to end, because another process has
        ended.
        """
        self._store.set_flag(f"here/{self._rank}")
        until = self._meet_until = linux.now_s() + ANSWER_S
        silent = [
            rank
            for rank in range(self._size)
            if not self._is_here(rank, max(0.0, until - linux.now_s()))
        ]
        if not silent:
            return "ended by torchrun (SIGTERM) on all ranks"
        # First the agents that are known to have ended: a silent one may be on a host
        # that gets SIGTERM later.
        gone_first = sorted(silent, key=lambda rank: not self.is_gone(rank))
        causes = [f"rank {rank}: {self.state(rank)}" for rank in gone_first]
        return f"{'; '.join(causes[:4])} (torchrun then ended the others)"

    def first_left(self) -> int:
        """Return the lowest rank whose agent has posted that it is present."""
        return next(rank for rank in range(self._size) if self._is_here(rank, 0.0))

    def report_error(self, cause: str) -> None:
        """Store the reason why this agent ends."""
        # Other agents, if they have not joined by now, do not wait for this one.
        self._meet_until = min(self._meet_until, linux.now_s() + ANSWER_S)
        with suppress(HarnessError):
            store = self.run_store(lambda: None)
            store.put(f"cause/{self._rank}", cause.encode())

    def read_note(self) -> str:
        """Return the note that the leader stored; "" if there is none."""
        note = None if self._run is None else self._run.read("note", 0.0, author=0)
        return "" if note is None else note.decode()

    def state(self, rank: int) -> str:
        """Describe the state of the agent of ``rank``."""
        if self._run is not None:
            cause = self._run.read(f"cause/{rank}", 0.0, author=rank)
            if cause is not None:
                return cause.decode()
        if self.is_gone(rank):
            return "its process is gone"
        return "its process does not answer"

    def is_gone(self, rank: int) -> bool:
        """Return True if an agent's process is known to have ended.

        Only processes on this machine can be checked.
        """
        member = self._member(rank, 0.0)
        if member is None or member.place != _place():
            return False  # a process on another machine cannot be seen from here
        return linux.process_state(member.pid) in ("", "Z")

    def describe_silent(self, silent: Sequence[int]) -> str:
        """Describe ranks without heartbeats, host by host."""
        by_host: dict[str, list[int]] = {}
        for rank in silent:
            member = self._member(rank, 0.0)
            by_host.setdefault(member.host if member else "?", []).append(rank)
        which = "; ".join(
            f"host {host}: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            for host, ranks in by_host.items()
        )
        return (
            f"not heard for {SILENCE_S:g} s: {which}; the link is cut, or the host "
            "is down"
        )

    def _is_here(self, rank: int, limit_s: float) -> bool:
        return self._store.wait(f"here/{rank}", limit_s)

    def _member(
        self, rank: int, limit_s: float, check: Callable[[], None] = lambda: None
    ) -> Member | None:
        if rank not in self._member_by_rank:
            key = f"member/{rank}"
            packed_member = self._store.read(key, limit_s, check, author=rank)
            if packed_member is None:
                return None
            self._member_by_rank[rank] = unpack(packed_member, Member)
        return self._member_by_rank[rank]


def _place() -> str:
    # Containers of one machine share a kernel, but have different process namespaces.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


class Heartbeat(threading.Thread):
    """Sends an agent's heartbeats over a separate connection.

    The main connection may be blocked by a wait.
    """

    def __init__(self, store: Store, rank: int) -> None:
        super().__init__(name="gradparity-heartbeat", daemon=True)
        self._key = f"heartbeat/{rank}"
        self._store = store
        self._over = threading.Event()
        with answering():
            self._store.set(self._key, "0")  # before the leader looks for it

    def run(self) -> None:
        """Send heartbeats until stopped, or until the store is gone."""
        number = 0
        while not self._over.wait(_INTERVAL_S):
            number += 1
            try:
                self._store.set(self._key, str(number))
            except dist.DistError:
                return  # the main thread notices the end by itself

    def stop(self) -> None:
        """Stop sending heartbeats."""
        self._over.set()
        # A thread that returns from native code while Python ends aborts the process.
        self.join(ANSWER_S)


class HeartbeatMonitor:
    """Measures for the leader how long each other agent has been silent."""

    def __init__(self, store: Store, size: int) -> None:
        self._store = store
        self._keys = [f"heartbeat/{rank}" for rank in range(1, size)]
        self._heard: list[bytes] = []
        self._silent_s = [0.0] * len(self._keys)
        self._looked = linux.now_s()

    @answering()
    def silent(self) -> list[int]:
        """Return ranks whose agent sent no heartbeat for :data:`SILENCE_S`.

        Agents that are lost together are reported together: the list is empty while
        another agent may soon count as silent too.
        """
        since = linux.now_s() - self._looked
        if self._keys and since >= _INTERVAL_S and self._store.check(self._keys):
            # A look is a request to the store, so look once a second, however often
            # this is called.
            self._looked += since
            since = min(since, _MAX_BETWEEN_POLLS_S)
            before, self._heard = self._heard, self._store.multi_get(self._keys)
            for index, count in enumerate(self._heard):
                # Compare counts, since clocks of hosts differ.
                same = bool(before) and before[index] == count
                self._silent_s[index] = self._silent_s[index] + since if same else 0.0
        silent = [q for q in self._silent_s if q > SILENCE_S - _TOGETHER_S]
        if any(silent_s <= SILENCE_S for silent_s in silent):
            return []
        everyone = enumerate(self._silent_s, start=1)
        return [rank for rank, silent_s in everyone if silent_s > SILENCE_S]
