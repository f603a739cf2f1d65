"""Signed values of any size in torchrun's store.

torch's ``TCPStore`` closes a connection over which more than 8 MiB are sent at once, so
large values are split.

Any process that reaches the store's port can read and write it, and some values are
pickled: functions, their results, exceptions. So each value has an HMAC-SHA256 of
everything that determines its use: attempt, prefix of the agents, value that the agents
of this run agreed on, rank of the writer, key, and the value itself. A value with
another signature is rejected unread, and a message is accepted once. Values that need
no pickle are MessagePack, checked against their type when they are read.

Values are not encrypted: do not store secrets.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch.distributed as dist

from .. import linux
from ..environment import cache_folder
from ..errors import HarnessError
from ..rank.worker import connect

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

# Half of what one connection takes at once.
_CHUNK = 4 << 20

SECRET_VARIABLE = "GRADPARITY_SECRET"
"""Environment variable with the key of the signatures; equal on all hosts of a run."""

_SHORTEST_SECRET = 16

_MIN_SLEEP_S = 0.001
_MAX_SLEEP_S = 0.05


@contextmanager
def answering() -> Iterator[None]:
    """Turn errors of the store into errors that name their cause.

    Raises:
        HarnessError: The process that holds the store is gone, or its host is cut off.
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
def torchrun_store(name: str) -> SignedStore:
    """Return torchrun's store with a prefix of ``name`` and the attempt."""
    env = os.environ
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    # A restart, possibly with another world size, begins without keys.
    prefix = f"gradparity/{attempt}/{env['WORLD_SIZE']}/{name}"
    # As in torch's own rendezvous, the environment says if torchrun serves the store;
    # if not, rank 0 does.
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = env["RANK"] == "0" and not agent
    port = int(env["MASTER_PORT"])
    raw = connect(env["MASTER_ADDR"], port, prefix, serves=serves)
    run = env.get("TORCHELASTIC_RUN_ID", "")
    return SignedStore(raw, rank=int(env["RANK"]), scope=(run, prefix))


