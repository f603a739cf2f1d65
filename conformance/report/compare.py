"""Compare two reports: verdicts and sequences by case, not dates or timings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..status import is_worse
from .records import CaseRecord, Report

__all__ = ["SEQUENCES", "Change", "Rows", "compare", "difference"]

SEQUENCES = {
    "scale": "the scale after",
    "growth": "the growth tracker after",
    "stepped": "whether the parameters changed in",
}
"""Maps each field of ``Curves`` that is compared exactly to its description."""
Rows = Sequence[Sequence[object]]
"""For each rank: a value for each step."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One difference between two reports."""

    kind: str
    """``regression``, ``fix``, ``changed``, ``new`` or ``gone``."""
    text: str
    """Description in one line."""


def compare(before: Report, after: Report) -> list[Change]:
    """Return the changes from ``before`` to ``after``, worst first."""
    old = {c.key: c for c in before.cases}
    new = {c.key: c for c in after.cases}
    changes = [_missing("gone", c) for k, c in old.items() if k not in new]
    changes += [_missing("new", c) for k, c in new.items() if k not in old]
    for key in old.keys() & new.keys():
        changes += _verdicts(old[key], new[key])
        changes += _sequences(old[key], new[key])
    order = ("regression", "gone", "changed", "fix", "new")
    return sorted(changes, key=lambda c: (order.index(c.kind), c.text))


def _missing(kind: str, case: CaseRecord) -> Change:
    return Change(kind=kind, text=f"{kind}: {case.scenario}  {case.scaler}")


def _verdicts(old: CaseRecord, new: CaseRecord) -> list[Change]:
    where = f"{new.scenario}  {new.scaler}"
    if old.problem or new.problem:
        return list(_broken(old, new, where))
    before = {v.law: v for v in old.verdicts}
    after = {v.law: v for v in new.verdicts}
    changes = [
        Change(kind="gone", text=f"gone: check {law} in {where}")
        for law in before.keys() - after.keys()
    ]
    changes += [
        Change(kind="new", text=f"new: check {law} in {where}")
        for law in after.keys() - before.keys()
    ]
    for law in before.keys() & after.keys():
        was, now = before[law], after[law]
        # Compare statuses first: if they differ, so do the messages.
        if was.status != now.status:
            kind = "regression" if is_worse(now.status, was.status) else "fix"
            text = f"{kind}: {law} {was.status} -> {now.status} in {where}: "
            changes.append(Change(kind=kind, text=text + now.message))
        elif was.message != now.message:
            text = f"changed: {law} in {where}: {was.message} -> {now.message}"
            changes.append(Change(kind="changed", text=text))
    return changes


def _broken(old: CaseRecord, new: CaseRecord, where: str) -> Iterator[Change]:
    """Yield a change if the harness broke in a case, so that no check was applied."""
    if old.status != new.status:
        kind = "regression" if is_worse(new.status, old.status) else "fix"
        text = f"{kind}: {old.status} -> {new.status} in {where}: "
        yield Change(kind=kind, text=text + (new.problem or "the harness broke before"))
    elif old.problem != new.problem:
        text = f"changed: harness in {where}: {old.problem} -> {new.problem}"
        yield Change(kind="changed", text=text)


def _sequences(old: CaseRecord, new: CaseRecord) -> Iterator[Change]:
    if old.curves is None or new.curves is None:
        return
    for name, what in SEQUENCES.items():
        text = difference(what, getattr(old.curves, name), getattr(new.curves, name))
        if text:
            where = f"{new.scenario}  {new.scaler}"
            yield Change(kind="changed", text=f"changed: {text} in {where}")


def difference(what: str, before: Rows, now: Rows) -> str:
    """Describe the first step and rank at which two runs differ; "" if none does."""
    shape, seen = [len(row) for row in before], [len(row) for row in now]
    if shape != seen:
        return f"{what} each step covers {seen} steps of the ranks, was {shape}"
    places = [
        (step, rank)
        for rank, row in enumerate(before)
        for step, value in enumerate(row)
        if value != now[rank][step]
    ]
    if not places:
        return ""
    step, rank = min(places)
    was, is_now = before[rank][step], now[rank][step]
    return f"{what} step {step} on rank {rank} is {is_now}, was {was}"
