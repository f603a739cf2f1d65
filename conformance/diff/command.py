"""``gradparity diff``: run both sides and print their first difference.

A side is an interpreter, a folder and what to train there: two workloads or scenarios
in this folder, two commits of a checkout (worktrees that are removed again), or two
virtual environments. Each runs in a separate process, which writes a recording.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ..files import write_whole
from ..status import EXIT_CODES, USAGE, UsageError, plain, worst_of
from .differences import RESULTS, Outcome, compare_runs
from .recording import (
    Recording,
    Request,
    Run,
    read_arrays,
    read_recording,
)

__all__ = ["DiffSettings", "diff"]

_JSON_VERSION = 1
"""Of what ``--json`` writes: raised when a field is renamed or removed."""
_WORDS = {
    "pass": "SAME",
    "fail": "DIFFERENT",
    "inconclusive": "INCONCLUSIVE",
    "error": "INVALID",
}
_MARKS = {
    "equal": "same",
    "noise": "same",
    "different": "DIFFERS",
    "undecided": "undecided",
    "broken": "broken",
}
_PACKAGES = 8
"""Packages whose versions differ that are printed; the JSON has all of them."""
_MORE = 3
"""Further tensors that are printed at the first difference of a scenario."""


@dataclass(frozen=True, kw_only=True)
class DiffSettings:
    """What to compare."""

    sides: Sequence[str]
    """Two workloads, two scenario ids or two commits; empty with ``venvs``."""
    request: Request
    """The settings of both sides, apart from ``sides``."""
    checkout: Path | None = None
    venvs: Sequence[Path] = ()
    json: Path | None = None
    """Where to write the result as JSON."""

    def __post_init__(self) -> None:
        if self.venvs and (self.sides or self.checkout):
            raise UsageError(
                "--venv A --venv B are the two sides: give no other, and no --checkout"
            )
        if len(self.venvs or self.sides) != 2:
            raise UsageError(
                f"a diff has two sides, got {len(self.venvs or self.sides)}: give two "
                "workloads (file.py:Class), two scenario ids, --checkout DIR with two "
                "commits, or --venv twice"
            )
        for side in self.sides:
            if side.endswith(".jsonl"):
                raise UsageError(
                    f"{side}: a report holds verdicts and curves, no tensors: "
                    f"gradparity compare {' '.join(self.sides)} says what changed"
                )


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One of the two sides: its interpreter, its folder and its arguments."""

    name: str
    text: str
    request: Request
    python: str = sys.executable
    folder: Path = field(default_factory=Path.cwd)
    paths: tuple[str, ...] = ()
    """Further import paths."""


def diff(settings: DiffSettings, show: Callable[[str], None]) -> int:
    """Run both sides and compare them.

    Args:
        settings: what to compare.
        show: called with each line of the result.

    Returns:
        0 the same, 1 different, 3 a side broke, 4 nothing is known.

    Raises:
        UsageError: for bad usage, including errors that a side finds in its workload.
    """
    with tempfile.TemporaryDirectory(prefix="gradparity-diff-") as scratch:
        with _sides(settings, Path(scratch)) as sides:
            recordings = [_recorded(side, Path(scratch), show) for side in sides]
            if apart := _packages_apart(recordings):
                show(plain(f"packages: {_packages_text(apart)}"))
            outcomes = _outcomes(sides, recordings, settings)
        status = worst_of(RESULTS[found.result] for found in outcomes)
        if status == "skipped":
            status = "inconclusive"
        for found in outcomes:
            for line in _outcome_lines(found):
                show(plain(line))
        show(f"diff: {_WORDS[status]}: {_counts(outcomes)}")
        if settings.json is not None:
            _write_json(settings.json, status, sides, recordings, outcomes)
    return EXIT_CODES[status]


@contextmanager
def _sides(settings: DiffSettings, scratch: Path) -> Iterator[list[_Side]]:
    """Both sides; worktrees exist until the context ends."""
    names, asked = ("A", "B"), settings.request
    if settings.venvs:
        yield [
            _side(name, str(venv), asked, python=_python_of(venv))
            for name, venv in zip(names, settings.venvs, strict=True)
        ]
        return
    if settings.checkout is None:
        yield [
            _side(name, text, _asked_for(asked, text))
            for name, text in zip(names, settings.sides, strict=True)
        ]
        return
    with _worktrees(settings.checkout, settings.sides, scratch) as folders:
        yield [
            _side(name, text, asked, folder=folder)
            for name, text, folder in zip(names, settings.sides, folders, strict=True)
        ]


