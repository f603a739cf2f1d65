"""Every command and snippet of README and docs runs, as a newcomer would run it.

Commands that take long are parsed as they are written and run on one small scenario;
``"cuda"`` in a snippet becomes ``"cpu"``.
"""

import io
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gradparity.benchmarks.__main__ import PAGES as TOOLS_OF_PAGES
from gradparity.benchmarks.__main__ import SPEED, VALIDATION
from gradparity.conformance.__main__ import main
from gradparity.conformance.cli.arguments import LISTS, NARROWING, parse
from gradparity.fixtures.peers import PEERS
from gradparity.tests.docs_blocks import PAGES, ROOT, Block, blocks, inline_commands
from gradparity.tests.extras import needs

SCENARIO = "single/1/fp32/sgd/none/steps=2"
BLOCKS = [block for page in PAGES for block in blocks(page)]
NOT_RUN_AT_MOST = 8
TESTS = [b for b in BLOCKS if b.language == "python" and "def test_" in b.text]
PYTHON = [b for b in BLOCKS if b.language == "python" and b not in TESTS]
SHELL = [b for b in BLOCKS if b.language == "sh"]
DATA = {"toml": tomllib.loads}
MINE = "from torch.amp import GradScaler\n\nMyScaler = GradScaler\n"
# appended, or put in the place of what is written: what a command does is tested by
# its own tests, here it must exist and take these options
SMALL: dict[str, list[str]] = {
    "run": ["--scenario", SCENARIO, "--quiet"],
    "hunt": ["--budget", "1s"],
    "bench": ["--help"],
    "mutants": ["--help"],
    "gate": ["--yes"],
}
PLACEHOLDERS = {
    "ID": SCENARIO,
    "SCENARIO": SCENARIO,
    "SPEC": "torch.amp:GradScaler",
    "LAW": "agreement.scale",
    "REPORT": "parity-report/report.jsonl",
    "R": "parity-report/report.jsonl",
}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a user's project: a package with a scaler."""
    folder = tmp_path_factory.mktemp("project")
    package = folder / "mypackage"
    package.mkdir()
    for name in ("__init__", "mymodule", "amp"):
        (package / f"{name}.py").write_text(MINE)
    return folder


