"""The foreign project in examples/ passes, and fails with a reason when it should."""

import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "examples" / "foreign_project"


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_the_foreign_project_passes_and_its_fault_is_found(tmp_path: Path) -> None:
    folder = shutil.copytree(PROJECT, tmp_path / "project")
    test = folder / "test_sum.py"
    wrong = test.read_text().replace("test_every", "test_wrong_every")
    wrong = wrong.replace("world.rank\n", "world.rank + (world.rank == 1)\n")
    (folder / "test_wrong.py").write_text(wrong)
    done = run(folder)
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "root cause: rank" in done.stdout
    assert "value.item() == sum(range(world.world_size))" in done.stdout
