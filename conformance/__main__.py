"""Commands ``gradparity`` and ``python -m gradparity.conformance``."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..multiprocess.environment import needs_agent, unsupported
from .chosen import Chosen
from .cli.arguments import COMMANDS as GROUP
from .cli.arguments import (
    DEFAULT_SCALER,
    FORMATS,
    LISTS,
    TOOLS,
    TOOLS_FOLDER,
    entry_points_of,
    parse,
)
from .output import console, say, say_file
from .rank import PRELOAD
from .status import (
    EXIT_CODES,
    INTERRUPTED,
    RANKING,
    USAGE,
    UsageError,
    WriteError,
    as_usage,
    case_status,
    counted,
    plain,
)

if TYPE_CHECKING:  # torch is imported only by the commands that need it
    from ..multiprocess.elastic.agent import Agent
    from .rank.devices import Devices
    from .space.catalogue import Selection

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program name; ``sys.argv[1:]`` if None.

    Returns:
        The exit code: 0 pass, 1 violations, 2 usage, 3 no verdict, 4 inconclusive;
        ``record`` returns the job's own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if needs_agent():
        from .run.spmd import main_on_torchrun

        return main_on_torchrun(arguments, _main)
    return _main(arguments, None, is_program=argv is None)


def _main(
    arguments: Sequence[str], agent: Agent | None, *, is_program: bool = False
) -> int:
    try:
        status = _command(arguments, agent, is_program)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output has exited, as in ``| head``
        _drop_output()
        return 128 + signal.SIGPIPE
    except UsageError as error:
        say(f"gradparity: {plain(str(error))}", error=True)
        return USAGE
    except WriteError as error:
        _drop_output()
        say(f"gradparity: {plain(str(error))}", error=True)
        return EXIT_CODES["error"]
    except KeyboardInterrupt:
        say("gradparity: interrupted", error=True)
        return INTERRUPTED
    except Exception:  # our own fault: a bug report needs the whole traceback
        say(traceback.format_exc().rstrip(), error=True)
        say("gradparity: internal error, no verdict: see above", error=True)
        return EXIT_CODES["error"]


def _drop_output() -> None:
    """Discard pending output that cannot be written; Python would flush it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command(arguments: Sequence[str], agent: Agent | None, is_program: bool) -> int:
    if arguments and arguments[0] in TOOLS:
        return _tool(arguments)
    if arguments and arguments[0] == "survey":
        raise UsageError(
            "survey is not in the package: in a checkout of the repository run "
            "gradparity bench survey (the models of transformers) or "
            "gradparity bench survey-scalers"
        )
    # This precedes `parse`, which does not know the options of these commands.
    plugged = entry_points_of(GROUP).select(name=arguments[0]) if arguments else ()
    for entry in plugged:  # it parses its own options, --help among them
        return int(entry.load()(list(arguments[1:])))
    own, job = _split(arguments)
    parsed = parse(own)
    parsed.arguments, parsed.job = arguments, job
    parsed.agent = agent
    # Another program that calls main() may hold locks or threads, which no fork copies.
    if parsed.command in STARTING_RANKS and is_program:
        _fork_forkserver()
    return COMMANDS[parsed.command](parsed)


def _fork_forkserver() -> None:
    """Fork the forkserver from this process, and import what a rank needs.

    Torch and gradparity are then imported once, for this process and for the ranks. A
    process with threads cannot be forked, so this must run before any thread starts. If
    forking is not safe, the first world starts a separate server.
    """
    from ..multiprocess.parent.forkserver_client import fork_forkserver

    if unsupported() or "torch" in sys.modules:
        return
    before = dict(os.environ)
    # OpenBLAS would start threads when NumPy is imported.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    gc.disable()  # what is imported stays: looking for garbage in it takes 0.5 s
    try:
        for name in (*PRELOAD, f"{__package__}.run.session"):
            importlib.import_module(name)
    finally:
        gc.freeze()  # do not look later either, nor in the ranks
        gc.enable()
        os.environ.clear()
        os.environ.update(before)
    fork_forkserver()


def _run(parsed: argparse.Namespace) -> int:
    """Run ``run`` with a selection of scenarios, or ``replay`` with one scenario id."""
    from .report.records import read_report
    from .report.table import render
    from .run.session import RunSettings, run

    replayed = parsed.command == "replay"
    # This comes first: a scenario without a script is bad usage, found before any rank
    # starts.
    if replayed and parsed.script is not None:
        _script(parsed)
    settings = RunSettings(
        scalers=parsed.scaler or [DEFAULT_SCALER],
        selection=_selection(parsed),
        preset=getattr(parsed, "preset", "default"),
        scenarios=parsed.scenario,
        require=getattr(parsed, "require", ()),
        # Use another folder, so that the report of the run stays in its place.
        out=parsed.out or (Path("parity-replay") if replayed else None),
        report=parsed.report,
        fail_fast=getattr(parsed, "fail_fast", False),
        timeout_s=parsed.timeout_s,
        devices=_devices(parsed),
        quiet=parsed.quiet,
        arguments=parsed.arguments,
    )
    if not getattr(parsed, "table", False):
        return run(settings, console(), parsed.agent)
    code = run(settings, console(error=True), parsed.agent)
    say_file(render(read_report(settings.path)))
    return code


