"""The arrows between the rooms, and no others."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import gradparity

ROOT = Path(gradparity.__file__).parent
MAY_IMPORT = {
    "scaler": set[str](),
    "multiprocess": set[str](),
    "fixtures": {"scaler"},
    "conformance": {"fixtures", "multiprocess"},
    "ci": {"conformance"},
}
MODULES = [path for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py"))]


def imported_rooms(source: str, module: Path) -> Iterator[str]:
    """Rooms that ``source``, the text of ``module``, names in an import."""
    package = module.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            whole = [*base, *(node.module.split(".") if node.module else [])]
            yield from whole[:1] or [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from _absolute(node.module)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _absolute(alias.name)


def _absolute(module: str) -> Iterator[str]:
    parts = module.split(".")
    if parts[0] == "gradparity" and len(parts) > 1:
        yield parts[1]


def rooms_of(path: Path) -> set[str]:
    own = path.relative_to(ROOT).parts[0]
    found = set(imported_rooms(path.read_text(encoding="utf-8"), path))
    return (found & MAY_IMPORT.keys()) - {own}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_each_room_imports_only_the_rooms_it_may(path: Path) -> None:
    assert rooms_of(path) <= MAY_IMPORT[path.relative_to(ROOT).parts[0]]


@pytest.mark.parametrize(
    ("source", "room"),
    [
        ("from ..conformance import law", "conformance"),
        ("from .. import fixtures", "fixtures"),
        ("import gradparity.ci", "ci"),
        ("from gradparity.multiprocess import Cluster", "multiprocess"),
    ],
)
def test_a_forbidden_arrow_would_be_seen(source: str, room: str) -> None:
    assert room in set(imported_rooms(source, ROOT / "scaler" / "made_up.py"))


# The folders inside multiprocess, and the modules on top of it: who may import whom.
# What lies on top comes in two kinds: what all folders share, and what a user calls.
SHARED = {
    *("environment", "errors", "linux", "messages", "outcomes"),
    *("report", "spec"),
}
FOLDERS = {
    "rank": SHARED,
    "parent": SHARED | {"rank"},
    "cluster": SHARED | {"parent"},
    "simulated": SHARED | {"cluster", "parent", "rank"},
    "elastic": SHARED | {"cluster", "parent", "rank"},
    "testcase": SHARED | {"cluster", "parent", "rank"},
    "pytest_plugin": SHARED
    | {"cluster", "elastic", "parent", "rank", "simulated", "testcase"},
    **dict.fromkeys(SHARED, SHARED),
}
MULTIPROCESS = [p for p in MODULES if p.relative_to(ROOT).parts[0] == "multiprocess"]


def imports_of(path: Path, *, first: bool = False) -> set[str]:
    """Modules of ours that ``path`` imports, by their path below the root.

    Args:
        path: of a module.
        first: only those that are imported before it can be.
    """
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if first else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            home = path.parents[node.level - 1].joinpath(
                *(node.module or "").split(".")
            )
            for module in (home, *(home / alias.name for alias in node.names)):
                if module.with_suffix(".py").is_file():
                    found.add(str(module.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("path", MULTIPROCESS, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows_inside_multiprocess(path: Path) -> None:
    own = path.relative_to(ROOT / "multiprocess").parts[0].removesuffix(".py")
    found = {name.split("/")[1] for name in imports_of(path)}
    if own != "__init__":  # the face hands on what lies below
        assert found - {own} <= FOLDERS[own]


def test_no_circle_inside_multiprocess() -> None:
    left = {
        str(p.relative_to(ROOT).with_suffix("")): imports_of(p) for p in MULTIPROCESS
    }
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    assert not left, "modules that import each other, or need those that do"


def test_an_import_inside_multiprocess_is_seen() -> None:
    server = ROOT / "multiprocess" / "rank" / "forkserver.py"
    assert imports_of(server) == {"multiprocess/linux", "multiprocess/rank/worker"}


# The folders inside conformance, from the bottom to the top: each imports lower ones.
FLOORS = (
    *("status", "files", "output", "chosen", "formulas", "report", "space", "rank"),
    "judge",
    *("script", "draft", "run", "diff", "record", "cli", "__main__", "plugin"),
    "__init__",
)
CONFORMANCE = [p for p in MODULES if p.relative_to(ROOT).parts[0] == "conformance"]


@pytest.mark.parametrize("path", CONFORMANCE, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows_inside_conformance(path: Path) -> None:
    own = path.relative_to(ROOT / "conformance").parts[0].removesuffix(".py")
    found = {n.split("/")[1] for n in imports_of(path) if n.startswith("conformance/")}
    assert not {other for other in found - {own} if floor(other) >= floor(own)}


def floor(folder: str) -> int:
    return FLOORS.index(folder)


def test_no_chain_of_imports_inside_conformance_is_long() -> None:
    paths = {str(p.relative_to(ROOT).with_suffix("")): p for p in CONFORMANCE}
    below = {
        name: imports_of(path, first=True) & paths.keys()
        for name, path in paths.items()
    }

    @cache
    def longest(name: str) -> tuple[str, ...]:
        chains = (longest(other) for other in below[name])
        return (name, *max(chains, key=len, default=()))

    chain = max(map(longest, below), key=len)
    assert 10 < len(chain) <= 14, " -> ".join(chain)


def test_the_judge_asks_what_a_workload_has_and_not_whose_it_is() -> None:
    """Only what calls a user's ``train_step`` reads it; the rest reads ``has``."""
    reads = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in CONFORMANCE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "train_step"
    ]
    assert 0 < len(reads) <= 5, reads


def test_an_import_inside_conformance_is_seen() -> None:
    path = ROOT / "conformance" / "rank" / "reshard.py"
    assert imports_of(path) == {"conformance/rank/engine", "conformance/rank/trace"}
