"""Files that another person prepared: writes stay in their folder, and unusable files
are refused in one line."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from gradparity.ci.baseline import make_baseline, write_baseline
from gradparity.conformance.__main__ import main
from gradparity.conformance.files import read_whole, write_whole
from gradparity.conformance.report.records import ReportWriter, read_report
from gradparity.conformance.space.scenario import Scenario
from gradparity.conformance.status import UsageError, WriteError
from gradparity.tests.ci.test_samples import sample
from gradparity.tests.ci.test_samples import write as write_sample
from gradparity.tests.conformance.test_report import case, header, write

SECRET = "not yours"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with a valid report ``R``; beside the folder is a file to be protected."""
    folder = tmp_path / "here"
    folder.mkdir()
    (tmp_path / "victim").write_text(SECRET)
    write_sample(sample(), folder / "R")
    monkeypatch.chdir(folder)
    return folder


WRITERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "page": ("index.html", ("report", "R", "--html", ".")),
    "baseline": (
        "b",
        ("gate", "R", "--baseline", "b", "--update-baseline", "--yes"),
    ),
    "decision": ("g.json", ("gate", "R", "--json", "g.json")),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_draft_is_never_somebody_elses_link(name: str, here: Path) -> None:
    file, arguments = WRITERS[name]
    (here / f".{file}.draft").symlink_to("../victim")
    assert main(arguments) == 0
    assert (here.parent / "victim").read_text() == SECRET
    assert (here / file).is_file() and not (here / file).is_symlink()
    assert sorted(p.name for p in here.iterdir()) == sorted(
        ["R", file, f".{file}.draft"]
    )


