"""Who is still heard: each following station beats in the store, the leader listens.

A link that is cut says nothing: a connection over it waits for a quarter of an hour
before it fails. So each side has a limit of its own:

- the leader, and torchrun's store beside it, miss the beats of who is cut off;
- who is cut off has a connection to the store over which nothing is acknowledged any
  more (``mail.connect`` has the kernel give it up).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from . import store as mail

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SILENCE_S = 15.0
"""So long a station may be unheard: many beats, also on a machine that is busy."""

_TOGETHER_S = 5.0
"""So far apart the last beats may be of stations that fell silent at once."""

_BEAT_S = 1.0
_MOST_BETWEEN_LOOKS_S = 2.0
"""The leader may have slept, or have been stopped: that is nobody's silence."""


class Pulse(threading.Thread):
    """A follower's beat, by a connection of its own: the main one may be waiting."""

    def __init__(self, rank: int) -> None:
        super().__init__(name="gradparity-pulse", daemon=True)
        self._rank = rank
        self._store = mail.torchrun_store("station")
        self._over = threading.Event()
        self._beat(0)

    def run(self) -> None:
        """Beat until the end, or until nobody can hear it."""
        number = 0
        while not self._over.wait(_BEAT_S):
            number += 1
            try:
                self._beat(number)
            except dist.DistError:
                return  # the main thread finds out by itself

    def stop(self) -> None:
        """Beat no more."""
        self._over.set()

    def _beat(self, number: int) -> None:
        self._store.set(_key(self._rank), str(number))


class Listener:
    """The leader's ear."""

    def __init__(self, store: Store, size: int) -> None:
        self._store = store
        self._keys = [_key(rank) for rank in range(1, size)]
        self._heard: list[bytes] = []
        self._silent_s = [0.0] * len(self._keys)
        self._looked = time.monotonic()

    def silent(self) -> list[int]:
        """Ranks whose station has not been heard for :data:`SILENCE_S`.

        None yet, while another is about to join them: one cause is told once.
        """
        since = time.monotonic() - self._looked
        if self._keys and since >= _BEAT_S and self._store.check(self._keys):
            self._looked += since
            self._listen(min(since, _MOST_BETWEEN_LOOKS_S))
        silent = [q for q in self._silent_s if q > SILENCE_S - _TOGETHER_S]
        if any(quiet_s <= SILENCE_S for quiet_s in silent):
            return []
        quiet = enumerate(self._silent_s, start=1)
        return [rank for rank, quiet_s in quiet if quiet_s > SILENCE_S]

    def _listen(self, since: float) -> None:
        before, self._heard = self._heard, self._store.multi_get(self._keys)
        for index, beat in enumerate(self._heard):
            same = bool(before) and before[index] == beat
            self._silent_s[index] = self._silent_s[index] + since if same else 0.0


def _key(rank: int) -> str:
    return f"beat/{rank}"
