"""``gradparity record`` and ``gradparity compare``: run a job, and compare two runs.

A recording is a folder with ``run.json`` and a folder for each run of the command:
``plain``, and, to measure noise, ``again``, ``nudged-1``, ``nudged-2`` and so on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..files import write_whole
from ..status import UsageError, as_usage, counted, plain
from .orders import (
    LATE,
    ORDERS,
    TWICE,
    VERSION,
    Manifest,
    Orders,
    idle_ranks,
    unrecorded,
)

# compare imports its modules where it uses them: recording needs none
if TYPE_CHECKING:
    from .compare import Comparison, Side

__all__ = ["compare", "record"]

HOOK = Path(__file__).parent / "hook"
MANIFEST = "run.json"
LINES = """\
gradparity: no optimizer of torch was called, or nothing could be written. A step that
is compiled is not seen: call the optimizer's own. A process that ends by os._exit
before its last recorded step writes nothing: record fewer --steps. If the optimizer is
not one of torch, or the job sets PYTHONPATH or runs Python with -I, with -E or in a
container, add two lines around the training:

    import gradparity
    with gradparity.record(model, optimizer): ...
"""
Say = Callable[[str], None]


def record(
    out: Path,
    command: Sequence[str],
    orders: Orders,
    *,
    noise: int,
    say: Say,
) -> int:
    """Run a command and record it.

    Args:
        out: folder to create.
        command: command line of the job.
        orders: orders for the job's processes; ``out`` and ``nudge`` are set here for
            each run.
        noise: number of extra runs with nudged weights.
        say: prints a line.

    Returns:
        The exit code of the command. If that is 0 and nothing was recorded, 2.

    Raises:
        UsageError: if there is no command, the folder exists, or the start weights are
            missing.
    """
    if not command:
        raise UsageError("give the command after --: gradparity record RUN -- COMMAND")
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists: choose another name, or delete it")
    if not str(out).isprintable():  # bytes that are not UTF-8 are not printable either
        text = "has a name that cannot be printed: choose another one"
        raise UsageError(f"{plain(str(out))} {text}")
    if orders.start and not any(Path(orders.start).glob("start-*.safetensors")):
        run = Path(orders.start).parent
        why = "that run has no weights: record it again with --keep-start"
        raise UsageError(f"--start {run}: {why if run.exists() else 'no such run'}")
    created = [each for each in (out, *out.parents) if not each.exists()]
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror or error}") from error
    names = ["plain"]
    if noise:
        # The last run overwrites what the job has saved, such as its checkpoint.
        names += [*(f"nudged-{n}" for n in range(1, noise + 1)), "again"]
        say(
            f"gradparity: the command runs {len(names)} times, and writes its own "
            f"files each time: as it is, {counted(noise, 'time')} with weights moved "
            "by a unit in the last place, and again as it is (--noise 0: once)"
        )
    started = time.monotonic()
    done: list[str] = []
    for number, name in enumerate(names):
        if number:
            left = (time.monotonic() - started) / number * (len(names) - number)
            text = f"run {number + 1} of {len(names)}, about {left:.0f} s left"
            say(f"gradparity: {text}")
        try:
            code, is_stopped = _run(command, out, name, orders)
        except UsageError:
            _remove(created)
            raise
        if number == 0:
            result = code
            if not _has_files(out / name):
                say(_why_not(out / name, orders, code))
                _remove([out / name, *created])
                return code or 2
        if _has_files(out / name):
            done.append(name)
            if number == 0:
                for text in idle_ranks(out / name):
                    say(f"gradparity: {text}")
        elif not is_stopped:
            say(f"{_why_not(out / name, orders, code, name)}; see {out / name}.log")
            break
        if is_stopped:
            say("gradparity: stopped by a signal")
            break
    is_complete = len(done) == len(names)
    manifest = Manifest(
        command=[word.encode("utf-8", "replace").decode() for word in command],
        steps=f"{orders.steps[0]}:{orders.steps[1]}",
        # the unchanged runs first; without all of them there is no noise
        runs=["plain", "again", *names[1:-1]] if noise and is_complete else ["plain"],
        complete=is_complete,
        code=result,
        twice=_twice(out),
        late=_late(out),
    )
    write_whole(out / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    if manifest.twice:
        say(f"gradparity: {out}: {_several(manifest.twice)}")
    after = f"; the command then ended with {result}" if result else ""
    say(f"gradparity: recorded {', '.join(done)} in {out}{after}")
    if result and orders.stop:
        say(
            "gradparity: with --stop a rank ends right after its last recorded step, "
            "and a rank that takes fewer steps then loses it and fails. If that is why "
            f"the command ended with {result}, record without --stop"
        )
    if noise and manifest.complete:
        other = (
            f"gradparity record OTHER --noise 0 -- COMMAND; gradparity compare {out}"
        )
        say(f"gradparity: next, the other side: {other} OTHER")
    return result


def _remove(folders: Sequence[Path]) -> None:
    """Remove the folders that are empty; a folder with files stays."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _twice(out: Path) -> list[int]:
    names = (path.name.removeprefix(TWICE) for path in out.glob(f"*/{TWICE}*"))
    return sorted({int(name) for name in names if name.isdigit()})


