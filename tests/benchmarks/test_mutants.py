"""Matrix of mutants: counts of caught scalers, the written files, refused options."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from gradparity.benchmarks.validation.mutants import MutantSettings, mutants
from gradparity.benchmarks.validation.mutants_matrix import Matrix, Row, as_text
from gradparity.conformance.__main__ import main
from gradparity.conformance.comparison.law import LAWS
from gradparity.conformance.space.catalogue import Selection

SMALL = Selection(
    topologies=["single"], models=["digits"], precisions=["fp32"], optimizers=["sgd"]
)


def row(**changes: object) -> Row:
    values = {
        "scaler": "A",
        "fault": "None.",
        "law": "scale.rule",
        "tried": 1,
        "failed": {"scale.rule": 1},
    }
    return Row(**values | changes)  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"failed": {"scale.positive": 1}}, False),
        ({"failed": {}}, False),
        ({"broken": 1}, False),
        ({"law": "", "failed": {}}, True),
        ({"law": "", "failed": {}, "tried": 0}, False),
        ({"law": ""}, False),
    ],
)
def test_a_row_is_right_only_if_its_expected_check_failed(
    changes: dict[str, object], good: bool
) -> None:
    assert row(**changes).as_it_should_be is good


def checked(folder: Path, *scalers: str, seeds: int = 1) -> tuple[int, str]:
    output = io.StringIO()
    settings = MutantSettings(
        selection=SMALL,
        folder=".",
        presets=["parity"],
        scalers=scalers,
        seeds=seeds,
        out=folder,
    )
    code = mutants(settings, Console(file=output, width=200))
    return code, output.getvalue()


def test_the_matrix_is_printed_and_written(tmp_path: Path) -> None:
    code, output = checked(tmp_path, "ForgetsToUnscale", "PlainScaler")
    assert code == 0, output
    written = (tmp_path / "mutants.json").read_bytes()
    matrix = msgspec.json.decode(written, type=Matrix)
    wrong, right = matrix.rows
    assert wrong.law in wrong.failed and wrong.preset == "parity"
    assert wrong.tried == 1 and right.tried > 0 and not right.failed
    text = (tmp_path / "mutants.md").read_text(encoding="utf-8")
    assert text == as_text(matrix) and text.strip() in output
    assert "1 of 1 caught" in text and all(f"`{law}`" in text for law in LAWS)


def test_a_missed_scaler_gives_exit_code_1(tmp_path: Path) -> None:
    """The scaler disagrees between ranks, which a single rank cannot show."""
    code, output = checked(tmp_path, "NeverAgrees", seeds=0)
    assert code == 1
    assert "NeverAgrees: not caught by agreement.scale" in output
    assert "**missed**" in output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--only", "Nobody"], "unknown scaler 'Nobody'"),
        (["--preset", "none"], "unknown preset"),
        (["--share", "0"], "share at least 1"),
        (["--topology", "ring"], "unknown topology 'ring'"),
    ],
)
def test_bad_usage_prints_one_line_and_exits_with_2(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mutants", *arguments]) == 2
    error = capsys.readouterr().err
    assert problem in error and len(error.splitlines()) == 1
