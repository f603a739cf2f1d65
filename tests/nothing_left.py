"""Run a command and fail if it leaves anything behind: ``nothing_left.py COMMAND...``.

Once the command and its last processes have had time to end, it looks for:

1. processes: an orphaned descendant becomes a child of this process, so none can hide;
2. sockets that listen: they belong to such a process and are named with it;
3. files in the temporary folder: the command gets one of its own;
4. shared memory: new names in /dev/shm that no process has open.

pytest's own folders, torch's compiler cache and the log folders of torchrun do not
count. They are deleted with the temporary folder, unless the command failed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gradparity.multiprocess import linux

GRACE_S = 20.0
"""Seconds for processes to end: an orphaned forkserver takes 3, longer under load."""

OTHERS = ("pytest-of-", "torchinductor_", "torchelastic_")
SHARED_MEMORY = Path("/dev/shm")


def main(command: list[str]) -> int:
    """Run the command; return its exit code, or 1 if it left something."""
    linux.adopt_orphans()
    memory = shared_memory()
    folder = Path(tempfile.mkdtemp(prefix="gradparity-run-"))
    done = subprocess.run(command, env={**os.environ, "TMPDIR": str(folder)})
    left = [*processes(GRACE_S), *files(folder), *held_by_nobody(memory)]
    if left:
        print("left behind:", *left, sep="\n  ", file=sys.stderr)
    if done.returncode:
        print(f"temporary files are kept in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return done.returncode or int(bool(left))


def processes(limit_s: float) -> list[str]:
    """Describe descendants that do not end by themselves, and end them."""
    deadline = time.monotonic() + limit_s
    while (pids := living()) and time.monotonic() < deadline:
        time.sleep(0.02)
    found = [describe(pid) for pid in pids]
    while pids := living():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return found


def living() -> list[int]:
    """Reap children that have ended; return the others, including adopted ones."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return linux.children()
        except ChildProcessError:
            return []


def describe(pid: int) -> str:
    """Name a process and the ports that it listens on."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    line = b" ".join(words).decode(errors="backslashreplace")[:200]
    ports = "".join(f", listens on port {port}" for port in listening(pid))
    return f"process {pid}: {line}{ports}"


def listening(pid: int) -> Iterator[int]:
    """Yield the TCP ports on which a process listens."""
    own = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own.add(os.readlink(fd))
        except OSError:
            continue
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                yield int(words[1].rpartition(":")[2], 16)


def files(folder: Path) -> list[str]:
    """Describe leftover files in the temporary folder."""
    return [
        f"temporary file {path.name}"
        for path in sorted(folder.iterdir())
        if not path.name.startswith(OTHERS)
    ]


def shared_memory() -> set[str]:
    """Return the names in shared memory."""
    return set(os.listdir(SHARED_MEMORY))


def held_by_nobody(before: set[str]) -> list[str]:
    """Describe new names in shared memory that no process uses."""
    new = sorted(shared_memory() - before)
    used = in_use() if new else set()
    return [
        f"shared memory {name}"
        for name in new
        # other people's may have gone since it was listed
        if name not in used and (SHARED_MEMORY / name).exists()
    ]


def in_use() -> set[str]:
    """Return the names in shared memory that some process has mapped or open."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/map_files/*"):
        found.add(target(maps))
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        found.add(target(fd))
    prefix = f"{SHARED_MEMORY}/"
    return {name.removeprefix(prefix) for name in found if name.startswith(prefix)}


def target(link: Path) -> str:
    """Return the target of a link of /proc; "" once its process is gone."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
