"""under_load.py: its busy loops run beside the command and end with it."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("under_load.py")
SIBLINGS = """
import os, pathlib
children = pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
pids = {int(pid) for pid in children.read_text().split()} - {os.getpid()}
pathlib.Path("loops").write_text(" ".join(map(str, pids)))
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("print('FAILED x'); 1 / 0", 1)])
def test_busy_loops_run_beside_the_command_and_end_with_it(
    tmp_path: Path, end: str, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "2", sys.executable, "-c", SIBLINGS + end],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert f"{2 - 2 * code} of 2 runs passed beside 4 busy loops" in done.stdout
    assert done.stdout.count("FAILED x") == 2 * code
    loops = (tmp_path / "loops").read_text().split()
    assert len(loops) == 4
    assert not [pid for pid in loops if Path(f"/proc/{pid}").exists()]