@pytest.fixture
def project(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(scratch)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    if not (scratch / "parity-report").exists():
        assert main(["run", "--scenario", SCENARIO, "--quiet"]) == 0
    return scratch


Runs = Callable[[list[str]], None]


def test_blocks_are_found_and_few_are_left_out() -> None:
    assert len(SHELL) >= 8 and len(PYTHON) >= 3 and len(TESTS) >= 2
    assert all(
        b.language in ("python", "sh", "text", "yaml", "diff", *DATA) for b in BLOCKS
    )
    left_out = [f"{b}: {b.not_run}" for b in BLOCKS if b.not_run]
    assert len(left_out) <= NOT_RUN_AT_MOST, left_out
    for block in BLOCKS:
        if block.tested:
            assert (ROOT / block.tested).is_file(), f"{block}: no {block.tested}"


def runnable(found: list[Block]) -> list[Block]:
    return [block for block in found if not (block.tested or block.not_run)]


def parameter(block: Block) -> Any:
    """Return a block as a case of ``parametrize``, marked for its cost and packages."""
    sessions = any(command.startswith("pytest") for command in block.commands)
    marks = [pytest.mark.slow] * sessions
    words = {word for command in block.commands for word in command.split()}
    for peer in PEERS.values():
        if peer.spec in words:
            marks += needs(peer.package.replace("-", "_"))
    return pytest.param(block, marks=marks, id=str(block))


@pytest.mark.parametrize("block", [parameter(b) for b in runnable(SHELL)])
@pytest.mark.few(12)
def test_commands(block: Block, project: Path, warm_ranks: list[str]) -> None:
    runners: dict[str, Runs] = {**RUNNERS, "pytest": partial(run_pytest, warm_ranks)}
    for command in block.commands:
        words = shlex.split(command)
        run = runners.get(words[0])
        assert run is not None, f"{command!r}: mark the block, or teach RUNNERS"
        run(words)


def run_ours(words: list[str]) -> None:
    """Run a command of ours in this process, with options that keep it short."""
    if any(word.startswith("[") for word in words):
        return check_options(words)
    argv = [PLACEHOLDERS.get(word, word) for word in words[1:]]
    asks = argv[0] != "gate" or "--update-baseline" in argv
    if argv[0] == "run":
        argv = without_selection(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as outside of pytest
        try:
            status = main([*argv, *(SMALL.get(argv[0], []) if asks else [])])
        except SystemExit as done:  # --help
            status = int(done.code or 0)
    assert status in (0, 1), f"{shlex.join(words)} gives {status}"
    return None


def without_selection(argv: list[str]) -> list[str]:
    """Parse a line, and drop options that ``--scenario`` excludes."""
    parse(argv)
    named = {f"--{name}" for name in (*NARROWING, "workload")}
    pairs = zip(["", *argv], argv, strict=False)
    return [
        word
        for before, word in pairs
        if before not in named and word.partition("=")[0] not in named
    ]


def check_options(words: list[str]) -> None:
    """Check that each option of a line is in the help of its command."""
    if words[1] == "bench" and len(words) > 2:
        assert words[2].replace("-", "_") in {**SPEED, **VALIDATION, **TOOLS_OF_PAGES}
    options = any(word.startswith("--") for word in words)
    told = help_of(*words[1 : 3 if words[1] == "bench" and options else 2])
    for option in re.findall(r"--[a-z-]+", " ".join(words)):
        known = re.search(rf"{option}(?![\w-])", told)
        assert known, f"{words[1]} has no {option}"
    if words[1] == "list":
        assert words[2] in LISTS, f"list has no {words[2]}"


def help_of(*command: str) -> str:
    kept, sys.stdout = sys.stdout, io.StringIO()
    try:
        assert main([*command, "--help"]) == 0
    except SystemExit as done:  # argparse
        assert done.code == 0
    finally:
        told, sys.stdout = sys.stdout.getvalue(), kept
    return told


def run_make(words: list[str]) -> None:
    """Check only that the target exists: running targets would take minutes."""
    done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr


def run_pip(words: list[str]) -> None:
    """Check the name and the extras of a package, without an installation."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = {*project["optional-dependencies"], ""}
    ours = [w for w in words[2:] if w.startswith(("gradparity", "."))]
    assert words[1] == "install" and ours, words
    for word in ours:
        named = word.partition("[")[2].rstrip("]").split(",")
        assert set(named) <= extras, word


def run_pytest(python: list[str], words: list[str]) -> None:
    """Run the catalogue as tests on one small scenario, or a folder of tests."""
    assert any(word.startswith("--gradparity-") for word in words), words
    folder = Path("tests")
    if words[-1] == f"{folder}/":
        folder.mkdir()
        (folder / "test_it.py").write_text("def test_it():\n    pass\n")
    else:
        words = [*words, "--gradparity-scenario", SCENARIO]
    done = subprocess.run(
        [*python, "-m", *words],
        capture_output=True,
        text=True,
    )
    shutil.rmtree(folder, ignore_errors=True)  # the next command would collect it
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-4000:]


RUNNERS: dict[str, Runs] = {
    "gradparity": run_ours,
    "make": run_make,
    "pip": run_pip,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_in_the_text_exist(page: Path) -> None:
    for command in inline_commands(page):
        words = command.split()
        if words[0] == "make":
            run_make(words[:2])
        else:
            check_options(words)


def names() -> dict[str, Any]:
    """Return names that snippets use without defining them."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "batches": [torch.ones(3, 2)] * 2,
        "loss": model(torch.ones(3, 2)).mean(),
        "loss_of": lambda model, batch: model(batch).mean(),
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }


@pytest.mark.parametrize("block", runnable(PYTHON), ids=str)
def test_python(block: Block, project: Path) -> None:
    code = compile(block.text.replace('"cuda"', '"cpu"'), str(block), "exec")
    exec(code, {"__name__": "snippet", **names()})


@pytest.mark.slow
def test_snippets_that_are_tests(tmp_path: Path) -> None:
    for number, block in enumerate(runnable(TESTS)):
        (tmp_path / f"test_snippet_{number}.py").write_text(block.text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in DATA], ids=str)
def test_data_can_be_read(block: Block) -> None:
    assert DATA[block.language](block.text)
