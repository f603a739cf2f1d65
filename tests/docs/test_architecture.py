"""Numbered lists of docs/architecture.md name functions that really run, in order."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradparity.conformance import Runner
from gradparity.conformance.comparison.parity import measure_parity
from gradparity.conformance.rank.worker import observe_rank
from gradparity.conformance.space.scenario import Scenario
from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler
from gradparity.tests.docs_blocks import ROOT

PAGE = ROOT / "docs" / "architecture.md"
OURS = "gradparity.scaler:GradScaler"
SCENARIO = "fsdp/2/fp32/sgd/inf@r0s1:first/steps=2"
ROOMS = ("scaler", "multiprocess", "fixtures", "conformance", "ci")
_STEP = re.compile(r"^\d+\. `([\w/]+\.py): ([\w.]+)`", re.MULTILINE)
TEST = """
import pytest, sys
@pytest.mark.world(world_size=2)
def test_x(world):
    frame = sys._getframe(1)
    while frame and world.rank == 0:
        print("rank", frame.f_code.co_filename, frame.f_code.co_qualname)
        frame = frame.f_back
"""
PROGRAM = """
import sys, pytest
seen = []
def note(frame, event, _):
    if event == "call":
        seen.append((frame.f_code.co_filename, frame.f_code.co_qualname))
sys.setprofile(note)
code = pytest.main(["-s", "-p", "no:cacheprovider", "test_x.py"])
sys.setprofile(None)
for name in dict.fromkeys(seen):
    print("parent", *name)
sys.exit(code)
"""


def walks() -> list[list[tuple[str, str]]]:
    """Return the numbered lists of the page, whose entries are (file, function)."""
    text = PAGE.read_text().partition("## What runs, in order")[2].partition("\n## ")[0]
    lists = re.split(r"^1\. ", text, flags=re.MULTILINE)[1:]
    return [_STEP.findall(f"1. {part}") for part in lists]


def called(function: Callable[..., Any], *args: Any) -> list[tuple[str, str]]:
    """Return (file, function) of our code, in the order of first calls."""
    seen: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.setdefault(frame.f_code)

    sys.setprofile(note)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return [
        (name, code.co_qualname) for code in seen if (name := ours(code.co_filename))
    ]


def ours(path: str) -> str:
    place = Path(path)
    inside = place.is_relative_to(ROOT) and ".venv" not in place.parts
    return str(place.relative_to(ROOT)) if inside else ""


def missed(walk: Iterable[tuple[str, str]], ran: list[tuple[str, str]]) -> list[str]:
    """Return functions of a list that did not run, or ran out of order."""
    wrong, last = [], -1
    for function in walk:
        place = ran.index(function) if function in ran else -1
        if place <= last:
            wrong.append(": ".join(function))
        last = max(last, place)
    return wrong


def test_a_wrong_walk_is_seen() -> None:
    ran = [("a.py", "f"), ("a.py", "g"), ("b.py", "h")]
    assert missed(ran, ran) == missed(ran[::2], ran) == []
    assert missed([("a.py", "g"), ("a.py", "f")], ran) == ["a.py: f"]
    assert missed([("a.py", "k"), ("b.py", "h")], ran) == ["a.py: k"]
    assert len(walks()) == 6 and all(walks())


def lost_paths(text: str) -> list[str]:
    """Return files, folders and modules that the page names but that do not exist."""
    named = re.findall(r"`([\w./-]+/[\w.-]*|\w+\.(?:py|md))`", text)
    # the page names a file from the root, or in the folder that it speaks of
    rooms = (ROOT / room for room in ROOMS)
    folders = [ROOT, *(path.parent for room in rooms for path in room.rglob("*.py"))]
    lost = [n for n in named if not any((each / n).exists() for each in {*folders})]
    for folder, modules in re.findall(r"^\| `(\w+)/` \| (.*?) \|", text, re.MULTILINE):
        held = {path.stem for path in (ROOT / "conformance" / folder).iterdir()}
        lost += [
            f"{folder}/{m}" for m in re.findall(r"`(\w+)`", modules) if m not in held
        ]
    return lost


def test_every_path_exists() -> None:
    for page in (PAGE, *(ROOT / "docs" / "decisions").glob("*.md")):
        assert lost_paths(page.read_text()) == [], page
    assert lost_paths("`scaler/gone.py`, `gone.py`") == ["scaler/gone.py", "gone.py"]
    assert lost_paths("| `comparison/` | `law`, `gone` | |") == ["comparison/gone"]


def train_step() -> list[tuple[str, str]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")

    def step() -> None:
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return called(step)


def scenario_on_a_rank() -> list[tuple[str, str]]:
    return called(observe_rank, Scenario.parse(SCENARIO), OURS, ".")


def test_a_training_step(two: Cluster) -> None:
    assert missed(walks()[0], two.run(train_step)[0]) == []


@pytest.mark.slow
def test_a_scenario(two: Cluster) -> None:
    assert missed(walks()[3], two.run(scenario_on_a_rank)[0]) == []
    scenario = Scenario.parse(SCENARIO)
    with Runner(folder=os.getcwd()) as runner:
        ran = called(runner.run, OURS, scenario)
        other = replace(scenario, seed=1)  # whose references are not there yet
        traces = runner.runs.traces(OURS, other)
        alone = runner.place.alone(called, measure_parity, other, traces)
    assert missed(walks()[1], ran) == []
    assert missed(walks()[2], alone) == []


@pytest.mark.slow
def test_a_distributed_test(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(TEST)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # With -s each line of a rank has the rank in front.
    lines = [
        line.removeprefix("rank 0: ").split(" ", 2) for line in done.stdout.splitlines()
    ]
    for kind, walk in (("parent", walks()[4]), ("rank", walks()[5])):
        found = [(ours(x[1]), x[2]) for x in lines if x[0] == kind and len(x) == 3]
        ran = found if kind == "parent" else found[::-1]
        assert missed(walk, ran) == [], ran