def _side(
    name: str,
    text: str,
    request: Request,
    *,
    python: str = sys.executable,
    folder: Path | None = None,
) -> _Side:
    """A side, with the folders in which its modules are looked for."""
    folder = folder or Path.cwd()
    paths = [str(folder / "src")] if (folder / "src").is_dir() else []
    path, _, attribute = request.workload.partition(":")
    if path.endswith(".py"):  # its folder becomes the import path
        file = folder / path
        if not file.is_file():
            raise UsageError(f"{name}: {file}: no such file")
        paths.insert(0, str(file.parent))
        workload = f"{file.stem}:{attribute}"
        request = msgspec.structs.replace(request, workload=workload)
    return _Side(
        name=name,
        text=text,
        request=request,
        python=python,
        folder=folder,
        paths=tuple(paths),
    )


def _asked_for(request: Request, side: str) -> Request:
    """The arguments of a side that is a workload or a scenario id."""
    is_file = ".py:" in side
    if "/" in side and not is_file:
        if request.workload or request.topologies:
            raise UsageError(
                f"{side} is a scenario: give no --workload and no --topology beside it"
            )
        return msgspec.structs.replace(request, scenarios=(side,))
    if ":" not in side:
        raise UsageError(
            f"{side!r} is no workload (file.py:Class or module:attribute) and no "
            "scenario id; commits need --checkout DIR"
        )
    if request.workload:
        raise UsageError("A and B are workloads: give no --workload beside them")
    return msgspec.structs.replace(request, workload=side)


def _python_of(venv: Path) -> str:
    """The interpreter of a virtual environment, or the interpreter itself."""
    for path in (venv / "bin" / "python", venv):
        if path.is_file() and os.access(path, os.X_OK):
            # not resolved: the link leads to the system's interpreter, without the
            # packages
            return str(path.absolute())
    raise UsageError(f"{venv}: no virtual environment: it has no bin/python")


@contextmanager
def _worktrees(
    checkout: Path, commits: Sequence[str], scratch: Path
) -> Iterator[list[Path]]:
    """A worktree of each commit; ``.`` is the checkout as it is."""
    made: list[Path] = []
    try:
        folders = []
        for name, commit in zip("AB", commits, strict=True):
            if commit == ".":
                folders.append(checkout.absolute())
                continue
            # named as the checkout: code may depend on the name of its folder
            folder = scratch / f"worktree-{name}" / (checkout.resolve().name or "tree")
            made.append(folder)
            _git(checkout, "worktree", "add", "--detach", str(folder), commit)
            folders.append(folder)
        yield folders
    finally:
        for folder in made:
            if folder.exists():
                _git(checkout, "worktree", "remove", "--force", str(folder))


