"""``gradparity record`` and ``gradparity compare``: run a job, and compare two runs.

A recording is a folder with ``run.json`` and a folder for each run of the command:
``plain``, and for the noise ``again`` and ``nudged-1``, ``nudged-2`` and so on.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..cli.arguments import Parser
from ..files import write_whole
from ..status import UsageError, counted

if TYPE_CHECKING:  # imported where it is used: recording needs none of it
    from .compare import Side

__all__ = ["Manifest", "compare_main", "is_recording", "record_main"]

HOOK = Path(__file__).parent / "hook"
MANIFEST = "run.json"
VERSION = 1
STOPPED = (130, -2)
"""Exit statuses of a job that Ctrl-C has ended."""
LINES = """\
gradparity: no optimizer of torch was called. If the optimizer is not one of torch, or
the job runs Python with -I or in a container, add two lines around the training:

    import gradparity
    with gradparity.record(model, optimizer): ...
"""
Say = Callable[[str], None]


class Manifest(msgspec.Struct, kw_only=True):
    """``run.json``: how a recording was made."""

    version: int = VERSION
    command: list[str]
    steps: str
    runs: list[str]
    """Names of the folders of its runs, the plain one first."""
    complete: bool
    """Whether all runs came to their end."""


def record_main(arguments: Sequence[str], say: Say) -> int:
    """Run ``gradparity record``; the exit code is that of the command."""
    own, command = _split(arguments)
    parsed = _record_parser().parse_args(own)
    if not command:
        raise UsageError("give the command after --: gradparity record RUN -- COMMAND")
    steps = _steps(parsed.steps)
    out: Path = parsed.out
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out}: exists: choose another name")
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror or error}") from error
    names = ["plain"]
    if parsed.noise:
        names += ["again", *(f"nudged-{n}" for n in range(1, parsed.noise + 1))]
        say(
            f"gradparity: the command runs {len(names)} times, and writes its own "
            f"files each time: as it is, again, and {counted(parsed.noise, 'time')} "
            "with weights moved by a unit in the last place (--noise 0: once)"
        )
    started = time.monotonic()
    done: list[str] = []
    for number, name in enumerate(names):
        code = _run(command, out, name, steps, stop=parsed.stop)
        if number == 0:
            if code in STOPPED or (code and not _has_files(out / name)):
                return code
            if not _has_files(out / name):
                say(LINES)
                return 2
            plain, seconds = code, time.monotonic() - started
            if len(names) > 1:
                left = seconds * (len(names) - 1)
                say(f"gradparity: the other runs take about {left:.0f} s")
        elif code in STOPPED:
            break
        elif not _has_files(out / name):
            say(f"gradparity: {name} recorded nothing (exit code {code}): see its log")
            break
        done.append(name)
    manifest = Manifest(
        command=list(command),
        steps=f"{steps[0]}:{steps[1]}",
        runs=done,
        complete=len(done) == len(names),
    )
    write_whole(out / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    say(f"gradparity: recorded {', '.join(done)} in {out}")
    return plain


def _run(
    command: Sequence[str], out: Path, name: str, steps: tuple[int, int], *, stop: bool
) -> int:
    """Run the command once; all runs but the first write into a log."""
    paths = [str(HOOK), os.environ.get("PYTHONPATH", "")]
    nudged = int(name.partition("-")[2] or 0)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "GRADPARITY_RECORD": str((out / name).absolute()),
        "GRADPARITY_RECORD_STEPS": f"{steps[0]}:{steps[1]}",
        "GRADPARITY_RECORD_NUDGE": str(nudged),
        "GRADPARITY_RECORD_STOP": str(int(stop)),
    }
    try:
        if name == "plain":
            return subprocess.run(command, env=environment).returncode
        with (out / f"{name}.log").open("wb") as log:
            return subprocess.run(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            ).returncode
    except KeyboardInterrupt:
        return STOPPED[0]
    except OSError as error:
        raise UsageError(f"{command[0]}: {error.strerror or error}") from error


def _has_files(folder: Path) -> bool:
    return any(folder.glob("rank-*.safetensors"))


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    given = list(arguments)
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


def _steps(text: str) -> tuple[int, int]:
    first, colon, stop = text.partition(":")
    try:
        found = (int(first), int(stop)) if colon else (0, int(first))
    except ValueError:
        found = (0, 0)
    if not 0 <= found[0] < found[1]:
        raise UsageError(f"--steps {text}: expected a number, or FIRST:END, as 100:104")
    return found


def _record_parser() -> Parser:
    parser = Parser(
        prog="gradparity record",
        description="Record a training job as it is, without an edit of its script.",
        usage="gradparity record RUN [options] -- COMMAND ...",
    )
    parser.add_argument("out", type=Path, metavar="RUN", help="a new folder")
    parser.add_argument(
        "--steps", default="3", metavar="N|A:B", help="steps to record (3)"
    )
    parser.add_argument(
        "--noise",
        type=int,
        default=2,
        metavar="N",
        help="runs with nudged weights; 0 on the side that is compared with (2)",
    )
    parser.add_argument(
        "--stop", action="store_true", help="end the job after the last recorded step"
    )
    return parser


# - Compare


def is_recording(path: str) -> bool:
    """Whether a path is a folder: reports, which are also compared, are files."""
    return Path(path).is_dir()


def compare_main(arguments: Sequence[str], say: Say) -> int:
    """Run ``gradparity compare A B`` on two recordings."""
    from .compare import compare, compare_exactly

    parser = Parser(
        prog="gradparity compare",
        description="Compare two recordings. Exit codes: 0 same, 1 different, 2 not "
        "comparable, 3 broken, 4 undecided.",
    )
    parser.add_argument("one", type=Path, metavar="A", help="the reference, with noise")
    parser.add_argument("other", type=Path, metavar="B")
    bits = "compare weights and gradients bit for bit"
    parser.add_argument("--exact", action="store_true", help=bits)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    parsed = parser.parse_args(list(arguments))
    one, other = (_side(path) for path in (parsed.one, parsed.other))
    found = (compare_exactly if parsed.exact else compare)(one, other)
    for line in found.lines:
        say(line)
    if parsed.json is not None:
        rows = [
            {**vars(row), "ratio": row.ratio, "differs": row.differs}
            for row in found.rows
        ]
        content = {"code": found.code, "lines": found.lines, "rows": rows}
        write_whole(parsed.json, json.dumps(content, indent=1) + "\n")
    return found.code


def _side(path: Path) -> Side:
    from .compare import Side
    from .merge import read_merged

    manifest = path / MANIFEST
    try:
        if not manifest.exists():
            raise UsageError(f"{path}: is no recording: it has no {MANIFEST}")
        made = msgspec.json.decode(manifest.read_bytes(), type=Manifest)
        if made.version != VERSION:
            text = f"has version {made.version}, expected {VERSION}: record it again"
            raise UsageError(f"{manifest}: {text}")
        plain, *noisy = [read_merged(path / Path(name).name) for name in made.runs]
    except (OSError, ValueError, IndexError, msgspec.MsgspecError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path}: {error}") from error
    return Side(name=str(path), run=plain, noisy=noisy)