def _devices(parsed: argparse.Namespace) -> Devices:
    from .rank.devices import Devices

    return Devices(
        device=parsed.device, share=parsed.share_gpus, isolation=parsed.isolation
    )


def _localise(parsed: argparse.Namespace) -> int:
    """Run one scenario; print the first module that differs from the reference."""
    from .rank.scaler_spec import NO_SCALER, load_scaler
    from .run.launcher import place_of
    from .run.runner import Runner
    from .run.session import RunSettings
    from .space.catalogue import Selection

    spec, *more = parsed.scaler or [NO_SCALER]
    if more:
        raise UsageError("localise runs one scaler: give --scaler once")
    settings = RunSettings(
        scalers=[spec], selection=Selection(), scenarios=parsed.scenario
    )
    with place_of(_devices(parsed), parsed.timeout_s, parsed.agent) as place:
        (scenario,) = settings.chosen(place)
        load_scaler(spec, os.getcwd())
        place.check([scenario.most_ranks])
        runner = Runner(folder=os.getcwd(), place=place)
        case = runner.run(spec, scenario)
        location = runner.localise(case)
    if location is None:
        why = case.problem or "the run did not end"
        say(plain(f"nothing was compared: {why}"))
        # A pass would be 0, but nothing was compared.
        return EXIT_CODES[case.status] or EXIT_CODES["inconclusive"]
    say(plain(location.text))
    for name in location.parameters:
        say(f"  differs: {plain(name)}")
    say(f"run {case.seconds:.1f} s, second run {location.seconds:.1f} s")
    if location.where == "unknown":
        return EXIT_CODES["error"]
    # Only the verdict decides the exit code.
    parity = [v.status for v in case.verdicts if v.law.startswith("parity.")]
    return EXIT_CODES[case_status(parity)]


def _script(parsed: argparse.Namespace) -> None:
    """Write the replayed scenario as a script.

    Raises:
        UsageError: if there are several scalers, or no script can be written.
    """
    from .rank.scaler_spec import load_scaler
    from .script.standalone import write_standalone
    from .space.scenario import Scenario

    scalers = parsed.scaler or [DEFAULT_SCALER]
    if len(scalers) > 1:
        raise UsageError(
            f"--script shows one scaler, got {len(scalers)}: give --scaler once"
        )
    load_scaler(scalers[0], os.getcwd())
    write_standalone(parsed.script, Scenario.parse(parsed.scenario[0]), scalers[0])


def _hunt(parsed: argparse.Namespace) -> int:
    """Hunt with each scaler in turn; return the worst exit code."""
    from ..fixtures import WorkloadError
    from .rank.scaler_spec import load_scaler, refuse_mixed
    from .run.hunt import HuntSettings, hunt
    from .script.standalone import refuse_other_file
    from .space.workload_checks import check_workload

    scalers = list(dict.fromkeys(parsed.scaler or [DEFAULT_SCALER]))
    refuse_mixed(scalers)
    for number, scaler in enumerate(scalers, 1):
        path = _numbered(parsed.script, number)
        refuse_other_file(path, scaler, parsed.workload)
    for scaler in scalers:
        load_scaler(scaler, os.getcwd())
    if parsed.workload:
        with as_usage(WorkloadError):
            check_workload(_selection(parsed).workload)
    codes = []
    for number, scaler in enumerate(scalers, 1):
        settings = HuntSettings(
            scaler=scaler,
            selection=_selection(parsed),
            folder=os.getcwd(),
            budget_s=parsed.budget,
            script=_numbered(parsed.script, number),
        )
        codes.append(hunt(settings, console()))
    # codes do not rank as their statuses: an undecided run has the highest one
    ranking = [EXIT_CODES[word] for word in RANKING if word in EXIT_CODES]
    return max(codes, key=ranking.index)


def _numbered(path: Path, number: int) -> Path:
    return path if number == 1 else path.with_stem(f"{path.stem}-{number}")


def _selection(parsed: argparse.Namespace) -> Selection:
    from .space.catalogue import Selection

    return Selection.of(Chosen.of(vars(parsed)))