def _late(out: Path) -> str:
    paths = sorted(out.glob(f"plain/{LATE}*"))
    return paths[0].read_text() if paths else ""


def _several(ranks: Sequence[int]) -> str:
    return (
        f"several processes recorded as rank {ranks[0]}, and the one that ended first "
        "was kept. If the job starts another program that trains, start it with `env "
        f"-u {ORDERS}`"
    )


def _why_not(folder: Path, orders: Orders, code: int, name: str = "") -> str:
    """Return why a run recorded nothing, and delete the notes of its processes."""
    start = f"gradparity: {name}: " if name else "gradparity: "
    reasons = unrecorded(folder).values()
    for path in folder.glob("unrecorded-*.json"):
        path.unlink()
    notes = [note for why in reasons for note in why.notes]
    calls = [each for why in reasons for each in why.calls.items()]
    if notes:
        return f"{start}nothing was recorded: {notes[0]}"
    if code or (name and not calls):
        text = f"the command ended with {code} before an optimizer's step was recorded"
        return f"{start}{text}"
    if not calls:
        return LINES
    kind, count = calls[0]
    first, asked = orders.first, orders.steps[0]
    return (
        f"{start}{kind} was called {counted(count, 'time')}, as steps {first} to "
        f"{first + count - 1}, and steps {asked}:{orders.steps[1]} were asked for. A "
        f"job that goes on from step {asked} needs --first {asked}"
    )


