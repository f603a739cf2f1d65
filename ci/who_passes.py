"""``gradparity who-passes``: judge known scalers and write ``docs/who-passes.md``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from ..conformance import LAWS
from ..conformance.catalogue import PRESETS
from ..conformance.law import RANKING
from ..conformance.peers import (
    OURS,
    PEERS,
    SMOKE,
    Record,
    judge_peers,
    not_judged,
    read_record,
)
from ..conformance.report import CaseRecord, Report, VerdictRecord
from .markdown import escape

__all__ = ["main", "render"]

_TEXT = """\
# Who passes

What the catalogue says of scalers that people use. Made by `make who-passes` from the
reports of one run; nothing here is written by hand.

{provenance}

{summary}

A case is one scaler in one scenario. A call that raised or never came back breaks
`liveness.completes`; what could not be judged after it is undecided. Scalers of other
projects are called through the adapters in `fixtures/peers.py`, which must first pass
{smoke} scenarios that every loss scaler gets right. The rule of growth is torch's: a
project that documents another one fails `scale.rule` by design, not by accident.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Judge, or only render, and write the page.

    Args:
        argv: arguments after ``gradparity who-passes``.

    Returns:
        0 written, 2 bad usage; what the scalers did does not matter.
    """
    try:
        parsed = _parser().parse_args(list(sys.argv[1:] if argv is None else argv))
        record = (
            read_record(parsed.reports)
            if parsed.render
            else judge_peers(
                parsed.reports, parsed.peer or list(PEERS), parsed.preset, Console()
            )
        )
        _write(parsed.out, render(record))
    except (ValueError, OSError) as error:
        line = " ".join(str(error).split())
        print(f"gradparity who-passes: {line}", file=sys.stderr)
        return 2
    except SystemExit as done:  # --help, or a usage error that argparse has told
        return int(done.code or 0)
    print(f"written: {parsed.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradparity who-passes",
        description="Judge the known scalers and write the page of the results.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("docs/who-passes.md"), metavar="FILE")
    add("--reports", type=Path, default=Path("parity-peers"), metavar="FOLDER")
    add("--preset", default="quick", choices=PRESETS)
    add("--peer", action="append", choices=PEERS, help="only this one; repeatable")
    add("--render", action="store_true", help="from the reports that are there")
    return parser


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def render(record: Record) -> str:
    """The page as Markdown."""
    head = _TEXT.format(
        provenance=_provenance(record.run),
        summary="\n".join(_summary(record)),
        smoke=len(SMOKE),
    )
    parts = [
        "\n".join(_story(name, record.run))
        for name, peer in PEERS.items()
        if peer.spec in record.run.scalers
    ]
    return "\n".join([head, *(part for part in parts if part)])


def _provenance(report: Report) -> str:
    header = report.header
    cases = len({case.scenario for case in report.cases})
    whole = f" **Incomplete:** {escape(report.incomplete)}" if report.incomplete else ""
    return (
        f"Recorded {header.started[:10]}: preset {header.preset}, {cases} scenarios, "
        f"torch {header.torch}, Python {header.python}, {escape(header.platform)}, "
        f"{header.backend} on {header.device}, gradparity {header.commit}.{whole}"
    )


def _summary(record: Record) -> Iterator[str]:
    yield "| scaler | version | pass | fail | undecided | laws broken |"
    yield "|---|---|---|---|---|---|"
    yield _row("ours", "`gradparity.scaler.GradScaler`", "", record.run, OURS)
    reasons = not_judged(record)
    for name, peer in PEERS.items():
        number = f"{peer.package} {record.versions.get(peer.package, '')}".strip()
        if name in reasons:
            reason = escape(reasons[name])
            yield f"| **{name}**: {peer.text} | {number} | not judged: {reason} | | | |"
        else:
            yield _row(name, peer.text, number, record.run, peer.spec)


def _row(name: str, text: str, number: str, report: Report, spec: str) -> str:
    cases = [case for case in report.cases if case.scaler == spec]
    counts = {s: sum(c.status == s for c in cases) for s in RANKING}
    undecided = len(cases) - counts["pass"] - counts["fail"]
    broken = ", ".join(f"`{law}`" for law in _broken(cases)) or "none"
    return (
        f"| **{name}**: {text} | {number} | {counts['pass']} | {counts['fail']} "
        f"| {undecided} | {broken} |"
    )


def _broken(cases: Sequence[CaseRecord]) -> list[str]:
    failed = {verdict.law for case in cases for verdict in case.failures}
    return [law for law in LAWS if law in failed]


def _story(name: str, report: Report) -> Iterator[str]:
    """Each broken law of one scaler, with its smallest example."""
    peer = PEERS[name]
    cases = [case for case in report.cases if case.scaler == peer.spec]
    broken = _broken(cases)
    if not broken:
        return
    yield f"## {name}\n"
    yield "| law | cases | an example | what was seen |"
    yield "|---|---|---|---|"
    for law in broken:
        found = [(c, v) for c in cases for v in c.failures if v.law == law]
        case, verdict = min(found, key=_size)
        yield f"| `{law}` | {len(found)} | `{case.scenario}` | {_seen(verdict)} |"
    yield f"\n    gradparity replay --scaler {peer.spec} SCENARIO\n"


def _size(found: tuple[CaseRecord, VerdictRecord]) -> tuple[int, int, str]:
    """Few ranks before many, a short id before a long one."""
    return found[0].world, len(found[0].scenario), found[0].scenario


def _seen(verdict: VerdictRecord) -> str:
    text = " ".join(verdict.message.split())
    return escape(text if len(text) <= 200 else text[:197] + "...")
