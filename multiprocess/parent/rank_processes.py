"""Processes of one world, as the parent sees them.

Each rank has a socket for messages and three pipes: its exit status (written by the
forkserver, which is its parent), its output and its stacks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from .. import linux, messages
from ..environment import unsupported
from ..errors import HarnessError
from ..messages import Context, Rendezvous, Run, Start
from ..outcomes import Collective, Place
from ..rank import assert_rewrite, flight_records
from ..rank.forkserver import EXIT_STATUS
from ..spec import CallOptions, WorldSpec
from .forkserver_client import ForkserverClient, forkserver, import_path

LOST = 255
"""Exit code of a rank whose forkserver ended before it could report one."""

_STOP_S = 5.0  # under coverage.py a rank saves its data before it ends
_KILL_S = 5.0
_CHUNK = 1 << 16

_PRIVATE = ("PYTEST_CURRENT_TEST",)
"""Environment variables that change with each test and are irrelevant to ranks."""


def current_context() -> Context:
    """Return the current settings that ranks copy from this process."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        raise HarnessError(
            "the current folder of this process has been removed, and the ranks are to "
            "be in it: change to another one by os.chdir()"
        ) from None
    return Context(
        cwd=cwd,
        # An empty entry means the current folder, which a call may change on its rank.
        path=tuple(entry or cwd for entry in import_path()),
        env={name: v for name, v in os.environ.items() if name not in _PRIVATE},
        modules=assert_rewrite.rewritten_modules(),
    )


class _LiveOutput:
    """Prints output of a rank as it arrives; each line begins with ``front``."""

    def __init__(self, front: str) -> None:
        self._front = front
        self._line = b""

    def add(self, part: bytes) -> None:
        """Print the lines that are complete."""
        *lines, self._line = (self._line + part).split(b"\n")
        if len(self._line) > _CHUNK:  # a line may have no end
            lines.append(self._line)
            self._line = b""
        if lines and sys.stdout is not None:
            texts = (line.decode("utf-8", "backslashreplace") for line in lines)
            sys.stdout.write("".join(f"{self._front}{text}\n" for text in texts))
            sys.stdout.flush()

    def end(self) -> None:
        """Print an unfinished last line."""
        if self._line:
            self.add(b"\n")


class Capture:
    """A rank's output, read from a pipe; only its head and tail are kept.

    A pipe is used because a file would be lost on a full disk, and need cleaning up.
    """

    def __init__(self, read_fd: int, limit: int) -> None:
        os.set_blocking(read_fd, False)
        self.fd = read_fd
        self._limit = limit
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0
        self._live: _LiveOutput | None = None

    def show(self, front: str | None) -> None:
        """Print output from now on, each line after ``front``; None to stop."""
        self._live = None if front is None else _LiveOutput(front)

    def drain(self, most: int = 1 << 24) -> bool:
        """Read available bytes, at most about ``most``; return False at the end."""
        while most > 0:
            try:
                part = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return True
            if not part:
                return False
            most -= len(part)
            if self._live is not None:
                self._live.add(part)
            room = self._limit - len(self._head)
            self._head += part[:room]
            self._tail += part[room:]
            excess = len(self._tail) - self._limit
            if excess > 0:
                del self._tail[:excess]
                self._dropped += excess
        return True

    def take(self) -> str:
        """Return the kept text and clear it."""
        if self._live is not None:
            self._live.end()
        middle = b""
        if self._dropped:
            middle = f"\n[... {self._dropped} bytes left out ...]\n".encode()
        text = bytes(self._head) + middle + bytes(self._tail)
        self._head, self._tail, self._dropped = bytearray(), bytearray(), 0
        return text.decode("utf-8", "backslashreplace")


