"""The survey: checks every model type under its plans, a few models at a time.

Models run in child processes, because a model may hang or end its process. The survey
waits on their pipes. It ends a child that is late or dead, with its ranks, and starts a
new one for the next model. The record of a model is one line of a file. It is written
at once, so that a survey can be interrupted and continued.

By default there are two children. References train in one process and ranks wait for
each other, so one model at a time leaves much of two cores idle. All plans of a model
go to one child, because they share results that do not depend on the plan.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Self

import msgspec
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gradparity import __version__
from gradparity.benchmarks.validation.survey.catalogue import (
    PLANS,
    ModelType,
    chosen_types,
)
from gradparity.benchmarks.validation.survey.records import (
    Header,
    ModelRecord,
    Survey,
    append,
    read_survey,
)
from gradparity.conformance.status import UsageError, plain

__all__ = ["Checking", "SurveySettings", "conduct", "finished", "writing"]

START_S = 180.0
"""Time limit of a child to import torch and transformers."""
GRACE_S = 10.0
"""Extra time in which a child itself reports that a model exceeded its time limit."""
READY = b"ready"
"""Message that a child sends when it is ready for models."""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "OMP_NUM_THREADS": "1",
}
"""Environment of the child and its ranks: no download, no progress bars of theirs."""


@dataclass(frozen=True, kw_only=True)
class SurveySettings:
    """Settings of one call of the command."""

    plans: Sequence[str]
    names: tuple[str, ...] = ()
    """Model types or folders; by default all."""
    out: Path
    limit_s: float = 60.0
    jobs: int = 2
    """Number of models that run at a time."""
    quiet: bool = False
    command: str = ""

    @property
    def path(self) -> Path:
        """File of the records."""
        return self.out / "survey.jsonl"

    def chosen(self) -> list[tuple[str, ModelType]]:
        """(plan, model type) of each run of the survey, model after model.

        Few references are kept, and the plans of a model share them. The plan with an
        odd number of heads is last, because it changes the model.

        Raises:
            UsageError: for a name that no model has.
        """
        found = [(p, k) for p in self.plans for k in chosen_types(p, self.names)]
        known = {name for _, kind in found for name in (kind.name, kind.folder)}
        for name in self.names:
            if name not in known:
                plans = " or ".join(self.plans)
                text = f"no model type {name!r} of transformers has rules for {plans}"
                raise UsageError(text)
        order = [*PLANS][::-1]
        return sorted(found, key=lambda pair: (pair[1].name, order.index(pair[0])))


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Reserve a folder for one survey in this context.

    Raises:
        UsageError: if another survey is writing there.
    """
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / ".survey.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        text = f"{out}: another survey writes here now: choose another --out"
        raise UsageError(text) from None
    with lock:
        yield


def conduct(settings: SurveySettings, console: Console) -> Survey:
    """Check the models without a record; return all records of the folder.

    Raises:
        UsageError: if the folder holds a survey of other versions.
        KeyboardInterrupt: after Ctrl-C; finished models are in the file.
    """
    chosen = settings.chosen()
    header = _header(settings)
    known = read_survey(settings.path)
    _same_versions(settings.path, known, header)
    done = {record.key for record in known.models}
    left = [(p, k) for p, k in chosen if (p, k.name) not in done]
    if left:
        append(settings.path, header)
        _check_all(left, settings, console)
    return read_survey(settings.path)


