"""Mutate the checks and count the mutants that their tests kill.

Each mutant is one change of one expression or statement in ``conformance/judge/laws``
or ``conformance/judge/parity.py``; a forked child, which has torch already, imports the
judge with the mutant in place and runs the judge's tests. mutmut leaves decorated
functions alone, and every law is one; cosmic-ray starts a process for each mutant,
which then imports torch.

    python benchmarks/validation/judge_mutants.py --seconds 600 --out benchmarks/results
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from gradparity.conformance.files import write_whole

ROOT = Path(__file__).parents[2]
LAWS = sorted(
    p for p in (ROOT / "conformance/judge/laws").glob("*.py") if p.stem[0] != "_"
)
PARITY = ROOT / "conformance/judge/parity.py"
TARGETS = [*LAWS, PARITY]
TESTS = (
    "tests/conformance/test_laws.py",
    "tests/conformance/test_findings.py",
)
TESTS_OF_PARITY = (
    "tests/conformance/test_findings.py",
    "tests/conformance/test_parity_rows.py",
    "tests/conformance/test_parity.py",
)
"""Tests of mutants of ``parity.py``, quick ones first; tests of laws do not run it."""
LIMIT_S = 120
"""CPU seconds of the child, so that a busy machine kills no mutant. A child that sleeps
ends after ten times as many seconds."""

Change = Callable[[ast.AST], ast.AST | None]


def _swapped(kind: type[ast.AST], table: dict[type, type]) -> Change:
    """Return a change that swaps the operator in one ``kind`` of expression."""

    def change(node: ast.AST) -> ast.AST | None:
        if not isinstance(node, kind):
            return None
        many = isinstance(node, ast.Compare)
        old = node.ops[0] if isinstance(node, ast.Compare) else node.op  # type: ignore[attr-defined]  # has one
        if type(old) not in table:
            return None
        new = copy.deepcopy(node)
        operator = table[type(old)]()
        if many:
            new.ops[0] = operator  # type: ignore[attr-defined]  # a Compare
        else:
            new.op = operator  # type: ignore[attr-defined]  # the others
        return new

    return change


def _negated(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.If | ast.IfExp):
        return None
    new = copy.deepcopy(node)
    new.test = ast.UnaryOp(ast.Not(), new.test)
    return new


def _constant(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Constant) or isinstance(node.value, str | bytes):
        return None
    if node.value is None or node.value is Ellipsis:
        return None
    value = not node.value if isinstance(node.value, bool) else node.value + 1
    return ast.Constant(value)


def _name(node: ast.AST) -> ast.AST | None:
    swap = {"any": "all", "all": "any", "min": "max", "max": "min"}
    if isinstance(node, ast.Name) and node.id in swap:
        return ast.Name(swap[node.id], node.ctx)
    return None


def _dropped(node: ast.AST) -> ast.AST | None:
    """Replace an expression statement or ``x += y`` by ``pass``; leave docstrings."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return (
        ast.Pass()
        if isinstance(node, ast.Expr | ast.AugAssign) and not is_text
        else None
    )


def _left(node: ast.AST) -> ast.AST | None:
    return ast.Break() if isinstance(node, ast.Continue) else None


