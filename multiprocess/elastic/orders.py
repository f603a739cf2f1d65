"""What the stations of torchrun's processes say to each other over its store.

Plain data, packed as MessagePack and checked against these types when it is read. What
cannot be plain is pickled inside: the payload of an order, a rank's result or its
exception.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ..errors import HarnessError
from ..parent.watch import Fact
from ..spec import CallOptions, WorldSpec

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the leader asks of the stations whose rank is in that world."""

    spec: WorldSpec
    options: CallOptions
    payload: bytes
    """Pickled ``(fn, args, kwargs)``."""

    world: int
    """Number of the world; one that is not known yet asks for new ranks."""

    fresh_group: bool


Finish = int
"""The leader's last order: the exit code of every station."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a station tells of itself when it enlists."""

    place: str
    """Stations with the same place can see each other's processes."""

    pid: int
    gpus: int
    """CUDA devices that it can see."""

    local_size: int
    """Ranks on its machine."""

    host: str = "?"
    """What torchrun and the kernel call its machine."""


def pack(value: Order | Finish | Card | Fact) -> bytes:
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
            f"torchrun's store holds what is no {kind}: {error}; all hosts need the "
            "same version of gradparity"
        ) from error
