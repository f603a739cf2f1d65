"""Statuses of a verdict, from best to worst, and how a case's follows from them."""

from __future__ import annotations

from collections.abc import Iterable

from ..conformance.law import RANKING, worst_of

__all__ = ["RANKING", "case_status", "is_worse"]


def is_worse(now: str, before: str) -> bool:
    """Whether ``now`` promises less than ``before`` did."""
    return RANKING.index(now) > RANKING.index(before)


def case_status(verdicts: Iterable[str]) -> str:
    """The status of a case with these verdicts; skipped laws do not count."""
    worst = worst_of(verdicts)
    return "inconclusive" if worst == "skipped" else worst
