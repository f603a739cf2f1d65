"""Matrix of scalers x checks: the result of running scalers with known faults."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from gradparity.conformance.comparison.law import LAWS
from gradparity.conformance.files import write_whole
from gradparity.conformance.report.records import Header

__all__ = ["Matrix", "Row", "as_text", "write_matrix"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the checks for one scaler."""

    scaler: str
    """Class name in ``fixtures.faulty``."""
    fault: str
    """First line of the scaler's docstring."""
    law: str
    """Check that must catch the scaler; empty for a right scaler."""
    tried: int
    """Number of scenarios that ran with it."""
    failed: dict[str, int]
    """Check -> number of scenarios in which it failed."""
    preset: str = ""
    """First preset in which the scaler's check failed; empty if none did."""
    scenario: str = ""
    """Scenario in which the scaler's check first failed; for a right scaler, the first
    in which any check failed."""
    message: str = ""
    """Message of the failure in ``scenario``."""
    broken: int = 0
    """Number of scenarios in which the harness broke; they do not count."""

    @property
    def right(self) -> bool:
        """True if no check may fail."""
        return not self.law

    @property
    def as_it_should_be(self) -> bool:
        """True if a wrong scaler fails its check, or a right one ran and passes all."""
        if self.broken:
            return False
        if self.right:
            return self.tried > 0 and not self.failed
        return self.law in self.failed


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one run over all scalers."""

    header: Header
    seeds: int
    """Number of seeds for the right scalers."""
    seconds: float
    rows: list[Row]

    @property
    def wrong_rows(self) -> list[Row]:
        """Rows of the faulty scalers."""
        return [row for row in self.rows if not row.right]

    @property
    def right_rows(self) -> list[Row]:
        """Rows of the right scalers."""
        return [row for row in self.rows if row.right]


def as_text(matrix: Matrix) -> str:
    """Return the matrix as Markdown: provenance, both tables, legend of the checks."""
    return "\n".join(
        [
            *_summary(matrix),
            "",
            *_wrong_table(matrix),
            "",
            *_right_table(matrix),
            "",
            *_legend(),
            "",
        ]
    )


def _summary(matrix: Matrix) -> Iterator[str]:
    head, wrong, right = matrix.header, matrix.wrong_rows, matrix.right_rows
    caught = [r for r in wrong if r.as_it_should_be]
    yield (
        f"`{head.command}`, commit {head.commit or 'unknown'}, torch {head.torch}, "
        f"Python {head.python}, {head.platform}, {head.started}, "
        f"{matrix.seconds:.0f} s."
    )
    yield ""
    yield f"- wrong: {len(caught)} of {len(wrong)} caught by the law they name"
    for preset in dict.fromkeys(r.preset for r in caught):
        count = sum(r.preset == preset for r in caught)
        yield f"  - {count} ({count / len(wrong):.0%}) first by preset `{preset}`"
    clean, cases = sum(r.as_it_should_be for r in right), sum(r.tried for r in right)
    yield (
        f"- right: {clean} of {len(right)} never failed, {cases} cases, "
        f"{matrix.seeds} seeds"
    )
    broken = sum(r.broken for r in matrix.rows)
    yield f"- cases in which the harness broke: {broken}"


def _letters() -> dict[str, str]:
    """Return check -> short head of its column."""
    # names would make a table of some thirty columns too wide to read raw
    return dict(
        zip(LAWS, string.ascii_uppercase + string.ascii_lowercase, strict=False)
    )


def _legend() -> Iterator[str]:
    yield "Laws (X: the law that the scaler names; x: others that caught it, too):"
    yield ""
    for law, letter in _letters().items():
        yield f"- {letter}: `{law}`"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = list(heads)
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _wrong_table(matrix: Matrix) -> Iterator[str]:
    heads = ["wrong scaler", "fault", *_letters().values(), "first caught in"]
    rows = (
        [
            r.scaler,
            r.fault,
            *(_cell(r, law) for law in LAWS),
            f"`{r.scenario}`" if r.scenario else "**missed**",
        ]
        for r in matrix.wrong_rows
    )
    return _table(heads, rows)


def _cell(row: Row, law: str) -> str:
    if law == row.law:
        return "X" if law in row.failed else "**-**"
    return "x" if law in row.failed else ""


def _right_table(matrix: Matrix) -> Iterator[str]:
    rows = ([r.scaler, r.fault, str(r.tried), _failures(r)] for r in matrix.right_rows)
    return _table(["right scaler", "how it is built", "cases", "failed checks"], rows)


def _failures(row: Row) -> str:
    if not row.failed:
        return "none" if row.tried and not row.broken else "**not checked**"
    return f"**{', '.join(row.failed)}** in `{row.scenario}`"


def write_matrix(matrix: Matrix, folder: Path) -> Path:
    """Write ``mutants.json`` and ``mutants.md`` and return the latter's path."""
    folder.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.format(msgspec.json.encode(matrix), indent=1) + b"\n"
    write_whole(folder / "mutants.json", data)
    page = folder / "mutants.md"
    write_whole(page, as_text(matrix))
    return page
