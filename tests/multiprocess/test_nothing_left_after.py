"""nothing_left.py, under which ``make test`` runs, fails and passes as it should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1].joinpath("nothing_left.py")

DAEMON = """
import subprocess, sys
subprocess.Popen(
    [sys.executable, "-c", '''
import socket, time
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    time.sleep(1000)
'''],
    start_new_session=True,
    stdout=(out := subprocess.PIPE),
).stdout.readline()
"""
FILE = "import tempfile; tempfile.mkstemp(prefix='trace')"
SHARED = "open('/dev/shm/gradparity-trace-{pid}', 'w').close()"
LATE = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(0.5)
"""
RANKS = """
from gradparity.multiprocess import Cluster
cluster = Cluster(2)
print(cluster.run(lambda: 1))
"""


def check(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHECK), sys.executable, "-c", program],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (DAEMON, ("left behind", "process", "create_server", "listens on port")),
        (FILE, ("left behind", "temporary file trace")),
    ],
)
def test_each_thing_left_behind_is_named(program: str, words: tuple[str, ...]) -> None:
    done = check(program)
    assert done.returncode == 1
    for word in words:
        assert word in done.stderr


def test_shared_memory_that_is_left_is_named() -> None:
    program = SHARED.format(pid=os.getpid())
    try:
        done = check(program)
    finally:
        Path(f"/dev/shm/gradparity-trace-{os.getpid()}").unlink()
    assert done.returncode == 1
    assert "shared memory gradparity-trace" in done.stderr


@pytest.mark.parametrize("program", [LATE, RANKS])
@pytest.mark.slow
def test_processes_that_end_by_themselves_are_not_reported(program: str) -> None:
    done = check(program)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_commands_own_failure_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # whose folder is kept
    done = check("raise SystemExit(7)")
    assert done.returncode == 7
    assert "left behind" not in done.stderr
