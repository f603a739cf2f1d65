"""Baseline: required results on one platform, checked in as JSON lines.

The first line says where the numbers come from. Each further line is one case, with two
kinds of fields:

- exact: verdict statuses, numbers of comparisons, skip decisions, scale sequences;
- measured: the worst error ratio, with its spread over repeated runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from ..conformance.files import read_whole, write_whole
from ..conformance.report.records import CaseRecord, Header, Report
from ..conformance.status import RANKING, Number, UsageError, Word, as_usage
from .ratios import Spread, spread_of, worst

__all__ = [
    "BASELINE_VERSION",
    "Baseline",
    "BaselineCase",
    "BaselineError",
    "Exact",
    "Measured",
    "Provenance",
    "make_baseline",
    "read_baseline",
    "write_baseline",
]

BASELINE_VERSION = 1


class BaselineError(UsageError):
    """A baseline cannot be used; the message says why and where."""


class Provenance(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="baseline"
):
    """Origin of the numbers: the first line of the file."""

    schema: int
    gradparity: str
    torch: str
    python: str
    platform: str
    backend: str
    device: str
    commit: str
    command: str
    made: str
    """Time when the run was started."""
    runs: int
    """Number of reports from which the measured fields were taken."""
    cases: int
    """Number of lines that follow; a file with fewer has been truncated."""
    data: dict[str, str]
    """Data set -> hash of its raw bytes."""


_WordOrNothing = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(RANKING)}|)$")]


class Exact(msgspec.Struct, frozen=True, kw_only=True):
    """Values that must be equal in later reports."""

    status: Word
    laws: dict[str, _WordOrNothing]
    """Check -> status of its verdict; "" for a failure that was not accepted, which
    later reports must pass or expect."""
    compared: dict[str, int]
    """Check that passes -> number of comparisons. A later pass must not have fewer."""
    not_compared: dict[str, int] = {}
    """Check that passes -> number of missing comparisons. A later pass must not have
    more."""
    stepped: list[list[bool | None]] | None
    """One list per rank: True for each step that was taken, False for each that was
    skipped.

    An entry is None if the rank has no parameters. The field is None if nothing was
    recorded.
    """
    scale: list[list[Number]] | None
    """One list per rank with the scale after each step; None if nothing was
    recorded."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Values that may change within their noise."""

    ratio: Spread | None
    """Worst error / bound of the case; None if it was not measured."""
    parameters: dict[str, Spread]
    """Worst error / bound of each parameter."""


class BaselineCase(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="case"
):
    """Baseline of one scaler in one scenario."""

    scaler: str
    scenario: str
    exact: Exact
    measured: Measured

    @property
    def key(self) -> tuple[str, str]:
        """(scaler, scenario), as in a report."""
        return self.scaler, self.scenario


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """A whole baseline, its cases sorted by scaler and scenario."""

    provenance: Provenance
    cases: tuple[BaselineCase, ...]


_ENCODER = msgspec.json.Encoder()
Line = Provenance | BaselineCase
_DECODER = msgspec.json.Decoder(Line)


def make_baseline(reports: Sequence[Report], without: Sequence[str] = ()) -> Baseline:
    """Return the baseline of the first report, with the spread over all reports.

    Args:
        reports: repeated runs of the same code.
        without: statuses that are stored as "". Later reports must pass these checks.

    Raises:
        BaselineError: if the reports differ in their cases or in an exact field.
    """
    first = reports[0]
    for number, report in enumerate(reports[1:], 2):
        _check_repeat(first, report, number)
    cases = [{c.key: c for c in report.cases} for report in reports]
    for number, other in enumerate(cases[1:], 2):
        if other.keys() != cases[0].keys():
            raise BaselineError(
                f"report {number} has other cases than report 1: repeat the same "
                "command"
            )
    cases_ = [_case([run[key] for run in cases], without) for key in sorted(cases[0])]
    return Baseline(
        provenance=_provenance(first.header, len(reports), len(cases_)),
        cases=tuple(cases_),
    )


def _check_repeat(first: Report, other: Report, number: int) -> None:
    """Raise if a report is a copy of the first one, or is of other code or data."""
    if other == first:  # also in the seconds that each case took
        raise BaselineError(
            f"report {number} is report 1, and shows no noise: run the command again"
        )
    for name in ("gradparity", "torch", "platform", "backend", "device", "commit"):
        before, now = getattr(first.header, name), getattr(other.header, name)
        if before != now:
            raise BaselineError(
                f"report {number} was made with {name} {now}, and report 1 with "
                f"{before}: repeat the same command on the same code"
            )
    if other.header.data != first.header.data:
        raise BaselineError(f"report {number} was made with other data than report 1")


