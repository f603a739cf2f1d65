"""Records of a report: one JSON object a line, header first and footer last.

A report is written while the run goes on. If the run is killed, the report has every
finished case and no footer, and counts as incomplete.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import msgspec
from filelock import FileLock, Timeout
from msgspec import Meta
from msgspec.json import Decoder

from ..files import create, read_whole, refuse_odd, write_whole, writing
from ..status import (
    Count,
    Number,
    Status,
    UsageError,
    Verdict,
    Word,
    case_status,
)

__all__ = [
    "HARNESS",
    "SCHEMA_VERSION",
    "CaseRecord",
    "Comparison",
    "Curves",
    "Footer",
    "Header",
    "Launcher",
    "LawText",
    "Line",
    "Location",
    "Report",
    "ReportError",
    "ReportWriter",
    "append_footer",
    "read_report",
]

SCHEMA_VERSION = 2
HARNESS = "harness"
"""Name used instead of a check if the harness broke."""


class ReportError(UsageError):
    """Raised if a report cannot be used; the message says why and where."""


class _Line(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """Base class of lines of the file; unknown fields are rejected."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of parts of a line."""


class Launcher(_Part, frozen=True, kw_only=True):
    """Facts about the launch of the ranks."""

    name: str
    """Kind of launcher: ``pool`` or ``torchrun``."""
    ranks: Count = 0
    """Number of ranks; 0 means as many as each scenario has."""
    hosts: Count = 1
    """Number of machines, counted by torchrun's agents."""
    run: str = ""
    """torchrun's id of the run."""
    attempt: Count = 0
    """Number of restarts by torchrun before this report began."""


class LawText(_Part, frozen=True, kw_only=True):
    """Texts of a check, so that a page can be rendered without the check's code."""

    text: str
    """The rule in one sentence."""
    reason: str
    """Reason why a training run needs the rule."""


class Header(_Line, frozen=True, kw_only=True, tag="header"):
    """Environment and settings of the run."""

    schema: int
    gradparity: str
    torch: str
    python: str
    platform: str
    backend: str
    device: str
    threads: int
    commit: str
    """Commit of the current folder's checkout; empty outside of one."""
    command: str
    preset: str
    seed: int
    started: str
    planned: Count
    """Number of planned cases."""
    data: dict[str, str]
    """Data set -> hash of its raw bytes."""
    environment: dict[str, str]
    """Environment variables that change numbers or transports."""
    launcher: Launcher = Launcher(name="pool")
    gpus: tuple[str, ...] = ()
    """Names of the GPUs on the machine of rank 0, if ranks use CUDA."""
    laws: dict[str, LawText] = {}
    """Check -> its texts; of two checks that fail at a step, the first is the cause."""
    require: tuple[str, ...] = ()
    """Scalers that decide the result of the report; empty means all of them."""
    reference: str = ""
    """Reference that the workload declares; empty for the plain reference."""
    not_tried: tuple[str, ...] = ()
    """Meshes and recipes that the preset leaves out for a workload, one line for each
    reason."""


class Curves(_Part, frozen=True, kw_only=True):
    """Numbers for the plots, and for a second evaluation of some checks."""

    loss: list[Number | None]
    """Mean loss of each step over the ranks that have one."""
    reference_loss: list[Number]
    """Loss of the fp64 reference."""
    scale: list[list[Number]]
    """For each rank: the scale after each step."""
    growth: list[list[int | None]]
    """For each rank: the growth tracker after each step; null if the scaler does not
    report it."""
    stepped: list[list[bool | None]]
    """For each rank: true for each step that changed the local parameters; null if
    unknown."""
    bad: list[list[str]]
    """For each rank and step: the first non-finite parameter, or an empty string."""
    parity: list[Number]
    """Largest error / bound of each step."""
    parameters: dict[str, Number]
    """Largest error / bound of each parameter."""


class Comparison(_Part, frozen=True, kw_only=True):
    """A tensor compared with the fp64 reference, with the bound of its error."""

    kind: Annotated[str, Meta(pattern="^(gradient|update|loss)$")]
    """Kind of tensor; updates are relative to the initial values."""
    parameter: str
    step: Count
    rank: Count
    measure: str
    """``norm`` or ``largest element`` of the difference."""
    error: Number
    """Size of the difference, divided by the size of the reference's tensor unless that
    is 0."""
    absolute: Number
    """Size of the difference, not divided by the size of the tensor."""
    bound: Number
    """Bound of the relative error."""

    @property
    def ratio(self) -> float:
        """Error divided by bound; above 1 is a violation. 0 if the error is 0."""
        error, bound = float(self.error), float(self.bound)
        if error == 0.0:
            return 0.0
        return error / bound if bound else float("inf")


