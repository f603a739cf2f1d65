"""Parser of the command line: the options of each command.

Errors that can be found without torch are raised before torch is imported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoints, PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ... import __version__
from ..status import USAGE, UsageError, did_you_mean, unknown
from . import converters
from .values import check_alone, check_values

if TYPE_CHECKING:  # the class is private and generic only for type checkers
    Commands = argparse._SubParsersAction[Any]  # noqa: SLF001  # for type checkers alone

__all__ = [
    "COMMANDS",
    "DEFAULT_SCALER",
    "FORMATS",
    "LISTS",
    "NARROWING",
    "SUITE",
    "TOOLS",
    "TOOLS_FOLDER",
    "Parser",
    "add_options",
    "build_parser",
    "entry_points_of",
    "parse",
    "repeated",
]

COMMANDS = "gradparity.commands"
"""Entry point group of additional commands: functions (argv) -> exit code."""
FORMATS = "gradparity.formats"
"""Entry point group of report formats: functions (Report) -> text."""
_HELP = {
    "gate": "check a report against a baseline and expectations",
    "init": "write a workload file for a model, and a CI job",
}
"""Help texts of the additional commands in this package."""
TOOLS_FOLDER = Path(__file__).parents[2] / "benchmarks"
"""Folder of the tools for work on gradparity itself; exists only in a checkout."""
TOOLS = ("mutants",)
"""Names of tools with a command of their own: ``gradparity mutants``, for example."""
_TOOLS_HELP = {
    "bench": "tools for work on gradparity itself",
    "mutants": "test gradparity itself: is each faulty scaler caught by its check",
}

DEFAULT_SCALER = "gradparity.scaler:GradScaler"
LISTS = {
    "laws": "checks: one line on what each compares",
    "topologies": "layouts of ranks, or the meshes of a --workload",
    "precisions": "number formats of weights, gradients and communication",
    "optimizers": "optimizers of the built-in models",
    "models": "built-in models",
    "recipes": "ways to step: clipping, accumulation, resume and others",
    "presets": "selections of scenarios, from quick to full",
    "faults": "how to write an inf or a nan into one gradient",
    "scalers": "gradient scalers that --scaler knows",
    "scenarios": "ids that replay runs and explain describes, as the options select",
}
"""Kind of names of ``gradparity list`` -> its description."""

_EPILOG = """\
examples:
  gradparity record one -- python train.py             record a job as it is, then
  gradparity compare one mesh                          compare it with one on ranks
  gradparity run --quick --scaler none --workload my.stack:Workload
                                                       check a small copy of a model
  gradparity run --scaler mypackage.amp:MyScaler       check a gradient scaler

exit codes of run: 0 all checks pass, 1 a check fails, 2 usage, 3 no result (your code
raised, the harness broke, the report is incomplete), 4 inconclusive. The commands
record and compare have their own, see their --help. docs/start.md takes five minutes.
"""


class Parser(argparse.ArgumentParser):
    """Argument parser that raises UsageError, and accepts no abbreviated options.

    An abbreviation such as ``--base`` could mean another option after an upgrade.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        # argparse also names "...", the words for another program, which may be none.
        raise UsageError(message.removesuffix(", ..."))

    def check_options(self, arguments: Sequence[str]) -> None:
        """Raise for an unknown option and suggest a known one.

        Raises:
            UsageError: an option is unknown; the message names it.
        """
        options = [name for name in self._option_string_actions if name[:2] == "--"]
        for word in arguments:
            name = word.partition("=")[0]
            if word == "--":
                return
            if word.startswith("--") and name not in options:
                others = f"; {self.prog} --help lists those there are"
                raise UsageError(
                    f"unknown option {name}{did_you_mean(name, options) or others}"
                )


