"""``gradparity record`` and ``gradparity compare``: run a job, and compare two runs.

A recording is a folder with ``run.json`` and a folder for each run of the command:
``plain``, and for the noise ``again`` and ``nudged-1``, ``nudged-2`` and so on.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..files import write_whole
from ..status import UsageError, counted

if TYPE_CHECKING:  # imported where it is used: recording needs none of it
    from .compare import Side

__all__ = ["Manifest", "compare", "record"]

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
    """True if all runs came to their end."""


def record(
    out: Path,
    command: Sequence[str],
    steps: range,
    *,
    noise: int,
    stop: bool,
    say: Say,
) -> int:
    """Run a command and record it.

    Args:
        out: a new folder.
        command: the job.
        steps: calls of each optimizer that are recorded.
        noise: number of runs with moved weights.
        stop: whether a run ends after the last recorded step.
        say: prints a line.

    Returns:
        The exit code of the command; 2 if nothing was recorded.

    Raises:
        UsageError: if there is no command, or the folder exists.
    """
    if not command:
        raise UsageError("give the command after --: gradparity record RUN -- COMMAND")
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out}: exists: choose another name")
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror or error}") from error
    names = ["plain"]
    if noise:
        names += ["again", *(f"nudged-{n}" for n in range(1, noise + 1))]
        say(
            f"gradparity: the command runs {len(names)} times, and writes its own "
            f"files each time: as it is, again, and {counted(noise, 'time')} "
            "with weights moved by a unit in the last place (--noise 0: once)"
        )
    started = time.monotonic()
    done: list[str] = []
    for number, name in enumerate(names):
        code = _run(command, out, name, steps, stop=stop)
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
        steps=f"{steps.start}:{steps.stop}",
        runs=done,
        complete=len(done) == len(names),
    )
    write_whole(out / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    say(f"gradparity: recorded {', '.join(done)} in {out}")
    return plain


def _run(
    command: Sequence[str], out: Path, name: str, steps: range, *, stop: bool
) -> int:
    """Run the command once; all runs but the first write into a log."""
    paths = [str(HOOK), os.environ.get("PYTHONPATH", "")]
    nudged = int(name.partition("-")[2] or 0)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "GRADPARITY_RECORD": str((out / name).absolute()),
        "GRADPARITY_RECORD_STEPS": f"{steps.start}:{steps.stop}",
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


# - Compare


def compare(a: Path, b: Path, *, exact: bool, json: Path | None, say: Say) -> int:
    """Compare two recordings; see ``compare.py``.

    Args:
        a: the reference, with noise.
        b: the side in question.
        exact: whether bits are compared.
        json: where to write all that was compared.
        say: prints a line.

    Returns:
        0 same, 1 different, 2 not comparable, 4 undecided.

    Raises:
        UsageError: if one is no recording.
    """
    from .compare import compare, compare_exactly

    one, other = _side(a), _side(b)
    found = (compare_exactly if exact else compare)(one, other)
    for line in found.lines:
        say(line)
    if json is not None:
        rows = [
            {**vars(row), "ratio": row.ratio, "differs": row.differs}
            for row in found.rows
        ]
        content = {"code": found.code, "lines": found.lines, "rows": rows}
        write_whole(json, msgspec.json.format(msgspec.json.encode(content)))
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
