"""The published schema matches the records, and is as strict as the reader."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

import gradparity.conformance
from gradparity.conformance.__main__ import main
from gradparity.conformance.report.records import SCHEMA_VERSION, Line
from gradparity.conformance.report.schema import report_schema, schema_text
from gradparity.tests.conformance.test_report import case, write

SHIPPED = Path(gradparity.conformance.__file__).with_name("report.schema.json")
VALIDATOR = Draft202012Validator(json.loads(SHIPPED.read_text()))
WRONG = {"a": "word", "b": -1, "c": None, "d": [[]], "e": {"x": {}}, "f": 0.5}


def test_the_shipped_schema_is_that_of_the_records() -> None:
    """A change of a record fails here.

    Raise SCHEMA_VERSION if that version has been released. Then renew the file by
    ``gradparity explain report.jsonl > conformance/report.schema.json``.
    """
    Draft202012Validator.check_schema(report_schema())
    assert SHIPPED.read_text() == schema_text() + "\n"


def test_explain_prints_the_shipped_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "report.jsonl"]) == 0
    assert capsys.readouterr().out == SHIPPED.read_text()


def test_every_record_of_a_real_report_is_valid(real_report: Path) -> None:
    lines = [json.loads(line) for line in real_report.read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds == ["header", *["case"] * 4, "footer"]
    assert {line["status"] for line in lines[1:-1]} == {"pass", "fail"}
    assert [e.message for x in lines for e in VALIDATOR.iter_errors(x)] == []


def records(tmp_path: Path) -> list[dict[str, Any]]:
    path = write(tmp_path / "r.jsonl", case(), case("c:D", "fail"))
    return [json.loads(line) for line in path.read_text().splitlines()]


def changed(value: Any) -> Iterator[Any]:
    """Yield ``value`` with a field removed, added or of another type, at any depth."""
    if isinstance(value, dict):
        yield {**value, "unknown field": 1}
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
            for inner in [*WRONG.values(), *changed(value[key])]:
                yield {**value, key: inner}
    elif isinstance(value, list) and value:
        for inner in [*WRONG.values(), *changed(value[0])]:
            yield [inner, *value[1:]]


def readable(record: Any) -> bool:
    try:
        msgspec.json.decode(json.dumps(record), type=Line)
    except msgspec.MsgspecError:
        return False
    return bool(record.get("schema", SCHEMA_VERSION) == SCHEMA_VERSION)


def test_the_schema_refuses_what_the_reader_refuses(tmp_path: Path) -> None:
    seen = {True: 0, False: 0}
    for record in records(tmp_path):
        assert VALIDATOR.is_valid(record) and readable(record)
        for other in changed(copy.deepcopy(record)):
            assert VALIDATOR.is_valid(other) == readable(other), other
            seen[readable(other)] += 1
    assert min(seen.values()) > 50  # both answers were given
