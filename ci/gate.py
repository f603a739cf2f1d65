"""``gradparity gate``: read report and baseline, decide, print each reason."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import msgspec

from ..conformance.cli.arguments import Parser
from ..conformance.files import write_whole
from ..conformance.output import say
from ..conformance.report.records import ReportError, read_report
from ..conformance.status import USAGE, UsageError, WriteError, counted, plain
from .baseline import read_baseline
from .decision import Decision, Terms, decide
from .expectations import read_expectations
from .reasons import Outcome, Reason, causes_of
from .update import Refused, update

__all__ = ["main"]

_JSON_VERSION = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gate.

    Args:
        argv: arguments after ``gradparity gate``; taken from ``sys.argv`` if None.

    Returns:
        The exit code: 0 pass, 1 fail, 2 usage, 3 invalid or incomplete report, 4
        inconclusive.
    """
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        parser = _parser()
        parser.check_options(arguments)
        parsed = parser.parse_args(arguments)
        _check(parsed)
        return _update(parsed) if parsed.update_baseline else _gate(parsed)
    except Refused as error:
        return _fail(error, error.code)
    except ReportError as error:  # of a repeated report; an error in REPORT is a reason
        return _fail(error, Outcome.INVALID.value)
    except UsageError as error:
        return _fail(error, USAGE)
    except WriteError as error:
        return _fail(error, Outcome.INVALID.value)
    except SystemExit as done:  # --help
        return int(done.code or 0)


def _fail(error: Exception, code: int) -> int:
    say(f"gradparity gate: {plain(str(error))}", error=True)
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="gradparity gate",
        description="Check a report against a baseline and expectations. "
        "docs/gate.md explains the rules.",
        epilog="exit codes: 0 pass, 1 fail, 2 usage, 3 invalid or incomplete "
        "report, 4 inconclusive",
    )
    add = parser.add_argument
    add("report", type=Path, metavar="REPORT", help="report.jsonl of gradparity run")
    add("--baseline", type=Path, metavar="FILE", help="results that must still hold")
    add(
        "--expect",
        type=Path,
        metavar="FILE",
        help="TOML file of known failures",
    )
    add(
        "--strict",
        action="store_true",
        help="fail if an expectation excuses nothing or has expired",
    )
    add("--json", type=Path, metavar="FILE", help="write the decision to FILE as JSON")
    add(
        "--min-cases",
        type=int,
        default=0,
        metavar="N",
        help="fail if fewer than N cases decided a check (default: 0)",
    )
    add(
        "--any-torch",
        action="store_true",
        help="accept a baseline of another minor version of torch",
    )
    add("--update-baseline", action="store_true", help="write REPORT as the baseline")
    add("--yes", action="store_true", help="with --update-baseline: do not ask")
    add(
        "--accept-failures",
        action="store_true",
        help="with --update-baseline: also write failures, so that later gates pass "
        "with them; expectations are the better place",
    )
    add(
        "--repeat",
        type=Path,
        action="append",
        default=[],
        metavar="REPORT",
        help="with --update-baseline: another run of the same code, for the noise",
    )
    return parser


def _check(parsed: argparse.Namespace) -> None:
    if parsed.update_baseline and parsed.baseline is None:
        raise UsageError("--update-baseline needs --baseline FILE, the file to write")
    for name in ("report", "baseline", "expect"):
        path = getattr(parsed, name)
        if parsed.json and path and parsed.json.resolve() == path.resolve():
            raise UsageError(f"--json {path} would replace the file that is read")
    if parsed.any_torch and parsed.baseline is None:
        raise UsageError("--any-torch goes with --baseline FILE")
    for name in ("yes", "repeat", "accept_failures"):
        if getattr(parsed, name) and not parsed.update_baseline:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} goes with --update-baseline only")
    for name in ("json", "strict", "min_cases", "any_torch"):
        if getattr(parsed, name) and parsed.update_baseline:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} has no effect with --update-baseline")