class Location(_Part, frozen=True, kw_only=True):
    """Place where a run first differs from the reference, found by a second run."""

    where: Annotated[
        str,
        Meta(pattern="^(forward|loss|backward|gradient|update|nowhere|unknown)$"),
    ]
    """Kind of the first difference: ``forward`` output of a module, ``loss``,
    ``backward`` gradient of a module's input or output, ``gradient`` of parameters
    only, ``update`` of parameters only, or ``nowhere``. ``unknown`` if the second run
    failed."""
    text: str
    """Description of the location."""
    module: str = ""
    """Faulty module; empty for the model itself, or if it is not a module."""
    inside: str = ""
    """Module inside ``module`` at whose boundary a tensor first differs; empty if there
    is none."""
    ranks: tuple[Count, ...] = ()
    """Ranks that first differ."""
    step: Count | None = None
    micro_batch: Count | None = None
    error: Number | None = None
    """Error relative to the size of the tensor."""
    bound: Number | None = None
    """Bound of the error, relative to the size of the tensor."""
    factor: Number | None = None
    """Common factor of the loss, or of all gradients that differ; null if there is
    none."""
    collective: str = ""
    """Last collective that the first differing rank issued before the difference."""
    parameters: tuple[str, ...] = ()
    """Parameters whose gradient differs in that step. If no gradient differs:
    parameters whose update differs."""
    compared: Count = 0
    """Number of compared tensors at module boundaries."""
    not_compared: Count = 0
    """Number of tensors at module boundaries that could not be compared."""
    seconds: float = 0.0
    """Duration of the second run."""


class CaseRecord(_Line, frozen=True, kw_only=True, tag="case"):
    """Record of one scaler in one scenario."""

    scaler: str
    scenario: str
    topology: str
    world_size: Annotated[int, Meta(ge=1)]
    precision: str
    model: str
    status: Word
    verdicts: tuple[Verdict, ...]
    seconds: float
    problem: str = ""
    """Reason, with the rank, why no check could be applied; empty if checks were
    applied."""
    whose: str = ""
    """Owner of the call in ``problem``, such as ``your train_step``; empty if the
    harness broke."""
    replay: str = ""
    """Command that runs this case again."""
    script: str = ""
    """Program that shows the violation with torch only; present in the first case in
    which a scaler fails a check."""
    location: Location | None = None
    """First module, loss or update that differs; null if the case was not localised."""
    worst: tuple[Comparison, ...] = ()
    """For each kind of tensor: the comparison with the largest error / bound over all
    steps and ranks; empty if parity was not measured."""
    curves: Curves | None = None

    @property
    def key(self) -> tuple[str, str]:
        """(scaler, scenario): identifies a case in a report."""
        return self.scaler, self.scenario

    def verdict(self, law: str) -> Verdict | None:
        """Return the verdict of one check, or None."""
        return next((v for v in self.verdicts if v.law == law), None)

    @property
    def findings(self) -> tuple[Verdict, ...]:
        """Verdicts of the case. If no check could be applied, an error comes first."""
        if not self.problem:
            return self.verdicts
        law = self.whose or HARNESS
        broke = Verdict(law=law, status="error", message=self.problem)
        return (broke, *self.verdicts)

    @property
    def failures(self) -> tuple[Verdict, ...]:
        """Violations, or the failure of the harness; the cause first.

        The check that failed at the earliest step is the cause of the others. If
        several fail at one step, the first in the list of checks is the cause. Checks
        without a step, such as counts, come last.
        """
        failures = [v for v in self.findings if v.status in ("fail", "error")]
        return tuple(sorted(failures, key=_precedence))

    @property
    def is_located(self) -> bool:
        """True if ``location`` shows the cause, and not a consequence."""
        if self.location is None or not self.failures:
            return self.location is not None
        first, step = self.failures[0], self.location.step
        if first.step is not None and step is not None and first.step < step:
            return False
        return first.law.startswith(_OF_VALUES)


_OF_VALUES = ("parity.", "transparency.", "agreement.replicas")
"""Beginnings of the ids of checks that compare values. If such a check fails first, the
location of the first difference from the reference shows the cause."""


def _precedence(verdict: Verdict) -> tuple[bool, float]:
    step = math.inf if verdict.step is None else verdict.step
    return verdict.status != "error", step