def _provenance(header: Header, runs: int, cases: int) -> Provenance:
    return Provenance(
        schema=BASELINE_VERSION,
        gradparity=header.gradparity,
        torch=header.torch,
        python=header.python,
        platform=header.platform,
        backend=header.backend,
        device=header.device,
        commit=header.commit,
        command=header.command,
        made=header.started,
        runs=runs,
        cases=cases,
        data=dict(sorted(header.data.items())),
    )


def _case(runs: Sequence[CaseRecord], without: Sequence[str]) -> BaselineCase:
    first = runs[0]
    exact = _exact(first, without)
    # Exact fields that differ between runs of the same code would fail the gate at
    # random.
    for number, run in enumerate(runs[1:], 2):
        if _exact(run, without) != exact:
            raise BaselineError(
                f"run {number} of {first.scenario}  {first.scaler} differs from run 1 "
                "in an exact field: repeated runs must agree on verdicts, skips, scales"
            )
    return BaselineCase(
        scaler=first.scaler,
        scenario=first.scenario,
        exact=exact,
        measured=_measured(runs),
    )


def _exact(case: CaseRecord, without: Sequence[str]) -> Exact:
    # The number of comparisons before a failure depends on the place of the failure.
    passes = [v for v in case.verdicts if v.status == "pass"]
    return Exact(
        status=case.status,
        laws={v.law: "" if v.status in without else v.status for v in case.verdicts},
        compared={v.law: v.compared for v in passes},
        not_compared={v.law: v.not_compared for v in passes},
        stepped=None if case.curves is None else case.curves.stepped,
        scale=None if case.curves is None else case.curves.scale,
    )


def _measured(runs: Sequence[CaseRecord]) -> Measured:
    curves = [run.curves for run in runs if run.curves is not None]
    ratios = [worst(c.parity) for c in curves if c.parity]
    names = dict.fromkeys(name for c in curves for name in c.parameters)
    return Measured(
        ratio=spread_of(ratios) if ratios else None,
        parameters={
            name: spread_of([worst([c.parameters[name]]) for c in curves])
            for name in names
            # A parameter that one run lacks has no spread, and later runs would miss
            # it.
            if all(name in c.parameters for c in curves)
        },
    )


def read_baseline(path: Path) -> Baseline:
    """Read a baseline.

    Raises:
        BaselineError: if the file cannot be read, is not a baseline of this version, or
            is truncated.
    """
    how = f"To write one: gradparity gate REPORT --baseline {path} --update-baseline"
    try:
        raw = read_whole(path)
    except UsageError as error:
        raise BaselineError(f"{error}. {how}") from error
    lines = [_line(path, n, line) for n, line in enumerate(raw.splitlines(), 1)]
    head = lines[0] if lines else None
    if not isinstance(head, Provenance):
        raise BaselineError(f"{path}: line 1 is not the header of a baseline. {how}")
    if head.schema != BASELINE_VERSION:
        raise BaselineError(
            f"{path}: version {head.schema}, this program reads {BASELINE_VERSION}: "
            "write a new one with --update-baseline"
        )
    cases = tuple(line for line in lines if isinstance(line, BaselineCase))
    _check(path, head, cases, len(lines) - 1)
    return Baseline(provenance=head, cases=cases)


def _line(path: Path, number: int, line: bytes) -> Line:
    try:
        decoded: Line = _DECODER.decode(line)
    except RecursionError:
        raise BaselineError(f"{path}: line {number}: nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        what = "not the header of a baseline: " if number == 1 else ""
        raise BaselineError(f"{path}: line {number}: {what}{error}") from error
    return decoded


def _check(
    path: Path, head: Provenance, cases: Sequence[BaselineCase], lines: int
) -> None:
    # Cut files and merge conflicts have a wrong count or doubled cases.
    distinct: Mapping[tuple[str, str], BaselineCase] = {c.key: c for c in cases}
    if not head.cases == lines == len(distinct):
        raise BaselineError(
            f"{path}: line 1 says {head.cases} cases, the file has {len(distinct)} "
            f"on {lines} lines"
        )


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Write a baseline atomically."""
    with as_usage(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    lines = [baseline.provenance, *baseline.cases]
    write_whole(path, b"".join(_ENCODER.encode(line) + b"\n" for line in lines))
