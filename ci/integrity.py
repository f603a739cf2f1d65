"""Integrity: reject a report that contradicts itself, before it is compared.

Reading a report checks its schema, its footer and its counts. The rules here detect
edits of single lines: each rule derives one field from others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ..conformance.report.records import HARNESS, CaseRecord, Curves, Report
from ..conformance.status import Status, case_status, counted
from .ratios import worst
from .reasons import at

__all__ = ["contradictions"]


def contradictions(report: Report) -> list[str]:
    """Return why a report cannot be trusted; empty for a complete, consistent one."""
    faults = [report.incomplete] if report.incomplete else []
    broken = [case for case in report.decided().cases if case.problem]
    if broken and not report.incomplete:
        first = broken[0]
        faults.append(
            "the report says that it is complete, but "
            f"{counted(len(broken), 'case')} of {len(report.cases)} have no verdict; "
            f"first {first.whose or HARNESS}: {first.problem}"
        )
    for case in report.cases:
        faults += [f"{text} in {at(case)}" for rule in _RULES for text in rule(case)]
    return faults


def _one_verdict_a_law(case: CaseRecord) -> Iterator[str]:
    for law, count in Counter(v.law for v in case.verdicts).items():
        if count > 1:
            yield f"check {law} has {count} verdicts"


def _status_follows(case: CaseRecord) -> Iterator[str]:
    statuses = {v.status for v in case.findings}
    expected = case_status(statuses)
    # A workload that cannot run a scenario: every check is skipped, with the reason.
    not_run = case.status == Status.SKIPPED and statuses <= {Status.SKIPPED}
    if case.status != expected and not not_run:
        yield f"the case has the status {case.status}, its verdicts give {expected}"


def _id_agrees(case: CaseRecord) -> Iterator[str]:
    """Check that the scenario's id agrees with the other fields of the case."""
    seen = f"{case.topology}/{case.world_size}/{case.precision}"
    # Compare with the slash, so that fsdp/2/fp16 does not match fsdp/2/fp16-params.
    if not f"{case.scenario}/".startswith(f"{seen}/"):
        yield f"the case says {seen}, but its scenario id begins otherwise"


def _ratios_are_numbers(case: CaseRecord) -> Iterator[str]:
    """Check the ratios of error to bound of a case: one for each step, none below 0.

    The largest ratio over steps must equal the largest over parameters.
    """
    curves = case.curves
    if curves is None or not curves.parity:
        return
    steps = {len(row) for row in curves.scale}
    if steps != {len(curves.parity)}:
        yield f"error / bound has {len(curves.parity)} steps, the run has more or fewer"
    ratios = [*curves.parity, *curves.parameters.values()]
    if any(float(value) < 0 for value in ratios):
        yield "an error / bound is below 0"
    elif worst(curves.parity) != worst(curves.parameters.values()):
        yield "the largest error / bound of the steps is not that of the parameters"


def _worst_tensors_agree(case: CaseRecord) -> Iterator[str]:
    """Check that the largest ratio over parameters is in the list of worst tensors."""
    if case.worst and case.curves:
        largest = max(each.ratio for each in case.worst)
        if largest != worst(case.curves.parameters.values()):
            yield "its worst tensor is not at the largest error / bound"


def _passes_are_borne_out(case: CaseRecord) -> Iterator[str]:
    """Check that no check passes if the curves of the case show its violation."""
    if case.curves is None:
        return
    passed = {v.law for v in case.verdicts if v.status == "pass"}
    for law, (shows_violation, words) in _EVIDENCE.items():
        if law in passed and shows_violation(case.curves):
            yield f"{law} passes, but {words}"


def _passes_rest_on_something(case: CaseRecord) -> Iterator[str]:
    for verdict in case.verdicts:
        if verdict.status == "pass" and not verdict.compared:
            yield f"{verdict.law} passes and compared nothing"


def _parity_is_borne_out(case: CaseRecord) -> Iterator[str]:
    """Check that no ratio is above 1 if a parity check passes and none fails."""
    statuses = {v.status for v in case.verdicts if v.law.startswith("parity.")}
    if case.curves and "pass" in statuses and not statuses & {"fail", "error"}:
        if _beyond_bound(case.curves):
            yield "parity passes, but an error is beyond its bound"


def _rows_differ(rows: Sequence[Sequence[object]]) -> bool:
    return any(row != rows[0] for row in rows)


def _beyond_bound(curves: Curves) -> bool:
    """Return True if any error is beyond its bound; nan counts too."""
    ratios = [*curves.parity, *curves.parameters.values()]
    return not all(float(value) <= 1 for value in ratios)


def _decisions_differ(curves: Curves) -> bool:
    """Return True if ranks decided differently; None is a rank without parameters."""
    steps = zip(*curves.stepped, strict=False)
    return any({True, False} <= set(step) for step in steps)


_EVIDENCE: dict[str, tuple[Callable[[Curves], bool], str]] = {
    "agreement.scale": (
        lambda curves: _rows_differ(curves.scale),
        "the scales of its ranks differ",
    ),
    "agreement.growth": (
        lambda curves: _rows_differ(curves.growth),
        "the growth trackers of its ranks differ",
    ),
    "agreement.skip": (
        _decisions_differ,
        "a step was taken by some ranks and skipped by others",
    ),
}
"""Id of a check -> (function that returns True if curves violate it, message)."""

_RULES: tuple[Callable[[CaseRecord], Iterator[str]], ...] = (
    _one_verdict_a_law,
    _status_follows,
    _id_agrees,
    _ratios_are_numbers,
    _worst_tensors_agree,
    _passes_are_borne_out,
    _passes_rest_on_something,
    _parity_is_borne_out,
)