def _list(parsed: argparse.Namespace) -> int:
    from .cli.listing import listing

    kinds = (f"{name:11} {text}" for name, text in LISTS.items())
    what = parsed.what
    for line in listing(what, Chosen.of(vars(parsed))) if what else kinds:
        say(line)
    return 0


def _explain(parsed: argparse.Namespace) -> int:
    if parsed.what == "report.jsonl":
        from .report.schema import schema_text

        say_file(f"{schema_text()}\n")
        return 0
    from .cli.listing import explain

    say(explain(parsed.what))
    return 0


def _report(parsed: argparse.Namespace) -> int:
    from .report.page import write_page
    from .report.records import read_report
    from .report.terminal import print_report

    report = read_report(parsed.report)
    if parsed.format is not None:  # a conversion: its exit code says whether it worked
        entry = entry_points_of(FORMATS)[parsed.format]
        say_file(entry.load()(report))
        return 0
    if parsed.html is not None:
        say(str(write_page(report, parsed.html)))
    else:
        print_report(console(), report)
    return EXIT_CODES[report.status]


def _table(parsed: argparse.Namespace) -> int:
    from .report.records import read_report
    from .report.table import render

    report = read_report(parsed.report)
    say_file(render(report))
    return EXIT_CODES[report.status]


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split the arguments of ``record`` from the job's command after ``--``."""
    if not arguments or arguments[0] != "record":
        return arguments, ()
    if "--" not in arguments:
        if {*arguments} & {"-h", "--help"}:
            return arguments, ()
        raise UsageError("give the command after --: gradparity record RUN -- COMMAND")
    at = [*arguments].index("--")
    return arguments[:at], arguments[at + 1 :]


def _record(parsed: argparse.Namespace) -> int:
    from .record.command import record
    from .record.orders import Orders

    start, stop = parsed.steps
    orders = Orders(
        steps=(parsed.first, parsed.first + stop) if start is None else (start, stop),
        first=parsed.first,
        stop=parsed.stop,
        start="" if parsed.start is None else str((parsed.start / "plain").absolute()),
        keep_start=parsed.keep_start,
        modules=parsed.modules,
    )
    error = partial(say, error=True)
    return record(parsed.out, parsed.job, orders, noise=parsed.noise, say=error)


def _compare(parsed: argparse.Namespace) -> int:
    both = (parsed.before, parsed.after)
    # Recordings are folders, and reports are files.
    if not any(path.is_file() for path in both):
        from .record.command import compare as compare_recordings

        return compare_recordings(
            *both, exact=parsed.exact, json=parsed.json, html=parsed.html, say=say
        )
    for path in both:
        if path.is_dir():
            raise UsageError(
                f"{path}: is a folder, and the other side is a file. Give two "
                "recordings, which are folders, or two reports, which are files"
            )
    from .report.compare import compare
    from .report.records import read_report

    if parsed.exact or parsed.json or parsed.html:
        raise UsageError(
            "--exact, --json and --html are for two recordings, which are folders"
        )
    reports = [read_report(path) for path in both]
    changes = compare(*reports)
    for change in changes:
        say(plain(change.text))
    say(counted(len(changes), "difference"))
    cut = [(p, r) for p, r in zip(both, reports, strict=True) if r.incomplete]
    for path, report in cut:
        say(plain(f"{path} is incomplete: {report.incomplete}"))
    if cut:
        return EXIT_CODES["error"]
    return 1 if any(c.kind in ("regression", "gone") for c in changes) else 0


def _train(parsed: argparse.Namespace) -> int:
    from .run.launcher import place_of
    from .run.training import TrainingError, train

    with place_of(_devices(parsed), parsed.timeout_s, parsed.agent) as place:
        try:
            steps = train(parsed.scenario[0], parsed.scaler, place)
        except TrainingError as error:
            say(plain(f"gradparity: {error}"), error=True)
            return EXIT_CODES["error"]
    say(plain(f"trained {parsed.scenario[0]}: {steps} steps"))
    return 0


def _bench(parsed: argparse.Namespace) -> int:
    return _tool(parsed.tool)


def _tool(arguments: Sequence[str]) -> int:
    script = TOOLS_FOLDER / "__main__.py"
    if not script.is_file():
        raise UsageError(
            "tools for work on gradparity itself are not installed: run this in a "
            "checkout of its repository"
        )
    return int(runpy.run_path(str(script))["main"](arguments))


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "replay": _run,
    "localise": _localise,
    "hunt": _hunt,
    "list": _list,
    "explain": _explain,
    "report": _report,
    "table": _table,
    "compare": _compare,
    "record": _record,
    "train": _train,
    "bench": _bench,
}

STARTING_RANKS = ("run", "replay", "localise", "hunt", "train")
"""Commands that always start ranks."""

if __name__ == "__main__":
    sys.exit(main())
