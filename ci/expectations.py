"""Expectations: known violations, in a user's TOML file.

Each entry says which verdicts (patterns), where (conditions), why (reason, link) and
until when (expiry). An entry that no longer matches gives a note, or fails in strict.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from ..conformance.aliases import current_id, current_law
from ..conformance.report.records import CaseRecord, Header
from ..conformance.status import RANKING, UsageError, Verdict

__all__ = [
    "Expectation",
    "ExpectationError",
    "read_expectations",
    "version_holds",
]


class ExpectationError(UsageError):
    """A file of expectations cannot be used; the message says why and where."""


class Expectation(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """One entry of the file. Patterns are shell globs: ``*`` and ``?``."""

    reason: str
    """Why it is known to be so."""
    scaler: str = "*"
    scenario: str = "*"
    law: str = "*"
    status: str | list[str] = "fail"
    """The status or statuses that are expected; never ``pass``."""
    torch: str = ""
    """Only with this torch, for example ``>=2.11,<2.15``; empty means any."""
    backend: str = ""
    """Only with this backend; empty means any."""
    world_size: int | list[int] = []
    """Only with these numbers of ranks; an empty list means any."""
    link: str = ""
    """Where it is tracked."""
    expires: date | None = None
    """The last day on which the entry counts."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def name(self) -> str:
        """The entry in words."""
        patterns = f"{self.law} in {self.scenario}  {self.scaler}"
        return f"{patterns} ({self.reason})"

    @property
    def statuses(self) -> list[str]:
        """The expected statuses."""
        return [self.status] if isinstance(self.status, str) else self.status

    def applies(self, header: Header) -> bool:
        """Whether the conditions on torch and backend hold for a run."""
        return self.backend in ("", header.backend) and (
            not self.torch or version_holds(self.torch, header.torch)
        )

    def expired(self, today: date) -> bool:
        """Whether the last day is over."""
        return self.expires is not None and today > self.expires

    def matches(self, case: CaseRecord, verdict: Verdict) -> bool:
        """Whether patterns and world size match, for any status."""
        sizes = (
            [self.world_size] if isinstance(self.world_size, int) else self.world_size
        )
        texts = (
            (case.scaler, self.scaler),
            (case.scenario, self.scenario),
            (verdict.law, self.law),
        )
        return (not sizes or case.world_size in sizes) and all(
            # equality first: ids contain [ and *, which a pattern would interpret
            text == pattern or fnmatchcase(text, pattern)
            for text, pattern in texts
        )

    def expects(self, case: CaseRecord, verdict: Verdict) -> bool:
        """Whether the entry matches this verdict and expects its status."""
        return verdict.status in self.statuses and self.matches(case, verdict)


def _check(entry: Expectation) -> None:
    if not entry.reason.strip():
        raise ValueError("an expectation needs a reason")
    if (entry.scaler, entry.scenario, entry.law) == ("*", "*", "*"):
        raise ValueError(
            "an expectation needs a pattern: give scaler, scenario or law, or it would "
            "excuse everything"
        )
    for word in entry.statuses:
        if word == "pass" or word not in RANKING:
            raise ValueError(
                f"status {word!r} cannot be expected: choose one of "
                f"{', '.join(RANKING[1:])}"
            )
    if entry.torch:
        _clauses(entry.torch)


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    expect: list[Expectation] = []


def read_expectations(path: Path) -> list[Expectation]:
    """Read a file of ``[[expect]]`` tables.

    Raises:
        ExpectationError: if it is no such file, or an entry is incomplete.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        if isinstance(entries := raw.get("expect"), list):
            raw["expect"] = [*map(_current, entries)]
        return msgspec.convert(raw, _File).expect
    except OSError as error:
        raise ExpectationError(f"{path}: {error.strerror or error}") from error
    except (ValueError, msgspec.ValidationError) as error:
        raise ExpectationError(f"{path}: {error}") from error


def _current(entry: Any) -> Any:
    """An entry in current names."""
    # msgspec says afterwards what is wrong with an entry that is no table
    if not isinstance(entry, dict):
        return entry
    entry = {"world_size" if key == "world" else key: entry[key] for key in entry}
    for key, current in (("scenario", current_id), ("law", current_law)):
        if isinstance(entry.get(key), str):
            entry[key] = current(entry[key])
    return entry


Release = tuple[int, ...]
_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)*)")
_COMPARE: dict[str, Callable[[Release, Release], bool]] = {
    ">=": lambda have, want: have >= want,
    "<=": lambda have, want: have <= want,
    "==": lambda have, want: have == want,
    "!=": lambda have, want: have != want,
    ">": lambda have, want: have > want,
    "<": lambda have, want: have < want,
}


def version_holds(condition: str, version: str) -> bool:
    """Whether ``version`` meets every clause of ``condition``.

    Only as many numbers are compared as a clause gives: 2.13.1 meets ``==2.13`` and
    ``<=2.13``. Suffixes (``+cpu``, ``.dev0``) do not count.
    """
    # Before the `+`: digits of a local version such as +cu126 are no release.
    release = tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])
    return all(
        _COMPARE[operator](_cut(release, len(want)), want)
        for operator, want in _clauses(condition)
    )


def _cut(release: Release, length: int) -> Release:
    return (release + (0,) * length)[:length]


def _clauses(condition: str) -> list[tuple[str, Release]]:
    found = []
    for part in condition.split(","):
        clause = _CLAUSE.fullmatch(part.strip())
        if clause is None:
            raise ValueError(
                f"condition {part.strip()!r} is none: expected for example >=2.11,<2.15"
            )
        found.append((clause[1], tuple(int(n) for n in clause[2].split("."))))
    return found
