"""The gate rejects every worsened report, and ignores irrelevant changes."""

from collections.abc import Callable
from datetime import date

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gradparity.ci.baseline import make_baseline
from gradparity.ci.decision import Decision, Terms, decide
from gradparity.ci.ratios import LUCK
from gradparity.ci.reasons import Outcome
from gradparity.conformance.report.records import CaseRecord, Report
from gradparity.conformance.status import RANKING
from gradparity.tests.ci.test_samples import (
    LAWS,
    SKIPPED,
    report_of,
    sample,
    verdict,
    with_curves,
    with_verdict,
)

BASE = sample()
TERMS = Terms(today=date(2026, 11, 21), baseline=make_baseline([BASE]))
CASES = st.integers(0, len(BASE.cases) - 1)
Worsen = Callable[[list[CaseRecord]], list[CaseRecord]]


def held(report: Report) -> Decision:
    return decide(report, TERMS)


def change(index: int, edit: Callable[[CaseRecord], CaseRecord]) -> Worsen:
    return lambda cases: [edit(c) if i == index else c for i, c in enumerate(cases)]


@st.composite
def worse_verdict(draw: st.DrawFn) -> Worsen:
    index, law = draw(CASES), draw(st.sampled_from(LAWS))
    before = BASE.cases[index].verdict(law)
    assert before is not None
    worse = RANKING[RANKING.index(before.status) + 1 :]
    status = draw(st.sampled_from(worse))
    message = draw(st.text(max_size=20))
    return change(index, lambda c: with_verdict(c, verdict(law, status, message)))


@st.composite
def lost_law(draw: st.DrawFn) -> Worsen:
    index, law = draw(CASES), draw(st.sampled_from(LAWS))

    def drop(record: CaseRecord) -> CaseRecord:
        return replace(
            record, verdicts=tuple(v for v in record.verdicts if v.law != law)
        )

    return change(index, drop)


@st.composite
def lost_case(draw: st.DrawFn) -> Worsen:
    index = draw(CASES)
    return lambda cases: [c for i, c in enumerate(cases) if i != index]


@st.composite
def other_sequence(draw: st.DrawFn) -> Worsen:
    """Draw an edit that sets the same wrong value on all ranks, so that they agree."""
    index, step = draw(CASES), draw(st.integers(0, 2))
    scale = [8.0, 4.0, 4.0]
    scale[step] = draw(st.floats(0.5, 1e6).filter(lambda x: x != scale[step]))
    stepped = [True, False, True]
    stepped[step] = not stepped[step]
    change_of = {"scale": [scale] * 2, "stepped": [stepped] * 2}
    name = draw(st.sampled_from(sorted(change_of)))
    return change(index, lambda c: with_curves(c, **{name: change_of[name]}))


@st.composite
def grown_error(draw: st.DrawFn) -> Worsen:
    index, name = draw(CASES), draw(st.sampled_from(["w", "b"]))
    before = {"w": 0.6, "b": 0.05}
    beyond = max(LUCK, before[name] * 1.25)
    grown = draw(st.floats(beyond, 1.0, exclude_min=True))
    after = {**before, name: grown}
    parity = [0.0, 0.0, max(after.values())]
    return change(index, lambda c: with_curves(c, parity=parity, parameters=after))


@st.composite
def fewer_comparisons(draw: st.DrawFn) -> Worsen:
    index, count = draw(CASES), draw(st.integers(1, 6))
    law = draw(st.sampled_from([law for law in LAWS if law != SKIPPED]))
    missed = draw(st.integers(0 if count < 6 else 1, 100))
    fewer = verdict(law, compared=count, not_compared=missed)
    return change(index, lambda c: with_verdict(c, fewer))


WORSENED = st.one_of(
    worse_verdict(),
    lost_law(),
    lost_case(),
    other_sequence(),
    grown_error(),
    fewer_comparisons(),
)


@st.composite
def irrelevant(draw: st.DrawFn, cases: list[CaseRecord]) -> Report:
    """Return the report with other dates, timings, and orders of cases and checks."""
    moved = [
        replace(
            c,
            seconds=draw(st.floats(0, 1e6)),
            verdicts=tuple(draw(st.permutations(c.verdicts))),
        )
        for c in draw(st.permutations(cases))
    ]
    report = report_of(
        moved,
        started=draw(st.datetimes()).isoformat(),
        commit=draw(st.text(max_size=8)),
        python=draw(st.text(max_size=8)),
        command=draw(st.text(max_size=8)),
    )
    assert report.footer is not None
    seconds = draw(st.floats(0, 1e6))
    footer = replace(report.footer, seconds=seconds)
    changed: Report = replace(report, footer=footer)
    return changed


@settings(deadline=None)
@given(st.data())
def test_a_worsened_report_is_never_accepted(data: st.DataObject) -> None:
    cases = list(BASE.cases)
    for worsen in data.draw(st.lists(WORSENED, min_size=1, max_size=3)):
        if len(cases) == len(BASE.cases):
            cases = worsen(cases)
    decision = held(data.draw(irrelevant(cases)))
    assert decision.outcome is not Outcome.PASS
    assert decision.reasons


@settings(deadline=None)
@given(irrelevant(list(BASE.cases)))
def test_order_dates_and_timings_never_matter(report: Report) -> None:
    assert held(report) == held(BASE)
    assert held(report).outcome is Outcome.PASS


@settings(deadline=None)
@given(st.data())
def test_the_reasons_do_not_depend_on_the_order(data: st.DataObject) -> None:
    worse = list(BASE.cases)
    for worsen in data.draw(st.lists(worse_verdict(), min_size=2, max_size=4)):
        worse = worsen(worse)
    assert held(data.draw(irrelevant(worse))) == held(report_of(worse))


@settings(deadline=None)
@given(st.data())
def test_more_that_passes_is_accepted(data: st.DataObject) -> None:
    """A new case, more comparisons and smaller errors pass the gate."""
    smaller = {"w": data.draw(st.floats(0, 0.6)), "b": data.draw(st.floats(0, 0.05))}
    parity = [0.0, max(smaller.values()), 0.0]
    count = data.draw(st.integers(6, 1000))
    better = with_curves(BASE.cases[0], parity=parity, parameters=smaller)
    better = with_verdict(better, verdict("scale.rule", compared=count))
    new = replace(BASE.cases[0], scaler="new:Scaler")
    report = report_of([better, *BASE.cases[1:], new])
    assert held(report).outcome is Outcome.PASS
