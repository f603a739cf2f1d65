"""Calls to the Linux kernel: processes, signals, clocks, sockets, files in memory."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import time  # noqa: TID251  # the one place
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_REAL_TIME = hasattr(signal, "SIGRTMAX")

STACKS_SIGNAL: int = signal.SIGRTMAX - 2 if _REAL_TIME else signal.SIGUSR2
"""Signal that makes a rank dump its stacks; tests are unlikely to use it."""

END_SIGNAL: int = signal.SIGRTMAX - 3 if _REAL_TIME else signal.SIGUSR1
"""Signal that makes a rank raise ``CallEnded`` in the function that it runs."""


def now_s() -> float:
    """Return the machine's monotonic clock in seconds.

    Read from the kernel, because a test may have replaced Python's own clocks.
    """
    return time.clock_gettime(time.CLOCK_MONOTONIC)


sleep = time.sleep
"""Python's own ``time.sleep``, even if a test replaces it."""

getpid = os.getpid
"""Python's own ``os.getpid``, even if a test replaces it."""


LONGEST_WAIT_S = 3600.0
"""Longest single wait for descriptors; the kernel takes 24 days at most."""


def flush_standard_streams() -> None:
    """Flush stdout and stderr, if they exist and can be written."""
    for stream in (sys.stdout, sys.stderr):
        # None in a process without a terminal, such as a daemon; it may also be closed
        # or full.
        with suppress(AttributeError, ValueError, OSError):
            stream.flush()


def fill_standard_descriptors() -> None:
    """Open the null device as stdin, stdout and stderr if they are closed.

    Otherwise the next pipe would get the number of stdout and receive a program's
    output.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


@contextmanager
def in_memory(content: bytes) -> Iterator[int]:
    """Open a file in memory that another process reads from its start.

    Yields:
        A descriptor that the other process inherits or is sent.
    """
    with open(os.memfd_create("gradparity", os.MFD_CLOEXEC), "wb") as file:
        file.write(content)
        file.seek(0)
        yield file.fileno()


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Check after the call, because the kernel does not report a parent that ended
    # before.
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def be_first_out_of_memory() -> None:
    """Ask the kernel to kill this process rather than the parent."""
    try:
        # This counts as half of the machine's memory, so a rank is killed before its
        # parent.
        Path("/proc/self/oom_score_adj").write_text("500")
    except OSError:
        pass  # helpful, not needed


def wait_for_turn() -> None:
    """Stop threads of this process from preempting each other when they wake.

    gloo's event loop wakes as soon as a peer answers, often on the core of the thread
    that is still sending with the connection locked. The event loop then retries the
    lock until its time slice is over. That costs 3 to 5 ms, in up to every second
    collective on machines with as many cores as ranks.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (OSError, AttributeError):
        pass  # helpful, not needed


def children() -> list[int]:
    """Return the pids of children of this process's main thread; [] if unknown."""
    try:
        text = Path(f"/proc/self/task/{getpid()}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def process_state(pid: int) -> str:
    """Return the kernel's letter for a process's state; "" if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # Read after the last bracket, because the name may contain spaces and brackets.
    return stat.rpartition(")")[2].split()[0]


def open_process(pid: int) -> list[int]:
    """Return a pidfd of a child that has not been waited for.

    A pidfd never refers to a later process with the same number.

    Returns:
        A list of one descriptor; empty if the kernel has no pidfds (before 5.3).
    """
    try:
        return [os.pidfd_open(pid)]
    except (OSError, AttributeError):
        return []


def has_ended(pidfd: int | None) -> bool:
    """Return True if a process is known to have ended; False without a pidfd."""
    if pidfd is None:
        return False
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(0))


def signal_process(pid: int, pidfd: int | None, number: int) -> None:
    """Send a signal to a process, by its pidfd if there is one.

    Raises:
        ProcessLookupError: The process has been waited for.
    """
    if pidfd is None:
        os.kill(pid, number)
    else:
        signal.pidfd_send_signal(pidfd, number)


def kill_tree(pid: int) -> None:
    """Kill a process, and everything in the process group that it leads.

    Use it only if no one else can wait for the process: otherwise its number may
    already belong to another process.
    """
    # Signal both: a new process may not lead a group yet, and an adopted daemon may be
    # in another group.
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def signal_main_thread(pid: int, pidfd: int | None, number: int) -> None:
    """Send a signal to the main thread of a process.

    The handler of a signal to the whole process may run on any thread. The main thread
    could then go on before the stacks are written.

    Raises:
        ProcessLookupError: There is no such process.
    """
    # Before Linux 6.9 a pidfd cannot be used with tgkill. Signalling the pidfd first
    # leaves only microseconds in which the number could be used again.
    signal_process(pid, pidfd, 0)
    try:
        failed = ctypes.CDLL(None, use_errno=True).tgkill(pid, pid, number)
    except (OSError, AttributeError):  # not Linux, or a C library without tgkill
        signal_process(pid, pidfd, number)
        return
    if failed:
        raise ProcessLookupError(ctypes.get_errno(), f"no thread {pid} to signal")


def signal_name(number: int) -> str:
    """Return a signal's name, also for a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def sockets() -> frozenset[str]:
    """Return identifiers of this process's open sockets."""
    return frozenset(name for _, name in _open_sockets())


def give_up_silent(limit_s: float, except_for: frozenset[str]) -> None:
    """Make TCP connections fail if the other host stops acknowledging.

    A connection that only awaits an answer has no data to be acknowledged. On such a
    connection the kernel sends probes.

    Args:
        limit_s: Time limit. The kernel's default limit is about a quarter of an hour
            for sent data; for an answer there is none.
        except_for: Sockets that are not changed.
    """
    between_s = max(1, int(limit_s / 3))
    options = (
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit_s * 1000)),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, between_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between_s),
    )
    for fd, name in _open_sockets():
        if name in except_for:
            continue
        try:
            # A copy, which the object may close: the descriptor belongs to torch.
            with socket.socket(fileno=os.dup(fd)) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6):
                    for option in options:
                        copy.setsockopt(*option)
        except OSError:
            continue  # another thread has closed it


def _open_sockets() -> Iterator[tuple[int, str]]:
    for entry in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if name.startswith("socket:"):
            yield int(entry), name


def _prctl(option: int, value: int) -> None:
    try:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):
        pass  # not Linux: closed sockets still end the ranks
