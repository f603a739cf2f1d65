"""The command line: which options each command takes. No work is done here."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the class is private and generic only for type checkers
    Commands = argparse._SubParsersAction[Any]

__all__ = ["COMMANDS", "DEFAULT_SCALER", "FORMATS", "LISTS", "build_parser"]

COMMANDS = "gradparity.commands"
"""Entry point group of further commands: functions (argv) -> exit code."""
FORMATS = "gradparity.formats"
"""Entry point group of report formats: functions (Report) -> text."""
_HELP = "report + baseline/expectations -> exit code, with reasons"

DEFAULT_SCALER = "gradparity.scaler:GradScaler"
LISTS = (
    "laws",
    "topologies",
    "precisions",
    "optimizers",
    "faults",
    "scalers",
    "scenarios",
)


class _Parser(argparse.ArgumentParser):
    """One clear line on bad usage, and exit code 2."""

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse says NoReturn, exit() does not return
        self.exit(2, f"gradparity: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``gradparity`` and ``python -m gradparity.conformance``."""
    parser = _Parser(
        prog="gradparity",
        description="Judge gradient scalers on real meshes and gate on the report.",
        epilog="exit codes: 0 conformant, 1 violations, 2 usage, 3 harness failure",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_replay(commands)
    _add_hunt(commands)
    _add_machine(commands)
    _add_mutants(commands)
    _add_small(commands)
    for entry in entry_points(group=COMMANDS):
        commands.add_parser(entry.name, help=_HELP)  # listed here, parsed there
    return parser


def _add_run(commands: Commands) -> None:
    run = commands.add_parser("run", help="run scenarios, write a report")
    _add(run, _JUDGED, _SELECTION, _RUN, _DEVICES, _OUTPUT)


def _add_replay(commands: Commands) -> None:
    replay = commands.add_parser("replay", help="run one scenario id again")
    replay.add_argument("scenario", nargs=1, metavar="ID", help="a scenario id")
    replay.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="also write the scenario as a script that needs only torch",
    )
    _add(replay, _JUDGED, _DEVICES, _OUTPUT)


def _add_hunt(commands: Commands) -> None:
    hunt = commands.add_parser(
        "hunt", help="search scenarios and call histories, shrink what fails"
    )
    _add(hunt, _JUDGED, _SELECTION)
    _add_budget(hunt, "time to search for each scaler, half of it call histories")
    hunt.add_argument(
        "--script",
        type=Path,
        default=Path("violation.py"),
        metavar="FILE",
        help="where to write a violation as a script that needs only torch",
    )


def _add_budget(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--budget",
        type=_seconds,
        default=60.0,
        metavar="TIME",
        help=f"{text}; as 60s, 5m or 1h (60s)",
    )


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(text: str) -> float:
    """``60s``, ``5m`` or ``1h`` in seconds."""
    number, unit = text[:-1], text[-1:]
    try:
        found = float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no positive time such as 60s, 5m or 1h"
        )
    return found


def _add_machine(commands: Commands) -> None:
    machine = commands.add_parser(
        "machine", help="call histories on all ranks against an oracle"
    )
    _add(machine, _JUDGED, _MACHINE)
    _add_budget(machine, "time to search")


def _add_mutants(commands: Commands) -> None:
    mutants = commands.add_parser(
        "mutants", help="judge the judge: faulty scalers x laws"
    )
    mutants.add_argument(
        "--preset", **_repeated("NAME", "take what is missed to the next (quick)")
    )
    mutants.add_argument("--only", **_repeated("CLASS", "a class of fixtures.faulty"))
    # its presets are several: those that follow take what was missed
    chosen = {n: how for n, how in _SELECTION.items() if n in _NARROWING}
    _add(mutants, chosen, _MUTANTS)


