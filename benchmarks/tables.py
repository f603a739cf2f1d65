"""Markdown tables for records of benchmarks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from gradparity.conformance.files import write_whole

__all__ = ["row", "write_between"]

_BETWEEN = re.compile(r"(<!-- recorded: (\w+) -->\n).*?\n(<!-- end -->)", re.DOTALL)


def row(*cells: object) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def write_between(page: Path, tables: Mapping[str, str]) -> None:
    """Replace a page's tables between their marks, by name."""
    text = _BETWEEN.sub(lambda m: f"{m[1]}\n{tables[m[2]]}\n\n{m[3]}", page.read_text())
    write_whole(page, text)
