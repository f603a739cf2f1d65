"""Check a report against a baseline, case by case, by pure functions.

Verdicts of the report are compared directly. Each other comparison becomes a verdict
whose id begins with ``baseline.``, so that an expectation can name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..conformance.report.compare import SEQUENCES, Rows, difference
from ..conformance.report.records import CaseRecord, Header, Report
from ..conformance.status import VERBS, Number, Status, Verdict, counted, is_worse
from .baseline import Baseline, BaselineCase, Provenance
from .ratios import Spread, limit, worst
from .reasons import Reason, at, reason_of

__all__ = [
    "DECIDED",
    "FAILURES",
    "Checked",
    "check_cases",
    "check_vanished",
    "check_whole",
]

DECIDED = "baseline.decided"
"""Id of the rule that at least one check of a new case is not skipped."""


FAILURES = ("fail", "error")
"""Statuses that a baseline contains only if a user accepted them."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A verdict with its case; if it fails the gate, also the reason."""

    case: CaseRecord
    verdict: Verdict
    reason: Reason | None
    better: bool = False
    """True if the verdict is better than in the baseline."""
    known: bool = False
    """True if the verdict is not a pass, but no worse than in the baseline."""


def check_cases(report: Report, baseline: Baseline | None) -> Iterator[Checked]:
    """Check the verdicts, sequences and ratios of each case of a report.

    A case that is not in the baseline must decide at least one check; its sequences and
    ratios are not checked.
    """
    recorded = {c.key: c for c in baseline.cases} if baseline else {}
    for case in report.cases:
        old = recorded.get(case.key)
        for verdict in case.verdicts:
            yield _verdict(case, verdict, old)
        if old is not None:
            yield from _numbers(case, old)
        else:
            yield from _decides(case)


def _verdict(case: CaseRecord, verdict: Verdict, old: BaselineCase | None) -> Checked:
    before = old.exact.laws.get(verdict.law, "") if old else ""
    reason = _reason(case, verdict, before, known=old is not None)
    return Checked(
        case=case,
        verdict=verdict,
        reason=reason,
        better=bool(before) and is_worse(before, verdict.status),
        known=reason is None and verdict.status in (*FAILURES, "inconclusive"),
    )


def _reason(
    case: CaseRecord, verdict: Verdict, before: str, *, known: bool
) -> Reason | None:
    """Return why a verdict fails the gate, or None.

    If the case is new, the check must pass or skip. If the case is ``known`` (in the
    baseline) and the check is not, the check must pass. Otherwise a later change from
    pass to skipped would not be noticed.
    """
    now = verdict.status
    if not is_worse(now, before or ("pass" if known else "skipped")):
        return None
    kind = "worse" if before else "failing"
    change = f"{before} -> {now}" if before else VERBS[now]
    if not before and now == "skipped":
        kind, change = "undecided", "is skipped and missing in the baseline,"
    kind = "undecided" if now == "inconclusive" else kind
    text = f"{verdict.law} {change} in {at(case)}: {_step(verdict)}{verdict.message}"
    return reason_of(kind, case, verdict, text, before)


def _decides(case: CaseRecord) -> Iterator[Checked]:
    """Yield a failure if all checks of a new case were skipped.

    Inconclusive and failed checks have their own reasons. A scenario that the workload
    cannot run is accepted.
    """
    if case.status != "skipped" and {v.status for v in case.verdicts} <= {"skipped"}:
        why = case.verdicts[0].message if case.verdicts else "it has no verdicts"
        text = f"no check was decided: {why}"
        verdict = Verdict(law=DECIDED, status=Status.INCONCLUSIVE, message=text)
        yield Checked(
            case=case, verdict=verdict, reason=reason_of("undecided", case, verdict)
        )


def _step(verdict: Verdict) -> str:
    """Return the prefix ``step N: ``, or "" if the message names the step already."""
    words = f"step {verdict.step}: "
    is_said = verdict.step is None or verdict.message.startswith(words)
    return "" if is_said else words


def _numbers(case: CaseRecord, old: BaselineCase) -> Iterator[Checked]:
    """Check sequences, counts and ratios of a case.

    A case that failed in the baseline and now has another status is not checked.
    """
    # The cure of a failure may change the numbers of its case.
    if old.exact.status in FAILURES and case.status != old.exact.status:
        return
    for law, (kind, check) in _NUMBERS.items():
        text = check(case, old)
        status = Status.FAIL if text else Status.PASS
        verdict = Verdict(law=law, status=status, message=text)
        yield Checked(
            case=case,
            verdict=verdict,
            reason=reason_of(kind, case, verdict) if text else None,
        )


def _scale(case: CaseRecord, old: BaselineCase) -> str:
    return _differs("scale", old.exact.scale, case)


def _skip(case: CaseRecord, old: BaselineCase) -> str:
    return _differs("stepped", old.exact.stepped, case)


def _differs(name: str, before: Rows | None, case: CaseRecord) -> str:
    """Describe the first difference of a sequence from the baseline; "" if equal."""
    if before is None:
        return ""
    if case.curves is None:
        return f"{SEQUENCES[name]} each step is no longer recorded"
    return difference(SEQUENCES[name], before, getattr(case.curves, name))


