"""Statuses, verdicts and exit codes, shared by checks, reports, commands and gates.

This module imports only the standard library and msgspec, so that reading a report does
not import torch.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = [
    "EXIT_CODES",
    "INTERRUPTED",
    "RANKING",
    "RESULTS",
    "USAGE",
    "VERBS",
    "Count",
    "Finding",
    "Number",
    "Status",
    "UsageError",
    "Verdict",
    "Word",
    "WriteError",
    "as_number",
    "as_usage",
    "case_status",
    "clipped",
    "counted",
    "did_you_mean",
    "id_parts",
    "is_worse",
    "plain",
    "rank_list",
    "unknown",
    "worst_of",
]


class UsageError(ValueError):
    """The caller's request is invalid; the message says why.

    A command prints the message on one line and ends with exit code 2. Any other
    exception is a fault of the harness: traceback, exit code 3.
    """


class WriteError(Exception):
    """A report, page or stream could not be written, for example to a full disk.

    A command prints the message on one line and ends with exit code 3.
    """


@contextmanager
def as_usage(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of the given types into :class:`UsageError`; also a decorator.

    Use it only around functions that parse the caller's input. Never compare runs
    inside it: an error there is a fault of gradparity, whatever its type.
    """
    try:
        yield
    except UsageError:
        raise
    except kinds as error:
        raise UsageError(str(error)) from error


class Status(StrEnum):
    """Result of one check in one run, or of a whole run."""

    PASS = "pass"
    """The rule was checked and holds."""
    FAIL = "fail"
    """The rule was checked and is broken; the finding says where."""
    INCONCLUSIVE = "inconclusive"
    """Too little could be compared; never a pass."""
    ERROR = "error"
    """A call of the workload raised, or the harness broke: there is no verdict."""
    SKIPPED = "skipped"
    """The check does not apply; the message says why."""


RANKING = ("pass", "skipped", "inconclusive", "fail", "error")
"""Statuses from best to worst. Skipped is worse than pass, because an unchecked rule
may be broken."""
assert set(RANKING) == set(Status)

Word = Annotated[str, Meta(pattern=f"^({'|'.join(RANKING)})$")]
"""A status as it is written in files."""
Count = Annotated[int, Meta(ge=0)]
Number = float | Annotated[str, Meta(pattern="^(nan|-?inf)$")]
"""A number; nan and infinities, which JSON lacks, are strings."""


def as_number(value: float) -> Number:
    """Return a finite number as it is, and any other one as text for JSON."""
    return value if math.isfinite(value) else str(value)


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of a check in a run."""

    status: Word
    message: str
    step: Count | None = None
    ranks: tuple[Count, ...] = ()
    parameter: str | None = None
    numbers: dict[str, Number] = {}
    cause: str = ""
    """Kind of the violation, if a check has several kinds: a text that is equal in all
    runs with that cause."""
    compared: Count = 0
    """Number of comparisons made."""
    not_compared: Count = 0
    """Number of expected comparisons that could not be made."""


class Verdict(Finding, frozen=True):
    """A finding with the id of its check; used by checks, reports and the gate."""

    law: str


EXIT_CODES = {"pass": 0, "fail": 1, "error": 3, "inconclusive": 4}
"""Exit code of a command by the worst status; the same in the gate."""
RESULTS = {
    "pass": "conformant",
    "fail": "violations",
    "error": "no verdict",
    "inconclusive": "inconclusive",
}
"""Worst status of a report -> its result as text."""
VERBS = {
    "pass": "passes",
    "fail": "fails",
    "error": "has no verdict",
    "inconclusive": "is undecided",
    "skipped": "is skipped",
}
"""Status -> predicate of a check or a scaler."""
USAGE = 2
"""Exit code of bad usage."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""


def worst_of(statuses: Iterable[str]) -> str:
    """Return the worst status; ``skipped`` only if there is no other."""
    present = set(statuses) - {Status.SKIPPED}
    # Test membership: `index` would raise an error for an unknown status.
    return next((s for s in reversed(RANKING) if s in present), Status.SKIPPED.value)


def case_status(verdicts: Iterable[str]) -> str:
    """Return the status of a case; inconclusive if all its checks were skipped."""
    worst = worst_of(verdicts)
    return Status.INCONCLUSIVE.value if worst == Status.SKIPPED else worst


def is_worse(now: str, before: str) -> bool:
    """Return True if ``now`` is worse than ``before``."""
    return RANKING.index(now) > RANKING.index(before)


def plain(text: str) -> str:
    """Return the text on one line, without control characters."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def clipped(text: str, most: int) -> str:
    """Return the text on one line; cut a text longer than ``most``, and say so.

    The cut is after a clause if one ends in the second half, else after a word if
    possible. The number of characters that are left out is added.
    """
    text = plain(text)
    if len(text) <= most:
        return text
    ends = [text.rfind(end, 0, most) for end in ("; ", ". ", ": ", ", ", " ")]
    cut = next((end for end in ends if end > most // 2), most)
    return f"{text[:cut]} [{len(text) - cut} more characters in the report]"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a clause that suggests the nearest known word; "" if no word is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def id_parts(text: str) -> list[str]:
    """Return the parts of a scenario id.

    Raises:
        UsageError: if ``text`` does not have the form of an id.
    """
    parts = text.split("/")
    if len(parts) not in (5, 6) or not parts[1].isdecimal():
        raise UsageError(
            f"{text!r} is not a scenario id: expected topology/world/precision/"
            "optimizer/faults[/key=value,...], for example fsdp/2/fp32/sgd/none"
        )
    return parts


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 run`` or ``2 runs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return the error text for a name that is not in ``known``."""
    names = list(known)
    return (
        f"unknown {what} {name!r}: expected one of {', '.join(names)}"
        f"{did_you_mean(name, names)}"
    )


def rank_list(ranks: Sequence[int]) -> str:
    """Return ``rank 1`` or ``ranks 0, 2``."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"
