"""Page of a comparison: one self-contained HTML file, readable without JavaScript.

One table shows tensors by steps, in the order of the model: each cell is a difference
as a share of its bound. Another table shows the first step that differs, by ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import templates
from .compare import Comparison, Row, Side
from .kept import BUFFER, IDLE
from .modules import GRADIENT, OUTPUT

__all__ = ["write_page"]

VERDICTS = {0: "same", 1: "different", 2: "not comparable", 4: "undecided"}
HEADINGS = {
    "gradient": "Gradients",
    "update": "Updates, weighted by the size of the gradient",
    IDLE: "Updates of elements without a gradient",
    BUFFER: "Running statistics",
    OUTPUT: "Outputs of blocks, at the first step that differs",
    GRADIENT: "Gradients of these outputs, up to one factor, as backward makes them",
}
LONG = 1e5
"""A share of the bound below this limit is written without an exponent."""
RANKS = 64
"""Largest number of ranks that get a column."""
SHADES = (0.25, 0.5, 1, 10, 100, 1000)
"""Upper limits of the shades, as shares of the bound; above 1 by powers of ten."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Table cell of one tensor at one step."""

    shade: int | None
    """Index of the cell's shade; None if the noise is as large as the tensor."""
    share: str
    words: str


def write_page(folder: Path, one: Side, other: Side, found: Comparison) -> Path:
    """Write ``index.html`` into a folder atomically.

    Raises:
        UsageError: if the folder cannot be written.
    """
    # blocks come first: they show where the difference begins
    rows = [*found.blocks, *found.rows]
    kinds = list(dict.fromkeys(row.kind for row in rows))
    page = templates.page(
        Path(__file__).parent / "templates" / "comparison.html.j2",
        {},
        verdict=VERDICTS[found.code],
        one=one,
        other=other,
        found=found,
        tables={HEADINGS[kind]: _table(rows, kind) for kind in kinds},
        ranks=_ranks(found),
        ends=[f"{limit:g}" for limit in SHADES],
    )
    return templates.write_page(folder, page)


def _table(
    rows: Sequence[Row], kind: str
) -> tuple[list[int], Mapping[str, Mapping[int, Cell]]]:
    """Return the steps, and the cells by tensor and step."""
    table: dict[str, dict[int, Cell]] = {}
    for row in rows:
        if row.kind == kind:
            table.setdefault(row.name, {})[row.step] = _cell(row)
    return sorted({step for cells in table.values() for step in cells}), table


def _ranks(found: Comparison) -> Mapping[str, Mapping[int, Cell]]:
    """Return cells by tensor and rank, for tensors that differ on some ranks only.

    Tensors with parts on more than ``RANKS`` ranks are left out.
    """
    return {
        row.what: {
            rank: _cell(replace(row, distance=share and row.distance * share, words=""))
            for rank, share in region.shares.items()
        }
        for row, region in found.regions
        if region.holders and len(region.shares) <= RANKS
    }


def _cell(row: Row) -> Cell:
    blind = row.bound >= 1 and not row.differs
    shade = bisect_left(SHADES, row.ratio)
    share = f"{row.ratio:.0f}" if 10 <= row.ratio < LONG else f"{row.ratio:.2g}"
    what = f"; it {row.words}" if row.words else ""
    return Cell(
        shade=None if blind else shade,
        share="·" if blind else share,
        words=f"differs by {row.distance:.2g} of its size, noise explains "
        f"{row.bound:.2g}{what}",
    )