def _add_small(commands: Commands) -> None:
    listing = commands.add_parser("list", help="what there is to choose from")
    listing.add_argument("what", choices=LISTS, metavar="|".join(LISTS))
    _add(listing, _SELECTION)
    explain = commands.add_parser(
        "explain", help="a law, a scenario, the report's schema"
    )
    explain.add_argument("what", metavar="LAW|ID|report.jsonl")
    report = commands.add_parser("report", help="render a report")
    report.add_argument("report", type=Path, metavar="REPORT")
    formats = report.add_mutually_exclusive_group()
    formats.add_argument("--html", type=Path, metavar="DIR", help="write index.html")
    for name in sorted(entry.name for entry in entry_points(group=FORMATS)):
        formats.add_argument(
            f"--{name}",
            action="store_const",
            const=name,
            dest="format",
            help=f"print the report as {name}",
        )
    compare = commands.add_parser("compare", help="two reports by meaning")
    compare.add_argument("before", type=Path, metavar="BEFORE")
    compare.add_argument("after", type=Path, metavar="AFTER")
    bench = commands.add_parser("bench", help="benchmarks, from a source checkout")
    bench.add_argument("what", choices=("scaler", "harness", "scale"))
    bench.add_argument("rest", nargs=argparse.REMAINDER)


def _add(parser: argparse.ArgumentParser, *tables: Options) -> None:
    for table in tables:
        for name, settings in table.items():
            parser.add_argument(f"--{name}", **settings)


def _repeated(metavar: str, text: str) -> dict[str, Any]:
    return {
        "action": "append",
        "default": [],
        "metavar": metavar,
        "help": f"{text}; may be repeated",
    }


Options = Mapping[str, Mapping[str, Any]]

_JUDGED: Options = {
    "scaler": _repeated(
        "SPEC",
        f"module:attribute to judge ({DEFAULT_SCALER}), or none: the stack alone",
    ),
}
_SELECTION: Options = {
    "preset": {
        "default": "default",
        "metavar": "NAME",
        "help": "parity (main job), quick, default (all pairs), full (all triples)",
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
        "default": "",
        "metavar": "SPEC",
        "help": "module:attribute of a workload of your own (docs/workload.md)",
    },
    "topology": _repeated("NAME", "only this topology"),
    "data": _repeated("NAME", "only this data set"),
    "precision": _repeated("NAME", "only this precision"),
    "optimizer": _repeated("NAME", "only this optimizer"),
    "world-size": {
        "type": int,
        "metavar": "N",
        "help": "ranks, instead of each topology's own number",
    },
    "seed": {"type": int, "default": 0, "help": "seed of weights and data"},
}
_NARROWING = ("topology", "data", "precision", "optimizer", "world-size", "seed")
_DEVICES: Options = {
    "device": {
        "default": "cpu",
        "choices": ("cpu", "cuda"),
        "help": "cpu with gloo (default), or cuda with NCCL, one rank a GPU",
    },
    "share-gpus": {
        "action": "store_true",
        "help": "several ranks a GPU, with gloo; goes with --device cuda",
    },
}
_RUN: Options = {
    "scenario": _repeated("ID", "run this scenario instead of a preset"),
    "require": _repeated("SPEC", "scaler that decides the exit code (all)"),
    "fail-fast": {"action": "store_true", "help": "stop at the first violation"},
}
_MACHINE: Options = {
    "world-size": {"type": int, "default": 2, "metavar": "N", "help": "ranks (2)"},
    "history": {
        "default": "",
        "metavar": "CALLS",
        "help": "run this history again, as a search has told it",
    },
    "family": _repeated("NAME", "only this family of programs (docs/mutants.md)"),
}
_MUTANTS: Options = {
    "every": {
        "action": "store_true",
        "help": "judge wrong scalers in all scenarios, caught or not",
    },
    "seeds": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "seeds for the right scalers (1)",
    },
    "share": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "each seed takes one Nth of the first preset (1)",
    },
    "out": {
        "type": Path,
        "metavar": "DIR",
        "help": "folder for mutants.json and mutants.md",
    },
    "quiet": {"action": "store_true", "help": "no progress"},
}
_OUTPUT: Options = {
    "out": {
        "type": Path,
        "metavar": "DIR",
        "help": "folder for report.jsonl and index.html (parity-report)",
    },
    "json": {
        "type": Path,
        "metavar": "FILE",
        "help": "write the report to FILE, one JSON object a line",
    },
    "timeout-s": {
        "type": float,
        "default": 120.0,
        "metavar": "S",
        "help": "limit of one scenario in seconds (120)",
    },
    "quiet": {"action": "store_true", "help": "no progress, no table"},
}

SUITE: Options = {
    **_JUDGED,
    **_SELECTION,
    "scenario": _RUN["scenario"],
    **_DEVICES,
    **{name: _OUTPUT[name] for name in ("out", "json", "timeout-s")},
}
"""The options that the pytest plugin takes, under its prefix."""
