"""A Python that has imported torch: programs run in forks of it, as new ones would.

Importing torch takes most of the time of a small job. A session has one server, started
by the first test that needs it; it ends with the session::

    python warm_python.py serve SOCKET PID      until process PID has ended
    python warm_python.py run SOCKET PROGRAM... as python PROGRAM...
    python warm_python.py ranks SOCKET PROGRAM... the same; its ranks are forks, too

``run`` hands over its descriptors, folder, environment and words, passes on ctrl-C and
SIGTERM, and ends as the program does. A program is a path, ``-m`` with a module or
``-c`` with code; what it writes at its end, it must write through ``atexit``.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
import sys

HEAVY = (
    *("torch", "torch._dynamo", "torch.distributed.run", "numpy"),
    *("torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("torch.distributed.tensor", "torch.distributed.tensor.parallel"),
)
"""Modules that small jobs import, some of them in their first step."""


def command(path: str, *, ranks: bool = False) -> list[str]:
    """Begin a command line that runs a program in the server at ``path``.

    Args:
        path: the server's socket.
        ranks: have the program's forkserver be a fork as well.
    """
    # neither site nor the environment: the program has its own
    return [sys.executable, "-I", "-S", __file__, "ranks" if ranks else "run", path]


# - The program's place in the session


def run(path: str, words: list[str], ranks: bool) -> None:
    """Have the server run a program; end as it ends."""
    program = {"words": words, "cwd": os.getcwd(), "env": dict(os.environ)}
    request = {**program, "ranks": ranks}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        fds = array.array("i", (0, 1, 2)).tobytes()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
        server.sendmsg([b"!"], rights)
        server.sendall(json.dumps(request).encode() + b"\n")
        answers = server.makefile()
        if pid := int(answers.readline() or 0):

            def pass_on(number: int, _: object) -> None:
                with contextlib.suppress(ProcessLookupError):  # its code is on the way
                    os.kill(pid, number)

            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, pass_on)
        answer = answers.readline()
    code = int(answer or 1)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


# - The server


def serve(path: str, session: int) -> None:
    """Listen at ``path``, from the end of this call on, until ``session`` has ended."""
    import importlib

    for name in HEAVY:
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)
        if os.fork():  # whoever waits for this process knows that it can connect
            os._exit(0)
        _answer(listening, os.pidfd_open(session))


def _answer(listening: socket.socket, session: int) -> None:
    """Fork for each request; send the fork's pid, and later its exit code."""
    import select

    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        # of a client nothing is read but its end
        clients = {
            client.fileno(): fd
            for fd, (_, client) in running.items()
            if client.fileno() >= 0
        }
        waited = [listening.fileno(), session, *running, *clients]
        ready, _, _ = select.select(waited, [], [])
        if session in ready:
            for pid, _ in running.values():
                os.kill(pid, signal.SIGKILL)
            return
        for fd in ready:
            if fd in clients:
                pid, client = running[clients[fd]]
                os.kill(pid, signal.SIGTERM)
                client.close()
        for fd in running.keys() & ready:
            pid, client = running.pop(fd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(fd)
            with client:
                with contextlib.suppress(OSError):  # it is gone
                    client.sendall(f"{code}\n".encode())
        if listening.fileno() in ready:
            client, _ = listening.accept()
            _, rights, _, _ = client.recvmsg(1, 64)
            fds = array.array("i", rights[0][2] if rights else b"")
            line = client.makefile().readline()
            if not line.endswith("\n"):  # killed while it asked
                client.close()
                continue
            request = json.loads(line)
            pid = os.fork()
            if not pid:
                for number, fd in enumerate(fds):
                    os.dup2(fd, number)
                os.closerange(3, 1024)
                _become(**request)
            for fd in fds:
                os.close(fd)
            running[os.pidfd_open(pid)] = pid, client
            with contextlib.suppress(OSError):  # it is gone
                client.sendall(f"{pid}\n".encode())


def _become(words: list[str], cwd: str, env: dict[str, str], ranks: bool) -> None:
    """Run the program that a client asks for in this fork, and exit with its code."""
    import atexit
    import runpy
    import threading
    import traceback
    import types

    # A program that ends by itself does not call os._exit, in which coverage.py saves.
    end = os._exit
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = words
    code = 0
    try:
        try:
            if words[0] == "-m":
                sys.argv = words[1:]
                _customize(os.getcwd())
                sys.modules.pop(words[1], None)
                _fork_forkserver(ranks)
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            elif words[0] == "-c":
                sys.argv = ["-c", *words[2:]]
                _customize("")
                _fork_forkserver(ranks)
                program = sys.modules["__main__"] = types.ModuleType("__main__")
                exec(compile(words[1], "<string>", "exec"), program.__dict__)
            else:
                _customize(os.path.dirname(os.path.abspath(words[0])))
                _fork_forkserver(ranks)
                runpy.run_path(words[0], run_name="__main__")
        except SystemExit as exit_:
            if isinstance(exit_.code, str):
                print(exit_.code, file=sys.stderr)
            code = exit_.code if isinstance(exit_.code, int) else bool(exit_.code)
        except BaseException:
            traceback.print_exc()
            code = 1
        threading._shutdown()  # type: ignore[attr-defined]  # as Python's own end
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        end(code)


def _fork_forkserver(ranks: bool) -> None:
    """Start the forkserver of a program with ranks, while there is only one thread."""
    if ranks:
        from gradparity.multiprocess.parent import forkserver_client

        assert forkserver_client.fork_forkserver()


def _customize(first: str) -> None:
    """Set the import path, and import the sitecustomize that the environment names."""
    import importlib.machinery
    import importlib.util

    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [first, *filter(None, named)]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if os.environ.get("GRADPARITY_RECORD"):  # it waits for torch, which is here
        module._begin()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        run(sys.argv[2], sys.argv[3:], ranks=sys.argv[1] == "ranks")
