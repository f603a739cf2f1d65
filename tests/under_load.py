"""Run ``make test`` beside busy loops: ``under_load.py RUNS [COMMAND...]``.

A test that fails only on a busy machine fails here. The output of run N is stored in
``parity-report/under-load-N.log``; failures and the time of each run are printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOPS = 4
LOGS = Path("parity-report")
# it ends with its parent, also where that is killed and can end nothing itself
LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


def main(runs: int, command: list[str]) -> int:
    """Return 0 if every run of the command did, and 1 otherwise."""
    LOGS.mkdir(exist_ok=True)
    failed = 0
    with busy_loops():
        for number in range(1, runs + 1):
            log = LOGS / f"under-load-{number}.log"
            start = time.monotonic()
            with log.open("w") as file:
                done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
            took = time.monotonic() - start
            print(f"run {number}: exit {done.returncode}, {took:.0f} s, {log}")
            if done.returncode:
                failed += 1
                print(*told(log), sep="\n", flush=True)
    print(f"{runs - failed} of {runs} runs passed beside {LOOPS} busy loops")
    return int(failed > 0)


@contextmanager
def busy_loops() -> Iterator[None]:
    """Keep the processors busy; no loop is left when it ends."""
    command = [sys.executable, "-c", LOOP, str(os.getpid())]
    loops = [subprocess.Popen(command) for _ in range(LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def told(log: Path) -> list[str]:
    """Return the lines that name failures, or the last lines."""
    lines = log.read_text(errors="replace").splitlines()
    named = ("FAILED ", "ERROR ", "left behind")
    return [line for line in lines if line.startswith(named)] or lines[-10:]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:] or ["make", "test"]))
