"""The catalogue as pytest items, in a user's empty folder."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradparity.conformance.report.records import read_report
from gradparity.conformance.space.catalogue import Selection, select

pytest_plugins = ["pytester"]
SCENARIOS = [
    "single/1/fp32/sgd/none/steps=2",
    "ddp/2/fp32/sgd/inf@r1s1:first/steps=2",
]
NEVER = "gradparity.fixtures.faulty:NeverAgrees"
PLAIN = "gradparity.fixtures.faulty:PlainScaler"
QUICK = ("--gradparity-quick", "--gradparity-topology=ddp")
FSDP = "fsdp/2/fp32/sgd/inf@r1s1:up.weight/steps=2"


def chosen(*scenarios: str) -> list[str]:
    return [f"--gradparity-scenario={each}" for each in scenarios]


def here(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    """Run a session of pytest in this process, which has imported torch."""
    return pytester.runpytest_inprocess("-q", *options)


def test_a_session_that_asks_for_nothing_pays_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n"
        "    assert 'gradparity.conformance.run.suite' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gradparity-scaler", "nosuch:Thing"], "cannot import"),
        (["--gradparity-scaler", "os:getcwd"], "cannot be checked"),
        (["--gradparity-scaler", "decimal:Decimal"], "cannot be checked"),
        (["--gradparity-scaler", PLAIN, "--gradparity-topology=ring"], "unknown"),
        (["--gradparity-topology", "fsdp"], "needs --gradparity-scaler"),
    ],
)
def test_bad_options_are_usage_errors(
    options: list[str], words: str, pytester: pytest.Pytester
) -> None:
    done = here(pytester, *options)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert words in done.stderr.str()
    assert "Traceback" not in done.stderr.str()


@pytest.mark.slow
def test_choosing_stopping_and_trying_again(pytester: pytest.Pytester) -> None:
    checked = (*chosen(*SCENARIOS, FSDP), f"--gradparity-scaler={NEVER}")
    report = pytester.path / "parity-report" / "report.jsonl"
    assert here(pytester, *checked, "-k", "fsdp").ret == 1
    assert [c.scenario for c in read_report(report).cases] == [FSDP]
    again = here(pytester, *checked, "--lf")
    assert "1 failed, 2 deselected" in again.stdout.str()
    failing_first = (*chosen(FSDP, *SCENARIOS), *checked[-1:])
    assert here(pytester, *failing_first, "-x").ret == 1
    assert [c.scenario for c in read_report(report).cases] == [FSDP]
    assert "1 of 3 planned cases were run" in read_report(report).incomplete


def new_session(
    folder: Path, *options: str, scaler: str = PLAIN
) -> "subprocess.Popen[str]":
    """Start a session in a new process group; a variable marks its processes."""
    words = ["-m", "pytest", "-q", f"--gradparity-scaler={scaler}", *options]
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "SESSION_MARK": str(folder)},
    )


def marked(folder: Path) -> set[int]:
    """Return the processes of the session in ``folder``, including its ranks."""
    mark, found = f"SESSION_MARK={folder}".encode(), set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def wait_until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.05)


def lines(report: Path) -> int:
    return report.read_text().count("\n") if report.exists() else 0


@pytest.mark.slow
def test_quick_is_the_quick_preset_of_run(pytester: pytest.Pytester) -> None:
    checked = (f"--gradparity-scaler={PLAIN}", "--gradparity-topology=ddp")
    quick = (*checked, "--gradparity-quick", "--collect-only")
    lines = here(pytester, *quick).stdout.lines
    collected = {line for line in lines if line.startswith("gradparity::")}
    wanted = select("quick", Selection(topologies=["ddp"]))
    assert collected == {f"gradparity::{scenario.id}" for scenario in wanted}
    full = here(pytester, *quick, "--gradparity-full").stdout.str()
    assert full.count("gradparity::") > len(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_an_interrupt_leaves_a_report_and_no_process(
    workers: tuple[str, ...], tmp_path: Path
) -> None:
    report = tmp_path / "parity-report" / "report.jsonl"
    session = new_session(tmp_path, *QUICK, *workers)
    wait_until(lambda: lines(report) >= 3)  # the header and two cases
    assert len(marked(tmp_path)) > 1  # ranks there are
    os.killpg(session.pid, signal.SIGINT)  # as a terminal does it
    output = session.communicate()[0]
    assert session.returncode == pytest.ExitCode.INTERRUPTED, output
    found = read_report(report)
    assert found.incomplete.startswith("interrupted after"), output
    assert 2 <= len(found.cases) < found.header.planned
    wait_until(lambda: not marked(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("crashes", [False, True])
def test_under_xdist_a_crashed_worker_costs_its_case_alone(
    crashes: bool, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(
        "import os, pathlib\n"
        "def pytest_runtest_setup(item):\n"
        "    mark = pathlib.Path('crashed')\n"
        f"    if {crashes} and 'single' in item.name and not mark.exists():\n"
        "        mark.touch()\n"
        "        os._exit(1)\n"
    )
    options = [*chosen(*SCENARIOS, FSDP), "-n", "2", "--junitxml=j.xml"]
    session = new_session(tmp_path, *options, scaler=NEVER)
    output = session.communicate()[0]
    assert session.returncode == 1, output
    assert "INTERNALERROR" not in output
    assert "agreement.scale: step 1: rank 0 scale 1024" in output
    assert f"FAILED gradparity::{FSDP}" in output
    found = read_report(tmp_path / "parity-report" / "report.jsonl")
    statuses = {case.scenario: case.status for case in found.cases}
    assert statuses.keys() == {*SCENARIOS[crashes:], FSDP}
    assert statuses[FSDP] == "fail" and found.header.planned == 3
    assert ("crashed while running" in output) == crashes
    assert ("planned cases were run" in found.incomplete) == crashes
    if not crashes:
        assert found.incomplete == "" and "Traceback" not in output
    assert 'tests="3"' in (tmp_path / "j.xml").read_text()
    wait_until(lambda: not marked(tmp_path))
