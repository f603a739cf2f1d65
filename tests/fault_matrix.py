"""Fault matrix: faults of rank 1, their reports, and the time to each report.

The tests hold each row in a world of 3; ``gradparity bench harness`` times it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from gradparity.multiprocess import RankState, current_world

OK, RAISED, EXITED = RankState.OK, RankState.RAISED, RankState.EXITED
KILLED, HUNG, VICTIM = RankState.KILLED, RankState.HUNG, RankState.VICTIM

LEFT = "left behind:"


class Unpicklable(Exception):
    """Exception that can be pickled, but not unpickled."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def wait() -> None:
    dist.all_reduce(torch.ones(3))


def raises() -> None:
    raise ValueError("boo")


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stops_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeps() -> None:
    time.sleep(1000)


def raises_what_does_not_pickle() -> None:
    raise Unpicklable(1, 2)


def crashes_in_native_code() -> None:
    import ctypes

    ctypes.string_at(0)


def sticks_in_native_code() -> None:
    import ctypes

    ctypes.PyDLL(None).pause()  # holds the interpreter's lock


def forks_a_child_and_raises() -> None:
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    print(LEFT, child, flush=True)
    raise ValueError("boo")


def leaves_a_daemon_and_exits() -> None:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    os._exit(3)


def prints_much() -> None:
    line = "x" * 999 + "\n"
    for _ in range(100_000):
        sys.stdout.write(line)
    raise ValueError("boo")


def runs_out_of_memory() -> None:
    # What the kernel does to the one that it picks.
    os.kill(os.getpid(), signal.SIGKILL)


def exits(code: int) -> Callable[[], None]:
    return lambda: os._exit(code)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the matrix: rank 1 of 3 calls ``bad``, the others ``others``."""

    bad: Callable[[], Any]
    states: tuple[RankState, RankState, RankState]
    others: Callable[[], Any] = wait
    says: tuple[str, ...] = ()
    limit_s: float = 60.0
    within_s: float = 2.0
    """Promised seconds until the error, on an idle machine: from the call, or if a rank
    hangs, from the time limit."""

    has: dict[str, Any] = field(default_factory=dict)
    leaves: bool = False
    """True if the rank prints the pid of a child, which must end with the rank."""

    @property
    def hangs(self) -> bool:
        """True if a rank hangs until the time limit."""
        return HUNG in self.states


def nothing() -> None:
    pass


MATRIX = {
    "raise": Fault(
        bad=raises,
        states=(VICTIM, RAISED, VICTIM),
        says=("ValueError: boo", "in raises", "victim: rank 0", "in wait"),
        has={"error_type": "ValueError"},
    ),
    "raise, nobody waits": Fault(
        bad=raises,
        others=nothing,
        states=(OK, RAISED, OK),
        says=("ValueError: boo", "returned normally: rank 0, 2"),
    ),
    "exit": Fault(
        bad=exits(3),
        states=(VICTIM, EXITED, VICTIM),
        says=("rank 1: exited with code 3",),
        within_s=0.5,
        has={"exit_code": 3},
    ),
    "exit, nobody waits": Fault(
        bad=exits(3), others=nothing, states=(OK, EXITED, OK), within_s=0.5
    ),
    "exit 0": Fault(
        bad=exits(0),
        others=nothing,
        states=(OK, EXITED, OK),
        within_s=0.5,
        has={"exit_code": 0},
    ),
    "SIGKILL": Fault(
        bad=kills_itself,
        states=(VICTIM, KILLED, VICTIM),
        says=("rank 1: killed by SIGKILL",),
        within_s=0.5,
        has={"signal": "SIGKILL"},
    ),
    "out of memory": Fault(
        bad=runs_out_of_memory,
        others=nothing,
        states=(OK, KILLED, OK),
        says=("when memory is short",),
        within_s=0.5,
    ),
    "crash in native code": Fault(
        bad=crashes_in_native_code,
        states=(VICTIM, KILLED, VICTIM),
        says=("SIGSEGV", "in crashes_in_native_code"),
        within_s=0.5,
    ),
    "SIGSTOP": Fault(
        bad=stops_itself,
        states=(VICTIM, HUNG, VICTIM),
        says=("rank 1: hung, stopped by a signal", "in stops_itself"),
        limit_s=1.5,
        within_s=1.0,
        has={"signal": "SIGSTOP"},
    ),
    "sleep for ever": Fault(
        bad=sleeps,
        states=(VICTIM, HUNG, VICTIM),
        says=("rank 1: hung, still running", "in sleeps"),
        limit_s=1.5,
        within_s=1.0,
    ),
    "deadlock in native code": Fault(
        bad=sticks_in_native_code,
        states=(VICTIM, HUNG, VICTIM),
        says=("in sticks_in_native_code",),
        limit_s=1.5,
        within_s=1.0,
    ),
    "one collective too many": Fault(
        bad=wait,
        others=nothing,
        states=(OK, HUNG, OK),
        says=("waiting in a collective", "in wait"),
        limit_s=1.5,
        within_s=1.0,
    ),
    "result that does not pickle": Fault(
        bad=threading.Lock,
        others=nothing,
        states=(OK, RAISED, OK),
        says=("that cannot be pickled",),
    ),
    "exception that does not pickle": Fault(
        bad=raises_what_does_not_pickle,
        others=nothing,
        states=(OK, RAISED, OK),
        says=("Unpicklable: 1 and 2", "in raises_what_does_not_pickle"),
        has={"exception": None},
    ),
    "child left behind": Fault(
        bad=forks_a_child_and_raises,
        others=nothing,
        states=(OK, RAISED, OK),
        leaves=True,
    ),
    "daemon left behind": Fault(
        bad=leaves_a_daemon_and_exits,
        others=nothing,
        states=(OK, EXITED, OK),
    ),
    "100 MB printed": Fault(
        bad=prints_much,
        others=nothing,
        states=(OK, RAISED, OK),
        says=("left out",),
        within_s=10.0,
    ),
}


def innocent() -> float:
    value = torch.ones(1) * current_world().rank
    dist.all_reduce(value)
    return value.item()


def act(bad: Callable[[], Any], others: Callable[[], Any]) -> Any:
    return (bad if current_world().rank == 1 else others)()
