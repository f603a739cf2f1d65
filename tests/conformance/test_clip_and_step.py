"""The recipe of scalers that clip and step in one call."""

from typing import Any

import pytest
import torch.distributed as dist

from gradparity.conformance import Case, Runner, Scenario, Status
from gradparity.conformance.script.standalone import standalone_script
from gradparity.conformance.status import Finding, UsageError
from gradparity.fixtures.faulty import ClippingScaler

HERE, RIGHT = __name__, "gradparity.fixtures.faulty:ClippingScaler"
DDP = "ddp/2/fp32/sgd/{}/steps=3,recipe=clip-and-step"


class ClipsTooHard(ClippingScaler):
    """Clips to half of the given norm."""

    def clip(self, optimizer: Any, max_norm: float, norm: Any) -> None:
        super().clip(optimizer, max_norm / 2, norm)


class ClipsOneRank(ClippingScaler):
    """Clips on the first rank only."""

    def clip(self, optimizer: Any, max_norm: float, norm: Any) -> None:
        if dist.get_rank() == 0:
            super().clip(optimizer, max_norm, norm)


def told(case: Case) -> dict[str, Finding]:
    return {verdict.law: verdict for verdict in case.verdicts}


@pytest.mark.parametrize("faults", ["none", "inf@r1s1:first"])
def test_a_right_one_passes(runner: Runner, faults: str) -> None:
    case = runner.run(RIGHT, Scenario.parse(DDP.format(faults)))
    assert case.status is Status.PASS
    assert told(case)["parity.gradient"].status is Status.PASS


@pytest.mark.parametrize("scaler", ["ClipsTooHard", "ClipsOneRank"])
def test_a_wrong_one_fails(runner: Runner, scaler: str) -> None:
    case = runner.run(f"{HERE}:{scaler}", Scenario.parse(DDP.format("none")))
    assert told(case)["parity.gradient"].status is Status.FAIL


@pytest.mark.parametrize("scaler", ["torch.amp:GradScaler", "none"])
def test_it_is_skipped_where_there_is_no_such_call(runner: Runner, scaler: str) -> None:
    case = runner.run(scaler, Scenario.parse(DDP.format("none")))
    if scaler == "none":  # then it is the recipe clip-norm
        assert case.status is Status.PASS
        return
    assert case.status is Status.SKIPPED
    assert "the scaler has no clip_and_step" in str(case.verdicts)


def test_no_script_is_written_of_it() -> None:
    with pytest.raises(UsageError, match="recipe 'clip-and-step'"):
        standalone_script(Scenario.parse(DDP.format("none")), "torch.amp:GradScaler")
