"""Statuses, verdicts and exit codes, shared by laws, reports, commands and gates.

This module imports nothing of ours, so that reading a report needs no torch.
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
    """A report, page or stream took no more: the disk is full, for example.

    A command prints the message on one line and ends with exit code 3.
    """


@contextmanager
def as_usage(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these types into :class:`UsageError`; also a decorator.

    Only for parsing the caller's input by functions that do not know commands. Never
    judge inside it: an error there is ours, whatever its type.
    """
    try:
        yield
    except UsageError:
        raise
    except kinds as error:
        raise UsageError(str(error)) from error


class Status(StrEnum):
    """The result of one law in one run, or of a whole run."""

    PASS = "pass"
    """It was checked and holds."""
    FAIL = "fail"
    """It was checked and is broken; the finding says where."""
    INCONCLUSIVE = "inconclusive"
    """Nothing could be compared; never a pass."""
    ERROR = "error"
    """A call of the stack raised, or the harness broke: there is no verdict."""
    SKIPPED = "skipped"
    """The law does not apply here; the message says why."""


RANKING = ("pass", "skipped", "inconclusive", "fail", "error")
"""From best to worst. Skipped is worse than pass: what is not checked can be broken."""
assert set(RANKING) == set(Status)

Word = Annotated[str, Meta(pattern=f"^({'|'.join(RANKING)})$")]
"""A status as files have it."""
Count = Annotated[int, Meta(ge=0)]
Number = float | Annotated[str, Meta(pattern="^(nan|-?inf)$")]
"""A number; nan and the infinities, which JSON lacks, are words."""


def as_number(value: float) -> Number:
    """``value`` as JSON can hold it; ``float`` reads it again."""
    return value if math.isfinite(value) else str(value)


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of a law in a run, in words and numbers."""

    status: Word
    message: str
    step: Count | None = None
    ranks: tuple[Count, ...] = ()
    parameter: str | None = None
    numbers: dict[str, Number] = {}
    cause: str = ""
    """Where not all violations of a law are alike: what kind this one is, in words that
    are equal in all runs with that cause."""
    compared: Count = 0
    """Number of comparisons made."""
    not_compared: Count = 0
    """Number of comparisons that were due and could not be made."""


class Verdict(Finding, frozen=True):
    """A finding with its law: the same type in the judge, the report and the gate."""

    law: str


EXIT_CODES = {"pass": 0, "fail": 1, "error": 3, "inconclusive": 4}
"""Exit code of a command by the worst status; the same in the gate."""
RESULTS = {
    "pass": "conformant",
    "fail": "violations",
    "error": "no verdict",
    "inconclusive": "inconclusive",
}
"""The worst status of a report, in words."""
VERBS = {
    "pass": "passes",
    "fail": "fails",
    "error": "has no verdict",
    "inconclusive": "is undecided",
    "skipped": "is skipped",
}
"""Predicate of a check or a scaler with this status."""
USAGE = 2
"""Exit code of bad usage."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def worst_of(statuses: Iterable[str]) -> str:
    """The worst of ``statuses``; ``skipped`` only where there is nothing else."""
    present = set(statuses) - {Status.SKIPPED}
    # membership instead of an index: a report may hold a word that is no status
    return next((s for s in reversed(RANKING) if s in present), Status.SKIPPED.value)


def case_status(verdicts: Iterable[str]) -> str:
    """The status of a case with these verdicts; skipped laws alone prove nothing."""
    worst = worst_of(verdicts)
    return Status.INCONCLUSIVE.value if worst == Status.SKIPPED else worst


def is_worse(now: str, before: str) -> bool:
    """True if ``now`` is worse than ``before``."""
    return RANKING.index(now) > RANKING.index(before)


def plain(text: str) -> str:
    """``text`` on one line, without control characters."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def clipped(text: str, most: int) -> str:
    """``text`` on one line, cut after a whole clause if it has more characters."""
    text = plain(text)
    if len(text) <= most:
        return text
    ends = [text.rfind(end, 0, most) for end in ("; ", ". ", ": ", ", ", " ")]
    cut = next((end for end in ends if end > most // 2), most)
    return f"{text[:cut]} [{len(text) - cut} more characters in the report]"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A clause for an error that names the known word nearest to ``word``, if any."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def id_parts(text: str) -> list[str]:
    """The parts of a scenario id.

    Raises:
        UsageError: if ``text`` has not the form of one.
    """
    parts = text.split("/")
    if len(parts) not in (5, 6) or not parts[1].isdecimal():
        raise UsageError(
            f"{text!r} is not a scenario id: expected topology/world/precision/"
            "optimizer/faults[/key=value,...], for example fsdp/2/fp32/sgd/none"
        )
    return parts


def counted(number: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The text of an error for a name that is none of ``known``."""
    names = list(known)
    return (
        f"unknown {what} {name!r}: expected one of {', '.join(names)}"
        f"{did_you_mean(name, names)}"
    )


def rank_list(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"