class SignedStore:
    """A torch store with signed values of any size.

    Methods raise ``HarnessError`` if the store is gone.
    """

    def __init__(self, store: Store, *, rank: int, scope: tuple[str, ...]) -> None:
        """Wrap a store.

        Args:
            store: Any store of torch.
            rank: Rank as which this process signs.
            scope: Owner of the values; values of another scope are rejected.
        """
        self.raw = store
        self.rank = rank
        self._scope = scope
        self._taken: dict[str, int] = {}

    def of_run(self, agreed: str) -> SignedStore:
        """Return a view of the store whose values belong to one run.

        Args:
            agreed: Value that the agents of the run agreed on; part of the scope.
        """
        scope = (*self._scope, agreed)
        return SignedStore(self.raw, rank=self.rank, scope=scope)

    @answering()
    def put(self, key: str, value: bytes) -> None:
        """Store a signed value; once the key exists, all of the value can be read."""
        parts = [value[at : at + _CHUNK] for at in range(0, len(value), _CHUNK)]
        head = f"{max(0, len(parts) - 1)} {self._signature(self.rank, key, value)} "
        # Further parts first, so that a reader who finds the key finds all parts.
        for number, part in enumerate(parts[1:]):
            self._set(f"{key}/{number}", part)
        self._set(key, head.encode() + b"".join(parts[:1]))

    def put_message(self, stream: str, number: int, value: bytes) -> None:
        """Store message ``number`` of a stream, for :meth:`take`."""
        self.put(f"{stream}/{number}", value)

    @answering()
    def read(
        self,
        key: str,
        limit_s: float,
        check: Callable[[], None] = lambda: None,
        *,
        author: int,
    ) -> bytes | None:
        """Wait for a value stored by :meth:`put`, and return it.

        Args:
            key: Key of the value.
            limit_s: Longest wait.
            check: Called repeatedly while waiting; an exception ends the wait.
            author: Rank that must have signed the value.

        Returns:
            The value; None if it did not come in time.

        Raises:
            HarnessError: The signature is not that of the author, this run and this
                key.
        """
        value_and_parts = self._verified(key, limit_s, check, author)
        return None if value_and_parts is None else value_and_parts[0]

    @answering()
    def take(
        self,
        stream: str,
        number: int,
        limit_s: float,
        check: Callable[[], None] = lambda: None,
        *,
        author: int,
        readers: int = 1,
    ) -> bytes | None:
        """Read a message once; its last reader removes it.

        Args:
            stream: Name of the stream of messages.
            number: Number in the stream; larger than all that were taken before.
            limit_s: Longest wait.
            check: Called repeatedly while waiting.
            author: Rank that must have signed the message.
            readers: Number of processes that take the message.

        Returns:
            The message; None if it did not come in time.

        Raises:
            HarnessError: As for ``read``; or the number is not larger.
        """
        if number <= self._taken.get(stream, -1):
            raise HarnessError(f"{stream}/{number} was read before: it is read once")
        key = f"{stream}/{number}"
        value_and_parts = self._verified(key, limit_s, check, author)
        if value_and_parts is None:
            return None
        value, parts = value_and_parts
        self._taken[stream] = number
        if self.raw.add(f"{key}/readers", 1) == readers:
            for name in (*parts, key, f"{key}/readers"):
                self.raw.delete_key(name)
        return value

    @answering()
    def set_flag(self, key: str) -> int:
        """Set an unsigned flag.

        Returns:
            Number of times that the flag was set, including this one.
        """
        return self.raw.add(key, 1)

    @answering()
    def wait(
        self, key: str, limit_s: float, check: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait until a key exists; return False if that takes longer than ``limit_s``.

        Polls, because the store's own ``wait`` would block signal handlers.
        """
        until = linux.now_s() + limit_s
        sleep_s = _MIN_SLEEP_S
        while not self.raw.check([key]):
            check()
            if linux.now_s() >= until:
                return False
            linux.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _MAX_SLEEP_S)
        return True

    def _set(self, key: str, value: bytes) -> None:
        self.raw.set(key, value)  # type: ignore[arg-type]  # takes bytes too

    def _verified(
        self, key: str, limit_s: float, check: Callable[[], None], author: int
    ) -> tuple[bytes, list[str]] | None:
        """Return a value and the keys of its further parts; None if it did not come."""
        if not self.wait(key, limit_s, check):
            return None
        head = self.raw.get(key).split(b" ", 2)
        count, signature, value = (*head, b"", b"")[:3]
        # Four digits allow 40 GB; the signature covers the count.
        n_parts = int(count) if count.isdigit() and len(count) <= 4 else 0
        parts = [f"{key}/{number}" for number in range(n_parts)]
        value += b"".join(self.raw.get(part) for part in parts)
        expected = self._signature(author, key, value).encode()
        if not hmac.compare_digest(signature, expected):
            raise HarnessError(
                f"{key} in torchrun's store is not signed by rank {author} for this "
                f"run with the secret of rank {self.rank}: all hosts of a run need the "
                f"same file {_secret_file()}, or the same {SECRET_VARIABLE} in their "
                "environment (`openssl rand -hex 32` makes one). If they have, another "
                "program writes to the store."
            )
        return value, parts

    def _signature(self, author: int, key: str, value: bytes) -> str:
        signed = repr((self._scope, author, key)).encode() + b"\0" + value
        return hmac.digest(_secret(), signed, "sha256").hex()


def pack(value: object) -> bytes:
    """Pack a value for :func:`unpack`."""
    return msgspec.msgpack.encode(value)


def unpack(packed: bytes, kind: type[T]) -> T:
    """Return the unpacked value, which must have type ``kind``.

    Raises:
        HarnessError: The value has another type.
    """
    try:
        return msgspec.msgpack.decode(packed, type=kind)
    except msgspec.DecodeError as error:
        raise HarnessError(
            f"a value in torchrun's store is not of type {kind}: {error}; all hosts "
            "need the same version of gradparity"
        ) from error


@functools.cache
def _secret() -> bytes:
    secret = os.environ.get(SECRET_VARIABLE)
    if secret is not None:
        if len(secret) < _SHORTEST_SECRET:
            raise HarnessError(
                f"{SECRET_VARIABLE} must have at least {_SHORTEST_SECRET} characters; "
                "`openssl rand -hex 32` makes one"
            )
        return secret.encode()
    path = _secret_file()
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Written to another file and linked: nobody reads half of it, and the first
            # of several ranks wins. Only the owner can read the file.
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
