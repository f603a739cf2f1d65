"""Bytes of any size from rank to rank over torchrun's store, signed.

torch's ``TCPStore`` drops the connection of who sends more than 8 MiB at once.

Whoever reaches its port can read and write it, and some of what crosses it is pickled:
functions, their results, exceptions. So each value bears an HMAC-SHA256 of itself and
of its key, and one that is not signed with this run's secret is refused unread.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

# Public names of torch.distributed, which does not export them to mypy.
from torch._C._distributed_c10d import PrefixStore, TCPStore

from .. import linux
from ..environment import cache_folder
from ..errors import HarnessError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CHUNK = 4 << 20
_CONNECT_S = 60.0
ACKNOWLEDGED_S = 15.0
"""So long the host of the store may acknowledge nothing before it counts as cut off."""

SECRET_VARIABLE = "GRADPARITY_SECRET"
"""Environment variable: what values are signed with; the same on all hosts of a run."""

_SHORTEST_SECRET = 16

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
    """Store ``value``, signed; who waits for ``key`` finds all of it."""
    parts = [value[at : at + _CHUNK] for at in range(0, len(value), _CHUNK)]
    for number, part in enumerate(parts):
        store.set(f"{key}/{number}", part)  # type: ignore[arg-type]  # takes bytes too
    store.set(key, f"{len(parts)} {_signature(key, value)}")


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

    Raises:
        HarnessError: It is not signed with this process's secret.
    """
    if not wait(store, key, limit_s, look):
        return None
    value = b"".join(store.get(name) for name in _parts(store, key))
    signature = store.get(key).partition(b" ")[2]
    if not hmac.compare_digest(signature, _signature(key, value).encode()):
        raise HarnessError(
            f"{key} in torchrun's store is not signed with the secret of rank "
            f"{os.environ.get('RANK', '?')}: all hosts of a run need the same file "
            f"{_secret_file()}, or the same {SECRET_VARIABLE} in their environment "
            "(`openssl rand -hex 32` makes one). If they have, somebody else writes to "
            "the store."
        )
    return value


def read_by_all(
    store: Store,
    key: str,
    readers: int,
    limit_s: float,
    look: Callable[[], None] = lambda: None,
) -> bytes | None:
    """Do as :func:`read`; the last of ``readers`` processes removes the value."""
    value = read(store, key, limit_s, look)
    if value is not None:
        with answering():
            if store.add(f"{key}/readers", 1) == readers:
                remove(store, key)
                store.delete_key(f"{key}/readers")
    return value


@answering()
def remove(store: Store, key: str) -> None:
    """Give back what :func:`put` stored under ``key``."""
    for name in (*_parts(store, key), key):
        store.delete_key(name)


def _parts(store: Store, key: str) -> list[str]:
    count = store.get(key).partition(b" ")[0]
    known = int(count) if count.isdigit() else 0  # what it is, the signature says
    return [f"{key}/{number}" for number in range(known)]


def _signature(key: str, value: bytes) -> str:
    env = os.environ
    run = env.get("TORCHELASTIC_RUN_ID"), env.get("TORCHELASTIC_RESTART_COUNT")
    # The key, too: an old value must not be given out as a new one.
    signed = b"\0".join([repr((*run, key)).encode(), value])
    return hmac.digest(_secret(), signed, "sha256").hex()


@functools.cache
def _secret() -> bytes:
    given = os.environ.get(SECRET_VARIABLE)
    if given is not None:
        if len(given) < _SHORTEST_SECRET:
            raise HarnessError(
                f"{SECRET_VARIABLE} must have at least {_SHORTEST_SECRET} characters; "
                "`openssl rand -hex 32` makes one"
            )
        return given.encode()
    path = _secret_file()
    try:
        if not path.exists():
            _make_secret(path)
        return path.read_bytes()
    except OSError as error:
        raise HarnessError(
            f"no secret can be kept in {path}: {error}; set {SECRET_VARIABLE} to the "
            "same one on all hosts (`openssl rand -hex 32` makes one)"
        ) from error


def _secret_file() -> Path:
    return cache_folder() / "secret"


def _make_secret(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # its owner's alone
        file.write(secrets.token_bytes(32))
        file.flush()
        with contextlib.suppress(FileExistsError):  # another rank was quicker
            os.link(file.name, path)


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
