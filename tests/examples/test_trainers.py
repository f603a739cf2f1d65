"""Trainers train, save and resume with our scaler as with torch's.

Each example runs on several ranks with real packages: with torch's scaler, with ours,
and with ours in two halves, of which the first may be saved by torch's. Curves are
compared to the last bit, on every rank.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import gradparity
from gradparity.multiprocess import Cluster, current_world
from gradparity.tests.extras import needs

EXAMPLES = Path(gradparity.__file__).parent / "examples" / "trainers"
TORCH, OURS = "torch.amp:GradScaler", "gradparity.scaler:GradScaler"
STEPS, HALF = 12, 6
DRIVER = """
import json, runpy, sys
example = runpy.run_path(sys.argv[1])
for argv in json.loads(sys.argv[2]):
    example["main"](argv)
example["leave"]()
"""
# script -> the package it needs
TRAINERS = {
    "accelerate_fp16": "accelerate",
    "lightning_fp16": "pytorch_lightning",
    "transformers_fp16": "transformers",
}
RANKS = 2
SWAP = re.compile(r"# swap: (.+?)\n(.*?)# end of swap", re.DOTALL)
Curve = list[tuple[int, float, float]]


def train_under_torchrun(
    python: list[str], name: str, folder: Path, *runs: list[str]
) -> None:
    """Run an example several times in one job: packages are imported once."""
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    launch = [*python, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(RANKS), "--no-python", *python]
    script = str(EXAMPLES / f"{name}.py")
    done = subprocess.run(
        [*launch, str(driver), script, json.dumps(runs)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def options(folder: Path, scaler: str, steps: int, *more: str) -> list[str]:
    named = ["--folder", str(folder), "--scaler", scaler, "--steps", str(steps)]
    return [*named, *more]


def curve(folder: Path, rank: int) -> Curve:
    lines = (folder / f"curve-{rank}.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=needs(p)) for n, p in TRAINERS.items()]
)
def test_same_curve_as_with_torch_also_when_resumed(
    name: str, tmp_path: Path, warm_python: list[str]
) -> None:
    folders = {x: tmp_path / x for x in ("torch", "ours", "resumed", "taken-over")}
    train_under_torchrun(
        warm_python,
        name,
        tmp_path,
        options(folders["torch"], TORCH, STEPS),
        options(folders["ours"], OURS, STEPS),
        options(folders["resumed"], OURS, HALF),
        options(folders["resumed"], OURS, STEPS),
        options(folders["taken-over"], TORCH, HALF),
        options(folders["taken-over"], OURS, STEPS),
    )
    for rank in range(RANKS):
        curves = {what: curve(folder, rank) for what, folder in folders.items()}
        assert_learns_and_skips(curves["ours"])
        for what in folders:
            assert curves[what] == curves["ours"], f"{what} on rank {rank}"


def assert_learns_and_skips(found: Curve) -> None:
    scales = [scale for _, _, scale in found]
    assert [step for step, _, _ in found] == list(range(STEPS))
    assert any(b < a for a, b in pairwise(scales)), scales
    assert any(b > a for a, b in pairwise(scales)), scales
    assert found[-1][1] < found[0][1]


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    with Cluster(4, timeout_s=120) as cluster:
        yield cluster


def train_on(cluster: Cluster, argv: list[str]) -> None:
    """Run the FSDP2 x TP example on the ranks of a cluster."""
    script = str(EXAMPLES / "fsdp2_tp.py")

    def on_rank() -> None:
        rank = current_world().rank
        os.environ["RANK"] = str(rank)
        sys.path.append(str(EXAMPLES))
        found = runpy.run_path(script)
        found["train"](found["parse"]("", argv))

    cluster.run(on_rank)


# no overflow: only there torch's scaler is right on this mesh (defect B01)
CALM = ["--init-scale", "1024"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "more"), [(TORCH, CALM), (OURS, CALM), (OURS, [])], ids=str
)
def test_fsdp2_tp_resumes_and_equals_torch_where_torch_is_right(
    four: Cluster, first: str, more: list[str], tmp_path: Path
) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train_on(four, options(whole, first, STEPS, *more))
    train_on(four, options(halves, first, HALF, *more))
    train_on(four, options(halves, OURS, STEPS, *more))
    for rank in range(4):
        assert len(curve(whole, rank)) == STEPS
        assert curve(halves, rank) == curve(whole, rank), f"rank {rank}"
        # ranks of one tensor parallel pair see the same rows
        assert curve(whole, rank) == curve(whole, rank // 2 * 2)
    if not more:
        assert_learns_and_skips(curve(whole, 0))


@pytest.mark.slow
def test_fsdp2_tp_where_torch_lets_ranks_disagree(
    four: Cluster, tmp_path: Path
) -> None:
    scales = {}
    for scaler in (TORCH, OURS):
        train_on(four, options(tmp_path / scaler, scaler, STEPS))
        found = (curve(tmp_path / scaler, rank) for rank in range(4))
        scales[scaler] = {tuple(scale for _, _, scale in one) for one in found}
    assert len(scales[TORCH]) > 1
    assert len(scales[OURS]) == 1


@pytest.mark.parametrize("name", [*TRAINERS, "fsdp2_tp"])
def test_the_swap_takes_at_most_five_lines(name: str) -> None:
    (swap,) = SWAP.findall((EXAMPLES / f"{name}.py").read_text())
    line, body = swap
    assert line == "from gradparity.scaler import GradScaler"
    assert 1 + len(body.strip().splitlines()) <= 5