def _check_all(
    left: Sequence[tuple[str, ModelType]], settings: SurveySettings, console: Console
) -> None:
    bar = Progress(
        TextColumn("{task.percentage:>3.0f}%"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        disable=settings.quiet,
    )
    # the plans of a model, one after another
    models = [[*plans] for _, plans in groupby(left, lambda pair: pair[1].name)]
    log = settings.out / "checking.log"
    with bar, ExitStack() as stack:
        task = bar.add_task("", total=len(left))
        children = [
            stack.enter_context(Checking(log, settings.limit_s))
            for _ in range(min(settings.jobs, len(models)))
        ]
        due: dict[Checking, list[tuple[str, ModelType]]] = {c: [] for c in children}
        while models or any(due.values()) or any(c.busy for c in children):
            for child in children:
                if not child.busy and not due[child] and models:
                    due[child] = models.pop(0)
                if not child.busy and due[child]:
                    plan, kind = due[child].pop(0)
                    bar.update(task, description=f"{plan} {kind.name}")
                    child.begin(plan, kind)
            for record in finished([c for c in children if c.busy]):
                # at once: what was checked outlives a Ctrl-C and a crash
                append(settings.path, record)
                bar.advance(task)
                if record.verdict != "right" and not settings.quiet:
                    name = f"{record.plan} {record.model}"
                    text = plain(f"{record.verdict:<10} {name}: {record.reason}")
                    console.print(text[:160], markup=False, highlight=False)


def _header(settings: SurveySettings) -> Header:
    return Header(
        package="transformers",
        version=version("transformers"),
        torch=version("torch"),
        python=platform.python_version(),
        gradparity=__version__,
        # the load, because times mean little on a busy machine
        machine=f"{os.cpu_count()} cores, CPU, gloo, load {os.getloadavg()[0]:.0f}",
        command=settings.command,
        started=_now(),
        limit_s=settings.limit_s,
        jobs=settings.jobs,
    )


def _same_versions(path: Path, known: Survey, header: Header) -> None:
    # records of other versions may have other verdicts
    for earlier in known.headers[-1:]:
        was = (earlier.package, earlier.version, earlier.torch)
        now = (header.package, header.version, header.torch)
        if was != now:
            text = f"{path} is of {was[0]} {was[1]} and torch {was[2]}, here are"
            way_out = "choose another --out"
            raise UsageError(f"{text} {now[0]} {now[1]} and torch {now[2]}: {way_out}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Checking:
    """Child process that checks models; as a context manager it ends with its ranks."""

    def __init__(self, log: Path, limit_s: float) -> None:
        """Set up without starting the child.

        Args:
            log: file for the output of the child and its libraries.
            limit_s: time limit in seconds of a model under a plan.
        """
        self.log = log
        self.limit_s = limit_s
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._record: ModelRecord | None = None
        """Facts about the model that is checked now."""
        self._begun = self._until = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def busy(self) -> bool:
        """True while a model runs."""
        return self._record is not None

    @property
    def pipe(self) -> Connection:
        """Pipe that becomes readable when the child has a message or has ended."""
        assert self._pipe is not None
        return self._pipe

    @property
    def left_s(self) -> float:
        """Seconds that the model has left, or the child if it is starting."""
        return max(0.0, self._until - time.monotonic())

    def begin(self, plan: str, kind: ModelType) -> None:
        """Let the child check a model; :func:`finished` yields the record."""
        assert not self.busy
        self._record = ModelRecord(
            plan=plan, model=kind.name, folder=kind.folder, verdict="crashed"
        )
        self._begin_clock()
        if self._pipe is None:
            self._start()
            self._until = self._begun + START_S
        with suppress(ConnectionError):  # it is gone: the end of its pipe will say so
            self.pipe.send_bytes(msgspec.json.encode((plan, kind.name)))

    def take(self) -> ModelRecord | None:
        """Return the record, once the pipe is readable or the time is over.

        The verdict is ``crashed`` if the model ended the child, and ``too slow`` if it
        exceeded its time. Returns None if the child has only become ready.
        """
        record = self._record
        assert record is not None
        try:
            if self.pipe.poll():
                message = self.pipe.recv_bytes()
                if message == READY:
                    self._begin_clock()
                    return None
                record = msgspec.json.decode(message, type=ModelRecord)
            else:
                self.end()
                text = f"not checked within {self.limit_s:g} s"
                record = msgspec.structs.replace(
                    record, verdict="too slow", reason=text
                )
        except (EOFError, ConnectionError):
            code = self.end()
            text = f"the process that checked it ended with exit code {code}"
            record = msgspec.structs.replace(record, reason=text)
        self._record = None
        seconds = round(time.monotonic() - self._begun, 2)
        return msgspec.structs.replace(record, seconds=seconds, finished=_now())

    def end(self) -> int | None:
        """End the child; return its exit code if it had already ended by itself."""
        process, self._process, self._pipe = self._process, None, None
        if process is None:
            return None
        # a child that is ending by itself gets a second, so that its exit code is known
        process.join(1.0)
        code = process.exitcode
        process.kill()
        process.join()
        return code

    def _begin_clock(self) -> None:
        self._begun = time.monotonic()
        # the grace lets the child report the limit itself, with what it knows of the
        # model
        self._until = self._begun + self.limit_s + GRACE_S

    def _start(self) -> None:
        os.environ.update(QUIET)  # the child's, and its ranks'
        # spawn: a fork would inherit this process's threads and modules
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, str(self.log), self.limit_s)
        )
        self._process.start()
        # else this process holds both ends, and a child that dies gives no end of file
        theirs.close()


def finished(children: Collection[Checking]) -> Iterator[ModelRecord]:
    """Wait until a child is done, late or dead; yield the records of such children."""
    # the pipe of a dead child is readable, too: its end of file
    wait([c.pipe for c in children], min(c.left_s for c in children))
    for child in children:
        if (child.pipe.poll() or not child.left_s) and (record := child.take()):
            yield record


def _serve(pipe: Connection, log: str, limit_s: float) -> None:
    """Main function of the child: serve requests until the survey closes the pipe."""
    # Ctrl-C reaches the whole process group; the survey ends this process itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(log, "ab") as file:
        for fd in (1, 2):
            # by descriptor: native code and ranks print there, too
            os.dup2(file.fileno(), fd)
    # imported only in the child: it imports torch and transformers
    from gradparity.benchmarks.validation.survey.comparing import check_model, ranks

    with ranks(limit_s) as place:
        pipe.send_bytes(READY)
        while True:
            try:
                plan, name = msgspec.json.decode(pipe.recv_bytes())
            except EOFError:
                return
            pipe.send_bytes(msgspec.json.encode(check_model(plan, name, place)))