@pytest.mark.parametrize("name", ["page", "decision"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_file_is_not_put_in_the_place_of_what_is_none(
    name: str, kind: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, arguments = WRITERS[name]
    {
        "link": lambda p: p.symlink_to("../victim"),
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
    }[kind](here / file)
    before = os.lstat(here / file)
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and file in told
    assert os.lstat(here / file) == before
    assert (here.parent / "victim").read_text() == SECRET


def test_a_run_writes_its_report_into_no_link(here: Path) -> None:
    (here / "r.jsonl").symlink_to("../made")  # leads nowhere yet
    with pytest.raises(UsageError, match="symbolic link"):
        ReportWriter(here / "r.jsonl", header())
    assert not (here.parent / "made").exists()
    with pytest.raises(UsageError, match="device"):
        ReportWriter(Path("/dev/null"), header())
    assert Path("/dev/null").is_char_device()


def test_somebody_elses_file_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("files of another user can only be made by root")
    tmp_path.chmod(0o777)
    (tmp_path / "page").write_text(SECRET)
    code = (
        "import os, sys; from pathlib import Path\n"
        "from gradparity.conformance.files import write_whole\n"
        "os.chdir(sys.argv[1]); os.setegid(1234); os.seteuid(1234)\n"
        "write_whole(Path('mine'), 'a'); write_whole(Path('mine'), 'b')\n"
        "write_whole(Path('page'), 'b')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert "page: belongs to user 0" in done.stderr
    assert (tmp_path / "page").read_text() == SECRET
    assert (tmp_path / "mine").read_text() == "b"


def test_an_earlier_file_stays_where_the_new_one_cannot_be_written(
    here: Path,
) -> None:
    write_whole(here / "page", "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(here / "page", "\ud800")
    assert (here / "page").read_text() == "old"
    assert sorted(p.name for p in here.iterdir()) == ["R", "page"]


FULL = """
import resource, sys
from gradparity.conformance.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000))
sys.exit(main(sys.argv[1:]))
"""


def on_a_full_disk(here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose files can have at most 9 kB."""
    return subprocess.run(
        [sys.executable, "-c", FULL, *arguments],
        cwd=here,
        capture_output=True,
        text=True,
    )


def test_a_page_on_a_full_disk_is_one_line(here: Path) -> None:
    done = on_a_full_disk(here, "report", "R", "--html", "out")
    assert done.returncode == 3, done.stderr
    assert done.stderr == "gradparity: out/index.html: File too large\n"
    assert [*(here / "out").iterdir()] == []


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Limit the files that this process writes to 5 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_report_on_a_full_disk_keeps_what_it_wrote(
    here: Path, small_disk: None
) -> None:
    with (
        pytest.raises(WriteError, match=r"^r\.jsonl: File too large$"),
        ReportWriter(Path("r.jsonl"), header(99)) as writer,
    ):
        for number in range(99):
            writer.case(case(f"a:B{number}"))
    assert len(read_report(here / "r.jsonl").cases) > 3


def test_a_full_standard_output_is_one_line(here: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gradparity.conformance", "report", "R"],
            cwd=here,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 3
    assert done.stderr == "gradparity: standard output: No space left on device\n"


Edit = Callable[[list[bytes]], list[bytes]]


def in_line(number: int, old: bytes, new: bytes) -> Edit:
    def edit(lines: list[bytes]) -> list[bytes]:
        assert old in lines[number]
        return [
            line.replace(old, new, 1) if n == number else line
            for n, line in enumerate(lines)
        ]

    return edit


DEEP = b"[" * 200_000
EDITS: dict[str, tuple[Edit, str]] = {
    "schema 1": (
        in_line(0, b'"schema":2', b'"schema":1'),
        "schema version 1, this program reads 2",
    ),
    "no UTF-8 in the header": (in_line(0, b"gloo", b"\xff\xfe"), "line 1"),
    "no UTF-8 in a case": (in_line(1, b"mine.amp", b"\xff\xfe"), "line 2"),
    "no UTF-8 in a key": (in_line(1, b'"seconds"', b'"\xff\xfe"'), "line 2"),
    "a deep header": (lambda lines: [DEEP + b"\n", *lines], "line 1"),
    "a deep version": (
        in_line(0, b'"schema":2', b'"schema":2,"x":' + DEEP),
        "line 1",
    ),
    "a deep case": (in_line(1, b'"seconds"', b'"x":' + DEEP + b',"seconds"'), "line 2"),
    "two headers": (lambda lines: [lines[0], *lines], "line 2: a second header"),
    "a short row of bad": (
        in_line(1, b'"bad":[["","', b'"bad":[["'),
        "line 2: bad has 2 steps on rank 0, and scale has 3",
    ),
    "no row of bad": (in_line(1, b'"bad":[', b'"bad":[],"x":['), "line 2"),
    "a row of growth too many": (
        in_line(1, b'"growth":[', b'"growth":[[0,0,0],'),
        "line 2: growth has 3 rows for 2 ranks",
    ),
}
READERS = {
    "shown": ("report", "R"),
    "page": ("report", "R", "--html", "out"),
    "annotations": ("report", "R", "--annotations"),
    "table": ("table", "R"),
    "compare": ("compare", "R", "R"),
    "gate": ("gate", "R"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", EDITS)
def test_a_report_that_is_none_is_refused_in_one_line(
    name: str, reader: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, words = EDITS[name]
    lines = (here / "R").read_bytes().splitlines(keepends=True)
    (here / "R").write_bytes(b"".join(edit(lines)))
    code = main(READERS[reader])
    said = capsys.readouterr()
    told = said.out if reader == "gate" else said.err
    assert code == (3 if reader == "gate" else 2), told
    (line,) = [line for line in told.splitlines() if "R: " in line]
    assert words in line and "Traceback" not in told


def make_large(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**31)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "symbolic link": lambda path: path.symlink_to("R"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "too large": make_large,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", NO_FILES)
def test_what_is_no_file_is_not_read(
    words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    NO_FILES[words](here / "X")
    for arguments in (["report", "X"], ["table", "X"], ["compare", "R", "X"]):
        assert main(arguments) == 2
        told = capsys.readouterr().err
        assert told.startswith("gradparity: X: ") and words in told
        assert told.count("\n") == 1
    for arguments in (["--baseline", "X"], ["--expect", "X"]):
        assert main(["gate", "R", *arguments]) == 2
        told = capsys.readouterr().err
        assert words in told and told.count("\n") == 1
    assert main(["gate", "X"]) == 3


def test_a_device_is_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "/dev/zero"]) == 2
    assert "/dev/zero: is a device" in capsys.readouterr().err
    with pytest.raises(UsageError, match="device"):
        read_whole(Path("/dev/zero"))


def test_a_baseline_that_is_none_is_refused_in_one_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_baseline(here / "b", make_baseline([sample()]))
    sound = (here / "b").read_bytes().splitlines(keepends=True)
    for lines in (
        [DEEP],
        [sound[0].replace(b'"schema":', b'"x":' + DEEP + b',"schema":'), *sound[1:]],
        [sound[0].replace(b"gloo", b"\xff"), *sound[1:]],
        [sound[0], *sound],
    ):
        (here / "b").write_bytes(b"".join(lines))
        assert main(["gate", "R", "--baseline", "b"]) == 2
        told = capsys.readouterr().err
        assert told.startswith("gradparity gate: b: ") and told.count("\n") == 1


@pytest.mark.parametrize("text", ["x = " + "[" * 100_000, "x = '\udcff'"])
def test_expectations_that_are_none_are_refused_in_one_line(
    text: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "e").write_text(text, errors="surrogateescape")
    assert main(["gate", "R", "--expect", "e"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("gradparity gate: e: ") and told.count("\n") == 1


def test_a_long_name_is_annotated(here: Path) -> None:
    write(here / "L", case("m:" + "a" * 100_000, "fail"), planned=1)
    assert main(["report", "L", "--annotations"]) == 0


@pytest.mark.parametrize(
    "text",
    [
        "fsdp/2/fp32/sgd/none/steps=3,steps=4",
        "fsdp/2/fp32/sgd/none/steps=4,seed=1,steps=4",
    ],
)
def test_an_id_gives_each_setting_once(text: str) -> None:
    with pytest.raises(UsageError, match=r"gives steps twice"):
        Scenario.parse(text)


def test_any_report_that_is_read_has_a_page(here: Path) -> None:
    """Any report within the limits of the schema has a page."""
    made = case(status="fail")
    assert made.curves is not None
    empty = msgspec.structs.replace(
        made.curves,
        loss=[],
        reference_loss=[],
        scale=[[], []],
        growth=[[], []],
        stepped=[[], []],
        bad=[[], []],
        parity=[],
        parameters={},
    )
    large = msgspec.structs.replace(
        made.curves,
        loss=[1e308, -1e308, 5e-324],
        scale=[[1e308, 5e-324, 0.0], [-1.0, "nan", "-inf"]],
        parameters={"": "nan", "w": 1e308, "b": -1.0},
    )
    for curves in (empty, large, None):
        write(
            here / "E",
            msgspec.structs.replace(made, curves=curves, verdicts=()),
            planned=1,
        )
        for arguments in (["report", "E"], ["report", "E", "--html", "out"]):
            assert main(arguments) in (0, 1, 3, 4)
