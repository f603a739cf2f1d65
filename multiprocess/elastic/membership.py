"""Who of the stations is there, who is gone, and what is known of either.

Each leaves a card when it enlists, flags ``here/RANK`` when the roll is called, and its
cause under ``cause/RANK`` when it ends by an error.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import linux
from ..errors import HarnessError
from . import pulse
from . import store as mail
from .orders import Card, pack, unpack

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MEET_S = 600.0
"""How long the stations wait for each other at the start."""

ANSWER_S = 2.0
"""How long a station may take to answer the roll."""


class Roll:
    """The stations of one run, as one of them sees the others."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def enlist(self, gpus: int, local_size: int) -> None:
        """Leave this station's card."""
        agent = os.environ.get("GROUP_RANK", "0")
        card = Card(
            place=_place(),
            pid=os.getpid(),
            gpus=gpus,
            local_size=local_size,
            host=f"{agent} ({socket.gethostname()})",
        )
        mail.put(self._store, f"card/{self._rank}", pack(card))

    def cards(self, look: Callable[[], None]) -> list[Card]:
        """Every station's card, in rank order; ``look`` is called while it waits.

        Raises:
            HarnessError: One did not come.
        """
        found = []
        for rank in range(self._size):
            card = self._card(rank, MEET_S, look)
            if card is None:
                raise HarnessError(f"rank {rank} did not come within {MEET_S:g} s")
            found.append(card)
        return found

    def call(self) -> str:
        """Answer the roll and name who does not."""
        mail.flag(self._store, f"here/{self._rank}")
        until = time.monotonic() + ANSWER_S
        silent = [
            rank
            for rank in range(self._size)
            if not self._answers(rank, max(0.0, until - time.monotonic()))
        ]
        if not silent:
            return "ended by torchrun (SIGTERM) on all ranks"
        # who is known to be gone before who may be on a host that hears of it later
        found = sorted(silent, key=lambda rank: not self.is_gone(rank))
        causes = [f"rank {rank}: {self.state(rank)}" for rank in found]
        return f"{'; '.join(causes[:4])} (torchrun then ended the others)"

    def first_left(self) -> int:
        """The first station that has answered the roll."""
        return next(rank for rank in range(self._size) if self._answers(rank, 0.0))

    def confess(self, cause: str) -> None:
        """Leave the reason why this station ends."""
        mail.put(self._store, f"cause/{self._rank}", cause.encode())

    def state(self, rank: int) -> str:
        """What is known of the station of ``rank``, in words."""
        cause = mail.read(self._store, f"cause/{rank}", 0.0)
        if cause is not None:
            return cause.decode()
        if self.is_gone(rank):
            return "its process is gone"
        return "its process does not answer"

    def is_gone(self, rank: int) -> bool:
        """Whether its process has ended, as far as this machine can see."""
        card = self._card(rank, 0.0)
        if card is None or card.place != _place():
            return False  # not to be seen from here
        return linux.process_state(card.pid) in ("", "Z")

    def unheard(self, silent: Sequence[int]) -> str:
        """Say that these ranks are not heard any more, host by host."""
        by_host: dict[str, list[int]] = {}
        for rank in silent:
            card = self._card(rank, 0.0)
            by_host.setdefault(card.host if card else "?", []).append(rank)
        who = "; ".join(
            f"host {host}: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            for host, ranks in by_host.items()
        )
        return (
            f"not heard for {pulse.SILENCE_S:g} s: {who}; the link is cut, or the host "
            "is down"
        )

    def _answers(self, rank: int, limit_s: float) -> bool:
        return mail.wait(self._store, f"here/{rank}", limit_s)

    def _card(
        self, rank: int, limit_s: float, look: Callable[[], None] = lambda: None
    ) -> Card | None:
        found = mail.read(self._store, f"card/{rank}", limit_s, look)
        return None if found is None else unpack(found, Card)


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
