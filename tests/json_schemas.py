"""check-jsonschema within this process: a new one takes a fifth of a second."""

from pathlib import Path

from check_jsonschema import main  # type: ignore[import-untyped]  # it has no types
from click.testing import CliRunner


def lint(file: Path, schema: str) -> tuple[int, str]:
    """Return the exit code and the output of a check against a schema it brings."""
    return _checked("-q", "--builtin-schema", schema, str(file))


def lint_by_file(file: Path, schema: Path) -> tuple[int, str]:
    """The same for a schema of ours."""
    return _checked("--schemafile", str(schema), str(file))


def _checked(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, arguments)
    return done.exit_code, done.output
