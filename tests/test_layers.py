"""Rules of imports that import-linter cannot check; pyproject.toml has the others."""

import ast
from pathlib import Path

import gradparity

ROOT = Path(gradparity.__file__).parent


def test_checks_depend_on_what_a_workload_has_and_not_on_whose_it_is() -> None:
    """Only code that calls a user's ``train_step`` may read that attribute."""
    reads = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "conformance").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "train_step"
    ]
    assert 0 < len(reads) <= 5, reads
