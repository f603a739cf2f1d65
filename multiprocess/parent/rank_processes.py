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
from ..outcomes import LOST, Collective, Place
from ..rank import assert_rewrite, flight_records
from ..rank.forkserver import EXIT_STATUS
from ..spec import CallOptions, WorldSpec
from .forkserver_client import ForkserverClient, forkserver, import_path

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
        """Print output from now on, with ``front`` before each line; None ends this."""
        self._live = None if front is None else _LiveOutput(front)

    def drain(self, most: int = 1 << 24) -> bool:
        """Read available bytes, at most about ``most``; return False after the end.

        The output ends when the rank and its children have closed the pipe.
        """
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
            self.channel = messages.Channel(ours)
            self.replies: list[messages.Reply] = []
            """Replies that have come and were not evaluated yet."""

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

    @property
    def last_reply(self) -> messages.Reply | None:
        """Reply that ends the call, among those not evaluated yet; or None."""
        return next((reply for reply in self.replies if reply.is_last), None)

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors to read; see [Note: Descriptors of a rank]."""
        return self.sock.fileno(), self.exit_fd, self.output.fd, self.stacks.fd

    def read(self, fd: int) -> bool:
        """Read what has come on a descriptor; return False if no more will come."""
        if fd == self.output.fd:
            return self.output.drain()
        if fd == self.stacks.fd:
            return self.stacks.drain()
        self.replies += self.channel.receive()
        if fd != self.exit_fd:
            return not self.channel.closed
        # The messages first: the rank may have answered before it ended.
        status = os.read(self.exit_fd, EXIT_STATUS.size)
        self.exit_code = EXIT_STATUS.unpack(status)[0] if status else LOST
        self.ended_at_s = linux.now_s()
        return False

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
        self.has_run = False
        """True once a call was sent."""

        self._context: Context | None = None
        """Settings that the ranks were sent last."""

        self.ranks: list[RankProcess] = []
        self._own = contextlib.ExitStack()
        try:
            # One forkserver for all ranks, because another one would lack the imports.
            server = forkserver()
            server.preload(spec.preload, spec.start_timeout_s)
            self._selector = self._own.enter_context(selectors.DefaultSelector())
            store_fd = os.memfd_create("gradparity-store", os.MFD_CLOEXEC)
            self._own.callback(os.close, store_fd)
            self._records_fd = flight_records.create(spec.world_size)
            self._own.callback(os.close, self._records_fd)
            for rank in range(spec.world_size) if ranks is None else ranks:
                process = RankProcess(rank, (store_fd, self._records_fd), spec, server)
                self.ranks.append(process)
                for fd in process.fds:
                    self._selector.register(fd, selectors.EVENT_READ, process)
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
        """Make all ranks join their world; a ``Watch`` waits for their answers."""
        self._context = context
        for rank in self.ranks:
            start = Start(
                spec=self.spec, rank=rank.rank, context=context, rendezvous=rendezvous
            )
            self._send(rank, messages.packed(start))

    def call(
        self,
        payload: bytes,
        options: CallOptions,
        context: Context | None = None,
    ) -> None:
        """Send every rank a call, packed once; see ``messages.Run``.

        This does not block: the time limit of the call holds for all ranks together.
        ``read`` sends the rest if a rank's socket does not accept everything at once.

        Args:
            payload: Pickled ``(fn, args, kwargs)``.
            options: Options of the call.
            context: Settings for the ranks; by default those that they have.
        """
        has_changed = context is not None and context != self._context
        run = Run(
            payload=payload,
            # Ranks that have just joined have a new group.
            fresh_group=self.has_run and options.isolation == "group",
            context=context if has_changed else None,
            is_test=options.is_test,
        )
        self.has_run, self._context = True, context or self._context
        packed = messages.packed(run)
        for rank in self.ranks:
            self._send(rank, packed)

    def _send(self, rank: RankProcess, packed: bytes) -> None:
        rank.channel.send(packed)
        if rank.channel.pending:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(rank.sock, both, rank)

    def read(self, limit_s: float) -> list[tuple[RankProcess, int]]:
        """Wait until ranks send something, and read it; also send pending calls.

        All ready descriptors of all ranks are read: a rank that writes to a full pipe
        would block until someone reads it.

        Returns:
            The ranks and descriptors from which something came; empty if nothing came
            within the limit, or within ``linux.LONGEST_WAIT_S``.
        """
        came = []
        wait_s = min(max(0.0, limit_s), linux.LONGEST_WAIT_S)
        for key, events in self._selector.select(wait_s):
            rank: RankProcess = key.data
            if events & selectors.EVENT_WRITE:
                rank.channel.flush()
                if not rank.channel.pending:
                    self._selector.modify(key.fileobj, selectors.EVENT_READ, rank)
            if events & selectors.EVENT_READ:
                came.append((rank, key.fd))
                if not rank.read(key.fd):  # it would stay ready
                    self._selector.unregister(key.fileobj)
        return came

    def _read_until(self, done: Callable[[], bool], limit_s: float) -> None:
        deadline = linux.now_s() + limit_s
        while not done() and (left_s := deadline - linux.now_s()) > 0:
            self.read(left_s)

    def collectives(self, rank: int) -> tuple[Collective, ...]:
        """Return the last collectives of one rank, oldest first."""
        return flight_records.read(self._records_fd, rank)

    def place(self, rank: int) -> Place:
        """Return the :class:`Place` that a rank has noted: what it waits for."""
        return flight_records.read_place(self._records_fd, rank)[0]

    def current_collective(self, rank: int) -> Collective | None:
        """Return the collective that a rank runs or waits for now, or None."""
        return flight_records.read_current(self._records_fd, rank)

    def are_ours(self) -> bool:
        """Return True if the ranks belong to this process, and not to its parent."""
        return self.owner == linux.getpid()

    def intact(self) -> bool:
        """Return True if every rank is alive and belongs to this process."""
        if not self.are_ours():
            return False
        self.read(0.0)
        # The exit status of a process that has just ended may still be on its way.
        return all(r.alive and not linux.has_ended(r.pidfd) for r in self.ranks)

    def stop(self) -> None:
        """Let the ranks end by themselves; kill those that do not."""
        if self.are_ours():
            for rank in self.ranks:
                # End of file orders the rank to end, and the rank can still answer.
                rank.sock.shutdown(socket.SHUT_WR)
            self._read_until(self._all_ended, _STOP_S)
        self.kill()

    def kill(self) -> None:
        """Kill every rank and release the parent's resources; may be called again."""
        if self.are_ours():
            for rank in self.ranks:
                # The forkserver kills the rest of the rank's process group. It does so
                # when it sees the rank end, before the number can be used again.
                rank.signal(signal.SIGKILL)
            self._read_until(self._all_ended, _KILL_S)
        # Removed one by one, so that a second kill closes no descriptor that has been
        # given to something else.
        while self.ranks:
            self.ranks.pop().close()
        self._own.close()

    def dump_stacks(self, ranks: list[RankProcess], limit_s: float = 0.4) -> None:
        """Make ranks, even stopped ones, write their stacks into their captures."""
        for rank in ranks:
            # faulthandler handles this signal in C, so it runs although the interpreter
            # is stuck in native code. A stopped process handles signals when it is
            # continued, in the order of their arrival.
            rank.signal(linux.STACKS_SIGNAL, linux.signal_main_thread)
            rank.signal(signal.SIGCONT)
        silent = set(ranks)
        until = deadline = linux.now_s() + limit_s
        while (left_s := until - linux.now_s()) > 0:
            for rank, fd in self.read(left_s):
                if fd == rank.stacks.fd:
                    silent.discard(rank)
                    if not silent:
                        # All ranks have begun to write, so a short silence means that
                        # they have finished.
                        until = min(deadline, linux.now_s() + 0.03)

    def end_call(self, ranks: list[RankProcess], limit_s: float) -> None:
        """Make ranks leave the function, so that ``finally`` and teardown run.

        A rank is killed once it has answered. So its connections break, and ranks that
        wait for it in native code leave too.

        Args:
            ranks: Ranks that have not answered.
            limit_s: Time limit; the caller kills the remaining processes.
        """
        left = set(ranks)
        for rank in self.ranks:
            rank.replies.clear()
            if rank in left:
                rank.signal(linux.END_SIGNAL, linux.signal_main_thread)
            else:
                rank.signal(signal.SIGKILL)

        def all_answered() -> bool:
            ended = [r for r in left if r.last_reply or r.channel.closed]
            for rank in ended:
                rank.signal(signal.SIGKILL)
                left.remove(rank)
            return not left

        self._read_until(all_answered, limit_s)

    def _all_ended(self) -> bool:
        return not any(rank.alive for rank in self.ranks)