class RankProcess:
    """One rank: its process, its messages, its output, its end."""

    def __init__(
        self,
        rank: int,
        shared: Sequence[int],
        spec: WorldSpec,
        server: ForkserverClient,
    ) -> None:
        self.rank = rank
        self.exit_code: int | None = None
        self.ended_at_s = 0.0
        # [Note: Descriptors of a rank]
        # The parent must learn the state of a rank even if the rank is broken. So each
        # kind of information has its own channel with one writer:
        # - messages, a socket: written by the rank's Python; silent if that hangs;
        # - exit status, a pipe: written by the forkserver, which waits for the process;
        # - output, a pipe: descriptors 1 and 2, also of native code and of children;
        # - stacks, a pipe: written by faulthandler in C, also while Python is stuck.
        # End of file says that the last writer is gone, so every process that forks
        # closes the copies that are not its own (here, and in
        # `ForkServer._become_rank`).
        with contextlib.ExitStack() as own_ends, contextlib.ExitStack() as rank_ends:

            def pipe() -> tuple[int, int]:
                ends = os.pipe()
                own_ends.callback(os.close, ends[0])
                rank_ends.callback(os.close, ends[1])
                return ends

            ours, theirs = socket.socketpair()
            self.sock = own_ends.enter_context(ours)
            rank_ends.enter_context(theirs)
            self.inbox = messages.Inbox(ours)
            self.outbox = messages.Outbox(ours)
            self.exit_fd, exit_w = pipe()
            output_r, output_w = pipe()
            stacks_r, stacks_w = pipe()
            self.output = Capture(output_r, spec.output_limit)
            self.stacks = Capture(stacks_r, spec.output_limit)
            fds = [exit_w, theirs.fileno(), output_w, stacks_w, *shared]
            self.pid, self.pidfd = server.fork(fds, spec.start_timeout_s)
            if self.pidfd is not None:
                own_ends.callback(os.close, self.pidfd)
            self._own_ends = own_ends.pop_all()

    @property
    def alive(self) -> bool:
        """True if the process is not known to have ended."""
        return self.exit_code is None

    def read_exit(self) -> None:
        """Read the exit status from the exit pipe, which must be readable."""
        status = os.read(self.exit_fd, EXIT_STATUS.size)
        self.exit_code = EXIT_STATUS.unpack(status)[0] if status else LOST
        self.ended_at_s = linux.now_s()

    def signal(
        self,
        number: int,
        send: Callable[[int, int | None, int], None] = linux.signal_process,
    ) -> None:
        """Send a signal, unless the process has ended."""
        if self.alive:
            try:
                send(self.pid, self.pidfd, number)
            except ProcessLookupError:
                pass  # the exit status is on its way

    def close(self) -> None:
        """Close the parent's descriptors."""
        self._own_ends.close()


def _too_few_descriptors(size: int) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    return (
        f"no descriptor is left for a world of {size}: it needs {size * 5 + 16} in the "
        f"process, which has {used} open and may have {limit}; raise the limit "
        "(ulimit -n), or ask for a smaller world"
    )


