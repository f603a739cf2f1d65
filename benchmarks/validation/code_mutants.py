"""Mutate modules of every room and count the mutants that their tests kill.

Each mutant is one change of one expression or statement. A forked child, which has
torch already, puts the mutant in place and runs the module's tests, those that start no
other process. mutmut leaves decorated functions alone, and every check is one;
cosmic-ray starts a process, and so torch, for each mutant.

    gradparity bench code-mutants --seconds 600 --out benchmarks/results
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
    p.relative_to(ROOT).as_posix()
    for p in (ROOT / "conformance/comparison/laws").glob("*.py")
    if p.stem[0] != "_"
)
PARITY = "conformance/comparison/parity.py"
TESTS_BY_MODULE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(LAWS, ("conformance/test_laws", "conformance/test_findings")),
    **dict.fromkeys(
        ["ci/baseline.py", "ci/checks.py", "ci/decision.py"],
        ("ci/test_baseline", "ci/test_gate", "ci/test_expectations"),
    ),
    **dict.fromkeys(
        [f"conformance/record/{name}.py" for name in ("compare", "equal", "merge")],
        ("record/test_verdicts", "record/test_where_it_begins"),
    ),
    **dict.fromkeys(
        ["multiprocess/parent/root_cause.py", "multiprocess/report.py"],
        ("multiprocess/test_root_cause",),
    ),
    "multiprocess/elastic/membership.py": ("multiprocess/test_membership",),
    "scaler/policy.py": ("scaler/test_policy", "scaler/test_settings"),
    **dict.fromkeys(
        ["scaler/grads.py", "scaler/iteration.py"],
        (
            *("scaler/test_division", "scaler/test_torch_steps"),
            *("scaler/test_totals", "scaler/test_range_and_dtypes"),
        ),
    ),
    PARITY: (
        "conformance/test_findings",
        "conformance/test_parity_rows",
        "conformance/test_parity",
    ),
}
"""Module -> its tests that run in one process, quick ones first."""
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


UNCHANGED = "unchanged"
"""Change of a mutant that is the module itself: its tests must pass."""


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
    """Yield (index, node) to change; texts, types and ``@law`` are left out.

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
    if mutant.change == UNCHANGED:
        return compile(tree, str(path), "exec")
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


def killed(mutant: Mutant, tests: Sequence[str]) -> bool:
    """Return True if the tests fail or hang with ``mutant`` in place."""
    child = os.fork()
    if child == 0:
        _run_tests(mutant, tests)
    _, status = os.waitpid(child, 0)
    return status != 0


def _run_tests(mutant: Mutant, tests: Sequence[str]) -> None:
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.alarm(10 * LIMIT_S)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    loader = _Loader(mutant)
    if loader.name in sys.modules:  # what was computed with it is kept
        _put_in_place(mutant)
    else:
        sys.meta_path.insert(0, loader)
        # before pytest, which would put its own loader first
        importlib.import_module(loader.name)
    os._exit(_tested(tests))


def _tested(tests: Sequence[str]) -> int:
    import pytest

    quiet = [f"-pno:{p}" for p in ("xdist", "cacheprovider")]
    plain = ["-x", "-q", "-o", "addopts=", "-W", "ignore", "--timeout=0"]
    fast = ["-m", "not slow and not extras"]
    paths = [f"tests/{name}.py" for name in tests]
    return int(pytest.main([*plain, *quiet, *fast, *paths]))


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

    modules = [name for name in TESTS_BY_MODULE if options.only in name]
    for name in modules:
        tests = TESTS_BY_MODULE[name]
        if name == PARITY and _tested(tests):  # trains the references, for all children
            return 1
        if killed(Mutant(name, 0, UNCHANGED, "", "", 0), tests):
            print(f"{name}: the unchanged code fails its tests", file=sys.stderr)
            return 1
        record = _checked(ROOT / name, tests, options.seconds / len(modules))
        print(json.dumps(record, indent=1))
        if options.out is not None:
            _keep(options.out / "code_mutants.json", name, record)
    return 0


def _checked(path: Path, tests: Sequence[str], seconds: float) -> dict[str, Any]:
    """Test as many mutants of one module as the time allows; return their record."""
    everyone = list(mutants(path))
    # a run that ends early has checked a fair sample
    random.Random(0).shuffle(everyone)
    end = time.monotonic() + seconds
    survivors, tried = [], 0
    for mutant in everyone:
        if time.monotonic() > end:
            break
        tried += 1
        if not killed(mutant, tests):
            text = f"{mutant.change}: {mutant.before} -> {mutant.after}"
            survivors.append(f"line {mutant.line}: {text}")
    return {
        "commit": _commit(),
        "python": sys.version.split()[0],
        "mutants": len(everyone),
        "tried": tried,
        "killed": tried - len(survivors),
        "survivors": survivors,
    }


def _commit() -> str:
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def _keep(file: Path, name: str, record: dict[str, Any]) -> None:
    """Replace the record of one module in a file; the other records stay."""
    old = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    new = old | {name: record}
    write_whole(file, json.dumps(new, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
