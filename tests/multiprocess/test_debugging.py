"""pdb on a rank, how to attach to one that hangs, and where its time went."""

import fcntl
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Self

import pytest

from gradparity.multiprocess import RankState, WorldFailure
from gradparity.multiprocess.outcomes import Collective, RankOutcome
from gradparity.multiprocess.pytest_plugin.debugging import how_to_attach
from gradparity.multiprocess.pytest_plugin.trace import merge

pytest_plugins = ["pytester"]
LIMIT_S = 180.0


class Terminal:
    """A pytest session in the foreground of a terminal."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._master, slave = pty.openpty()
        env = {k: v for k, v in os.environ.items() if k != "PYTEST_XDIST_WORKER"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", *options],
            cwd=folder,
            env=env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.seen = ""

    def wait_for(self, text: str) -> None:
        """Read until it shows this."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self._master], [], [], 1.0)[0]:
                try:
                    self.seen += os.read(self._master, 4096).decode()
                except OSError:  # it has ended
                    break
        assert text in self.seen, self.seen

    def type(self, line: str) -> None:
        """Type a line, and forget what was shown before it."""
        self.seen = ""
        os.write(self._master, f"{line}\n".encode())

    def end(self) -> int:
        """Wait for the end."""
        return self._process.wait(LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)


@pytest.mark.slow
def test_a_person_at_a_terminal_stops_on_a_rank(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch, torch.distributed as dist

        @pytest.mark.world(size=2, timeout_s=60)
        def test_stops(world):
            if world.rank == 1:
                breakpoint()
            dist.barrier()

        @pytest.mark.world(size=2)
        def test_raises(world):
            found = 100 + world.rank
            dist.barrier()
            if world.rank == 1:
                raise ValueError("boo")
        """
    )
    options = ("--pdb", "-p", "no:cacheprovider")
    with Terminal(pytester.path, *options) as terminal:
        terminal.wait_for("(rank 1) ")
        terminal.type("p world.rank + 40")
        terminal.wait_for("41")
        terminal.type("c")
        terminal.wait_for("rank 1 raised ValueError: boo")
        terminal.wait_for("(rank 1) ")
        terminal.type("p found")
        terminal.wait_for("101")
        terminal.type("q")
        terminal.wait_for("1 failed, 1 passed")
        assert terminal.end() == 1


@pytest.mark.slow
def test_without_a_terminal_each_says_so_in_a_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch.distributed as dist

        @pytest.mark.world(size=2)
        def test_stops(world):
            if world.rank == 1:
                breakpoint()

        @pytest.mark.world(size=2, timeout_s=1)
        def test_hangs(world):
            if world.rank == 1:
                dist.barrier()
        """
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pdb"),
            *("--gradparity-attach", "1", "--basetemp", "kept"),
        ],
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 1
    assert "--pdb: not on rank 1: There is no terminal" in done.stdout
    assert "RuntimeError: There is no terminal" in done.stdout
    assert "--pdb: not on rank 1: it raised nothing (rank 1: hung" in done.stdout
    found = re.search(r"rank 1: pid (\d+) <- root cause", done.stdout)
    assert found is not None
    assert f"py-spy dump --native --pid {found[1]}" in done.stdout
    assert f"gdb -p {found[1]}" in done.stdout
    assert "goes on after 1 s" in done.stdout
    assert "(Pdb)" not in done.stdout


@pytest.mark.slow
def test_times_and_a_trace_of_each_rank(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch, torch.distributed as dist

        @pytest.mark.world(size=3)
        def test_works(world):
            for _ in range(3):
                value = torch.randn(64, 64) @ torch.randn(64, 64)
                dist.all_reduce(value)
        """
    )
    result = pytester.runpytest_subprocess(
        *("--gradparity-durations", "5", "--gradparity-trace", "traces")
    )
    result.assert_outcomes(passed=1)
    line = next(text for text in result.outlines if "test_works: " in text)
    assert len(line.rpartition(": ")[2].split()) == 3
    (file,) = (pytester.path / "traces").iterdir()
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    timed = [event for event in events if "ts" in event]
    assert {event["pid"] for event in timed} == {0, 1, 2}
    times = [event["ts"] for event in timed]
    assert times == sorted(times) and times[0] == 0.0
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in timed:
        if event.get("cat") == "collective":
            spans[event["name"]].append((event["ts"], event["ts"] + event["dur"]))
    assert list(spans) == ["allreduce #1", "allreduce #2", "allreduce #3"]
    for ranks in spans.values():  # nobody ends before all have begun: one clock
        assert len(ranks) == 3
        assert max(start for start, _ in ranks) < min(end for _, end in ranks)
    for rank in range(3):  # and the profiler's is the same
        mine = [e for e in timed if e["pid"] == rank]
        products = [e["ts"] for e in mine if e["name"] == "aten::mm"]
        sums = [e["ts"] for e in mine if e.get("cat") == "collective"]
        assert len(products) == 3
        order = sorted([(t, "mm") for t in products] + [(t, "sum") for t in sums])
        assert [name for _, name in order] == ["mm", "sum"] * 3


def test_a_collective_that_never_ended_is_in_the_trace(tmp_path: Path) -> None:
    calls = tuple(
        Collective("g", n, "barrier", "-", "a.py:1", issued_ns=n * 1000, ended_ns=end)
        for n, end in ((1, 1500), (2, 0))
    )
    killed = RankOutcome(rank=0, state=RankState.KILLED, collectives=calls)
    parts = tmp_path / "t.ranks"
    parts.mkdir()
    (parts / "rank-1.json.part").write_text("of a rank that was killed")
    merge(parts, [killed], tmp_path / "t.json")
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [(e["ph"], e["ts"]) for e in events if "ts" in e] == [("X", 0), ("B", 1)]


def test_how_to_attach_begins_with_the_root_cause() -> None:
    hung = [RankOutcome(rank=r, state=RankState.HUNG, message="there") for r in (0, 1)]
    lines = list(how_to_attach(WorldFailure(tuple(hung), hung[1]), {0: 10, 1: 11}))
    assert "rank 1: pid 11 <- root cause" in lines[1]
    assert "rank 0: pid 10" in lines[2]
    assert "--pid 11" in lines[3] and "gdb -p 11" in lines[4]