class Footer(_Line, frozen=True, kw_only=True, tag="footer"):
    """Result of the run."""

    complete: bool
    """True if every planned case was run and checked."""
    cases: Count
    counts: dict[Word, Count]
    """Case status -> number of cases."""
    seconds: float
    reason: str = ""
    """Reason why the run is incomplete; empty if it is complete."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a report file."""

    header: Header
    cases: tuple[CaseRecord, ...]
    footer: Footer | None
    """None if the run was cut off."""

    @property
    def incomplete(self) -> str:
        """Reason why the report does not cover the whole run; empty if it does."""
        if self.footer is None:
            return (
                f"the run was cut off after {len(self.cases)} of "
                f"{self.header.planned} cases: the footer is missing"
            )
        if self.footer.complete:
            return ""
        return self.footer.reason or "the footer says so, and gives no reason"

    @property
    def status(self) -> str:
        """Result of the run, from the cases of scalers that decide.

        An incomplete run is an ``error``, unless it stopped at a failed check.
        ``EXIT_CODES`` has the exit code of each status.
        """
        status = case_status(c.status for c in self.decided().cases)
        stopped = self.footer is not None and status == Status.FAIL
        return Status.ERROR.value if self.incomplete and not stopped else status

    def decides(self, scaler: str) -> bool:
        """Return True if the cases of a scaler decide the result (``--require``)."""
        return not self.header.require or scaler in self.header.require

    def decided(self) -> Report:
        """Return the report without the cases of scalers that do not decide."""
        cases = tuple(case for case in self.cases if self.decides(case.scaler))
        return msgspec.structs.replace(self, cases=cases)

    @property
    def scalers(self) -> list[str]:
        """Scalers in the order of their first case."""
        return list(dict.fromkeys(c.scaler for c in self.cases))

    @property
    def topologies(self) -> list[str]:
        """Topologies in the order of their first case."""
        return list(dict.fromkeys(c.topology for c in self.cases))

    def of(self, topology: str, scaler: str) -> list[CaseRecord]:
        """Return the cases of one cell of the matrix topology x scaler."""
        return [c for c in self.cases if (c.topology, c.scaler) == (topology, scaler)]


Line = Header | CaseRecord | Footer
"""Types of the lines of the file."""
_ENCODER = msgspec.json.Encoder()
_DECODER = Decoder(Line)


class _Version(msgspec.Struct):
    """Version field of a header; read first, as it decides how to read the rest."""

    schema: int
    kind: str = "header"


_VERSION = Decoder(_Version)
T = TypeVar("T")


class ReportWriter:
    """Writes a report line by line; a context manager.

    Earlier reports with the same name are kept in the same folder as ``NAME.1``,
    ``NAME.2`` and so on, the oldest first. Only one writer at a time can write a report
    of this name.

    Raises:
        UsageError: if the file cannot be written, or another run is writing it.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        refuse_odd(path)
        self._lock = FileLock(path.with_name(f".{path.name}.lock"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Lock before the rename: an earlier report moves only if no run still
            # writes it.
            self._lock.acquire(blocking=False)
            if path.exists():
                path.rename(_free_name(path))
            self._file = create(path)
        except Timeout:
            raise UsageError(
                f"{path}: another run writes this report now: wait for its end, or "
                "choose another folder by --out"
            ) from None
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error}") from error
        self._counts: Counter[str] = Counter()
        self._planned = header.planned
        self._write(header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with writing(self.path):  # closing retries what a full disk did not take
                self._file.close()
        finally:
            self._lock.release()

    def case(self, record: CaseRecord) -> None:
        """Append one case."""
        self._counts[record.status] += 1
        self._write(record)

    def close(self, seconds: float, reason: str = "") -> Footer:
        """Append the footer.

        Args:
            seconds: wall time of the run.
            reason: why the run is incomplete; empty if it is not.
        """
        cases = self._counts.total()
        if not reason and cases != self._planned:
            reason = f"{cases} of {self._planned} planned cases were run"
        footer = Footer(
            complete=not reason,
            cases=cases,
            counts=dict(sorted(self._counts.items())),
            seconds=round(seconds, 3),
            reason=reason,
        )
        self._write(footer)
        return footer

    def _write(self, line: Line) -> None:
        with writing(self.path):
            self._file.write(_encoded(line) + b"\n")
            # Flush, so that a killed run leaves every finished case.
            self._file.flush()


def _encoded(line: Line) -> bytes:
    try:
        return _ENCODER.encode(line)
    # a name of a file that is not UTF-8, in a message of a user's code
    except UnicodeEncodeError:
        return _ENCODER.encode(_escaped(msgspec.to_builtins(line)))


def _escaped(value: Any) -> Any:
    """Write characters that UTF-8 does not have as escape sequences."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(each) for key, each in value.items()}
    return [*map(_escaped, value)] if isinstance(value, list | tuple) else value


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def append_footer(path: Path, reason: str) -> None:
    """End the report of a writer that is gone; do nothing if it has a footer.

    Args:
        path: file of the report.
        reason: why the report is incomplete.
    """
    report = read_report(path)
    if report.footer is not None:
        return
    whole = read_whole(path)
    footer = Footer(
        complete=False,
        cases=len(report.cases),
        counts=_count(case.status for case in report.cases),
        seconds=round(sum(case.seconds for case in report.cases), 3),
        reason=reason,
    )
    # Cut off a line that the writer did not finish.
    complete_lines = whole[: whole.rfind(b"\n") + 1]
    write_whole(path, complete_lines + _ENCODER.encode(footer) + b"\n")


