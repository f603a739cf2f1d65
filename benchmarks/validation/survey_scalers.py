"""Judge scalers that people use, and write ``docs/known-scalers.md``.

gradparity bench survey-scalers --preset quick
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from gradparity.benchmarks.validation.survey_scalers_confirm import (
    broken_laws,
    examples,
)
from gradparity.benchmarks.validation.survey_scalers_run import (
    OURS,
    SMOKE,
    Record,
    confirm_peers,
    judge_peers,
    not_judged,
    read_record,
)
from gradparity.conformance.files import write_whole
from gradparity.conformance.report.records import Report, ReportError
from gradparity.conformance.report.table import escape, legible
from gradparity.conformance.space.catalogue import PRESETS
from gradparity.conformance.status import RANKING, UsageError, Verdict
from gradparity.fixtures.peers import PEERS

__all__ = ["main", "render"]

_TEXT = """\
# Known scalers

What the catalogue says of scalers that people use. Made by `gradparity bench
survey-scalers` from the reports of one run; nothing here is written by hand.

{provenance}

{summary}

A case is one scaler in one scenario. A call that raised or never came back breaks
`liveness.completes`; what could not be judged after it is undecided. Scalers of other
projects are called through the adapters in `fixtures/peers.py`, which must first pass
{smoke} scenarios that every loss scaler gets right. The rule of growth is torch's: a
project that documents another one fails `scale.rule` by design, not by accident.

*Alone* says whether a script of the example that needs only torch and the scaler,
without gradparity's harness, shows a violation too. Its judge is coarser: finer laws
(parity of updates, bitwise transparency) may be beyond it.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Judge, or only render, and write the page.

    Args:
        argv: arguments those of the command line.

    Returns:
        0 written, 2 bad usage; what the scalers did does not matter.
    """
    try:
        parsed = _parser().parse_args(list(sys.argv[1:] if argv is None else argv))
        write_whole(parsed.out, render(_record(parsed)))
    except (UsageError, ReportError, OSError) as error:
        line = " ".join(str(error).split())
        print(f"survey_scalers: {line}", file=sys.stderr)
        return 2
    except SystemExit as done:  # --help, or a usage error that argparse has printed
        return int(done.code or 0)
    print(f"written: {parsed.out}")
    return 0


def _record(parsed: argparse.Namespace) -> Record:
    if not parsed.render:
        names = parsed.peer or list(PEERS)
        return judge_peers(parsed.reports, names, parsed.preset, Console())
    if parsed.confirm:
        confirm_peers(parsed.reports)
    return read_record(parsed.reports)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradparity bench survey-scalers",
        description="Judge the known scalers and write the page of the results.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("docs/known-scalers.md"), metavar="FILE")
    add("--reports", type=Path, default=Path("parity-peers"), metavar="FOLDER")
    add("--preset", default="quick", choices=PRESETS)
    add("--peer", action="append", choices=PEERS, help="only this one; repeatable")
    add("--render", action="store_true", help="from the reports that are there")
    add("--confirm", action="store_true", help="with --render: run the scripts again")
    return parser


def render(record: Record) -> str:
    """The page as Markdown."""
    head = _TEXT.format(
        provenance=_provenance(record.run),
        summary="\n".join(_summary(record)),
        smoke=len(SMOKE),
    )
    parts = [
        "\n".join(_story(name, record))
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
    broken = ", ".join(f"`{law}`" for law in broken_laws(cases)) or "none"
    return (
        f"| **{name}**: {text} | {number} | {counts['pass']} | {counts['fail']} "
        f"| {undecided} | {broken} |"
    )


def _story(name: str, record: Record) -> Iterator[str]:
    """Each broken law of one scaler, with its smallest example."""
    peer = PEERS[name]
    cases = [case for case in record.run.cases if case.scaler == peer.spec]
    said = {(each.scaler, each.law): each for each in record.confirmed}
    broken = broken_laws(cases)
    if not broken:
        return
    yield f"## {name}\n"
    yield "| law | cases | an example | what was seen | alone |"
    yield "|---|---|---|---|---|"
    for law in broken:
        found = examples(cases, law)
        story = said.get((peer.spec, law))
        alone = "not run" if story is None else "yes" if story.confirmed else "no"
        shown = story.scenario if story else ""
        case = next((c for c in found if c.scenario == shown), found[0])
        verdict = next(v for v in case.failures if v.law == law)
        seen = _seen(verdict)
        yield f"| `{law}` | {len(found)} | `{case.scenario}` | {seen} | {alone} |"
    yield f"\n    gradparity replay --scaler {peer.spec} SCENARIO\n"


def _seen(verdict: Verdict) -> str:
    text = " ".join(verdict.message.split())
    return legible(text if len(text) <= 200 else text[:197] + "...")


if __name__ == "__main__":
    sys.exit(main())