class RankProcesses:
    """Ranks of one world that this process watches."""

    def __init__(self, spec: WorldSpec, ranks: Sequence[int] | None = None) -> None:
        """Fork the ranks.

        Args:
            spec: Settings of the world.
            ranks: Ranks to fork in this process; all by default.
        """
        if reason := unsupported():
            raise HarnessError(reason)
        self.spec = spec
        self.owner = linux.getpid()
        self.runs = 0
        self.answered = False
        """True if all ranks have ended the previous call."""

        self.reusable = True
        self.ranks: list[RankProcess] = []
        # One forkserver for all ranks, because another one would lack the imports.
        self._shared: list[int] = []
        try:
            server = forkserver()
            server.preload(spec.preload, spec.start_timeout_s)
            self._shared.append(os.memfd_create("gradparity-store", os.MFD_CLOEXEC))
            self._records_fd = flight_records.create(spec.world_size)
            self._shared.append(self._records_fd)
            for rank in range(spec.world_size) if ranks is None else ranks:
                self.ranks.append(RankProcess(rank, self._shared, spec, server))
        except OSError as error:
            self.kill()
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise HarnessError(_too_few_descriptors(spec.world_size)) from error
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in rank order."""
        return tuple(rank.pid for rank in self.ranks)

    def join(self, context: Context, rendezvous: Rendezvous | None = None) -> None:
        """Make all ranks join their world, and wait for their answers."""
        for rank in self.ranks:
            start = Start(
                spec=self.spec, rank=rank.rank, context=context, rendezvous=rendezvous
            )
            rank.outbox.put(messages.packed(start))

    def call(
        self,
        payload: bytes,
        options: CallOptions,
        *,
        fresh_group: bool,
        context: Context | None,
    ) -> None:
        """Send every rank a call, packed once; see ``messages.Run``.

        This does not block: the time limit of the call holds for all ranks together.
        The ``Watch`` sends the rest if a rank's socket does not accept everything at
        once.
        """
        self.runs += 1
        run = Run(
            payload=payload,
            number=self.runs,
            fresh_group=fresh_group,
            context=context,
            is_test=options.is_test,
        )
        packed = messages.packed(run)
        for rank in self.ranks:
            rank.outbox.put(packed)

    def collectives(self, rank: int) -> tuple[Collective, ...]:
        """Return the last collectives of one rank, oldest first."""
        return flight_records.read(self._records_fd, rank)

    def place(self, rank: int) -> Place:
        """Return where a rank is."""
        return flight_records.read_place(self._records_fd, rank)[0]

    def has_begun(self, rank: int) -> bool:
        """Return True if a rank has prepared the call that it was sent last."""
        return flight_records.read_begun(self._records_fd, rank) == self.runs

    def current_collective(self, rank: int) -> Collective | None:
        """Return the collective in which a rank is, or None."""
        return flight_records.read_current(self._records_fd, rank)

    def intact(self) -> bool:
        """Return True if every rank is alive and belongs to this process."""
        if self.owner != linux.getpid():
            return False
        self._collect_exits(0.0)
        # The exit status of a process that has just ended may still be on its way.
        return all(r.alive and not linux.has_ended(r.pidfd) for r in self.ranks)

    def stop(self) -> None:
        """Let the ranks end by themselves; kill those that do not."""
        # in a fork of the parent, the ranks belong to the parent
        if self.owner == linux.getpid():
            for rank in self.ranks:
                # End of file orders the rank to end, and the rank can still answer.
                rank.sock.shutdown(socket.SHUT_WR)
            self._collect_exits(_STOP_S)
        self.kill()

    def kill(self) -> None:
        """Kill every rank and release the parent's resources; may be called again."""
        if self.owner == linux.getpid():  # a forked copy of the parent has no ranks
            for rank in self.ranks:
                # The forkserver kills the rest of the rank's process group. It does so
                # when it sees the rank end, before the number can be used again.
                rank.signal(signal.SIGKILL)
            self._collect_exits(_KILL_S)
        # Removed one by one, so that a second kill closes no descriptor that has been
        # given to something else.
        while self.ranks:
            self.ranks.pop().close()
        while self._shared:
            os.close(self._shared.pop())

    def dump_stacks(self, ranks: list[RankProcess], limit_s: float = 0.4) -> None:
        """Make ranks, even stopped ones, write their stacks into their captures."""
        for rank in ranks:
            # faulthandler handles this signal in C, so it runs although the interpreter
            # is stuck in native code. A stopped process handles signals when it is
            # continued, in the order of their arrival.
            rank.signal(linux.STACKS_SIGNAL, linux.signal_main_thread)
            rank.signal(signal.SIGCONT)
        silent = {rank.rank for rank in ranks}
        deadline = linux.now_s() + limit_s
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(rank.stacks.fd, selectors.EVENT_READ, rank)
            while (left := deadline - linux.now_s()) > 0:
                # All ranks have begun to write, so a short silence means that they have
                # finished.
                events = selector.select(left if silent else min(left, 0.03))
                if not events and not silent:
                    return
                for key, _ in events:
                    silent.discard(key.data.rank)
                    if not key.data.stacks.drain():
                        selector.unregister(key.fd)

    def end_call(self, ranks: list[RankProcess], limit_s: float) -> None:
        """Make ranks leave the function, so that ``finally`` and teardown run.

        A rank is killed once it has answered. So its connections break, and ranks that
        wait for it in native code leave too.

        Args:
            ranks: Ranks that have not answered.
            limit_s: Time limit; the caller kills the remaining processes.
        """
        for rank in self.ranks:
            if rank in ranks:
                rank.signal(linux.END_SIGNAL, linux.signal_main_thread)
            else:
                rank.signal(signal.SIGKILL)
        deadline = linux.now_s() + limit_s
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                for fd in (rank.sock.fileno(), rank.output.fd):
                    selector.register(fd, selectors.EVENT_READ, rank)
            left = {rank.rank for rank in ranks}
            while left and (left_s := deadline - linux.now_s()) > 0:
                for key, _ in selector.select(left_s):
                    rank = key.data
                    if key.fd == rank.output.fd:
                        if not rank.output.drain():
                            selector.unregister(key.fd)
                    elif rank.inbox.poll() or rank.inbox.closed:
                        selector.unregister(key.fd)
                        rank.signal(signal.SIGKILL)
                        left.discard(rank.rank)

    def _collect_exits(self, limit_s: float) -> None:
        deadline = linux.now_s() + limit_s
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                if rank.alive:
                    selector.register(rank.exit_fd, selectors.EVENT_READ, rank)
                    # Drained, or a rank that writes to a full pipe would never end.
                    selector.register(rank.output.fd, selectors.EVENT_READ, rank)
            while selector.get_map():
                events = selector.select(max(0.0, deadline - linux.now_s()))
                for key, _ in events:
                    ended: RankProcess = key.data
                    if key.fd == ended.exit_fd:
                        ended.read_exit()
                        selector.unregister(ended.exit_fd)
                        if ended.output.fd in selector.get_map():
                            selector.unregister(ended.output.fd)
                    elif ended.alive and not ended.output.drain():
                        selector.unregister(ended.output.fd)
                if not events:
                    return
