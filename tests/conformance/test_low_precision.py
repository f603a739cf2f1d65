"""Models and optimizers that round to 8 bits: what is declared, and what it changes."""

from typing import Any

import pytest
import torch

from gradparity.conformance import Runner, Scenario
from gradparity.conformance.rank.scaler_spec import NO_SCALER
from gradparity.conformance.space.workload_checks import check_workload, coarseness
from gradparity.fixtures import WorkloadError, resolve_workload
from gradparity.fixtures.specimens.eight_bits import (
    ScaleOfTheOtherOperand,
    ScalesAreNotSaved,
)

HERE = __name__


class Undeclared(ScaleOfTheOtherOperand):
    """Its input is rounded by a scale of all rows, and nothing says so."""

    rounds_to: Any = None


class UndeclaredState(ScalesAreNotSaved):
    """Blocks of its momentum are others on a shard, and nothing says so."""

    rounds_state = False


class WrongDtype(ScaleOfTheOtherOperand):
    """A dtype of 16 bits is a precision of the scenario."""

    rounds_to = torch.bfloat16


UNDECLARED, DECLARED = Undeclared(fixed=True), ScaleOfTheOtherOperand(fixed=True)
STATE = UndeclaredState(fixed=True)
WRONG = WrongDtype(fixed=True)


def test_a_model_that_joins_rows_by_a_scale_is_told_the_line_to_add() -> None:
    with pytest.raises(WorkloadError, match=r"rounds_to = torch\.float8_e4m3fn$"):
        check_workload(f"{HERE}:UNDECLARED")


def test_with_that_line_it_is_accepted() -> None:
    check_workload(f"{HERE}:DECLARED")
    assert resolve_workload(f"{HERE}:DECLARED").rounds_to == torch.float8_e4m3fn


def test_a_dtype_of_more_than_8_bits_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"got torch\.bfloat16, expected an 8-bit"):
        resolve_workload(f"{HERE}:WRONG")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float8_e4m3fn, 2.0**-4),
        (torch.float8_e5m2, 2.0**-3),
        (torch.int8, 1 / 254),
    ],
)
def test_coarseness_is_half_a_spacing(dtype: torch.dtype, expected: float) -> None:
    assert coarseness(dtype) == expected


def test_a_rounded_state_is_noise_only_where_it_is_declared() -> None:
    with Runner(folder=".", timeout_s=120.0) as runner:
        found = {
            name: runner.run(
                NO_SCALER, Scenario.parse(f"dp2/2/fp32/own/none/model={spec},steps=5")
            )
            for name, spec in {
                "undeclared": f"{HERE}:STATE",
                "declared": "gradparity.fixtures.specimens.eight_bits:Q06Fixed",
            }.items()
        }
    assert found["declared"].status == "pass"
    wrong = [v.law for v in found["undeclared"].verdicts if v.status == "fail"]
    assert "parity.update" in wrong