CHANGES: dict[str, Change] = {
    "comparison": _swapped(
        ast.Compare,
        {
            ast.Eq: ast.NotEq,
            ast.NotEq: ast.Eq,
            ast.Lt: ast.LtE,
            ast.LtE: ast.Lt,
            ast.Gt: ast.GtE,
            ast.GtE: ast.Gt,
            ast.Is: ast.IsNot,
            ast.IsNot: ast.Is,
            ast.In: ast.NotIn,
            ast.NotIn: ast.In,
        },
    ),
    "and / or": _swapped(ast.BoolOp, {ast.And: ast.Or, ast.Or: ast.And}),
    "arithmetic": _swapped(
        ast.BinOp,
        {
            ast.Add: ast.Sub,
            ast.Sub: ast.Add,
            ast.Mult: ast.Div,
            ast.Div: ast.Mult,
            ast.BitAnd: ast.BitOr,
            ast.BitOr: ast.BitAnd,
        },
    ),
    "negated condition": _negated,
    "constant": _constant,
    "any / all, min / max": _name,
    "dropped statement": _dropped,
    "continue / break": _left,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one node."""

    path: str
    line: int
    change: str
    before: str
    after: str
    place: int
    """Index of the node in the order of ``ast.walk``."""


def _places(tree: ast.Module) -> Iterator[tuple[int, ast.AST]]:
    """Yield the nodes to change: no texts, types or entries of ``@law``.

    ``strict=`` of a ``zip`` is left out, because the lists have equal lengths. So are
    the settings of dataclasses, because frozen ones are never assigned to.
    """
    left_out: set[int] = set()
    for node in ast.walk(tree):
        quiet: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef):
            quiet = [*node.decorator_list, node.returns, node.args]
        if isinstance(node, ast.AnnAssign):
            quiet = [node.annotation]
        if isinstance(node, ast.ClassDef):
            quiet = [*node.decorator_list]
        if isinstance(node, ast.JoinedStr):
            quiet = [node]
        if isinstance(node, ast.keyword) and node.arg == "strict":
            quiet = [node]
        left_out |= {id(n) for q in quiet if q is not None for n in ast.walk(q)}
    yield from ((i, n) for i, n in enumerate(ast.walk(tree)) if id(n) not in left_out)


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of one module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for place, node in _places(tree):
        for name, change in CHANGES.items():
            new = change(node)
            if new is not None:
                line = getattr(node, "lineno", 0)
                where = str(path.relative_to(ROOT))
                yield Mutant(where, line, name, _shown(node), _shown(new), place)


def _shown(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node)).splitlines()[0][:90]


def mutated(mutant: Mutant) -> CodeType:
    """Return the code of a module, changed by ``mutant`` and compiled."""
    path = ROOT / mutant.path
    tree = ast.parse(path.read_text(encoding="utf-8"))
    target = list(ast.walk(tree))[mutant.place]
    new = CHANGES[mutant.change](target)
    assert new is not None
    ast.copy_location(new, target)

    class Put(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return new if node is target else self.generic_visit(node)

    return compile(ast.fix_missing_locations(Put().visit(tree)), str(path), "exec")


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a mutant's code."""

    def __init__(self, mutant: Mutant) -> None:
        parts = Path(mutant.path).with_suffix("").parts
        self.name, self.mutant = ".".join(("gradparity", *parts)), mutant

    def find_spec(
        self, name: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        return importlib.util.spec_from_loader(name, self)

    def exec_module(self, module: ModuleType) -> None:
        exec(mutated(self.mutant), module.__dict__)


def _put_in_place(mutant: Mutant) -> None:
    """Replace a module, and the names that other modules have imported from it."""
    name = ".".join(("gradparity", *Path(mutant.path).with_suffix("").parts))
    space = vars(sys.modules[name])
    old = dict(space)
    exec(mutated(mutant), space)
    for module in list(sys.modules.values()):
        for key, value in list(vars(module).items()):
            if key in old and value is old[key] and value is not space[key]:
                setattr(module, key, space[key])


def killed(mutant: Mutant | None) -> bool:
    """Return True if the tests fail or hang with ``mutant`` in place."""
    child = os.fork()
    if child == 0:
        _run_tests(mutant)
    _, status = os.waitpid(child, 0)
    return status != 0


def _run_tests(mutant: Mutant | None) -> None:
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.alarm(10 * LIMIT_S)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if mutant is None:
        os._exit(_tested(TESTS))
    if "gradparity.conformance" in sys.modules:  # its references are kept, too
        _put_in_place(mutant)
        os._exit(_tested(TESTS_OF_PARITY))
    loader = _Loader(mutant)
    sys.meta_path.insert(0, loader)
    importlib.import_module(loader.name)  # pytest would put its own loader first
    os._exit(_tested(TESTS))


def _tested(tests: Sequence[str]) -> int:
    import pytest

    quiet = [f"-pno:{p}" for p in ("xdist", "cacheprovider")]
    plain = ["-x", "-q", "-o", "addopts=", "-W", "ignore", "--timeout=0"]
    return int(pytest.main([*plain, *quiet, *tests]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; return 1 if the unchanged code fails its tests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="part of a path")
    options = parser.parse_args(arguments)
    if options.out is not None:  # now, and not after minutes
        options.out.mkdir(parents=True, exist_ok=True)
        options.out = options.out.resolve()
    os.chdir(ROOT)
    import hypothesis  # noqa: F401  # what the children share
    import pytest  # noqa: F401
    import torch.distributed.pipelining  # noqa: F401

    import gradparity.fixtures  # noqa: F401
    import gradparity.multiprocess  # noqa: F401

    if killed(None):
        print("the unchanged judge fails its tests", file=sys.stderr)
        return 1
    modules = [p for p in TARGETS if options.only in str(p)]
    for path in sorted(modules, key=lambda path: path == PARITY):
        if path == PARITY and _tested(TESTS_OF_PARITY):  # trains the references once
            print("the unchanged judge fails its tests", file=sys.stderr)
            return 1
        record = _judged(path, options.seconds / len(modules))
        print(json.dumps(record, indent=1))
        if options.out is not None:
            _keep(options.out / "judge_mutants.json", path, record)
    return 0


def _judged(path: Path, seconds: float) -> dict[str, Any]:
    """Test as many mutants of one module as the time allows; return their record."""
    everyone = list(mutants(path))
    # a run that ends early has judged a fair sample
    random.Random(0).shuffle(everyone)
    end = time.monotonic() + seconds
    survivors, judged = [], 0
    for mutant in everyone:
        if time.monotonic() > end:
            break
        judged += 1
        if not killed(mutant):
            text = f"{mutant.change}: {mutant.before} -> {mutant.after}"
            survivors.append(f"line {mutant.line}: {text}")
    return {
        "commit": _commit(),
        "python": sys.version.split()[0],
        "mutants": len(everyone),
        "judged": judged,
        "killed": judged - len(survivors),
        "survivors": survivors,
    }


def _commit() -> str:
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def _keep(file: Path, path: Path, record: dict[str, Any]) -> None:
    """Replace the record of one module in a file; the other records stay."""
    old = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    new = old | {str(path.relative_to(ROOT)): record}
    write_whole(file, json.dumps(new, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