def _check_words(arguments: Sequence[str], parser: Parser, commands: Commands) -> None:
    """Raise for an unknown command or option."""
    name, *others = arguments
    if name.startswith("-"):
        if others or name not in ("-h", "--help", "--version"):
            parser.check_options([name])
        return
    if name not in commands.choices:
        raise UsageError(unknown("command", name, commands.choices))
    if name != "bench":  # it hands on options of other programs
        commands.choices[name].check_options(others)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line.

    Raises:
        SystemExit: after ``--help`` or ``--version``, or without arguments.
        UsageError: if an option is wrong, or options exclude each other.
    """
    parser, commands = _parsers()
    if not arguments:
        parser.print_help(sys.stderr)
        parser.exit(USAGE)
    _check_words(arguments, parser, commands)
    parsed = parser.parse_args(arguments)
    if layouts := getattr(parsed, "layouts", []):
        if parsed.topology or parsed.scenario or parsed.preset != "default":
            raise UsageError(
                "--layouts is a set of scenarios: give no --topology, --scenario or "
                "preset beside it"
            )
        parsed.topology, parsed.preset = layouts, "layouts"
    if parsed.command == "run" and parsed.scenario:
        check_alone(parsed, {**NARROWING, "workload": _SELECTION["workload"]})
    check_values(parsed)
    # A misspelt --require would let every scaler pass.
    tested = getattr(parsed, "scaler", None) or [DEFAULT_SCALER]
    for spec in getattr(parsed, "require", ()):
        if spec not in tested:
            raise UsageError(
                f"--require {spec} is not checked: add --scaler {spec}, or choose one "
                f"of {', '.join(tested)}"
            )
    return parsed


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``gradparity`` and ``python -m gradparity.conformance``."""
    return _parsers()[0]


