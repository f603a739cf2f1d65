"""The catalogue on two hosts: the link between them is cut in the middle of a run."""

import re
import subprocess
import time
from pathlib import Path

import pytest

from gradparity.conformance.report.records import read_report
from gradparity.multiprocess.elastic.membership import SILENCE_S

SLOW = """
import os, pathlib, time
from gradparity.fixtures.faulty import PlainScaler

class Slow(PlainScaler):
    def update(self):
        super().update()
        pathlib.Path(f"rank-{os.environ['RANK']}").touch()
        time.sleep(0.2)
"""
RUN = ("-m", "gradparity.conformance", "run", "--scaler", "mine:Slow", "--quiet")
SCENARIO = "fsdp/4/fp32/sgd/none/steps=100"
START_S, SLACK_S = 120.0, 25.0


@pytest.mark.slow
@pytest.mark.timeout(START_S + SILENCE_S + 4 * SLACK_S)
def test_a_link_that_is_cut_ends_the_run_and_is_named(
    on_two_hosts: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(SLOW)
    program = [*RUN, "--scenario", SCENARIO, "--report", str(tmp_path / "r.jsonl")]
    process = subprocess.Popen(
        [*on_two_hosts, "veth", str(tmp_path), *program],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for(process, tmp_path / "rank-3", START_S)
        (tmp_path / "cut").touch()
        cut_at = time.monotonic()
        incomplete = wait_for_the_verdict(tmp_path / "r.jsonl", SILENCE_S + SLACK_S)
        took_s = time.monotonic() - cut_at
        said, _ = process.communicate(timeout=SILENCE_S + 2 * SLACK_S)
    finally:
        process.kill()  # and all in its namespaces
        process.communicate()
    logs = [(tmp_path / f"host{number}.log").read_text() for number in range(2)]
    assert "not heard for 15 s: host 1 (" in incomplete, logs
    assert "ranks 2, 3; the link is cut" in incomplete
    assert took_s > SILENCE_S - 2
    assert "goes on" not in said, logs  # nobody is left on either host
    assert exit_codes(logs[0]) == {3}, logs[0]
    for rank in (2, 3):
        assert f"gradparity: rank {rank}: torchrun's store is gone" in logs[1]
    (case,) = read_report(tmp_path / "r.jsonl").cases
    assert case.status == "error"


def exit_codes(log: str) -> set[int]:
    return {int(code) for code in re.findall(r"exitcode\s*: (-?\d+)", log)}


def wait_for(process: subprocess.Popen[str], path: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_the_verdict(report: Path, limit_s: float) -> str:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = read_report(report)
        if found.footer is not None:
            return found.incomplete
        time.sleep(0.2)
    raise AssertionError(f"no verdict in {limit_s:g} s")
