"""Expectations: known violations, listed in a user's TOML file.

Each entry gives the verdicts (patterns), conditions, a reason, a link and an expiry
date. An entry that no longer matches gives a note, or in strict mode a failure.
"""

from __future__ import annotations

import tomllib
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ..conformance.files import read_whole
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
    """Reason why the violation is known and accepted."""
    scaler: str = "*"
    scenario: str = "*"
    law: str = "*"
    status: str | list[str] = "fail"
    """Expected status or statuses; never ``pass``."""
    torch: str = ""
    """Versions of torch for which the entry holds, such as ``>=2.11,<2.15``; empty:
    any."""
    backend: str = ""
    """Backend for which the entry holds; empty: any."""
    world_size: int | list[int] = []
    """Numbers of ranks for which the entry holds; an empty list means any."""
    link: str = ""
    """Link to the issue that tracks the violation."""
    expires: date | None = None
    """Last day on which the entry counts; None for no end."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def name(self) -> str:
        """Patterns and reason of the entry, as written in the file."""
        patterns = {
            "scaler": self.scaler,
            "scenario": self.scenario,
            "law": self.law,
        }
        given = [f'{key} = "{each}"' for key, each in patterns.items() if each != "*"]
        return f"{', '.join(given)} ({self.reason})"

    @property
    def statuses(self) -> list[str]:
        """Expected statuses as a list."""
        return [self.status] if isinstance(self.status, str) else self.status

    def applies(self, header: Header) -> bool:
        """Return True if the conditions on torch and backend hold for a run."""
        return self.backend in ("", header.backend) and (
            not self.torch or version_holds(self.torch, header.torch)
        )

    def expired(self, today: date) -> bool:
        """Return True after the last day on which the entry counts."""
        return self.expires is not None and today > self.expires

    def matches(self, case: CaseRecord, verdict: Verdict) -> bool:
        """Return True if patterns and world size match, for any status."""
        sizes = (
            [self.world_size] if isinstance(self.world_size, int) else self.world_size
        )
        texts = (
            (case.scaler, self.scaler),
            (case.scenario, self.scenario),
            (verdict.law, self.law),
        )
        return (not sizes or case.world_size in sizes) and all(
            # Equality comes first: ids contain [ and *, which a pattern would
            # interpret.
            text == pattern or fnmatchcase(text, pattern)
            for text, pattern in texts
        )

    def expects(self, case: CaseRecord, verdict: Verdict) -> bool:
        """Return True if the entry matches this verdict and expects its status."""
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
    SpecifierSet(entry.torch)  # raises ValueError for bad input


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    expect: list[Expectation] = []


def read_expectations(path: Path) -> list[Expectation]:
    """Read a file of ``[[expect]]`` tables.

    Raises:
        ExpectationError: if the file has another format, or an entry is incomplete.
    """
    raw = read_whole(path)
    try:
        return msgspec.convert(tomllib.loads(raw.decode()), _File).expect
    except RecursionError:
        raise ExpectationError(f"{path}: nested too deeply") from None
    except (ValueError, msgspec.ValidationError) as error:
        raise ExpectationError(f"{path}: {error}") from error


def version_holds(condition: str, version: str) -> bool:
    """Return True if a version meets a condition such as ``>=2.11,<2.15``.

    Suffixes of builds (``+cpu``, ``.dev0``, ``rc1``) are ignored.
    """
    try:
        return Version(version).base_version in SpecifierSet(condition)
    except InvalidVersion:  # a report may have any text here
        return False
