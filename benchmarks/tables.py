"""Markdown of what a benchmark recorded."""

from __future__ import annotations


def row(*cells: object) -> str:
    """One line of a table."""
    return f"| {' | '.join(map(str, cells))} |"
