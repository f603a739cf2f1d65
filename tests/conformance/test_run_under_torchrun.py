"""The catalogue on torchrun's ranks gives the pool's report, also with failures."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradparity.ci.gate import main as gate
from gradparity.conformance.__main__ import main
from gradparity.conformance.report.compare import compare
from gradparity.conformance.report.records import Report, read_report

RUN = ["-m", "gradparity.conformance", "run"]
OURS = "gradparity.scaler:GradScaler"
TORCH = "torch.amp:GradScaler"
PLAIN = "gradparity.fixtures.faulty:PlainScaler"
SCALERS = '''
import os, pathlib, signal, time
import torch, torch.distributed as dist
from gradparity.fixtures.faulty import PlainScaler

class Kills(PlainScaler):
    """Kills rank 1 in its second update, as the kernel does for want of memory."""
    updates = 0
    def update(self):
        super().update()
        self.updates += 1
        if self.updates == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

class Hangs(PlainScaler):
    """Rank 1 waits in native code for a lock that nobody gives back."""
    def update(self):
        if dist.get_rank() == 1:
            time.sleep(1000)
        super().update()

class Slow(PlainScaler):
    """Leaves a file that names the agent of its rank."""
    def update(self):
        super().update()
        path = pathlib.Path(f"rank-{os.environ['RANK']}")
        path.with_suffix(".new").write_text(os.environ["GRADPARITY_AGENT"])
        path.with_suffix(".new").rename(path)
        time.sleep(0.2)
'''
SAME = [
    "single/1/fp32/sgd/inf@r0s1:last/steps=3",
    "ddp/2/fp16-autocast/adamw/none/steps=3",
    "fsdp/2/fp32/sgd/inf@r1s1:up.weight/steps=3",
    "tp/2/fp32/sgd/none/steps=3",
]
LARGE = "hsdp/4/fp32/sgd/none/steps=3"


def start(
    folder: Path, python: list[str], *arguments: str, restarts: int = 0
) -> subprocess.Popen[str]:
    """Start torchrun on two ranks in ``folder``, and write ``mine.py`` there."""
    (folder / "mine.py").write_text(SCALERS)
    launcher = [*python, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node=2", f"--max-restarts={restarts}", "--no-python"]
    return subprocess.Popen(
        [*launcher, *python, *RUN, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "400", "OMP_NUM_THREADS": "1"},
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for torchrun; return its exit code and the output of all ranks."""
    output, _ = process.communicate()
    return process.returncode, output


def exit_codes(output: str) -> set[int]:
    """Return the exit codes of the ranks that torchrun prints; its own is always 1."""
    return {int(code) for code in re.findall(r"exitcode\s*: (-?\d+)", output)}


def scenarios(*ids: str) -> list[str]:
    return [f"--scenario={each}" for each in ids]


def pool(folder: Path, python: list[str], *arguments: str) -> Report:
    (folder / "mine.py").write_text(SCALERS)
    subprocess.run(
        [*python, *RUN, *arguments, "--report", "pool.jsonl", "--quiet"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "2"},  # must not show in the report
        capture_output=True,
    )
    return read_report(folder / "pool.jsonl")


def descendants(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            stat = entry.read_text()
        except OSError:
            continue  # ended while we looked
        if int(stat.rpartition(")")[2].split()[1]) == pid:
            child = int(entry.parent.name)
            found += [child, *descendants(child)]
    return found


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pids: list[int]) -> None:
    while any(alive(pid) for pid in pids):
        time.sleep(0.1)


def agent_of(folder: Path, rank: int) -> int:
    """Return the pid of the agent of ``rank``, from the file that the rank wrote."""
    return int((folder / f"rank-{rank}").read_text())


@pytest.mark.slow
def test_the_same_report_as_on_the_pool(tmp_path: Path, warm_ranks: list[str]) -> None:
    checked = ["--scaler", OURS, "--scaler", TORCH]
    same = [*checked, *scenarios(*SAME)]
    before = pool(tmp_path, warm_ranks, *same)
    run = [*same, *scenarios(LARGE), "--out", "out"]
    code, output = ended(start(tmp_path, warm_ranks, *run))
    assert code == 1 and exit_codes(output) == {1}, output
    after = read_report(tmp_path / "out" / "report.jsonl")
    assert after.incomplete == ""
    assert {c.status for c in before.cases} == {"pass", "fail"}
    changes = compare(before, after)
    assert {(c.kind, c.text.split()[1]) for c in changes} == {("new", LARGE)}
    assert [c for c in after.cases if c.world_size == 2] != []
    launcher = after.header.launcher
    assert (launcher.name, launcher.ranks, launcher.attempt) == ("torchrun", 2, 0)
    assert (tmp_path / "out" / "index.html").is_file()

    large = [c for c in after.cases if c.scenario == LARGE]
    assert {c.status for c in large} == {"inconclusive"}
    words = "not runnable here: needs 4 ranks, torchrun made 2"
    assert {(v.status, v.message) for c in large for v in c.verdicts} == {
        ("skipped", words)
    }
    assert words in output


