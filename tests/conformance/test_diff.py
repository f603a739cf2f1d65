"""Two recordings: where they differ first, what is noise, and what cannot be known."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from gradparity.conformance.__main__ import main
from gradparity.conformance.diff.command import _packages_apart, _packages_text
from gradparity.conformance.diff.differences import Outcome, compare_runs
from gradparity.conformance.diff.recording import (
    Arrays,
    Part,
    RecordingError,
    Run,
    Step,
    Tensor,
    add_array,
    read_arrays,
    read_recording,
    write_arrays,
    write_recording,
)

SPLIT = ((0, 1), (2, 3))
"""Places of a sharded tensor of 4 elements on 2 ranks."""
WHOLE = ((0, 1, 2, 3), (0, 1, 2, 3))
BOUND = 1e-6
VALUES = (1.0, 2.0, 3.0, 4.0)


class Side:
    """A made-up side: 2 steps of a parameter ``w`` and a loss."""

    def __init__(self, places: Sequence[Sequence[int]] = SPLIT) -> None:
        self.arrays: Arrays = {}
        self.places = places
        self.gradients = [list(VALUES), list(VALUES)]
        self.updates = [list(VALUES), list(VALUES)]
        self.start = list(VALUES)
        self.losses = [1.0, 0.5]
        self.norms = [2.0, 4.0]
        self.changes: dict[str, object] = {}

    def tensor(self, values: Sequence[float], dtype: type = np.float32) -> Tensor:
        full: NDArray[Any] = np.array(values, dtype)
        index = [np.array(p, np.int64) for p in self.places]
        return Tensor(
            parts=tuple(
                Part(r, add_array(self.arrays, full[p]), add_array(self.arrays, p))
                for r, p in enumerate(index)
            ),
            elements=4,
            size=(float(np.linalg.norm(full)), float(np.abs(full).max())),
            bound=(BOUND, BOUND),
        )

    def number(self, value: float, ranks: int = 1) -> Tensor:
        values, place = (
            add_array(self.arrays, each)
            for each in (np.array([value]), np.zeros(1, np.int64))
        )
        return Tensor(
            parts=tuple(Part(rank, values, place) for rank in range(ranks)),
            elements=1,
            size=(value, value),
            bound=(BOUND, BOUND),
        )

    def run(self) -> Run:
        steps = tuple(
            Step(
                batch="b",
                scale=[8.0, 8.0],
                stepped=[True, True],
                tensors={
                    "loss": {"loss": self.number(self.losses[n])},
                    "gradient": {"w": self.tensor(self.gradients[n])},
                    "norm": {"norm": self.number(self.norms[n], 2)},
                    "update": {"w": self.tensor(self.updates[n], np.float64)},
                },
            )
            for n in range(2)
        )
        start = self.tensor(self.start)
        made = Run(
            scenario="tp2/2/fp32/own/none/model=a:B",
            pairs_with="tp2/2/fp32/own/none",
            start={"w": replace(start, bound=(BOUND * 5.5, BOUND * 4))},
            steps=steps,
        )
        return replace(made, **self.changes)


def changed(step: Step, kind: str, **changes: object) -> Step:
    made = {n: replace(t, **changes) for n, t in step.tensors[kind].items()}
    return replace(step, tensors={**step.tensors, kind: made})


def compared(a: Side, b: Side) -> Outcome:
    runs = a.run(), b.run()
    return compare_runs(*runs, (a.arrays, b.arrays))


def test_equal_bits_are_the_same() -> None:
    found = compared(Side(), Side())
    assert found.result == "equal"
    # start, and in each step loss, gradient, norm and update; all but a loss on both
    # ranks
    assert (found.compared, found.equal, found.not_compared) == (16, 16, 0)


def test_other_layouts_of_equal_values_are_the_same() -> None:
    assert compared(Side(SPLIT), Side(WHOLE)).result == "equal"
    assert compared(Side(WHOLE), Side(((1, 0), (3, 2)))).result == "equal"


def test_differences_within_both_bounds_are_noise() -> None:
    b = Side()
    b.updates[1][2] += 1.9 * BOUND
    found = compared(Side(), b)
    assert found.result == "noise" and found.closest is not None
    assert found.closest.ratio == pytest.approx(0.95, rel=1e-3)
    b.updates[1][2] += 0.2 * BOUND
    assert compared(Side(), b).result == "different"


def spoil_start(b: Side) -> None:
    b.start[1] += 0.5


def spoil_loss(b: Side) -> None:
    b.losses[1] += 1e-3


def spoil_norm(b: Side) -> None:
    b.norms[1] += 4e-3
    b.updates[1][3] = 5.0  # follows from it


def spoil_gradient(b: Side) -> None:
    b.gradients[1][3] = 4.1
    b.updates[1][3] = 5.0  # follows from it


def spoil_update(b: Side) -> None:
    b.updates[0][0] = float("nan")


def spoil_scale(b: Side) -> None:
    steps = tuple(replace(s, scale=[8.0, 4.0]) for s in b.run().steps)
    b.changes["steps"] = steps


TORCH = "torch.amp:GradScaler"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_start, "the initial value of w on rank 0 differs by 0.125"),
        (spoil_loss, "step 1: the loss differs by 0.002 of the loss"),
        (spoil_norm, "step 1: the norm on rank 1 differs by 0.001 of the norm"),
        (spoil_gradient, "step 1: the gradient of w on rank 1 differs by 0.0183"),
        (spoil_update, "step 0: the update of w on rank 0 differs by inf"),
        (spoil_scale, "step 0: the scale differs on rank 1: 8.0 in A, 4.0 in B"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_the_first_difference_is_named(
    spoil: Callable[[Side], None], words: str, turned: bool
) -> None:
    a, b = Side(), Side()
    spoil(b)
    found = compared(*((b, a) if turned else (a, b)))
    assert found.result == "different"
    if not turned:  # sizes and sides are those of A
        assert words in found.text


def test_a_rank_that_differs_is_found_through_other_layouts() -> None:
    b = Side(WHOLE)
    b.gradients[0][3] = 5.0
    # rank 1 of B holds the element, and both ranks of A do
    found = compared(b, Side(SPLIT))
    assert found.result == "different"
    assert {row.rank for row in found.first} == {0, 1}


def test_models_with_other_parameters_differ() -> None:
    b = Side()
    b.changes["start"] = {"v": b.tensor(VALUES)}
    assert "only in A: w; only in B: v" in compared(Side(), b).text


@pytest.mark.parametrize(
    ("a", "b", "result", "words"),
    [
        (
            {},
            {"problem": "step 1: backward raised"},
            "different",
            "B: step 1: backward",
        ),
        ({"problem": "x"}, {"problem": "y"}, "undecided", "none came to its end"),
        ({}, {"broken": "rank 0 was killed"}, "broken", "B: rank 0 was killed"),
        ({"steps": (), "start": {}}, {}, "undecided", "0 of 0 comparisons"),
    ],
)
def test_runs_that_stopped_are_told_apart_from_differences(
    a: dict[str, object], b: dict[str, object], result: str, words: str
) -> None:
    first, second = Side(), Side()
    first.changes, second.changes = a, b
    found = compared(first, second)
    assert (found.result, words in found.text) == (result, True), found.text


def test_a_side_that_differs_from_itself_is_not_accused() -> None:
    b = Side()
    b.updates[1][2] += 0.5 * BOUND
    b.changes["unsteady"] = "the update of w at step 1 on rank 1"
    found = compared(Side(), b)
    assert (found.result, "differs from itself" in found.text) == ("undecided", True)


def test_without_bounds_nothing_but_bits_is_compared() -> None:
    def unknown(side: Side) -> Side:
        steps = side.run().steps
        for kind in ("loss", "gradient", "norm", "update"):
            steps = tuple(changed(s, kind, bound=("inf", "inf")) for s in steps)
        side.changes["steps"] = steps
        return side

    b = Side()
    b.gradients, b.updates = [[9.0] * 4] * 2, [[9.0] * 4] * 2
    b.norms = [9.0, 9.0]
    found = compared(unknown(Side()), unknown(b))
    assert (found.result, found.not_compared) == ("undecided", 12)


def test_weights_of_either_side_leave_an_element_out() -> None:
    a, b = Side(), Side()
    b.updates[1][2] = 9.0
    name = add_array(b.arrays, np.array([1, 1, 0, 1], np.float32))
    steps = [changed(s, "update", weights=name) for s in b.run().steps]
    b.changes["steps"] = tuple(steps)
    assert compared(a, b).result == "noise"
    assert compared(b, a).result == "noise"


def test_a_recording_comes_back_equal_and_holds_no_pickle(tmp_path: Path) -> None:
    side = Side()
    made = side.run()
    write_arrays(tmp_path, 0, side.arrays)
    write_recording(tmp_path, (made,), "2.13")
    assert read_recording(tmp_path).runs == (made,)
    found = read_arrays(tmp_path, 0)
    assert {n: a.tolist() for n, a in found.items()} == {
        n: a.tolist() for n, a in side.arrays.items()
    }
    np.savez(tmp_path / "1.npz", evil=np.array([{"a": 1}], object))
    with pytest.raises(RecordingError, match="allow_pickle"):
        read_arrays(tmp_path, 1)
    (tmp_path / "recording.json").write_text("{}")
    with pytest.raises(RecordingError, match="missing required field"):
        read_recording(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a:B"], "a diff has two sides, got 1"),
        (["a:B", "c:D", "--venv", "x", "--venv", "y"], "are the two sides"),
        (["--venv", "/no/such", "--venv", "y"], "no virtual environment"),
        (["a.jsonl", "b.jsonl"], "gradparity compare a.jsonl b.jsonl"),
        (["HEAD", "HEAD~1"], "commits need --checkout DIR"),
        (["no.py:Stack", "no.py:Stack"], "A: "),
        (
            ["a:B", "c:D", "--workload", "gradparity.tests.stacks:Right"],
            "give no --workload",
        ),
        (
            ["--upload-pack=x", "HEAD", "--checkout", "."],
            "unknown option --upload-pack",
        ),
        (["x", "y", "--checkout", "/no/such"], "git worktree add"),
        (["a:B", "c:D", "--scaler", f"{TORCH},{TORCH}"], "give --scaler once"),
    ],
)
def test_bad_usage_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["diff", *arguments])
    except SystemExit as done:  # argparse
        code = int(str(done.code))
    told = capsys.readouterr().err
    assert (code, len(told.splitlines())) == (2, 1), told
    assert words in told


STACK = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Stack:
    meshes = ({"dp": 2},)

    def model(self):
        return nn.Linear(3, 2)

    def batch(self, step, seed):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        return x, x[:, :2].sin()

    def loss(self, output, targets):
        return nn.functional.mse_loss(output, targets) * FACTOR

    def parallelize(self, model, mesh):
        return DistributedDataParallel(model, process_group=mesh.get_group("dp"))

    def optimizer(self, parameters):
        return torch.optim.SGD([p for _, p in parameters], lr=0.1)
"""


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of two commits, the second of which scales its loss."""
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q")
    for factor in ("1.0", "1.001"):
        (folder / "stack.py").write_text(STACK.replace("FACTOR", factor))
        git(folder, "add", "stack.py")
        git(folder, "commit", "-qm", factor)
    monkeypatch.chdir(folder)
    return folder


ONE_STEP = "dp2/2/fp32/own/none/model=stack:Stack,steps=1"


@pytest.mark.slow
def test_two_commits_differ_and_leave_no_worktree(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = ["HEAD~1", "HEAD", "--checkout", ".", "--scenario", ONE_STEP]
    assert main(["diff", *sides, "--json", "found.json"]) == 1
    assert "step 0: the loss differs by 0.001 of the loss" in capsys.readouterr().out
    assert len(git(repo, "worktree", "list").splitlines()) == 1
    found = json.loads((repo / "found.json").read_text())
    assert (found["exit_code"], found["outcome"]) == (1, "different")
    assert [s["result"] for s in found["scenarios"]] == ["different"]


@pytest.mark.slow
def test_an_environment_does_not_differ_from_itself(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = ["--venv", sys.executable, "--venv", sys.prefix, "--scenario", ONE_STEP]
    assert main(["diff", *sides]) == 0
    told = capsys.readouterr().out
    assert "diff: SAME: 1 scenarios: 1 bitwise equal" in told
    assert "packages:" not in told


def test_packages_of_other_versions_are_named(tmp_path: Path) -> None:
    recordings = []
    for name, packages in (("A", {"x": "1", "y": "2"}), ("B", {"x": "1.1", "z": "3"})):
        (tmp_path / name).mkdir()
        write_recording(tmp_path / name, (), "2.13")
        made = read_recording(tmp_path / name)
        assert made.packages["msgspec"] == msgspec.__version__
        changed = msgspec.structs.replace(made, packages=packages)
        (tmp_path / name / "recording.json").write_bytes(msgspec.json.encode(changed))
        recordings.append(tmp_path / name)
    apart = _packages_apart(recordings)
    assert apart == {"x": ("1", "1.1"), "y": ("2", ""), "z": ("", "3")}
    text = "x 1 in A, 1.1 in B; y 2 in A, none in B; z none in A, 3 in B"
    assert _packages_text(apart) == text
    many = {f"p{n}": ("1", "2") for n in range(11)}
    assert _packages_text(many).endswith("p7 1 in A, 2 in B; 3 more")