def _gate(parsed: argparse.Namespace) -> int:
    # Read the caller's own files first: their faults are usage errors, whatever the
    # report is.
    terms = Terms(
        today=date.today(),
        baseline=read_baseline(parsed.baseline) if parsed.baseline else None,
        expectations=read_expectations(parsed.expect) if parsed.expect else (),
        strict=parsed.strict,
        min_cases=parsed.min_cases,
        any_torch=parsed.any_torch,
    )
    try:
        decision = decide(read_report(parsed.report), terms)
    except ReportError as error:
        # A reason of the gate, not a usage error: CI must get exit code 3 for an
        # invalid report.
        decision = _unreadable(error)
    decision = _with_the_way_out(decision, parsed)
    if parsed.json is not None:
        _write_json(parsed.json, decision, parsed)
    _say(decision)
    return decision.outcome.value


def _with_the_way_out(decision: Decision, parsed: argparse.Namespace) -> Decision:
    """Add a note, if the environment changed: the command that makes a new baseline."""
    if not any(reason.kind == "environment" for reason in decision.reasons):
        return decision
    report, baseline = str(parsed.report), str(parsed.baseline)
    command = ["gradparity", "gate", report, "--baseline", baseline]
    note = (
        "if the change is intended, write a new baseline: "
        f"{shlex.join([*command, '--update-baseline'])} "
        '(docs/gate.md, "After an upgrade of torch")'
    )
    return msgspec.structs.replace(decision, notes=(*decision.notes, note))


def _unreadable(error: ReportError) -> Decision:
    return Decision(
        outcome=Outcome.INVALID,
        reasons=(reason := Reason(kind="invalid", text=str(error)),),
        causes=causes_of([reason]),
        notes=(),
        known_failures=0,
        cases=0,
        checked=0,
    )


def _say(decision: Decision) -> None:
    word = decision.outcome.word.upper()
    if decision.known_failures:
        failures_text = counted(decision.known_failures, "known failure")
        word += f", with {failures_text} in the baseline"
    why = (
        counted(len(decision.causes), "cause"),
        counted(len(decision.reasons), "reason"),
    )
    counts = (
        *(why if decision.reasons else ()),
        counted(decision.cases, "case"),
        counted(decision.checked, "check"),
    )
    say(f"gate: {word}: {', '.join(counts)}")
    for cause in decision.causes:
        for line in cause.lines:
            say(line)
    for note in decision.notes:
        say(plain(f"note: {note}"))


def _write_json(path: Path, decision: Decision, parsed: argparse.Namespace) -> None:
    value = {
        "schema": _JSON_VERSION,
        "outcome": decision.outcome.word,
        "exit_code": decision.outcome.value,
        "report": str(parsed.report),
        "baseline": str(parsed.baseline) if parsed.baseline else None,
        "expectations": str(parsed.expect) if parsed.expect else None,
        "strict": parsed.strict,
        "any_torch": parsed.any_torch,
        "known_failures": decision.known_failures,
        "cases": decision.cases,
        "checked": decision.checked,
        "reasons": [
            {"line": r.line, **msgspec.to_builtins(r)} for r in decision.reasons
        ],
        "causes": [
            {
                "line": cause.line,
                "cases": cause.cases,
                "consequences": cause.consequences,
                **msgspec.to_builtins(cause.reason),
                **({"where": cause.where} if cause.where else {}),
            }
            for cause in decision.causes
        ],
        "notes": decision.notes,
    }
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def _update(parsed: argparse.Namespace) -> int:
    reports = [read_report(path) for path in (parsed.report, *parsed.repeat)]
    ask = _agree if parsed.yes else _ask
    expected = read_expectations(parsed.expect) if parsed.expect else ()
    accept = parsed.accept_failures
    if update(parsed.baseline, reports, ask, say, expected, accept_failures=accept):
        say(f"written: {parsed.baseline}")
        return Outcome.PASS.value
    raise UsageError("the baseline was not written: answer y, or give --yes")


def _agree(question: str) -> bool:
    return True


def _ask(question: str) -> bool:
    say(f"{question} [y/N]")
    answer = sys.stdin.readline()  # the empty string where there is no terminal
    return answer.strip().lower() in ("y", "yes")