def _run(
    command: Sequence[str], out: Path, name: str, orders: Orders
) -> tuple[int, bool]:
    """Run the command as the run ``name``.

    The run ``plain`` prints as usual; the output of every other run goes to a log.

    Returns:
        Exit code, and True if a signal asked this process to end.
    """
    paths = [str(HOOK), os.environ.get("PYTHONPATH", "")]
    own = msgspec.structs.replace(
        orders,
        out=str((out / name).absolute()),
        nudge=int(name.partition("-")[2] or 0),
        keep_start=orders.keep_start and name == "plain",
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        ORDERS: msgspec.json.encode(own).decode(),
    }
    with ExitStack() as stack:
        streams: dict[str, Any] = {}
        if name != "plain":
            log = stack.enter_context((out / f"{name}.log").open("wb"))
            streams = {"stdout": log, "stderr": subprocess.STDOUT}
        asked, jobs = list[int](), list[subprocess.Popen[bytes]]()

        def ask(number: int, _: object) -> None:
            asked.append(number)
            # A terminal sends SIGINT to the job itself. A second one would end the job
            # while it saves a checkpoint.
            for job in jobs if number != signal.SIGINT else ():
                job.send_signal(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            # the job must inherit that a signal is ignored, as by nohup
            if signal.getsignal(number) != signal.SIG_IGN:
                stack.callback(signal.signal, number, signal.signal(number, ask))
        try:
            jobs.append(subprocess.Popen(command, env=environment, **streams))
        except OSError as error:
            text = f"{command[0]}: {error.strerror or error}"
            raise UsageError(text) from error
        # the job may save a checkpoint, and decides when and how it ends
        code = jobs[0].wait()
    # as a shell reports a signal
    return code if code >= 0 else 128 - code, bool(asked)


def _has_files(folder: Path) -> bool:
    return any(folder.glob("rank-*.safetensors"))


# - Compare


def compare(
    a: Path, b: Path, *, exact: bool, json: Path | None, html: Path | None, say: Say
) -> int:
    """Compare two recordings; see ``compare.py``.

    Args:
        a: the reference, with noise.
        b: recording to check. Each of ``a`` and ``b`` may be several folders separated
            by commas, one for each host.
        exact: true to compare bit for bit.
        json: file to write every comparison to.
        html: folder to write a page into.
        say: prints a line.

    Returns:
        0 same, 1 different, 2 not comparable, 4 undecided.

    Raises:
        UsageError: if a folder is not a recording.
    """
    from .compare import compare
    from .exact import compare_exactly

    one, other = (_side(path, say, exact=exact) for path in (a, b))
    comparison = (compare_exactly if exact else compare)(one, other)
    try:
        for line in comparison.lines:
            say(plain(line))
    finally:  # the reader of our output may have exited, as in ``| head``
        page = _write_files(one, other, comparison, json=json, html=html)
    if page is not None:
        say(f"page: {page}")
    return comparison.code


def _write_files(
    one: Side,
    other: Side,
    comparison: Comparison,
    *,
    json: Path | None,
    html: Path | None,
) -> Path | None:
    """Write the JSON file and the page if they are wanted; return the page's path."""
    from .page import write_page

    if json is not None:
        with as_usage(OSError):
            json.parent.mkdir(parents=True, exist_ok=True)
        rows, blocks = (
            [{**vars(row), "ratio": row.ratio, "differs": row.differs} for row in rows]
            for rows in (comparison.rows, comparison.blocks)
        )
        content = {"code": comparison.code, "lines": comparison.lines, "rows": rows}
        content |= {"blocks": blocks} if blocks else {}
        content["regions"] = [
            {"kind": row.kind, "name": row.name, "step": row.step, **vars(region)}
            for row, region in comparison.regions
        ]
        write_whole(json, msgspec.json.format(msgspec.json.encode(content)))
    return None if html is None else write_page(html, one, other, comparison)


def _side(path: Path, say: Say, *, exact: bool) -> Side:
    from .compare import Side
    from .merge import read_merged

    folders = [path] if path.exists() else [Path(p) for p in str(path).split(",")]
    manifests = [_manifest(folder) for folder in folders]
    if twice := [rank for each in manifests for rank in each.twice]:
        raise UsageError(f"{path}: {_several(twice)}")
    if not all(each.complete for each in manifests):
        say(plain(f"{path}: ended early, with the runs {', '.join(manifests[0].runs)}"))
    try:
        first, *noisy = [
            read_merged(*(folder / Path(name).name for folder in folders), exact=exact)
            for name in manifests[0].runs
            if all(name in each.runs for each in manifests)
        ]
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    code = max(each.code for each in manifests)
    late = next((each.late for each in manifests if each.late), "")
    return Side(name=str(path), run=first, noisy=noisy, code=code, late=late)


def _manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        text = (
            f"{folder} is not a recording: {MANIFEST} is missing. To make one: "
            f"gradparity record {folder} -- COMMAND"
        )
        raise UsageError(text) from error
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path}: {error}") from error
    if manifest.version != VERSION:
        text = f"has version {manifest.version}, expected {VERSION}: record it again"
        raise UsageError(f"{path}: {text}")
    if not manifest.runs:
        raise UsageError(f"{path}: lists no run: record it again")
    return manifest
