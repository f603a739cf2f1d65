"""Runs standalone scripts, each as ``python PATH`` does, but imports torch only once.

As a program it reads a path a line and forks for it; it tells the exit code on a line
when that has ended. What the script says goes to ``PATH.out``.
"""

import importlib
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gradparity.conformance import Scenario
from gradparity.conformance.script.standalone import standalone_script
from gradparity.multiprocess.rank.worker import COSTLY, PRELOAD

LIMIT_S = 250
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Scripts:
    """Runs scripts in ``folder``, one after the other."""

    def __init__(self, folder: Path, ask: IO[str], answer: IO[str]) -> None:
        self.path, self.ask, self.answer = folder / "script.py", ask, answer

    def __call__(self, scaler: str, scenario: str) -> tuple[int, str]:
        """The exit code of a scenario's script, and what it said."""
        self.path.write_text(standalone_script(Scenario.parse(scenario), scaler))
        self.ask.write(f"{self.path}\n")
        self.ask.flush()
        code = int(self.answer.readline())
        return code, Path(f"{self.path}.out").read_text()


@contextmanager
def serving(folder: Path) -> Iterator[Scripts]:
    """A server of scripts, which ends with the block."""
    command = [sys.executable, "-m", __name__]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env=ENVIRONMENT
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        yield Scripts(folder, server.stdin, server.stdout)


def alone(folder: Path, scaler: str, scenario: str) -> tuple[int, str]:
    """As :class:`Scripts`, in a Python of its own, which must not complain."""
    script = folder / "script.py"
    script.write_text(standalone_script(Scenario.parse(scenario), scaler))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        env=ENVIRONMENT,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def run(path: str) -> int:
    """The exit code of a script, run in this process."""
    signal.alarm(LIMIT_S)
    out = os.open(f"{path}.out", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(out, number)
    os.chdir(os.path.dirname(path))
    sys.argv = [path]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    except Exception:
        traceback.print_exc()
        return 70
    return 0


def main() -> None:
    for name in (*PRELOAD, *COSTLY):
        if name.startswith("torch"):
            importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = run(line.strip())
            sys.stdout.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
