"""The observations of one rank in one call, which nothing has judged yet."""

from __future__ import annotations

from dataclasses import dataclass

from ..messages import Reply
from ..outcomes import Collective, Place


@dataclass(frozen=True, kw_only=True)
class Fact:
    """The observations of one rank."""

    rank: int
    reply: Reply | None = None
    exit_code: int | None = None
    ended_at_s: float = 0.0
    order: int = 0
    """Number of its fault among those that several parents have reported, from 1: the
    clocks of several machines cannot be compared."""

    stopped: bool = False
    waited_s: float = 0.0
    place: Place = Place.BODY
    left_by: int | None = None
    """A rank that has ended without the collective that this one waits for."""

    stacks: str = ""
    collectives: tuple[Collective, ...] = ()
    output: str = ""
