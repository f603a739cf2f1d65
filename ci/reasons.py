"""Reason: why the gate closes, in one line and as data; outcome: the exit code."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec

from ..conformance.report import CaseRecord
from ..conformance.terminal import plain

__all__ = ["KINDS", "Outcome", "Reason", "at", "outcome_of"]


class Outcome(Enum):
    """What the gate says, with its exit code. 2, bad usage, is no outcome."""

    PASS = 0
    """Nothing that was promised is broken."""
    REGRESSION = 1
    """Something that was promised is broken."""
    INVALID = 3
    """The report cannot be believed or does not speak for the whole run."""
    INCONCLUSIVE = 4
    """Nothing is known to be broken, and what was promised is not known to hold."""

    @property
    def word(self) -> str:
        """The outcome in lower case."""
        return self.name.lower()


KINDS = {
    "invalid": Outcome.INVALID,
    "worse": Outcome.REGRESSION,
    "failing": Outcome.REGRESSION,
    "vanished": Outcome.REGRESSION,
    "too-few": Outcome.REGRESSION,
    "sequence": Outcome.REGRESSION,
    "ratio": Outcome.REGRESSION,
    "expectation": Outcome.REGRESSION,
    "undecided": Outcome.INCONCLUSIVE,
    "nothing": Outcome.INCONCLUSIVE,
    "elsewhere": Outcome.INCONCLUSIVE,
}
"""Kind of reason -> what it makes of the whole."""

_FIRST = (Outcome.INVALID, Outcome.REGRESSION, Outcome.INCONCLUSIVE)


class Reason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One cause for which the gate closes."""

    kind: str
    """A key of :data:`KINDS`."""
    text: str
    """One line in words."""
    scaler: str = ""
    scenario: str = ""
    law: str = ""
    before: str = ""
    """Status in the baseline."""
    now: str = ""
    """Status in the report."""
    step: int | None = None
    ranks: tuple[int, ...] = ()
    replay: str = ""
    """The command that shows it again."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"a reason of kind {self.kind!r}"

    @property
    def line(self) -> str:
        """Kind and words on one line, without control characters."""
        return plain(f"{self.kind}: {self.text}")


def at(case: CaseRecord) -> str:
    """Where a case is, in words that begin with its topology."""
    return f"{case.scenario}  {case.scaler}"


def outcome_of(reasons: Iterable[Reason]) -> Outcome:
    """What ``reasons`` come to: invalid before regression before inconclusive."""
    found = {KINDS[reason.kind] for reason in reasons}
    return next((each for each in _FIRST if each in found), Outcome.PASS)