def _counts(case: CaseRecord, old: BaselineCase) -> str:
    for law, before in old.exact.compared.items():
        verdict = case.verdict(law)
        if verdict is None or verdict.status != "pass":
            continue  # reported under its own check
        # More comparisons do not fail the gate; the next baseline records them.
        if verdict.compared < before:
            return f"{law} rests on {verdict.compared} comparisons, was {before}"
        # A baseline of an earlier version lacks this number: then nothing is demanded.
        missed = old.exact.not_compared.get(law, verdict.not_compared)
        if verdict.not_compared > missed:
            text = f"could not make {verdict.not_compared} comparisons"
            return f"{law} {text}, was {missed}"
    return ""


def _ratio(case: CaseRecord, old: BaselineCase) -> str:
    curves, before = case.curves, old.measured
    series: dict[str, tuple[Spread, list[Number]]] = {}
    if before.ratio is not None:
        series["the largest"] = (before.ratio, curves.parity if curves else [])
    now = curves.parameters if curves else {}
    for name, spread in before.parameters.items():
        series[f"the {name}"] = (spread, [now[name]] if name in now else [])
    return _grown(series)


def _grown(series: dict[str, tuple[Spread, list[Number]]]) -> str:
    """Describe a missing ratio, or the ratio furthest beyond its limit.

    Returns "" if all ratios are present and within their limits.
    """
    # This comes first: a ratio that is no longer measured cannot exceed its limit.
    gone = [name for name, (_, values) in series.items() if not values]
    if gone:
        return f"{gone[0]} error / bound is no longer measured"
    beyond = [
        # Relative to its own limit: parameters differ in their noise.
        (worst(values) / limit(spread), name)
        for name, (spread, values) in series.items()
        if worst(values) > limit(spread)
    ]
    if not beyond:
        return ""
    _, name = max(beyond)
    spread, values = series[name]
    return (
        f"{name} error / bound grew to {worst(values):.3g}, "
        f"was {float(spread.high):.3g}, its noise ends at {limit(spread):.3g}"
    )


Check = Callable[[CaseRecord, BaselineCase], str]
_NUMBERS: dict[str, tuple[str, Check]] = {
    "baseline.scale": ("sequence", _scale),
    "baseline.skip": ("sequence", _skip),
    "baseline.compared": ("too-few", _counts),
    "baseline.ratio": ("ratio", _ratio),
}
"""Id of a rule -> (kind of reason, function that describes how a case breaks it)."""


def check_vanished(report: Report, baseline: Baseline) -> Iterator[Reason]:
    """Yield a reason for each scenario and check of the baseline that is missing."""
    now = {c.key: c for c in report.cases}
    for old in baseline.cases:
        if not report.decides(old.scaler):
            continue
        case = now.get(old.key)
        where = f"{old.scenario}  {old.scaler}"
        if case is None:
            yield _vanished(old, f"scenario {where} is not in the report")
            continue
        for law in old.exact.laws:
            if case.verdict(law) is None:
                yield _vanished(old, f"check {law} was not run in {where}", law)


def _vanished(old: BaselineCase, text: str, law: str = "") -> Reason:
    return Reason(
        kind="vanished", text=text, scaler=old.scaler, scenario=old.scenario, law=law
    )


def check_whole(
    report: Report,
    baseline: Baseline | None,
    min_cases: int,
    *,
    any_torch: bool = False,
) -> Iterator[Reason]:
    """Check the report as a whole: number of decided cases, and the environment.

    Args:
        report: the report.
        baseline: the baseline, if any.
        min_cases: number of decided cases that the user requires.
        any_torch: true if the baseline also holds for other minor versions of torch.
    """
    decided = [c for c in report.cases if _decided(c)]
    if not decided:
        text = f"nothing was compared: {len(report.cases)} cases, no check decided"
        yield Reason(kind="nothing", text=text)
    # Cases that ran have their own reasons.
    ran = {c.scaler for c in report.cases if c.status != Status.SKIPPED}
    for scaler in report.scalers if decided else ():
        if scaler not in ran:
            text = f"nothing was compared with {scaler}: all its cases are skipped"
            yield Reason(kind="nothing", text=text, scaler=scaler)
    if len(decided) < min_cases:
        cases = counted(len(decided), "case")
        text = f"{cases} decided a check, and --min-cases is {min_cases}"
        yield Reason(kind="too-few", text=text)
    if baseline is not None:
        for name, text in _other_environment(report.header, baseline.provenance):
            if name != "torch" or not any_torch:
                yield Reason(kind="environment", text=text)


def _decided(case: CaseRecord) -> bool:
    return any(v.status in ("pass", "fail") for v in case.verdicts)


def _other_environment(now: Header, then: Provenance) -> Iterator[tuple[str, str]]:
    """Yield the parts of the environment that differ, each with a sentence.

    A baseline of another platform or of other data is not valid for this report.
    """
    places: list[tuple[str, str, str]] = [
        ("torch", _minor(then.torch), _minor(now.torch)),
        ("gradparity", _minor(then.gradparity), _minor(now.gradparity)),
        *(
            (name, getattr(then, name), getattr(now, name))
            for name in ("platform", "backend", "device")
        ),
        *(
            (f"data {name}", digest, now.data.get(name, "none"))
            for name, digest in then.data.items()
        ),
    ]
    for name, before, seen in places:
        if before != seen:
            text = f"the baseline was made with {name} {before}, the report has {seen}"
            yield name, text


def _minor(version: str) -> str:
    # Between minor versions kernels change, and with them rounding; so do checks, and
    # what they count.
    return ".".join(version.split(".")[:2])
