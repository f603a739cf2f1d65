"""Update: show what a new baseline changes, ask, and write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ..conformance.report.compare import SEQUENCES
from ..conformance.report.compare import difference as sequences_differ
from ..conformance.report.records import Report
from ..conformance.report.terminal import plain
from .baseline import (
    Baseline,
    BaselineCase,
    make_baseline,
    read_baseline,
    write_baseline,
)
from .checks import check_whole
from .integrity import contradictions
from .reasons import folded

__all__ = ["Refused", "difference", "update"]

Ask = Callable[[str], bool]


class Refused(ValueError):
    """No baseline is made of this report.

    Attributes:
        code: exit code of the gate.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def update(
    path: Path, reports: Sequence[Report], ask: Ask, show: Callable[[str], None]
) -> bool:
    """Write a baseline of ``reports`` to ``path`` if ``ask`` agrees.

    Args:
        path: the file; need not exist.
        reports: repeated runs of one code; the first is what must hold.
        ask: called with the question; returns whether to write.
        show: called with each difference, one line.

    Returns:
        Whether ``path`` now is the baseline of ``reports``.

    Raises:
        Refused: if a report is incomplete, contradicts itself or compared nothing.
        BaselineError: if ``path`` is no baseline, or the reports do not agree.
    """
    # Before anything is shown or asked: such a baseline would pass what it never saw.
    for report in reports:
        _check(report)
    new = make_baseline(reports)
    # read although it will be replaced: a file that is no baseline is kept
    old = read_baseline(path) if path.exists() else None
    found = list(_differences(old, new))
    for line in folded(found):
        show(plain(line))
    show(f"{len(found)} differences")
    if not ask(f"write {len(new.cases)} cases to {path}?"):
        return False
    write_baseline(path, new)
    return True


def _check(report: Report) -> None:
    broken = contradictions(report)
    if broken:
        raise Refused(f"no baseline is made of this report: {broken[0]}", 3)
    empty = list(check_whole(report, None, 0))
    if empty:
        raise Refused(f"no baseline is made of this report: {empty[0].text}", 4)


def difference(old: Baseline | None, new: Baseline) -> list[str]:
    """What ``new`` changes, sorted by case; what changed alike is one line."""
    return folded(_differences(old, new))


def _differences(
    old: Baseline | None, new: Baseline
) -> Iterator[tuple[tuple[str, ...], str]]:
    """(what makes it alike, the line) for each change."""
    before = {c.key: c for c in old.cases} if old else {}
    after = {c.key: c for c in new.cases}
    for key in sorted(before.keys() | after.keys()):
        where = f"{key[1]}  {key[0]}"
        if key not in after:
            yield ("gone", key[0]), f"gone: {where}"
        elif key not in before:
            status = after[key].exact.status
            yield ("new", key[0], status), f"new: {where}: {status}"
        else:
            for what, text in _changes(before[key], after[key]):
                yield ("changed", key[0], what), f"changed: {where}: {text}"


def _changes(old: BaselineCase, new: BaselineCase) -> Iterator[tuple[str, str]]:
    """(what has changed, the change in words)."""
    was, now = old.exact, new.exact
    yield from _table("{}", was.laws, now.laws)
    yield from _table("comparisons of {}", was.compared, now.compared)
    lacking = "comparisons that {} could not make"
    # a baseline of an earlier version lacks these numbers: that is no change
    both = was.not_compared.keys() & now.not_compared.keys()
    lacked, lacks = (
        {law: exact.not_compared[law] for law in both} for exact in (was, now)
    )
    yield from _table(lacking, lacked, lacks)
    for name in ("scale", "stepped"):
        rows, others = (getattr(exact, name) or () for exact in (was, now))
        text = sequences_differ(SEQUENCES[name], rows, others)
        if text:
            yield name, text
    if old.measured.ratio != new.measured.ratio:
        yield "ratio", f"largest error / bound {_words(old)} -> {_words(new)}"
    elif old.measured != new.measured:
        yield "ratios", "error / bound of its parameters"


def _table(
    what: str, old: Mapping[str, object], new: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """Changes of a table; ``what`` has a place for the name."""
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name, "none"), new.get(name, "none")
        if was != now:
            text = f"{what.format(name)} {was} -> {now}"
            yield text, text


def _words(case: BaselineCase) -> str:
    spread = case.measured.ratio
    if spread is None:
        return "none"
    return f"{float(spread.low):.3g}..{float(spread.high):.3g}"
