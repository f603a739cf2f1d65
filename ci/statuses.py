"""Statuses of a verdict, from best to worst, and how a case's follows from them."""

from __future__ import annotations

from collections.abc import Iterable

from ..conformance import Status

__all__ = ["RANKING", "case_status", "is_worse"]

RANKING = ("pass", "skipped", "inconclusive", "fail", "error")
"""From best to worst. Skipped is worse than pass: what is not checked can be broken."""
assert set(RANKING) == {status.value for status in Status}

_OF_A_CASE = ("error", "fail", "inconclusive", "pass")


def is_worse(now: str, before: str) -> bool:
    """Whether ``now`` promises less than ``before`` did."""
    return RANKING.index(now) > RANKING.index(before)


def case_status(verdicts: Iterable[str]) -> str:
    """The status of a case with these verdicts; skipped laws do not count."""
    found = set(verdicts)
    return next((status for status in _OF_A_CASE if status in found), "inconclusive")