def _parsers() -> tuple[Parser, Commands]:
    parser = Parser(
        prog="gradparity",
        description="Find out whether your parallel PyTorch training computes what one "
        "process would.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"gradparity {__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_record(commands)
    _add_compare(commands)
    _add_run(commands)
    _add_replay(commands)
    _add_localise(commands)
    _add_hunt(commands)
    _add_train(commands)
    _add_small(commands)
    _add_tools(commands)
    # List the tools here; each parses its own options.
    for entry in entry_points_of(COMMANDS):
        if entry.name in commands.choices:
            continue
        help_ = _HELP.get(entry.name, f"from {entry.module}")
        commands.add_parser(entry.name, help=help_)
    return parser, commands


def entry_points_of(group: str) -> EntryPoints:
    """Return the entry points of a group that gradparity itself declares.

    Entry points of other packages are ignored, so no package can replace a command.
    """
    try:
        return distribution("gradparity").entry_points.select(group=group)
    except PackageNotFoundError:  # it is not installed
        return EntryPoints()


_REPORT: dict[str, Any] = {
    "type": Path,
    "metavar": "REPORT",
    "help": "report.jsonl of gradparity run",
}


def _command(commands: Commands, name: str, text: str) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    Args:
        commands: commands of the main parser.
        name: name of the command.
        text: description in the list of commands; also begins the command's own help.
    """
    sentence = f"{text[0].upper()}{text[1:]}."
    command: argparse.ArgumentParser
    command = commands.add_parser(name, help=text, description=sentence)
    return command


def _add_compare(commands: Commands) -> None:
    compare = _command(
        commands, "compare", "compare two recordings (folders), or two reports (files)"
    )
    compare.epilog = (
        "exit codes of recordings: 0 same, 1 different, 2 not comparable, 4 undecided"
    )
    first = (
        "the reference: RUN of gradparity record, the one with noise runs; or "
        f"{_REPORT['help']}"
    )
    compare.add_argument("before", **_REPORT | {"metavar": "A", "help": first})
    second = "the side to check, of the same kind as A"
    compare.add_argument("after", **_REPORT | {"metavar": "B", "help": second})
    exact = "compare two recordings bit for bit"
    compare.add_argument("--exact", action="store_true", help=exact)
    rows = "write all compared values of two recordings to FILE"
    compare.add_argument("--json", type=converters.file, metavar="FILE", help=rows)
    page = "write a page about two recordings into DIR"
    compare.add_argument("--html", type=converters.folder, metavar="DIR", help=page)


def _add_run(commands: Commands) -> None:
    run = _command(commands, "run", "run scenarios, write a report")
    add_options(run, _TESTED, _SELECTION, _RUN, _DEVICES, _OUTPUT)


def _add_replay(commands: Commands) -> None:
    replay = _command(commands, "replay", "run one scenario id again")
    replay.add_argument("scenario", nargs=1, metavar="ID", help="a scenario id")
    replay.add_argument(
        "--script",
        type=converters.file,
        metavar="FILE",
        help="also write the scenario as a script that needs only torch",
    )
    add_options(replay, _TESTED, _DEVICES, _OUTPUT)


def _add_localise(commands: Commands) -> None:
    localise = _command(
        commands, "localise", "find the first module that differs from the reference"
    )
    localise.add_argument("scenario", nargs=1, metavar="ID", help="a scenario id")
    localise.add_argument(
        "--scaler",
        **repeated("SPEC", "module:attribute to train with (none)", converters.specs),
    )
    add_options(localise, _DEVICES, {"timeout-s": _OUTPUT["timeout-s"]})


def _add_train(commands: Commands) -> None:
    train = _command(commands, "train", "train one scenario id, as a job for record")
    train.add_argument("scenario", nargs=1, metavar="ID", help="a scenario id")
    train.add_argument(
        "--scaler", default="none", metavar="SPEC", help="module:attribute (none)"
    )
    add_options(train, _DEVICES, {"timeout-s": _OUTPUT["timeout-s"]})


def _add_hunt(commands: Commands) -> None:
    hunt = _command(commands, "hunt", "search scenarios for failures, and shrink these")
    # a hunt draws scenarios, and has no preset
    add_options(hunt, _TESTED, {"workload": _SELECTION["workload"], **NARROWING})
    _add_budget(hunt, "time to search for each scaler")
    hunt.add_argument(
        "--script",
        type=converters.file,
        default=Path("failure.py"),
        metavar="FILE",
        help="where to write a failure as a script that needs only torch",
    )


def _add_budget(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--budget",
        type=converters.seconds,
        default=60.0,
        metavar="TIME",
        help=f"{text}; as 60s, 5m or 1h (60s)",
    )


def _add_small(commands: Commands) -> None:
    listing = _command(
        commands,
        "list",
        "list the names of checks, topologies, models and other choices",
    )
    listing.add_argument(
        "what",
        nargs="?",
        type=converters.one_of("list", [*LISTS]),
        metavar="NAMES",
        help=f"{', '.join(LISTS)}; without it these words are explained",
    )
    add_options(listing, _SELECTION)
    explain = _command(
        commands,
        "explain",
        "explain a check, a group of checks, a scenario or the schema of a report",
    )
    explain.add_argument(
        "what",
        metavar="LAW|CHAPTER|ID|report.jsonl",
        help="a check (scale.rule), a group (scale), an id, or the word report.jsonl",
    )
    report = _command(commands, "report", "show a report again, or write its page")
    report.add_argument("report", **_REPORT)
    formats = report.add_mutually_exclusive_group()
    formats.add_argument(
        "--html", type=converters.folder, metavar="DIR", help="write index.html"
    )
    for name in sorted(entry_points_of(FORMATS).names):
        formats.add_argument(
            f"--{name}",
            action="store_const",
            const=name,
            dest="format",
            help=f"print the report as {name}",
        )
    table = _command(
        commands, "table", "print the layouts of a report as a Markdown table"
    )
    table.add_argument("report", **_REPORT)


def _add_record(commands: Commands) -> None:
    """Add ``record``; ``--`` and the job's command are split off before parsing."""
    record = _command(commands, "record", "record a training job as it is")
    record.usage = "gradparity record RUN [options] -- COMMAND ..."
    record.epilog = "exit code: that of the first run, or 2 if nothing was recorded"
    record.add_argument("out", type=Path, metavar="RUN", help="a new folder")
    record.add_argument(
        "--steps",
        type=converters.step_range,
        default=(None, 3),
        metavar="N|A:B",
        help="steps of each optimizer to record: the first N, or A to B - 1 (3)",
    )
    record.add_argument(
        "--first",
        type=converters.natural,
        default=0,
        metavar="N",
        help="number of the first step of a job that resumes another (0)",
    )
    record.add_argument(
        "--noise",
        type=converters.noise_runs,
        default=2,
        metavar="N",
        help="runs with moved weights, to measure noise; 0 for the other side (2)",
    )
    record.add_argument(
        "--stop", action="store_true", help="end the job after the last recorded step"
    )
    record.add_argument(
        "--modules",
        action="store_true",
        help="also keep outputs of the model's blocks: they say where a difference "
        "begins",
    )
    record.add_argument(
        "--keep-start", action="store_true", help="also write the initial weights"
    )
    record.add_argument(
        "--start",
        type=Path,
        metavar="RUN",
        help="begin from the weights of a run that was recorded with --keep-start",
    )


def _add_tools(commands: Commands) -> None:
    """Add tools for work on gradparity itself; those without help are not listed."""
    # An installed wheel has no benchmarks/ and lists no command that it cannot run.
    shown = _TOOLS_HELP if TOOLS_FOLDER.is_dir() else {}
    for name in ("bench", *TOOLS):
        tool = (
            _command(commands, name, shown[name])
            if name in shown
            else commands.add_parser(name)
        )
        if name == "bench":
            tool.add_argument(
                "tool",
                nargs=argparse.REMAINDER,
                metavar="TOOL ...",
                help="a tool and its options, such as: scaler --help; none lists them",
            )


def add_options(parser: argparse.ArgumentParser, *tables: Options) -> None:
    """Add all options of the given tables to a parser."""
    for table in tables:
        for name, settings in table.items():
            parser.add_argument(f"--{name}", **settings)


def repeated(
    metavar: str, text: str, split: Callable[[str], list[str]] = converters.names
) -> dict[str, Any]:
    """Return arguments of ``add_argument`` for ``--x a,b``, which may be repeated."""
    return {
        "action": "extend",
        "type": split,
        "default": [],
        "metavar": f"{metavar},...",
        "help": text,
    }


Options = Mapping[str, Mapping[str, Any]]

_TESTED: Options = {
    "scaler": repeated(
        "SPEC",
        f"module:attribute to check ({DEFAULT_SCALER}), or none: the training alone",
        converters.specs,
    ),
}
_SELECTION: Options = {
    "preset": {
        "default": "default",
        "metavar": "NAME",
        "help": "parity (main job), layouts (each topology, plain), quick, default "
        "(all pairs), full (all triples)",
    },
    "quick": {
        "action": "store_const",
        "const": "quick",
        "dest": "preset",
        "help": "short for --preset quick",
    },
    "full": {
        "action": "store_const",
        "const": "full",
        "dest": "preset",
        "help": "short for --preset full",
    },
    "workload": {
        "action": converters.Once,
        "default": "",
        "type": converters.workload_spec,
        "metavar": "SPEC",
        "help": "module:attribute of your workload (docs/workload.md)",
    },
    "topology": repeated("NAME", "only these topologies"),
    "model": repeated("NAME", "only these models, see list models"),
    "precision": repeated("NAME", "only these precisions"),
    "optimizer": repeated("NAME", "only these optimizers"),
    "world-size": {
        "type": converters.count,
        "metavar": "N",
        "help": "ranks, instead of each topology's own number",
    },
    "seed": {"type": int, "default": 0, "help": "seed of weights and data"},
}
NARROWING: Options = {
    name: how
    for name, how in _SELECTION.items()
    if name not in ("preset", "quick", "full", "workload")
}
"""Options that remove scenarios from a preset."""
_DEVICES: Options = {
    "device": {
        "default": "cpu",
        "type": converters.one_of("device", ("cpu", "cuda")),
        "metavar": "cpu|cuda",
        "help": "cpu with gloo (default), or cuda with NCCL, one rank per GPU",
    },
    "share-gpus": {
        "action": "store_true",
        "help": "several ranks per GPU, with --device cuda (NCCL 2.31 or later)",
    },
    "isolation": {
        "default": "pool",
        "choices": ("pool", "process"),
        "help": "ranks of all runs are the same processes (pool, default), or each run "
        "has fresh ones (process): for code that keeps a mesh or groups in globals",
    },
}
_RUN: Options = {
    "scenario": {  # an id has commas of its own
        "action": "append",
        "default": [],
        "metavar": "ID",
        "help": "run this scenario instead of a preset; may be repeated",
    },
    "require": repeated(
        "SPEC", "scalers that decide the exit code (all)", converters.specs
    ),
    "fail-fast": {
        "action": "store_true",
        "help": "stop at the first failed check or error",
    },
    "layouts": repeated(
        "NAME", "compare three fp32 steps of each topology with one process"
    ),
    "table": {
        "action": "store_true",
        "help": "print layouts x (verdict, worst tensor, errors, bound) as Markdown, "
        "and all else on stderr",
    },
}
_OUTPUT: Options = {
    "out": {
        "type": converters.folder,
        "metavar": "DIR",
        "help": "folder for report.jsonl and index.html (parity-report)",
    },
    "report": {
        "type": converters.file,
        "metavar": "FILE",
        "help": "write the report to FILE instead, without a page",
    },
    "timeout-s": {
        "type": converters.positive,
        "default": 120.0,
        "metavar": "S",
        "help": "limit of one scenario in seconds (120)",
    },
    "quiet": {"action": "store_true", "help": "no progress, no table"},
}

SUITE: Options = {
    **_TESTED,
    **_SELECTION,
    "scenario": _RUN["scenario"],
    **_DEVICES,
    **{name: _OUTPUT[name] for name in ("out", "report", "timeout-s")},
}
"""Options of the pytest plugin, which puts ``--gradparity-`` before each name."""
