"""Looking at ranks: pdb where one raised, how to attach to one that hangs, times."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from .. import linux
from ..errors import WorldFailure
from ..messages import NO_TERMINAL, Debug, Kind
from ..outcomes import RankState
from ..parent.rank_processes import RankProcess, RankProcesses

SECONDS = "gradparity_rank_seconds"
"""Name of the property of a report with each rank's own time."""

BeforeEnd = Callable[[RankProcesses, WorldFailure], None]


def before_end_of(config: pytest.Config) -> BeforeEnd | None:
    """Return the action on a failed world before its ranks end."""
    attach_s = config.getoption("gradparity_attach")
    wants_pdb = bool(config.option.usepdb)
    if attach_s is None and not wants_pdb:
        return None

    def before_end(ranks: RankProcesses, failure: WorldFailure) -> None:
        hung = [o.rank for o in failure.outcomes if _still_there(o.state)]
        with _visible(config) as out:
            if wants_pdb:
                chosen = config.getoption("gradparity_pdb_rank")
                rank = failure.root.rank if chosen is None else chosen
                _post_mortem(ranks, failure, rank, out)
            if attach_s is not None and failure.root.state is RankState.HUNG:
                _attach(ranks, failure, hung, attach_s, out)

    return before_end


def _still_there(state: RankState) -> bool:
    return state in (RankState.HUNG, RankState.VICTIM)


def _post_mortem(
    ranks: RankProcesses, failure: WorldFailure, chosen: int, out: TextIO
) -> None:
    where = linux.terminal()
    if not 0 <= chosen < len(ranks.ranks):
        why = f"the world has ranks 0 to {len(ranks.ranks) - 1}"
    elif failure.outcomes[chosen].error_type is None:
        why = f"it raised nothing ({failure.outcomes[chosen].headline})"
    elif not where or "PYTEST_XDIST_WORKER" in os.environ:
        why = NO_TERMINAL
    else:
        _talk(ranks.ranks[chosen], Debug(terminal=where))
        return
    print(f"\n--pdb: not on rank {chosen}: {why}", file=out, flush=True)


def _talk(rank: RankProcess, message: Debug) -> None:
    """Send a message and wait for its answer, however long a person takes."""
    rank.send(message, 60.0)
    while rank.alive:
        watched = [rank.sock.fileno(), rank.exit_fd, rank.output.fd]
        ready, _, _ = select.select(watched, [], [])
        # Else a rank that prints much at the prompt would wait for a reader.
        if rank.output.fd in ready:
            rank.output.drain()
        replies = {reply.kind for reply in rank.inbox.poll()}
        if replies - {Kind.DEBUGGING, Kind.RESUMED}:
            return
        if rank.exit_fd in ready:
            rank.read_exit()


def _attach(
    ranks: RankProcesses,
    failure: WorldFailure,
    hung: list[int],
    limit_s: float,
    out: TextIO,
) -> None:
    for line in how_to_attach(failure, {r: ranks.ranks[r].pid for r in hung}):
        print(line, file=out)
    terminal = "" if "PYTEST_XDIST_WORKER" in os.environ else linux.terminal()
    ways = ["Enter goes on"] if terminal else []
    ways.append(f"goes on after {limit_s:g} s, or when these processes have ended")
    print("; ".join(ways), file=out, flush=True)
    deadline = time.monotonic() + limit_s
    with contextlib.ExitStack() as stack:
        key = stack.enter_context(open(terminal)) if terminal else None
        keys = [] if key is None else [key.fileno()]
        waited = [ranks.ranks[rank] for rank in hung]
        while waited and (left_s := deadline - time.monotonic()) > 0:
            exits = {rank.exit_fd: rank for rank in waited}
            ready, _, _ = select.select([*exits, *keys], [], [], left_s)
            if key is not None and key.fileno() in ready:
                key.readline()
                return
            for fd in ready:
                exits[fd].read_exit()
                waited.remove(exits[fd])


def how_to_attach(failure: WorldFailure, pids: dict[int, int]) -> Iterator[str]:
    """Say how to look into the processes of a hung test.

    Args:
        failure: The hang.
        pids: Processes that are there, by rank.
    """
    root = failure.root
    sudo = "" if _may_trace() else "sudo "
    yield f"\n{root.headline}"
    for rank, pid in sorted(pids.items(), key=lambda item: item[0] != root.rank):
        yield f"  rank {rank}: pid {pid}" + (" <- root cause" * (rank == root.rank))
    pid = pids.get(root.rank, next(iter(pids.values())))
    yield f"  {sudo}py-spy dump --native --pid {pid}"
    yield f"  {sudo}gdb -p {pid} -batch -ex 'thread apply all bt'"


def _may_trace() -> bool:
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text()
    except OSError:
        return True
    return scope.strip() == "0" or os.geteuid() == 0


@contextlib.contextmanager
def _visible(config: pytest.Config) -> Iterator[TextIO]:
    """Print at once, past pytest's capture."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        yield sys.stdout


def show_durations(terminal: Any, count: int) -> None:
    """Write the tests whose ranks took longest."""
    found = [
        (max(seconds), seconds, report.nodeid)
        for reports in terminal.stats.values()
        for report in reports
        for name, seconds in getattr(report, "user_properties", ())
        if name == SECONDS and getattr(report, "when", "") == "call"
    ]
    if not found:
        return
    terminal.write_sep("=", f"slowest {min(count, len(found))} tests, rank by rank")
    for longest, seconds, test in sorted(found, reverse=True)[:count]:
        each = " ".join(f"{s:.2f}" for s in seconds[:16])
        more = f" ... {len(seconds)} ranks" if len(seconds) > 16 else ""
        terminal.write_line(f"{longest:.2f}s {test}: {each}{more}")
