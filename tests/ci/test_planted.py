"""Five regressions planted into copies of this tree: each turns ``make gate`` red.

The gate takes about a minute for each regression. So ``gradparity bench planted`` runs
it, and the suite only tests that each regression can still be inserted.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import gradparity

ROOT = Path(gradparity.__file__).parent
COPIED = ("scaler", "conformance", "multiprocess", "fixtures", "ci")
BESIDE = ("__init__.py", "py.typed", "Makefile", "pyproject.toml", "constraints.txt")
REASON = re.compile(
    r"^worse(?: \([^)]*\))?: (\S+) pass -> fail in ([^/]+)/\S+ \S+: step (\d+)", re.M
)


@dataclass(frozen=True)
class Plant:
    """One regression: a piece of the scaler's source and its replacement."""

    file: str
    right: str
    wrong: str
    laws: frozenset[str]
    """Checks, of which the gate must name at least one."""


def plant(file: str, right: str, wrong: str, *laws: str) -> Plant:
    return Plant(file, right, wrong, frozenset(laws))


PLANTS = {
    "agreement lost": plant(
        "scaler/sync_group.py",
        'if self.over == "local" or not dist.is_initialized():',
        "if True:",
        "agreement.scale",
    ),
    "found_inf not reduced": plant(
        "scaler/core.py",
        "flags = {place: torch.ones_like(flag) for place, flag in flags.items()}",
        "flags = dict(flags)",
        "agreement.scale",
        "liveness.completes",  # the next agreement finds the scales apart and raises
    ),
    "step taken on skip": plant(
        "scaler/core.py",
        "return None if skips else optimizer.step(*args, **kwargs)",
        "return optimizer.step(*args, **kwargs)",
        "skip.all-ranks-skip",
    ),
    "unscale off by 0.1 %": plant(
        "scaler/grads.py",
        "factor = moved_to(inv_scale, device)",
        "factor = moved_to(inv_scale, device) * 1.001",
        "parity.gradient",
    ),
    "growth tracker off by one": plant(
        "scaler/grad_scaler.py",
        "rule = self._growth_factor, self._backoff_factor, self._growth_interval",
        "rule = self._growth_factor, self._backoff_factor, self._growth_interval + 1",
        "scale.rule",
    ),
}


@pytest.mark.parametrize("name", PLANTS)
def test_the_text_that_a_plant_replaces_occurs_once(name: str) -> None:
    assert (ROOT / PLANTS[name].file).read_text().count(PLANTS[name].right) == 1


@pytest.mark.timeout(1000)
@pytest.mark.skipif(
    "PLANTED" not in os.environ, reason="minutes: gradparity bench planted"
)
@pytest.mark.parametrize("name", ["nothing", *PLANTS])
def test_the_gate_fails_on_each_planted_fault(name: str, tmp_path: Path) -> None:
    tree = tmp_path / "gradparity"
    copy_tree(tree)
    if name in PLANTS:
        file = tree / PLANTS[name].file
        source = file.read_text().replace(PLANTS[name].right, PLANTS[name].wrong)
        file.write_text(source)
    code, told = make_gate(tree)
    found = REASON.findall(told)
    lines = told.splitlines()
    head = [line for line in lines if line.startswith("gate: ")]
    laws = PLANTS[name].laws if name in PLANTS else set()
    first = [line for line in lines if any(f" {law} " in line for law in laws)][:1]
    print("\n".join([f"{name}: exit {code}", *head, *first]))
    if name == "nothing":
        assert (code, found) == (0, []), told
    else:
        assert code != 0
        assert PLANTS[name].laws & {law for law, _, _ in found}, told


def copy_tree(tree: Path) -> None:
    tree.mkdir()
    for name in COPIED:
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tree / name, ignore=unwanted)
    for name in BESIDE:
        shutil.copy2(ROOT / name, tree / name)


def make_gate(tree: Path) -> tuple[int, str]:
    """Return exit code and output of ``make gate`` in ``tree``, in this environment."""
    venv = Path(sys.prefix)
    command = ["make", "gate", f"VENV={venv}", f"READY={venv / 'pyvenv.cfg'}"]
    command += ["-o", "pyproject.toml", "-o", "constraints.txt"]  # installed already
    done = subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree.parent)},  # before the installed one
        capture_output=True,
        text=True,
        timeout=900,
    )
    return done.returncode, done.stdout + done.stderr
