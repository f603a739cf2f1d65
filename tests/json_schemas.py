"""Run check-jsonschema in this process: a new process takes a fifth of a second."""

from pathlib import Path

from check_jsonschema import main  # type: ignore[import-untyped]  # it has no types
from click.testing import CliRunner


def lint(file: Path, schema: str) -> tuple[int, str]:
    """Return exit code and output of a check against a schema of check-jsonschema."""
    return _checked("-q", "--builtin-schema", schema, str(file))


def lint_by_file(file: Path, schema: Path) -> tuple[int, str]:
    """Return exit code and output of a check against a schema file of ours."""
    return _checked("--schemafile", str(schema), str(file))


def _checked(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, arguments)
    return done.exit_code, done.output
