"""The command line for users: exit codes, messages, and no leftovers."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace

from gradparity import __version__, fixtures
from gradparity.ci import gate
from gradparity.conformance.__main__ import main
from gradparity.conformance.cli import listing
from gradparity.conformance.cli.arguments import LISTS
from gradparity.conformance.cli.tables import TABLES, law_texts, names_of, rows_of
from gradparity.conformance.cli.values import check_values
from gradparity.conformance.comparison.law import LAWS
from gradparity.conformance.report.records import ReportWriter, read_report
from gradparity.conformance.space.catalogue import PRESETS
from gradparity.conformance.space.recipes import RECIPES
from gradparity.conformance.status import UsageError
from gradparity.fixtures.peers import PEERS
from gradparity.tests.conformance.test_report import case, header, write

PROGRAM = [sys.executable, "-m", "gradparity.conformance"]
PLAIN = "gradparity.fixtures.faulty:PlainScaler"
DRIFTING = "gradparity.fixtures.faulty:NeverAgrees"
OF_A_WORKLOAD = ["run", "--workload", "gradparity.examples.workload:Stack"]
FAULTY_CASE = "fsdp/2/fp32/sgd/inf@r1s1:up.weight/steps=3"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--scaler", "nosuch:Thing"], "cannot import"),
        (["run", "--scaler", "torch.amp:Nope"], "has no attribute 'Nope'"),
        (["run", "--scaler", "torch"], "is not module:attribute"),
        (["run", "--scaler", "../mine.py:Scaler"], "name its module, mine:Scaler"),
        (["list", "topologies", "--workload", "s.py:W"], "name its module, s:W"),
        (["run", "--scaler", "math:pi"], "is not callable"),
        (["run", "--topology", "ring"], "unknown topology 'ring'"),
        (["run", "--model", "mnist"], "unknown model 'mnist'"),
        (["run", "--preset", "nosuch"], "unknown preset"),
        (["run", "--precision", "fp8"], "unknown precision 'fp8'"),
        (
            ["run", "--topology", "tp", "--precision", "fp16-params"],
            "leaves no scenario of preset 'default': precision 'fp16-params' with",
        ),
        (
            [*OF_A_WORKLOAD, "--world-size", "3"],
            "no topology is for 3 ranks (single 1, dp2 2, dp2-tp2 4, dp1 1, ",
        ),
        (["run", "--topology", "fsdp", "--world-size", "1"], "cannot be built on 1"),
        (["run", "--topology", "hsdp", "--world-size", "7"], "cannot be built on 7"),
        (["run", "--scenario", "what"], "is not a scenario id"),
        (["run", "--timeout-s", "0"], "must be positive"),
        (["run", "--require", "a:B"], "is not checked"),
        (["run", "--zzz"], "--zzz; gradparity run --help lists"),
        (["run", "--workload", "stack.py"], "is not module:attribute"),
        (["run", "--topolgy", "ddp"], "--topolgy; did you mean --topology?"),
        (["run", "--topo", "ddp"], "unknown option --topo"),
        (["report", "--hmtl=x"], "did you mean --html?"),
        (["gate", "R", "--basline", "b"], "did you mean --baseline?"),
        (["--verison"], "did you mean --version?"),
        (["list", "law"], "did you mean laws?"),
        (["survey", "--plan", "tp"], "gradparity bench survey"),
        (["run", "--device", "cdua"], "did you mean cuda?"),
        (["run", "--preset", "quik"], "did you mean quick?"),
        (["hunt", "--calls"], "unknown option --calls"),
        (["nosuch"], "unknown command"),
        (["rnu"], "did you mean run?"),
        (["run", "--topology", "ddp,fspd"], "did you mean fsdp?"),
        (["explain", "agreement.scales"], "did you mean agreement.scale?"),
        (["explain", "agreement.nosuch"], "neither a check"),
        (["run", "--out", "/dev/null/x"], "is a file, expected a folder"),
        (["report", "nosuch.jsonl", "--html", "/dev/null"], "expected a folder"),
        (["compare", "a", "b", "--html", "/dev/null"], "is a file, expected a folder"),
        (
            ["compare", "/dev", "/proc/version"],
            ": is a folder, and the other side is a",
        ),
        (["record", "x", "--start", "/no", "--", "x"], "--start /no: no such run"),
        (["replay", FAULTY_CASE, "--script", "/dev"], "expected a file"),
        (["report", "nosuch.jsonl"], "No such file"),
        (["replay", "a/b"], "is not a scenario id"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_usage_is_one_line_and_exit_2(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(arguments)
    printed = capsys.readouterr()
    assert code == 2
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", LISTS)
def test_list_prints_every_table(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", what]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_list_alone_explains_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*LISTS]


def test_a_module_is_found_in_folders_without_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "inner" / "mine.py").write_text("class Stack: ...\n")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--scaler", "outer.inner.mine:Stock"]) == 2
    told = capsys.readouterr().err
    assert "has no attribute 'Stock'; did you mean Stack?" in told


def test_the_names_that_are_read_without_torch_are_those_of_the_tables() -> None:
    tables: dict[str, Iterable[str]] = {
        "topology": fixtures.TOPOLOGIES,
        "model": fixtures.MODELS,
        "precision": fixtures.PRECISIONS,
        "optimizer": fixtures.OPTIMIZERS,
        "preset": PRESETS,
        "recipe": RECIPES,
        "fault": fixtures.KINDS,
        "scaler": PEERS,
    }
    assert {what: names_of(what) for what in TABLES} == {
        what: list(table) for what, table in tables.items()
    }


def test_the_texts_that_are_read_without_torch_are_those_of_the_tables() -> None:
    for what, table in (
        ("topology", fixtures.TOPOLOGIES),
        ("precision", fixtures.PRECISIONS),
        ("recipe", RECIPES),
    ):
        texts = {name: row["text"] for name, row in rows_of(what).items()}
        assert texts == {name: entry.text for name, entry in table.items()}
    assert [*law_texts()] == [(x.id, x.text, x.reason) for x in LAWS.values()]


def test_names_are_listed_and_explained_without_torch() -> None:
    words = [["list", what] for what in LISTS if what != "scenarios"]
    program = (
        "import sys; from gradparity.conformance.__main__ import main\n"
        f"for words in {[*words, ['explain', 'scale']]}:\n"
        "    assert main(words) == 0 and 'torch' not in sys.modules, words"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 0 and done.stdout, done.stderr.decode()


def test_the_meshes_of_a_workload_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list", "topologies", "--workload", "examples.workload:Stack"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"single", "dp2", "dp2-tp2"} <= {*names} and "fsdp" not in names


def test_the_checks_that_are_read_without_torch_are_complete() -> None:
    with pytest.raises(UsageError, match="a group of them"):
        explained("nosuch")
    for name in (*LAWS, *(law.chapter for law in LAWS.values())):
        explained(name)


def explained(what: str) -> None:
    check_values(argparse.Namespace(command="explain", what=what))


def test_a_plugged_command_takes_options_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["gate", "--strict", "nosuch.jsonl"]) == 3
    assert "nosuch.jsonl" in capsys.readouterr().out
    assert main(["gate", "--help"]) == 0
    assert "--baseline" in capsys.readouterr().out


def test_a_reader_that_has_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as nobody:
        command = [*PROGRAM, "explain", "report.jsonl"]
        done = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_comma_list_is_as_good_as_repetition(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list", "scenarios", "--topology", "ddp,fsdp+tp"]) == 0
    listed = capsys.readouterr().out
    twice = ["--topology", "ddp", "--topology", "fsdp+tp"]
    assert main(["list", "scenarios", *twice]) == 0
    assert listed == capsys.readouterr().out
    topologies = {line.partition("/")[0] for line in listed.splitlines()}
    assert topologies == {"ddp", "fsdp+tp"}


@pytest.mark.parametrize("kind", [ValueError, OSError, AssertionError])
def test_a_fault_of_ours_is_a_traceback_and_exit_3(
    kind: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*_: object) -> None:
        raise kind("a fault of ours")

    monkeypatch.setattr(listing, "listing", broken)
    assert main(["list", "laws"]) == 3
    printed = capsys.readouterr().err
    assert "Traceback" in printed and "a fault of ours" in printed
    assert "internal error" in printed.splitlines()[-1]


def test_a_fault_of_ours_in_a_further_command_is_exit_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(gate, "read_report", broken)
    assert main(["gate", "R"]) == 3
    assert "Traceback" in capsys.readouterr().err


CODES = {"pass": 0, "fail": 1, "error": 3, "inconclusive": 4}


@pytest.mark.parametrize("status", CODES)
def test_every_reader_of_a_report_exits_with_what_it_comes_to(
    status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = case(status=status, message="why")
    if status == "error":
        made = replace(made, verdicts=(), problem="killed")
    path = str(write(tmp_path / "R", made, planned=1))
    for words in (["report", path], ["report", path, "--html", str(tmp_path)]):
        assert main(words) == CODES[status]
    assert main(["table", path]) == CODES[status]
    for name in ("junit", "markdown", "badge", "annotations"):
        assert main(["report", path, f"--{name}"]) == 0  # for other programs
    capsys.readouterr()


def test_only_required_scalers_decide_the_exit_code_of_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "R"
    with ReportWriter(path, replace(header(), require=("a:B",))) as writer:
        writer.case(case("a:B"))
        writer.case(case("c:D", "fail"))
        writer.close(1.0)
    assert main(["report", str(path)]) == main(["table", str(path)]) == 0
    assert "c:D (not required)" in capsys.readouterr().out
    assert main(["report", str(path), "--html", str(tmp_path)]) == 0
    assert "<title>pass: " in (tmp_path / "index.html").read_text()


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"gradparity {__version__}\n"


def test_an_incomplete_report_is_exit_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write(tmp_path / "R", case(), close=False))
    assert main(["report", path]) == 3
    assert "INCOMPLETE" in capsys.readouterr().out
    assert main(["report", path, "--html", str(tmp_path)]) == 3
    assert main(["report", path, "--junit"]) == 0  # says so by itself
    assert 'type="incomplete"' in capsys.readouterr().out


def test_explain_a_chapter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "liveness"]) == 0
    assert "liveness.completes" in capsys.readouterr().out


def test_explain_a_law_and_a_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "agreement.scale"]) == 0
    assert "same scale" in capsys.readouterr().out
    assert main(["explain", FAULTY_CASE]) == 0
    assert "mesh:      dp 2" in capsys.readouterr().out


def test_run_compares_scalers_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")  # no line of the table is broken
    checked = ["--scaler", PLAIN, "--scaler", DRIFTING]
    code, told = main(["run", "--scenario", FAULTY_CASE, *checked]), capsys.readouterr()
    assert code == 1, told.err
    assert "agreement" in told.out
    assert "step 1: rank 0 scale 1024; rank 1 scale 512" in told.out
    report = read_report(tmp_path / "parity-report" / "report.jsonl")
    assert [c.status for c in report.cases] == ["pass", "fail"]
    assert report.incomplete == ""
    assert (tmp_path / "parity-report" / "index.html").stat().st_size > 10_000


def test_require_decides_the_exit_code_and_json_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    checked = ["--scaler", PLAIN, "--scaler", DRIFTING, "--require", PLAIN]
    told = ["--report", "out.json", "--quiet"]
    code = main(["run", "--scenario", FAULTY_CASE, *checked, *told])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert printed.out == ""
    assert len(read_report(tmp_path / "out.json").cases) == 2
    assert main(["report", "out.json"]) == code
    assert {p.name for p in tmp_path.iterdir()} == {"out.json", ".out.json.lock"}


def test_a_scaler_of_the_current_folder_and_fail_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scaler_of_mine.py").write_text(
        "from gradparity.fixtures.faulty import NeverAgrees as Mine\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder is put on it
    options = [
        "--scenario=fsdp/2/fp32/sgd/inf@r1s0:up.weight/steps=1",
        "--scenario=ddp/2/fp32/sgd/none/steps=1",
        "--report=r.jsonl",
    ]
    code = main(["run", *options, "--scaler", "scaler_of_mine:Mine", "--fail-fast"])
    assert code == 1, capsys.readouterr().err
    report = read_report(tmp_path / "r.jsonl")
    assert [case.status for case in report.cases] == ["fail"]
    assert "stopped at the first failed check" in report.incomplete


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # ended while we looked
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        new = children.get(queue.pop(), [])
        found += new
        queue += new
    return found


def alive(pid: int) -> bool:
    try:
        state = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return state.split()[0] != "Z"


@pytest.mark.slow
def test_a_killed_rank_gives_exit_3_and_an_incomplete_report(tmp_path: Path) -> None:
    # a scaler that dawdles, so that the kill comes in the middle of the run
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, time\n"
        "from gradparity.fixtures.faulty import PlainScaler\n"
        "class Slow(PlainScaler):\n"
        "    def update(self):\n"
        "        super().update()\n"
        "        pathlib.Path(f'rank-{os.getpid()}').touch()\n"
        "        time.sleep(0.5)\n"
    )
    process = subprocess.Popen(
        [
            *PROGRAM,
            "run",
            "--scenario",
            "fsdp/2/fp32/sgd/none/steps=30",
            "--scaler",
            "slow:Slow",
            "--out",
            "out",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while len(ranks := list(tmp_path.glob("rank-*"))) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    family = descendants(process.pid)
    # its forkserver is a fork of it, so that torch is imported once
    commands = [Path(f"/proc/{p}/cmdline").read_text() for p in (process.pid, *family)]
    assert {*commands} == {commands[0]}
    os.kill(int(ranks[0].name.partition("-")[2]), signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 3, output
    assert "SIGKILL" in output
    report = read_report(tmp_path / "out" / "report.jsonl")
    assert "rank" in report.incomplete and "SIGKILL" in report.incomplete
    assert report.cases[0].status == "error"
    while any(alive(pid) for pid in family):
        time.sleep(0.1)
