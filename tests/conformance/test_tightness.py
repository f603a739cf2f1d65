"""Smallest errors that are caught in fp32, on real runs over two ranks."""

import pytest

from gradparity.conformance import Case, Runner, Scenario, Status

MODULE = "gradparity.fixtures.faulty"
TIGHT = {
    "UnscalesOneGradientSlightlyOff": ("parity.gradient", "0.1 % in one gradient"),
    "FlipsOneSign": ("parity.gradient", "one sign in one bias on one rank"),
    "FlushesOneTinyGradient": ("transparency.gradient", "one element below 1e-7"),
}


def checked(runner: Runner, scaler: str, place: str) -> Case:
    scenario = Scenario.parse(f"{place}/fp32/sgd/none/steps=1")
    return runner.run(f"{MODULE}:{scaler}", scenario)


@pytest.mark.parametrize("place", ["ddp/2", "fsdp/2", "tp/2"])
@pytest.mark.parametrize("scaler", TIGHT)
def test_a_small_wrong_is_caught_at_its_step(
    runner: Runner, scaler: str, place: str
) -> None:
    law, wrong = TIGHT[scaler]
    failed = {
        v.law: v
        for v in checked(runner, scaler, place).verdicts
        if v.status is Status.FAIL
    }
    assert law in failed, wrong
    assert failed[law].step == 0


def test_a_flushed_gradient_of_1e_7_is_caught(runner: Runner) -> None:
    scenario = Scenario.parse("ddp/2/fp32/sgd/none/model=text,steps=1")
    spec = f"{MODULE}:FlushesOneTinyGradient"
    case = runner.run(spec, scenario, parity=False)
    (finding,) = [v for v in case.verdicts if v.law == "transparency.gradient"]
    assert finding.status is Status.FAIL and "(0 for" in finding.message
    lost = float(finding.message.split(" for ")[1].split(",")[0])
    assert 0 < abs(lost) <= 1e-7
    assert "1 of" in finding.message
