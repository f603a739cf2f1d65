"""JSON Schema of a line of ``report.jsonl``, for other programs.

The schema is derived from the records in :mod:`.records`. The shipped file
``report.schema.json`` holds the schema as text; a test checks that both agree.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import msgspec

from ..status import Verdict
from .records import (
    SCHEMA_VERSION,
    CaseRecord,
    Comparison,
    Curves,
    Footer,
    Header,
    Launcher,
    Line,
    Location,
)

__all__ = ["report_schema", "schema_text"]


def schema_text() -> str:
    """Return the schema as printed by ``gradparity explain report.jsonl``."""
    return msgspec.json.format(msgspec.json.encode(report_schema()), indent=1).decode()


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema 2020-12 of one line: a header, a case or a footer."""
    schema = msgspec.json.schema(Line)
    parts = schema["$defs"]
    parts["Header"]["properties"]["schema"] = {"const": SCHEMA_VERSION}
    # msgspec gives the fields their types; only the source has their texts
    for record in (
        Header,
        Launcher,
        CaseRecord,
        Verdict,
        Comparison,
        Location,
        Curves,
        Footer,
    ):
        for field, text in _documented(record).items():
            parts[record.__name__]["properties"][field]["description"] = text
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"One line of report.jsonl of gradparity, version {SCHEMA_VERSION}",
        "description": "Header first, a case a line, footer last. No footer: cut off.",
        **schema,
    }


def _documented(record: type) -> dict[str, str]:
    """Return the docstring of each field, from the record or from a base class."""
    texts: dict[str, str] = {}
    for each in record.__mro__[: record.__mro__.index(msgspec.Struct)]:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(node, ast.ClassDef)
        for field, below in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                assert isinstance(field.target, ast.Name)
                texts[field.target.id] = inspect.cleandoc(ast.literal_eval(below.value))
    return texts
