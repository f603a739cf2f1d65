"""Ranks without memory, and full disks; both are real where the kernel allows it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradparity.multiprocess import Cluster, RankState, WorldError, current_world

MIB = 1 << 20
LIMIT = {"v1": "memory.limit_in_bytes", "v2": "memory.max"}

UNSHARE = ("unshare", "--user", "--map-root-user", "--mount")
FULL_DISK = 'mount -t tmpfs -o size=64k,nr_inodes=8 none "$0" && cd "$0" && exec "$@"'

FILL = """
import errno, os, tempfile
assert tempfile.gettempdir() == os.getcwd()  # chosen while there is room
try:
    with open("ballast", "wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))
except OSError as error:
    assert error.errno == errno.ENOSPC
try:
    for number in range(10):
        open(f"entry{number}", "w").close()
except OSError as error:
    assert error.errno == errno.ENOSPC
"""

PROGRAM = (
    FILL
    + """
from gradparity.multiprocess import Cluster, WorldError, current_world

def speaks():
    print("head" + "x" * 30_000 + "tail")
    assert current_world().rank == 0, "boo"

with Cluster(2) as cluster:
    try:
        cluster.run(speaks)
    except WorldError as failure:
        print(failure.root.message, [len(o.output) for o in failure.outcomes])
    print(cluster.run(lambda: current_world().rank))
"""
)

SESSION = (
    FILL
    + """
import sys
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
)

TESTS = """
import pytest, torch, torch.distributed as dist

@pytest.mark.world(world_size=2)
def test_faulty(world):
    print("x" * 100_000)
    assert world.rank == 0, "boo"

@pytest.mark.world(world_size=2)
def test_innocent(world):
    print("x" * 100_000)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 2
"""


def memory_cgroup() -> tuple[Path, str]:
    """Return the folder of this process's memory cgroup, and its version."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory" + path), "v1"
        if not controllers:
            unified = Path("/sys/fs/cgroup" + path)
    return unified, "v2"


@contextlib.contextmanager
def little_memory(limit: int) -> Iterator[Path]:
    """Return a memory cgroup of ``limit`` bytes; skip if none can be made."""
    folder, version = memory_cgroup()
    made = folder / f"gradparity-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        try:
            (made / LIMIT[version]).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"the memory of a cgroup cannot be limited here: {error}")
        yield made
    finally:
        made.rmdir()  # fails if a process is left in it


def innocent() -> float:
    value = torch.ones(1) * current_world().rank
    dist.all_reduce(value)
    return value.item()


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_that_the_kernel_kills_for_want_of_memory(waits: bool) -> None:
    def act(group: Path) -> None:
        if current_world().rank == 1:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            hoard = [bytearray(b"x" * MIB) for _ in range(1024)]
            raise AssertionError(f"{len(hoard)} MiB fitted")
        if waits:
            dist.all_reduce(torch.ones(1))

    with little_memory(64 * MIB) as group, Cluster(3) as cluster:
        with pytest.raises(WorldError) as caught:
            cluster.run(act, group)
        others = RankState.VICTIM if waits else RankState.OK
        states = [outcome.state for outcome in caught.value.outcomes]
        assert states == [others, RankState.KILLED, others]
        assert caught.value.root.rank == 1
        assert caught.value.root.signal == "SIGKILL"
        assert "when memory is short" in str(caught.value)
        assert cluster.run(innocent) == [3.0] * 3


def on_a_full_disk(
    folder: Path, program: str, *args: str
) -> subprocess.CompletedProcess[str]:
    """Run a program while its folder, home and temporary folder are full."""
    trial = [*UNSHARE, "mount", "-t", "tmpfs", "none", str(folder)]
    can = subprocess.run(trial, capture_output=True, text=True)
    if can.returncode:
        pytest.skip(f"no file system can be mounted here: {can.stderr.strip()}")
    homes = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(folder))
    command = ["sh", "-c", FULL_DISK, str(folder), sys.executable, "-c", program, *args]
    return subprocess.run(
        [*UNSHARE, *command],
        env={**os.environ, **homes},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_output_is_captured_whole_on_a_full_disk(tmp_path: Path) -> None:
    done = on_a_full_disk(tmp_path, PROGRAM)
    assert done.stdout == "boo [30009, 30009]\n[0, 1]\n", done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_session_on_a_full_disk_fails_the_faulty_test_alone(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    tests = tmp_path / "test_it.py"
    tests.write_text(TESTS)
    done = on_a_full_disk(disk, SESSION, "--capture=sys", str(tests))
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "rank 1: raised AssertionError: boo" in done.stdout
