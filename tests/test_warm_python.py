"""warm_python.py: its client ends as the program does, whatever signal comes."""

import os
import signal
import subprocess
import time
from pathlib import Path

PROGRAM = """
import os, pathlib, sys, time
pathlib.Path("pid.part").write_text(str(os.getpid()))
os.rename("pid.part", "pid")
while not pathlib.Path("go").exists():
    time.sleep(0.01)
sys.exit(7)
"""


def test_a_signal_for_a_program_that_has_just_ended_leaves_its_exit_code(
    tmp_path: Path, warm_python: list[str]
) -> None:
    # torchrun ends its other processes, one of which has ended a moment before
    client = subprocess.Popen([*warm_python, "-c", PROGRAM], cwd=tmp_path)
    while not (tmp_path / "pid").exists():
        assert client.poll() is None
        time.sleep(0.01)
    os.kill(client.pid, signal.SIGSTOP)
    (tmp_path / "go").touch()
    program = Path("/proc", (tmp_path / "pid").read_text())
    while program.exists():
        time.sleep(0.01)
    os.kill(client.pid, signal.SIGTERM)
    os.kill(client.pid, signal.SIGCONT)
    assert client.wait() == 7
