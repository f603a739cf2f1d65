"""Runs scripts, each as ``python PATH`` does, but imports torch only once.

Reads a path a line and forks for it; tells the exit code on a line when it has ended.
What the script says goes to ``PATH.out``.
"""

import importlib
import os
import runpy
import signal
import sys
import traceback

from gradparity.multiprocess.preloads import COSTLY, PRELOAD

LIMIT_S = 250


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
