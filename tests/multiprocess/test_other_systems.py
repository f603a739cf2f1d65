"""The plugin does nothing on a system other than Linux, and says so."""

import subprocess
import sys
from pathlib import Path

import pytest

from gradparity.multiprocess import Cluster, HarnessError

# What macOS lacks: /proc, and the names in os, signal and socket that are Linux's.
PROGRAM = """
import os, signal, socket, sys, sysconfig
import pytest
sysconfig.get_config_vars()  # from a file named after the real platform
for module, names in (
    (os, "memfd_create pidfd_open sched_getaffinity sched_setscheduler SCHED_BATCH"),
    (signal, "SIGRTMIN SIGRTMAX pidfd_send_signal"),
    (socket, "SOCK_SEQPACKET TCP_USER_TIMEOUT"),
):
    for name in names.split():
        delattr(module, name)

def elsewhere(real):
    def call(path=".", *args, **kwargs):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, *args, **kwargs)
    return call

os.listdir, os.readlink = elsewhere(os.listdir), elsewhere(os.readlink)
sys.platform = "darwin"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""

TESTS = """
import pytest

def test_ordinary():
    pass

@pytest.mark.world(world_size=2)
def test_world(world):
    pass
"""


def session(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(TESTS)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *options, "test_it.py"],
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_an_ordinary_session_is_not_disturbed(tmp_path: Path) -> None:
    done = session(tmp_path, "-k", "ordinary")
    assert "1 passed, 1 deselected" in done.stdout, done.stdout + done.stderr


def test_a_world_test_fails_with_the_reason(tmp_path: Path) -> None:
    done = session(tmp_path)
    assert "1 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "ranks need Linux, and this is darwin" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_starting_a_cluster_fails_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(HarnessError, match="ranks need Linux, and this is darwin"):
        Cluster(2).start()
