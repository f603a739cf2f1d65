"""Update: show what a new baseline changes, ask, and write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ..conformance.compare import SEQUENCES
from ..conformance.compare import difference as sequences_differ
from ..conformance.report import Report
from ..conformance.terminal import plain
from .baseline import (
    Baseline,
    BaselineCase,
    make_baseline,
    read_baseline,
    write_baseline,
)
from .checks import check_whole
from .integrity import contradictions

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
    path: Path, reports: Sequence[Report], ask: Ask, tell: Callable[[str], None]
) -> bool:
    """Write a baseline of ``reports`` to ``path`` if ``ask`` agrees.

    Args:
        path: the file; need not exist.
        reports: repeated runs of one code; the first is what must hold.
        ask: told the question, says whether to write.
        tell: told each difference, one line.

    Returns:
        Whether ``path`` now is the baseline of ``reports``.

    Raises:
        Refused: if a report is incomplete, contradicts itself or compared nothing.
        BaselineError: if ``path`` is no baseline, or the reports do not agree.
    """
    for report in reports:
        _check(report)
    new = make_baseline(reports)
    old = read_baseline(path) if path.exists() else None
    lines = list(difference(old, new))
    for line in lines:
        tell(plain(line))
    tell(f"{len(lines)} differences")
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


def difference(old: Baseline | None, new: Baseline) -> Iterator[str]:
    """What ``new`` changes, one line each, sorted by case."""
    before = {c.key: c for c in old.cases} if old else {}
    after = {c.key: c for c in new.cases}
    for key in sorted(before.keys() | after.keys()):
        where = f"{key[1]}  {key[0]}"
        if key not in after:
            yield f"gone: {where}"
        elif key not in before:
            yield f"new: {where}: {after[key].exact.status}"
        else:
            for text in _changes(before[key], after[key]):
                yield f"changed: {where}: {text}"


def _changes(old: BaselineCase, new: BaselineCase) -> Iterator[str]:
    yield from _table("", old.exact.laws, new.exact.laws)
    yield from _table("comparisons of ", old.exact.compared, new.exact.compared)
    for name in ("scale", "stepped"):
        was, now = (getattr(case.exact, name) or () for case in (old, new))
        text = sequences_differ(SEQUENCES[name], was, now)
        if text:
            yield text
    if old.measured.ratio != new.measured.ratio:
        yield f"largest error / bound {_words(old)} -> {_words(new)}"
    elif old.measured != new.measured:
        yield "error / bound of its parameters"


def _table(
    what: str, old: Mapping[str, object], new: Mapping[str, object]
) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name, "none"), new.get(name, "none")
        if was != now:
            yield f"{what}{name} {was} -> {now}"


def _words(case: BaselineCase) -> str:
    spread = case.measured.ratio
    if spread is None:
        return "none"
    return f"{float(spread.low):.3g}..{float(spread.high):.3g}"
