"""Write ``docs/laws.md`` from the definitions of the checks."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from gradparity.conformance.comparison import laws as laws
from gradparity.conformance.comparison.law import LAWS, MOST, Law
from gradparity.conformance.files import write_whole
from gradparity.conformance.status import UsageError

__all__ = ["main", "render"]

WIDTH = 100
_HEAD = """\
# Checks

`gradparity explain ID` shows one check in the terminal. Code and reports call a check a
law.

A pass needs half of the comparisons that the run should make, unless the check names
another share. With fewer the check is `inconclusive`. Each verdict counts its
comparisons.

[Known defects](defects.md) of published scalers break some of these checks. [Faulty
versions](mutants.md) of scalers and of training test every check.

<!-- Written by `gradparity bench laws-page` from conformance/comparison/laws/. -->
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page.

    Args:
        argv: arguments; None means ``sys.argv``.

    Returns:
        0 written, 2 bad usage.
    """
    parser = argparse.ArgumentParser(
        prog="gradparity bench laws-page",
        description="Write the page of all laws.",
        allow_abbrev=False,
    )
    default = Path("docs/laws.md")
    parser.add_argument("--out", type=Path, default=default, metavar="FILE")
    try:
        parsed = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
        write_whole(parsed.out, render())
    except UsageError as error:
        print(f"laws_page: {error}", file=sys.stderr)
        return 2
    except SystemExit as done:  # --help, or a usage error that argparse has printed
        return int(done.code or 0)
    print(f"written: {parsed.out}")
    return 0


def render() -> str:
    """Return the page as Markdown."""
    chapters = groupby(LAWS.values(), key=lambda law: law.id.partition(".")[0])
    parts = [f"## {name}\n\n" + "\n".join(map(_entry, laws)) for name, laws in chapters]
    return "\n".join([_HEAD, *parts])


def _entry(law: Law) -> str:
    return "\n".join(_lines(law))


def _lines(law: Law) -> Iterator[str]:
    yield f"### {law.id}\n"
    yield _filled(law.text)
    yield _filled(f"*Why:* {law.reason}")
    conditions = [*_conditions(law)]
    if conditions:
        yield _filled(f"*{' '.join(conditions)}*")


def _conditions(law: Law) -> Iterator[str]:
    if not law.of_stack:
        yield "Only with a scaler."
    if law.least != MOST:
        share = f"{law.least:.0%} of the comparisons" if law.least else "one comparison"
        yield f"A pass needs {share}."


def _filled(text: str) -> str:
    """Wrap a paragraph, so that the Markdown source is readable."""
    lines = textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