@pytest.mark.slow
def test_a_rank_that_dies_or_hangs_is_a_verdict(
    tmp_path: Path, warm_ranks: list[str]
) -> None:
    checked = ["--scaler", "mine:Kills", "--scaler", "mine:Hangs", "--scaler", PLAIN]
    # beyond the 30 s after which the other rank once gave up, as if it were at fault
    run = [*checked, *scenarios(SAME[2]), "--timeout-s", "35"]
    process = start(tmp_path, warm_ranks, *run, "--report", "r.jsonl")
    code, output = ended(process)
    assert code == 1 and exit_codes(output) == {3}, output
    after = read_report(tmp_path / "r.jsonl")
    assert [c.status for c in after.cases] == ["error", "fail", "pass"]
    assert after.cases[0].problem == "rank 1: killed by SIGKILL"
    assert "rank 1: killed by SIGKILL" in after.incomplete
    (hang,) = after.cases[1].failures
    assert hang.law == "liveness.completes"
    assert 1 in hang.ranks and "still running" in hang.message


def wait_for(process: subprocess.Popen[str], path: Path, what: str) -> None:
    while not path.exists():
        assert process.poll() is None, (what, process.communicate())
        time.sleep(0.1)


def wait_for_the_first_case(process: subprocess.Popen[str], report: Path) -> None:
    wait_for(process, report, "report")
    while report.read_text().count("\n") < 2:  # the header comes before it
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.slow
def test_the_leader_is_killed_and_another_rank_says_so(
    tmp_path: Path, warm_ranks: list[str]
) -> None:
    long = ["fsdp/2/fp32/sgd/none/steps=2", "fsdp/2/fp32/sgd/none/steps=60"]
    run = ["--scaler", "mine:Slow", *scenarios(*long), "--report", "r.jsonl"]
    process = start(tmp_path, warm_ranks, *run)
    wait_for_the_first_case(process, tmp_path / "r.jsonl")
    (tmp_path / "rank-1").unlink()
    wait_for(process, tmp_path / "rank-1", "step of the second scenario")
    agents = [agent_of(tmp_path, rank) for rank in range(2)]
    family = [*agents, *(each for agent in agents for each in descendants(agent))]
    os.kill(agents[0], signal.SIGKILL)
    code, output = ended(process)
    assert code == 1 and exit_codes(output) == {-9, 3}, output
    report = read_report(tmp_path / "r.jsonl")
    assert "rank 0: its process is gone" in report.incomplete
    assert report.footer is not None and not report.footer.complete
    assert len(report.cases) == 1
    wait_until_gone(family)
    assert gate([str(tmp_path / "r.jsonl")]) == 3


@pytest.mark.slow
def test_without_torchruns_agent_nothing_goes_on(tmp_path: Path) -> None:
    run = ["--scaler", "mine:Slow", "--scenario", "fsdp/2/fp32/sgd/none/steps=60"]
    process = start(tmp_path, [sys.executable], *run, "--report", "r.jsonl")
    wait_for(process, tmp_path / "rank-1", "step")
    family = descendants(process.pid)
    process.kill()
    ended(process)
    wait_until_gone(family)
    assert "torchrun's store is gone" in read_report(tmp_path / "r.jsonl").incomplete


@pytest.mark.slow
def test_a_restart_begins_anew_and_keeps_the_older_report(
    tmp_path: Path, warm_ranks: list[str]
) -> None:
    long = ["fsdp/2/fp32/sgd/none/steps=2", "fsdp/2/fp32/sgd/none/steps=12"]
    run = ["--scaler", "mine:Slow", *scenarios(*long), "--report", "r.jsonl"]
    process = start(tmp_path, warm_ranks, *run, restarts=1)
    report = tmp_path / "r.jsonl"
    wait_for_the_first_case(process, report)
    first = report.read_text().splitlines()[1]
    os.kill(agent_of(tmp_path, 1), signal.SIGKILL)
    code, output = ended(process)
    assert code == 0, output
    after = read_report(report)
    assert after.incomplete == ""
    assert [c.status for c in after.cases] == ["pass", "pass"]
    assert after.header.launcher.attempt == 1
    before = tmp_path / "r.jsonl.1"
    assert before.read_text().splitlines()[1] == first
    assert "rank 1: its process is gone" in read_report(before).incomplete


@pytest.mark.slow
def test_bad_usage_is_reported_once(tmp_path: Path, warm_ranks: list[str]) -> None:
    code, output = ended(start(tmp_path, warm_ranks, "--topology", "ring"))
    assert code == 1 and exit_codes(output) == {2}, output
    assert output.count("unknown topology 'ring'") == 1
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != "") == ["mine.py"]


@pytest.mark.slow
def test_a_large_value_goes_through_the_store(
    tmp_path: Path, warm_python: list[str]
) -> None:
    (tmp_path / "program.py").write_text(
        "from gradparity.multiprocess import WorldSpec\n"
        "from gradparity.multiprocess.elastic.agent import Agent, AgentCluster\n"
        "with Agent() as agent:\n"
        "    if agent.leads:\n"
        "        cluster = AgentCluster(agent, WorldSpec(world_size=2))\n"
        "        print([len(x) for x in cluster.run(lambda: b'x' * (20 << 20))])\n"
        "        agent.finish(0)\n"
        "    else:\n"
        "        agent.follow()\n"
    )
    launcher = [*warm_python, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node=2", "--no-python", *warm_python, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == str([20 << 20] * 2)


def test_other_commands_are_rank_0s_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "1")
    assert main(["list", "laws"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    assert main(["list", "laws"]) == 0
    assert "agreement.scale" in capsys.readouterr().out
