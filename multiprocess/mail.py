"""Bytes of any size from rank to rank over torchrun's store.

torch's ``TCPStore`` drops the connection of who sends more than 8 MiB at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

# Public names of torch.distributed, which does not export them to mypy.
from torch._C._distributed_c10d import PrefixStore, TCPStore

from . import linux
from .errors import HarnessError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CHUNK = 4 << 20
_CONNECT_S = 60.0
ACKNOWLEDGED_S = 15.0
"""So long the host of the store may acknowledge nothing before it counts as cut off."""

_SHORTEST_NAP_S = 0.001
_LONGEST_NAP_S = 0.05


def torchrun_store(name: str) -> Store:
    """Return the store that torchrun's agents hold, below ``name`` and the attempt."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return connect(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        f"gradparity/{attempt}/{os.environ['WORLD_SIZE']}/{name}",
        serves=os.environ["RANK"] == "0" and not agent,
    )


def connect(host: str, port: int, prefix: str, *, serves: bool = False) -> Store:
    """Connect to the store at ``host``, or be it."""
    limit = timedelta(seconds=_CONNECT_S)
    before = linux.sockets()
    store = TCPStore(host, port, is_master=serves, timeout=limit)
    linux.give_up_unacknowledged(ACKNOWLEDGED_S, kept=before)
    return PrefixStore(prefix, store)


@contextmanager
def answering() -> Iterator[None]:
    """Say what it means when the store does not answer.

    Raises:
        HarnessError: The process that holds it is gone, or its host is cut off.
    """
    try:
        yield
    except dist.DistError as error:
        text = (
            "torchrun's store is gone: its agent has ended, or its host is no longer "
            f"heard: {error}"
        )
        raise HarnessError(text) from error


@answering()
def put(store: Store, key: str, value: bytes) -> None:
    """Store ``value``; who waits for ``key`` finds all of it."""
    parts = [value[at : at + _CHUNK] for at in range(0, len(value), _CHUNK)]
    for number, part in enumerate(parts):
        store.set(f"{key}/{number}", part)  # type: ignore[arg-type]  # takes bytes too
    store.set(key, str(len(parts)))


@answering()
def flag(store: Store, key: str, value: str = "") -> None:
    """Store a word, which needs no parts."""
    store.set(key, value)


@answering()
def read(
    store: Store, key: str, limit_s: float, look: Callable[[], None] = lambda: None
) -> bytes | None:
    """Wait for what :func:`put` stores under ``key``.

    Args:
        store: Where.
        key: Under which name.
        limit_s: How long to wait.
        look: Called again and again meanwhile; what it raises ends the waiting.

    Returns:
        The value; None when it did not come in time.
    """
    if not wait(store, key, limit_s, look):
        return None
    return b"".join(store.get(name) for name in _parts(store, key))


@answering()
def remove(store: Store, key: str) -> None:
    """Give back what :func:`put` stored under ``key``."""
    for name in (*_parts(store, key), key):
        store.delete_key(name)


def _parts(store: Store, key: str) -> list[str]:
    return [f"{key}/{number}" for number in range(int(store.get(key)))]


@answering()
def wait(
    store: Store, key: str, limit_s: float, look: Callable[[], None] = lambda: None
) -> bool:
    """Wait until ``key`` is there; False when it did not come in time.

    Asked for again and again, because a thread in the store's own ``wait`` hears no
    signal.
    """
    until = time.monotonic() + limit_s
    nap_s = _SHORTEST_NAP_S
    while not store.check([key]):
        look()
        if time.monotonic() >= until:
            return False
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)
    return True