def _git(checkout: Path, *words: str) -> None:
    # git takes a commit as a separate argument: it must not look like an option
    if any(word.startswith("-") for word in words[3:]):
        raise UsageError(f"{words[-1]!r} is no commit")
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *words], capture_output=True, text=True
        )
    except OSError as error:
        raise UsageError(f"git: {error.strerror or error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise UsageError(f"{checkout}: git {words[0]} {words[1]}: {plain(last)}")


def _recorded(side: _Side, scratch: Path, show: Callable[[str], None]) -> Path:
    """Run a side; returns the folder of its recording.

    Raises:
        UsageError: if the side says that it cannot do what it is asked for.
    """
    out, shim = scratch / side.name, scratch / "judge"
    out.mkdir()
    shim.mkdir(exist_ok=True)
    # this gradparity observes both sides, whatever is installed in theirs
    link = shim / "gradparity"
    if not link.exists():
        link.symlink_to(Path(__file__).parent.parent.parent, target_is_directory=True)
    request = out / "request.json"
    asked = msgspec.structs.replace(side.request, out=str(out))
    request.write_bytes(msgspec.json.encode(asked))
    before = os.environ.get("PYTHONPATH")
    paths = [*side.paths, str(shim), *([before] if before else [])]
    start = time.monotonic()
    done = subprocess.run(
        [side.python, "-m", "gradparity.conformance.diff.record", str(request)],
        cwd=side.folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        seconds = time.monotonic() - start
        recording = read_recording(out)
        show(
            plain(
                f"{side.name}: {side.text}: {len(recording.runs)} scenarios in "
                f"{seconds:.0f} s, torch {recording.torch}, Python {recording.python}"
            )
        )
        return out
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    # a module that one side lacks is the caller's choice of sides, not our fault
    if done.returncode == USAGE or "ModuleNotFoundError" in lines[-1]:
        raise UsageError(f"{side.name}: {side.text}: {plain(lines[-1])}")
    raise RuntimeError("\n".join([f"side {side.name} broke:", *lines]))


def _packages_apart(folders: Sequence[Path]) -> dict[str, tuple[str, str]]:
    """Package -> its versions in A and B, where they differ; "" if not installed."""
    a, b = (read_recording(folder).packages for folder in folders)
    pairs = {name: (a.get(name, ""), b.get(name, "")) for name in sorted(a | b)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _packages_text(apart: dict[str, tuple[str, str]]) -> str:
    texts = [
        f"{n} {a or 'none'} in A, {b or 'none'} in B" for n, (a, b) in apart.items()
    ]
    more = [f"{len(texts) - _PACKAGES} more"] if len(texts) > _PACKAGES else []
    return "; ".join(texts[:_PACKAGES] + more)


def _outcomes(
    sides: Sequence[_Side], folders: Sequence[Path], settings: DiffSettings
) -> list[Outcome]:
    """Each scenario of A with its twin of B."""
    a, b = (read_recording(folder).runs for folder in folders)
    if sides[0].request.scenarios and not settings.request.scenarios:
        # two ids are compared even if the scenarios differ
        pairs = [((0, a[0]), (0, b[0]))]
        lone: list[tuple[str, Run]] = []
    else:
        twins = {run.pairs_with: (n, run) for n, run in enumerate(b)}
        pairs = [
            ((n, run), twins.pop(run.pairs_with))
            for n, run in enumerate(a)
            if run.pairs_with in twins
        ]
        known = {run.pairs_with for _, (_, run) in pairs}
        lone = [("A", run) for run in a if run.pairs_with not in known]
        lone += [("B", run) for _, run in twins.values()]
    outcomes = [
        compare_runs(
            run, twin, (read_arrays(folders[0], n), read_arrays(folders[1], m))
        )
        for (n, run), (m, twin) in pairs
    ]
    for name, run in lone:
        found = Outcome(a=run, b=run)
        text = f"only {name} has this scenario: the other side cannot run it"
        outcomes.append(found.ended("undecided", text))
    return outcomes


def _outcome_lines(found: Outcome) -> Iterator[str]:
    other = found.b.scenario
    where = found.a.scenario if other == found.a.scenario else found.a.pairs_with
    if found.a.pairs_with != found.b.pairs_with:
        where = f"{found.a.scenario} and {other}"
    yield f"{_MARKS[found.result]:9} {where}: {found.text}"
    for more in found.first[1 : 1 + _MORE]:
        yield f"          also {more.text}"


def _counts(outcomes: Sequence[Outcome]) -> str:
    words = {
        "equal": "bitwise equal",
        "noise": "within the noise",
        "different": "different",
        "undecided": "undecided",
        "broken": "broken",
    }
    texts = [
        f"{count} {word}"
        for result, word in words.items()
        if (count := sum(found.result == result for found in outcomes))
    ]
    return f"{len(outcomes)} scenarios: {', '.join(texts) or 'none'}"


def _write_json(
    path: Path,
    status: str,
    sides: Sequence[_Side],
    folders: Sequence[Path],
    outcomes: Sequence[Outcome],
) -> None:
    recordings: list[Recording] = [read_recording(folder) for folder in folders]
    value: dict[str, Any] = {
        "schema": _JSON_VERSION,
        "outcome": _WORDS[status].lower(),
        "exit_code": EXIT_CODES[status],
        "sides": [
            {
                "name": side.name,
                "text": side.text,
                "torch": recording.torch,
                "python": recording.python,
            }
            for side, recording in zip(sides, recordings, strict=True)
        ],
        "packages": _packages_apart(folders),
        "scenarios": [
            {
                "a": found.a.scenario,
                "b": found.b.scenario,
                "result": found.result,
                "text": found.text,
                "compared": found.compared,
                "equal": found.equal,
                "not_compared": found.not_compared,
                "first": found.first,
            }
            for found in outcomes
        ],
    }
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
