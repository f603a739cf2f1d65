"""What the stations of torchrun's processes say to each other over its store."""

from __future__ import annotations

from dataclasses import dataclass

from .spec import CallOptions, WorldSpec


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


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The leader's last order."""

    code: int
    """Exit code of every station."""


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
