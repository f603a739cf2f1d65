"""The server that imports torch once and forks ranks from itself.

The server runs in a separate process, is connected to its client by a socket, and:

1. receives the client's import path, imports the modules to preload, answers "ready";
2. forks one rank for each request, which carries the rank's pipes;
3. writes how each rank ended on that rank's exit pipe;
4. kills every rank and ends when the client is gone, for whatever reason.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import traceback
from typing import Any, NoReturn

from .. import linux, python_internals
from . import worker

RANK_FDS = 5
"""Descriptors that follow the exit pipe in a fork request: messages, output, stacks,
store, flight records."""

EXIT_STATUS = struct.Struct("!i")
"""Content of an exit pipe: exit code, or minus the signal."""

# The socket keeps messages apart, and cuts one that is longer than the buffer. So long
# requests come in memory, and errors are cut.
_LARGEST_REQUEST = 1 << 10
_LONGEST_ERROR = 1 << 15

# Needed if the socket does not show the client's end; see `serve`.
_CLIENT_CHECK_S = 2.0
_END_S = 3.0


# [Note: No rank outlives its parent]
# Each end must be seen in whatever way a process goes, SIGKILL included:
# - The client ends: its end of the socket closes, and `serve` calls `_end`. A child of
#   the client's that inherited the descriptor keeps it open, so the parent's number is
#   checked as well.
# - The server ends: PR_SET_PDEATHSIG has the kernel kill each rank.
# - A rank ends: its process group is killed with it, before its number is free again.
# - A daemon, which has left its rank's group: the server has adopted it
#   (PR_SET_CHILD_SUBREAPER) and kills it with the last rank, since nothing shows which
#   rank it belongs to.
# - A rank that the parent gives up: the parent kills that one process, the server sees
#   it end and does the rest. Only the server may kill by number: as the rank's parent,
#   it alone knows that the number is not another process's yet.
class ForkServer:
    """Serves one client until it is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._client = os.getppid()
        self._exit_fds: dict[int, int] = {}
        self._wake_r, self._wake_w = os.pipe()

    def serve(self) -> NoReturn:
        """Answer requests; never returns."""
        # A signal is awaited as the sockets are: its number arrives in a pipe, and is
        # handled between two requests. The handler itself has nothing to do, but
        # without one the kernel would ignore SIGCHLD and nothing would be written.
        for fd in (self._wake_r, self._wake_w):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the client
        # Sent by a client whose wait timed out: the stack shows where this process is.
        faulthandler.register(signal.SIGTERM, chain=True)
        # A daemon that a rank leaves behind becomes our child, so it can be found.
        linux.adopt_orphans()
        selector = selectors.DefaultSelector()
        selector.register(self._sock, selectors.EVENT_READ)
        selector.register(self._wake_r, selectors.EVENT_READ)
        self._selector = selector
        # End of file on the socket says that the client has ended, unless a child of
        # the client's has inherited the other end: so its number is checked, too.
        while os.getppid() == self._client:
            for key, _ in selector.select(_CLIENT_CHECK_S):
                if key.fileobj is self._sock:
                    self._request()
                else:
                    # Empty the pipe before looking: a rank that ends meanwhile writes
                    # again.
                    os.read(self._wake_r, 1 << 16)
                    self._reap()
        self._end()

    def _request(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(
                self._sock, _LARGEST_REQUEST, RANK_FDS + 1
            )
        except ConnectionError:
            self._end()
        if not message:
            self._end()
        request = json.loads(message)
        pidfds: list[int] = []
        if request["do"] == "fork":
            answer = self._fork(fds)
            if "pid" in answer:
                pidfds = linux.open_process(answer["pid"])
        else:
            answer = self._import(*fds)
        answer["serial"] = request["serial"]
        try:
            socket.send_fds(self._sock, [json.dumps(answer).encode()], pidfds)
        except ConnectionError:
            self._end()
        _close(pidfds)

    def _import(self, fd: int) -> dict[str, Any]:
        with open(fd) as file:
            request = json.load(file)
        sys.path[:], modules = request["path"], request["modules"]
        # Looking for garbage takes a fifth of the time, and finds 7 of 310 MB.
        gc.disable()
        try:
            for name in modules:
                importlib.import_module(name)
        except Exception:
            trace = traceback.format_exc()[-_LONGEST_ERROR:]
            return {"error": f"cannot preload {name}\n{trace}"}
        finally:
            # ranks share these objects: garbage collection must not touch their pages
            gc.freeze()
            gc.enable()
        return {}

    def _fork(self, fds: list[int]) -> dict[str, Any]:
        if len(fds) <= RANK_FDS:  # the kernel drops those above the limit
            _close(fds)
            return {"error": "the forkserver has no descriptor left: see ulimit -n"}
        exit_w, rank_fds = fds[0], fds[1:]
        try:
            pid = os.fork()
        except OSError as error:
            _close(fds)
            return {"error": f"cannot fork a rank: {error}"}
        if pid == 0:
            self._become_rank(exit_w, rank_fds)
        _close(rank_fds)
        # Kept open, so that an end without a status means the end of the server.
        self._exit_fds[pid] = exit_w
        return {"pid": pid}

    def _become_rank(self, exit_w: int, rank_fds: list[int]) -> NoReturn:
        code = 1
        try:
            # At once: a signal of this process must not wake the server.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            faulthandler.unregister(signal.SIGTERM)
            server = os.getppid()
            # a group of its own, so that it can be killed with its children
            os.setsid()
            linux.die_with_parent(server)
            linux.be_first_out_of_memory()
            linux.wait_for_turn()
            # Close what belongs to the server. A copy of another rank's exit pipe would
            # keep it open after the server has closed its own.
            self._selector.close()
            self._sock.close()
            _close([exit_w, self._wake_r, self._wake_w, *self._exit_fds.values()])
            python_internals.drop_exit_handlers()  # the server's
            code = worker.main(*rank_fds)
            # The rank's own. The parent waits for them, and kills the rank if one does
            # not end.
            python_internals.run_exit_handlers()
            linux.flush_standard_streams()
        except BaseException:  # also SystemExit: nothing may leave this frame
            traceback.print_exc()
        finally:
            # No return: the frames below, and what they would end, are the server's.
            os._exit(code)

    def _reap(self) -> None:
        # Wait for all that have ended: one SIGCHLD may stand for several ends.
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            # With WNOWAIT it stays a zombie, so its number belongs to no other process
            # or group. What is left of its group is killed first.
            linux.kill_tree(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            fd = self._exit_fds.pop(ended.si_pid, None)
            if fd is not None:  # None for an orphan that the server has adopted
                try:
                    os.write(fd, EXIT_STATUS.pack(os.waitstatus_to_exitcode(status)))
                except BrokenPipeError:
                    pass  # the client no longer reads
                os.close(fd)
            # Not before the last rank has ended: a daemon may belong to any rank.
            if not self._exit_fds:
                _kill_strays()

    def _end(self) -> NoReturn:
        # A process that dies leaves its children to us: repeat until none is left.
        deadline = linux.now_s() + _END_S
        while linux.now_s() < deadline:
            _kill_strays()
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    linux.sleep(0.002)
            except ChildProcessError:
                break
        # Not os._exit: coverage.py, where it measures, would write a file of this
        # process, when the session has combined those of all.
        signal.raise_signal(signal.SIGKILL)
        os._exit(0)  # not reached


def _kill_strays() -> None:
    # No rank is left, so each remaining child was left by one.
    for pid in linux.children():
        linux.kill_tree(pid)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def main(fd: int) -> NoReturn:
    """Serve the client at the other end of socket ``fd``."""
    # torch's test classes ask for GPUs when they are imported. Without this variable
    # the answer loads the driver, and no process that is forked later can use a GPU.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    ForkServer(socket.socket(fileno=fd)).serve()