def read_report(path: Path) -> Report:
    """Read a report, complete or not.

    Raises:
        ReportError: if the file is not a report of this version, or its counts do not
            add up.
    """
    header, *others = _read_lines(path)
    if not isinstance(header, Header):
        raise ReportError(f"{path}: line 1 is not a report header")
    footer, cases = None, []
    for number, line in enumerate(others, 2):
        if isinstance(line, Header):
            raise ReportError(f"{path}: line {number}: a second header")
        if footer is not None:
            raise ReportError(f"{path}: a footer that is not the last line")
        if isinstance(line, Footer):
            footer = line
            continue
        if wrong := _wrong_shape(line):
            raise ReportError(f"{path}: line {number}: {wrong} in {line.scenario}")
        cases.append(line)
    report = Report(header=header, cases=tuple(cases), footer=footer)
    _check_counts(path, report)
    return report


def _read_lines(path: Path) -> list[Line]:
    try:
        raw = read_whole(path)
    except UsageError as error:
        raise ReportError(str(error)) from error
    # Bytes after the last newline are an unfinished line of a killed run.
    lines = raw.split(b"\n")[:-1]
    if not lines:
        raise ReportError(
            f"{path}: no complete line: the file is empty, or not a report"
        )
    # Read the version first: another version may have other fields.
    first = _decoded(path, 1, lines[0], _VERSION)
    if first.kind != "header":
        kind = ": it is a baseline" if first.kind == "baseline" else ""
        raise ReportError(f"{path}: line 1 is not a report header{kind}")
    if first.schema != SCHEMA_VERSION:
        raise ReportError(
            f"{path}: schema version {first.schema}, this program reads "
            f"{SCHEMA_VERSION}"
        )
    return [_decoded(path, n, line, _DECODER) for n, line in enumerate(lines, 1)]


def _decoded(path: Path, number: int, line: bytes, decoder: Decoder[T]) -> T:
    try:
        return decoder.decode(line)
    except RecursionError:
        raise ReportError(f"{path}: line {number}: nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        what = "not a report header: " if number == 1 else ""
        raise ReportError(f"{path}: line {number}: {what}{error}") from error


def _wrong_shape(case: CaseRecord) -> str:
    """Describe a wrong number of ranks or steps in a case; "" if all are right."""
    curves = case.curves
    if curves is None:
        return ""
    tables = {name: getattr(curves, name) for name in _BY_RANK}
    for name, rows in tables.items():
        if len(rows) != case.world_size:
            return f"{name} has {len(rows)} rows for {case.world_size} ranks"
    # If a run stopped early, ranks may have completed different steps.
    for name, rows in tables.items():
        for rank, (row, scales) in enumerate(zip(rows, curves.scale, strict=True)):
            if len(row) != len(scales):
                steps = f"{len(row)} steps on rank {rank}"
                return f"{name} has {steps}, and scale has {len(scales)}"
    return ""


_BY_RANK = ("scale", "growth", "stepped", "bad")
"""Curves with one row for each rank."""


def _check_counts(path: Path, report: Report) -> None:
    keys = Counter(c.key for c in report.cases)
    doubled = [key for key, count in keys.items() if count > 1]
    if doubled:
        raise ReportError(f"{path}: case {doubled[0]} occurs more than once")
    footer = report.footer
    if footer is None:
        return
    counts = _count(c.status for c in report.cases)
    if footer.cases != len(report.cases) or footer.counts != counts:
        raise ReportError(
            f"{path}: the footer counts {footer.cases} cases {footer.counts}, the file "
            f"holds {len(report.cases)} {counts}"
        )
    if footer.complete and footer.cases != report.header.planned:
        raise ReportError(
            f"{path}: the footer says complete with {footer.cases} of "
            f"{report.header.planned} planned cases"
        )


def _count(statuses: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(statuses).items()))
