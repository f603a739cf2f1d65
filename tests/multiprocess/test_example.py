"""Examples of the documentation run: a user's project, and torch's simulated ranks."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2] / "examples" / "foreign_project"
LOCAL = """
import torch, torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=256, store=FakeStore())
with LocalTensorMode(256):
    value = torch.ones(4)
    dist.all_reduce(value)  # 256 on every rank
"""


def run(folder: Path, python: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_the_foreign_project_passes_and_its_fault_is_found(
    tmp_path: Path, warm_ranks: list[str]
) -> None:
    folder = shutil.copytree(PROJECT, tmp_path / "project")
    test = folder / "test_sum.py"
    wrong = test.read_text().replace("test_every", "test_wrong_every")
    wrong = wrong.replace("world.rank\n", "world.rank + (world.rank == 1)\n")
    (folder / "test_wrong.py").write_text(wrong)
    done = run(folder, warm_ranks)
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "root cause: rank" in done.stdout
    assert "value.item() == sum(range(world.world_size))" in done.stdout


@pytest.mark.slow
def test_torchs_local_tensors_as_the_page_shows_them() -> None:
    page = Path(__file__).parents[2] / "docs" / "harness.md"
    assert LOCAL in page.read_text()
    shows = "print(value.reconcile().tolist())"
    done = subprocess.run(
        [sys.executable, "-c", f"{LOCAL}\n{shows}"], capture_output=True, text=True
    )
    assert done.stdout == "[256.0, 256.0, 256.0, 256.0]\n", done.stderr
