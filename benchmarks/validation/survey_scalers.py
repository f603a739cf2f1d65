"""Check scalers that people use, and write ``docs/known-scalers.md``.

gradparity bench survey-scalers --preset quick
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from gradparity.benchmarks.validation.survey_scalers_confirm import (
    broken_laws,
    examples,
)
from gradparity.benchmarks.validation.survey_scalers_run import (
    OURS,
    SMOKE,
    Record,
    check_peers,
    confirm_peers,
    not_checked,
    read_record,
)
from gradparity.conformance.comparison.law import LAWS
from gradparity.conformance.files import write_whole
from gradparity.conformance.report.records import Report, ReportError
from gradparity.conformance.report.table import escape, legible
from gradparity.conformance.space.catalogue import PRESETS
from gradparity.conformance.status import RANKING, UsageError, Verdict
from gradparity.fixtures.peers import PEERS

__all__ = ["main", "render"]

_TEXT = """\
# Known scalers

Results of scalers that people use, in one run of the catalogue.

{provenance}

{summary}

- A case is one scaler in one scenario. A call that raises or hangs fails
  `liveness.completes` and leaves later checks undecided.
- Scalers of other projects run through the adapters in `fixtures/peers.py`. Each must
  first pass {smoke} scenarios that every loss scaler gets right.
- `scale.rule` checks torch's rule of growth. A project that documents another rule
  fails it by design.

## Failed cases by check

{counts}

## Examples

    gradparity replay --scaler SPEC SCENARIO

{alone}

{examples}

<!-- Written by `gradparity bench survey-scalers` from the reports of one run. -->
"""


class Example(NamedTuple):
    """One check that a scaler fails, with its smallest scenario."""

    scaler: str
    law: str
    n_cases: int
    scenario: str
    message: str
    alone: str
    """``yes`` if a script without gradparity fails, ``no`` or ``not run``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the survey, or only render its record, and write the page.

    Args:
        argv: arguments of the command line.

    Returns:
        0 written, 2 bad usage; violations of the scalers do not matter.
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
        return check_peers(parsed.reports, names, parsed.preset, Console())
    if parsed.confirm:
        confirm_peers(parsed.reports)
    return read_record(parsed.reports)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradparity bench survey-scalers",
        description="Check the known scalers and write the page of the results.",
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
    """Return the page as Markdown."""
    examples_of_run = [*_examples(record)]
    return _TEXT.format(
        provenance=_provenance(record.run),
        summary="\n".join(_summary(record)),
        smoke=len(SMOKE),
        counts="\n".join(_counts(examples_of_run)),
        alone=_alone(examples_of_run),
        examples="\n".join(_table(examples_of_run)),
    )


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
    yield "| scaler | version | pass | fail | undecided | SPEC |"
    yield "|---|---|---|---|---|---|"
    yield _row("ours", "`GradScaler`", "", record.run, OURS)
    reasons = not_checked(record)
    for name, peer in PEERS.items():
        number = f"{peer.package} {record.versions.get(peer.package, '')}".strip()
        if name in reasons:
            reason = f"not checked: {escape(reasons[name])}"
            yield f"| **{name}**: {peer.text} | {number} | | | | {reason} |"
        else:
            yield _row(name, peer.text, number, record.run, peer.spec)


def _row(name: str, text: str, number: str, report: Report, spec: str) -> str:
    cases = [case for case in report.cases if case.scaler == spec]
    counts = {s: sum(c.status == s for c in cases) for s in RANKING}
    undecided = len(cases) - counts["pass"] - counts["fail"]
    return (
        f"| **{name}**: {text} | {number} | {counts['pass']} | {counts['fail']} "
        f"| {undecided} | `{spec}` |"
    )


def _examples(record: Record) -> Iterator[Example]:
    """Yield an example for each check that a scaler fails, by scaler and check."""
    story_by_key = {(each.scaler, each.law): each for each in record.confirmed}
    for name, peer in PEERS.items():
        cases = [case for case in record.run.cases if case.scaler == peer.spec]
        for law in broken_laws(cases):
            failed = examples(cases, law)
            story = story_by_key.get((peer.spec, law))
            alone = "not run" if story is None else "yes" if story.confirmed else "no"
            shown = story.scenario if story else ""
            case = next((c for c in failed if c.scenario == shown), failed[0])
            verdict = next(v for v in case.failures if v.law == law)
            yield Example(
                name, law, len(failed), case.scenario, _message(verdict), alone
            )


def _counts(rows: Sequence[Example]) -> Iterator[str]:
    names = [name for name in PEERS if any(each.scaler == name for each in rows)]
    count_by_key = {(each.law, each.scaler): each.n_cases for each in rows}
    yield f"| {' | '.join(['check', *names])} |"
    yield "|---" * (len(names) + 1) + "|"
    for law in LAWS:
        counts = [count_by_key.get((law, name), 0) for name in names]
        if any(counts):
            yield f"| {' | '.join([f'`{law}`', *map(str, counts)])} |"


def _alone(rows: Sequence[Example]) -> str:
    """Return a sentence on scripts without gradparity; names those that do not fail."""
    if not rows:
        return "No check fails."
    text = (
        "Examples also run as a script that needs only torch and the scaler, with a "
        "coarser comparison."
    )
    left = [each for each in rows if each.alone != "yes"]
    if not left:
        return f"{text} All of them fail there."
    names = (f"{each.scaler} at `{each.law}` ({each.alone})" for each in left)
    return f"{text} All of them fail there but {', '.join(names)}."


def _table(rows: Sequence[Example]) -> Iterator[str]:
    """Return one line for each example. Scalers with the same failure share a line."""
    names_by_key: dict[tuple[str, str, str], list[str]] = {}
    for each in sorted(rows, key=lambda each: [*LAWS].index(each.law)):
        key = (each.law, each.scenario, each.message)
        names_by_key.setdefault(key, []).append(each.scaler)
    yield "| check | scaler | scenario | message |"
    yield "|---|---|---|---|"
    for (law, scenario, message), names in names_by_key.items():
        yield f"| `{law}` | {', '.join(names)} | `{scenario}` | {message} |"


def _message(verdict: Verdict) -> str:
    text = " ".join(verdict.message.split())
    return legible(text if len(text) <= 200 else text[:197] + "...")


if __name__ == "__main__":
    sys.exit(main())
