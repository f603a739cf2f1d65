"""CI systems read no printed line as a command, and any terminal can show the lines."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.text import Text

from gradparity.conformance.__main__ import main
from gradparity.conformance.output import console, harmless, say
from gradparity.tests.ci.test_formats import hostile_report
from gradparity.tests.ci.test_samples import case, report_of, verdict, with_verdict
from gradparity.tests.ci.test_samples import write as write_sample

COMMANDS = [
    "::error file=x,line=1::y",
    " \t::warning::z",
    "::stop-commands::token",
    "##[error]x",
    "text ##[add-matcher]y",
    "###[group]x",
    "##vso[task.setvariable variable=a]b",
    "text ##vso[task.complete result=Succeeded;]",
    "##teamcity[buildStatus status='SUCCESS']",
    "\x1b[0Ksection_start:1560896352:name\r\x1b[0Kheader",
    "travis_fold:start:name\r\x1b[0K",
    "--- group",
    "+++ group",
    "~~~ group",
    "^^^ +++",
]
BEGINS = re.compile(
    r"\s*::"  # GitHub, Gitea, Forgejo
    r"|.*##\w*\["  # GitHub, Azure Pipelines, TeamCity
    r"|.*(section_(start|end)|travis_fold):"  # GitLab, Travis
    r"|(---|\+\+\+|~~~|\^\^\^) "  # Buildkite
)
"""Pattern of the log lines that CI runners read as commands."""


def begun(text: str) -> list[str]:
    return [line for line in text.split("\n") if BEGINS.match(line)]


@pytest.mark.parametrize("text", COMMANDS)
def test_the_commands_are_commands(text: str) -> None:
    assert begun(text) == [text]


@pytest.mark.parametrize("text", COMMANDS)
def test_no_line_begins_a_command(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    say(text)
    say(f"one\n{text}\ntwo", error=True)
    # folded, the text begins a line of a cell
    console().print(Text(f"word {text} " * 20), width=30)
    said = capsys.readouterr()
    assert said.out and said.err and begun(said.out + said.err) == []


def test_what_is_no_command_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual = "## heading\na::b c#1 x--- [y] std::vector # [z]\n| --- | --- |"
    assert harmless(usual) == usual
    say(usual)
    assert capsys.readouterr().out == f"{usual}\n"


SHOWN = (
    ("report", "R"),
    ("table", "R"),
    ("compare", "R", "S"),
    ("gate", "R"),
    ("gate", "R", "--baseline", "b", "--update-baseline", "--yes"),
    ("report", "R", "--markdown"),
    ("report", "R", "--junit"),
    ("report", "R", "--badge"),
)


@pytest.mark.parametrize(("number", "text"), [*enumerate(COMMANDS)], ids=COMMANDS)
@pytest.mark.few(5)
def test_no_command_of_ours_begins_one_of_theirs(
    number: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    folded = f"{text}\n{text}"
    first, *others = hostile_report(folded).cases
    found = with_verdict(first, verdict("scale.rule", "fail", folded))
    sound = replace(case(), scaler=folded)
    write_sample(hostile_report(folded), tmp_path / "R")
    write_sample(
        report_of([replace(found, problem=""), *others, sound]), tmp_path / "S"
    )
    monkeypatch.setenv("COLUMNS", "60")
    # each text meets two of the eight: how it is changed does not depend on them
    for words in (SHOWN * 2)[number % 8 :][:2]:
        for which in "R", "S":
            main([which if word == "R" else word for word in words])
            said = capsys.readouterr()
            assert said.out + said.err, words
            assert begun(said.out) == [] and begun(said.err) == [], words
    for wrong in ([text], ["report", f"{text}/nosuch", folded], ["list", folded]):
        assert main(wrong) == 2
        assert begun(capsys.readouterr().err) == []


@pytest.mark.parametrize("text", COMMANDS)
def test_annotations_are_the_only_commands(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sample(hostile_report(f"{text}\n{text}"), tmp_path / "R")
    assert main(["report", str(tmp_path / "R"), "--annotations"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.startswith("::error ") for line in lines)
    assert begun("\n".join(line.removeprefix("::error ") for line in lines)) == []


@pytest.mark.parametrize(
    "encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.slow)]
)
def test_any_terminal_is_written_to(encoding: str, tmp_path: Path) -> None:
    long = with_verdict(
        case(), verdict("scale.rule", "fail", "\u00e4\u2026 \u4e2d " + "long " * 80)
    )
    write_sample(report_of([replace(long, status="fail")]), tmp_path / "R")
    for words in (["report", "R"], ["gate", "R"], ["table", "R"], ["report", "\udcff"]):
        done = subprocess.run(
            [sys.executable, "-m", "gradparity.conformance", *words],
            cwd=tmp_path,
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "40"},
        )
        assert b"Traceback" not in done.stderr
        assert done.stdout + done.stderr
        assert b"..." in done.stdout or words[1] != "R" or words[0] == "table"


def test_a_file_of_a_format_is_utf_8_on_any_terminal(tmp_path: Path) -> None:
    found = with_verdict(case(), verdict("scale.rule", "fail", "\u4e2d"))
    write_sample(report_of([found]), tmp_path / "R")
    done = subprocess.run(
        [sys.executable, "-m", "gradparity.conformance", "report", "R", "--junit"],
        cwd=tmp_path,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert "\u4e2d" in done.stdout.decode()


def test_a_line_goes_to_the_stream_of_the_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    say("::a")
    console().print("##[b]", markup=False)
    assert stream.getvalue() == ": :a\n# #[b]\n"


def test_a_stream_that_is_closed_before_its_console_is_no_error() -> None:
    """Run in development mode, which reports errors of finalizers."""
    script = (
        "import io, sys\n"
        "from gradparity.conformance.output import console\n"
        "sys.stdout = io.TextIOWrapper(io.BytesIO())\n"
        "shown = console()\n"
        "sys.stdout.close()\n"
        "sys.stdout = sys.__stdout__\n"
        "del shown\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
