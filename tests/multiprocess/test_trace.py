"""A Chrome trace of the ranks of a test."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from gradparity.multiprocess import RankState
from gradparity.multiprocess.outcomes import Collective, RankOutcome
from gradparity.multiprocess.pytest_plugin.trace import merge

pytest_plugins = ["pytester"]


@pytest.mark.slow
def test_a_trace_of_all_ranks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch, torch.distributed as dist

        @pytest.mark.world(world_size=3)
        def test_works(world):
            for _ in range(3):
                value = torch.randn(64, 64) @ torch.randn(64, 64)
                dist.all_reduce(value)
        """
    )
    result = pytester.runpytest_subprocess("--gradparity-trace", "traces")
    result.assert_outcomes(passed=1)
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
