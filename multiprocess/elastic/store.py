"""torchrun's store: values of any size from process to process, signed.

torch's ``TCPStore`` drops a connection over which more than 8 MiB are sent at once.

Any process that reaches its port can read and write it, and some of its values are
pickled: functions, their results, exceptions. So each value bears an HMAC-SHA256 of
itself and of its key, and one that is not signed with this run's secret is refused
unread. What need not be pickled is MessagePack, checked against its type when it is
read.
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
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch.distributed as dist

from ..environment import cache_folder
from ..errors import HarnessError
from ..rank.worker import connect

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

# Half of what a connection takes at once.
_CHUNK = 4 << 20

SECRET_VARIABLE = "GRADPARITY_SECRET"
"""Environment variable: what values are signed with; the same on all hosts of a run."""

_SHORTEST_SECRET = 16

_MIN_SLEEP_S = 0.001
_MAX_SLEEP_S = 0.05


def torchrun_store(name: str) -> SignedStore:
    """Return the store that torchrun's agents hold, below ``name`` and the attempt."""
    env = os.environ
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    # As torch's own rendezvous: the store is torchrun's where it says so, else rank 0
    # holds it.
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return SignedStore(
        connect(
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
            # A restart, which may come with another world size, begins with no keys.
            f"gradparity/{attempt}/{env['WORLD_SIZE']}/{name}",
            serves=env["RANK"] == "0" and not agent,
        )
    )


@contextmanager
def _answering() -> Iterator[None]:
    """Turn errors of the store into errors that name their cause.

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


class SignedStore:
    """A store of torch's with values of any size; raises ``HarnessError`` if gone."""

    def __init__(self, store: Store) -> None:
        self.raw = store

    @_answering()
    def put(self, key: str, value: bytes) -> None:
        """Store ``value``, signed; a reader that waits for ``key`` finds all of it."""
        # The parts first: a reader that finds the key finds all of them.
        parts = [value[at : at + _CHUNK] for at in range(0, len(value), _CHUNK)]
        for number, part in enumerate(parts):
            self.raw.set(f"{key}/{number}", part)  # type: ignore[arg-type]  # takes bytes too
        self.raw.set(key, f"{len(parts)} {_signature(key, value)}")

    @_answering()
    def set_flag(self, key: str, word: str = "") -> None:
        """Store a word, which is neither signed nor cut in parts."""
        self.raw.set(key, word)

    @_answering()
    def flag(self, key: str) -> str:
        """Return the word of a flag that is there."""
        return self.raw.get(key).decode()

    @_answering()
    def read(
        self,
        key: str,
        limit_s: float,
        check: Callable[[], None] = lambda: None,
        *,
        readers: int = 0,
    ) -> bytes | None:
        """Wait for what :meth:`put` stores under ``key``.

        Args:
            key: Under which name.
            limit_s: How long to wait.
            check: Called repeatedly while waiting; an exception ends the wait.
            readers: How many processes read it, the last of which removes it; 0 leaves
                it there.

        Returns:
            The value; None when it did not come in time.

        Raises:
            HarnessError: It is not signed with this process's secret.
        """
        if not self.wait(key, limit_s, check):
            return None
        value = b"".join(self.raw.get(name) for name in self._parts(key))
        signature = self.raw.get(key).partition(b" ")[2]
        if not hmac.compare_digest(signature, _signature(key, value).encode()):
            raise HarnessError(
                f"{key} in torchrun's store is not signed with the secret of rank "
                f"{os.environ.get('RANK', '?')}: all hosts of a run need the same file "
                f"{_secret_file()}, or the same {SECRET_VARIABLE} in their environment "
                "(`openssl rand -hex 32` makes one). If they have, another "
                "program writes to the store."
            )
        if readers and self.raw.add(f"{key}/readers", 1) == readers:
            for name in (*self._parts(key), key, f"{key}/readers"):
                self.raw.delete_key(name)
        return value

    @_answering()
    def wait(
        self, key: str, limit_s: float, check: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait until ``key`` is there; False when it did not come in time.

        Polled, because a thread in the store's own ``wait`` handles no signal.
        """
        until = time.monotonic() + limit_s
        sleep_s = _MIN_SLEEP_S
        while not self.raw.check([key]):
            check()
            if time.monotonic() >= until:
                return False
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _MAX_SLEEP_S)
        return True

    def _parts(self, key: str) -> list[str]:
        count = self.raw.get(key).partition(b" ")[0]
        # the signature shows whether it is true
        known = int(count) if count.isdigit() else 0
        return [f"{key}/{number}" for number in range(known)]


def pack(value: object) -> bytes:
    """Return what :func:`unpack` reads."""
    return msgspec.msgpack.encode(value)


def unpack(packed: bytes, kind: type[T]) -> T:
    """Return the ``kind`` of thing that was packed.

    Raises:
        HarnessError: It is something else.
    """
    try:
        return msgspec.msgpack.decode(packed, type=kind)
    except msgspec.DecodeError as error:
        raise HarnessError(
            f"a value in torchrun's store is not of type {kind}: {error}; all hosts "
            "need the same version of gradparity"
        ) from error


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
            path.parent.mkdir(parents=True, exist_ok=True)
            # Written aside and linked, so nobody reads half of it, and the first of
            # several ranks that make one wins. The file is its owner's alone.
            with tempfile.NamedTemporaryFile(dir=path.parent) as file:
                file.write(secrets.token_bytes(32))
                file.flush()
                with contextlib.suppress(FileExistsError):
                    os.link(file.name, path)
        return path.read_bytes()
    except OSError as error:
        raise HarnessError(
            f"no secret can be kept in {path}: {error}; set {SECRET_VARIABLE} to the "
            "same one on all hosts (`openssl rand -hex 32` makes one)"
        ) from error


def _secret_file() -> Path:
    return cache_folder() / "secret"
