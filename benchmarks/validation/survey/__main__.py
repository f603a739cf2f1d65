"""Check each model type of transformers that ships a parallel plan.

gradparity bench survey --plan tp --model qwen3
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gradparity.benchmarks.validation.survey.catalogue import PLANS
from gradparity.benchmarks.validation.survey.findings import (
    COMMAND,
    confirm_all,
    families,
    write_finding,
)
from gradparity.benchmarks.validation.survey.page import print_survey, render
from gradparity.benchmarks.validation.survey.survey import (
    SurveySettings,
    conduct,
    writing,
)
from gradparity.benchmarks.validation.wild import write_pages
from gradparity.conformance.cli.converters import folder, positive
from gradparity.conformance.files import write_whole
from gradparity.conformance.status import (
    EXIT_CODES,
    INTERRUPTED,
    USAGE,
    UsageError,
    case_status,
    plain,
)

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "benchmarks" / "results" / "survey-transformers.jsonl"
FINDINGS = RECORD.parent / "wild"
PAGES = ROOT / "docs" / "wild"
WORK = ROOT / "parity-report" / "survey"
"""Folder of a survey that will be recorded; the same command continues the survey."""

STATUSES = {"right": "pass", "wrong": "fail", "undecided": "inconclusive"}
"""Verdict on a model -> status; all other verdicts are errors."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the survey, write its records and its page, and print the table.

    Args:
        arguments: arguments of the command line; None takes the process's own.

    Returns:
        Exit code, as for every command: 0 all models are right, 1 some are wrong, 2 bad
        usage, 3 some have no verdict, 4 nothing could be compared for some.
    """
    try:
        return _conduct(list(sys.argv[1:] if arguments is None else arguments))
    except UsageError as error:
        print(f"survey: {plain(str(error))}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("survey: interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED


def _conduct(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    if parsed.record:
        parsed.out = WORK
        _begin(parsed.plan or ())
    settings = SurveySettings(
        plans=tuple(dict.fromkeys(parsed.plan or PLANS)),
        names=tuple(parsed.model),
        out=parsed.out,
        limit_s=parsed.limit,
        jobs=parsed.jobs,
        quiet=parsed.quiet,
        command=shlex.join([*COMMAND.split(), *arguments]),
    )
    # unknown names are reported before any file is written
    asked = {(plan, kind.name) for plan, kind in settings.chosen()}
    console = Console()
    with writing(settings.out):
        survey = conduct(settings, console)
        found = families(survey)
        if not parsed.no_scripts:
            path = settings.path
            survey = confirm_all(survey, found, path, console, settings.jobs)
        folder = settings.out / "findings"
        kept = [write_finding(family, survey, folder) for family in found]
        page = settings.out / "transformers.md"
        write_whole(page, render(survey, [record for record in kept if record]))
    if parsed.record:
        _keep(settings.path, page, folder)
    models = tuple(m for m in survey.models if m.key in asked)
    if not settings.quiet:
        print_survey(models, console)
        console.print(f"records: {settings.path}", markup=False, highlight=False)
        console.print(f"page:    {page}", markup=False, highlight=False)
    statuses = [STATUSES.get(m.verdict, "error") for m in models]
    return EXIT_CODES[case_status(statuses)]


def _begin(plans: Sequence[str]) -> None:
    """Copy the records of all other plans, if only some plans run again."""
    if plans and not (WORK / "survey.jsonl").exists():
        lines = RECORD.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line).get("plan") not in plans]
        WORK.mkdir(parents=True, exist_ok=True)
        write_whole(WORK / "survey.jsonl", "".join(kept))


def _keep(record: Path, page: Path, findings: Path) -> None:
    """Copy records, page and findings to their final folders."""
    shutil.copy(record, RECORD)
    shutil.copy(page, PAGES)
    for path in findings.glob("*.*"):
        shutil.copy(path, FINDINGS if path.suffix == ".json" else PAGES)
    write_pages()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description=(
            "Check every model type of the installed transformers that ships a "
            "parallel plan: tiny, of random weights, with no download. A survey that "
            "was interrupted is continued by the same command."
        ),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--plan", action="append", choices=PLANS, help="only this one; repeatable")
    add("--model", nargs="+", default=[], metavar="NAME", help="types or folders")
    add("--out", type=folder, default=Path("survey-transformers"), metavar="DIR")
    add("--limit", type=positive, default=60.0, metavar="S", help="a model's (60)")
    add("--jobs", type=_jobs, default=2, metavar="N", help="models at a time (2)")
    add("--no-scripts", action="store_true", help="do not confirm failures by scripts")
    add("--record", action="store_true", help="write records and pages of docs/wild")
    add("--quiet", action="store_true", help="no progress, no table")
    return parser


def _jobs(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of models")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
