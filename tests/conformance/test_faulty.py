"""Each faulty scaler fails its check, and right scalers pass all."""

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest

from gradparity.conformance import LAWS, Case, Runner, Scenario, Status
from gradparity.conformance.rank.devices import Devices
from gradparity.conformance.run.launcher import Pool
from gradparity.conformance.space.catalogue import Selection, select
from gradparity.fixtures import faulty
from gradparity.fixtures.faulty import FAULTY, RIGHT, Broken, plain
from gradparity.fixtures.faulty.own_steps import FAULTY_STEPS
from gradparity.fixtures.faulty.stacks import FAULTY_STACKS
from gradparity.fixtures.faulty.trainers import FAULTY_TRAINERS
from gradparity.tests.made_up import OF_STACKS

MODULE = "gradparity.fixtures.faulty"
# the recorded run of `gradparity mutants` has many more, see docs/mutants.md
PLACES = (
    plain.CLEAN,
    plain.BURST,
    plain.FOUR,
    plain.PIPELINE,
    plain.LARGE,
    plain.MOVED,
    plain.HIGHEST,
    plain.LOWEST,
    plain.SMALL,
    plain.NO_POWER_OF_TWO,
)


@pytest.fixture(scope="module")
def runner(device: str) -> Iterator[Runner]:
    devices = Devices(device=device, share=device == "cuda")
    with Runner(folder=".", place=Pool(devices, 30.0)) as runner:
        yield runner


def checked(
    runner: Runner, scaler: type[Any], scenario: str, parity: bool = True
) -> Case:
    spec = f"{MODULE}:{scaler.__name__}"
    case = runner.run(spec, Scenario.parse(scenario), parity=parity)
    assert case.status is not Status.ERROR, case.problem
    return case


def failures(case: Case) -> dict[str, str]:
    return {v.law: v.message for v in case.verdicts if v.status is Status.FAIL}


BY_SCENARIO: list[tuple[type[Any], Broken]] = sorted(
    FAULTY.items(), key=lambda item: item[1].at
)
"""Faulty scalers by scenario: all of one scenario share a run without a scaler."""


@pytest.mark.parametrize(
    ("scaler", "broken"), BY_SCENARIO, ids=lambda x: getattr(x, "__name__", "")
)
@pytest.mark.few(36)
def test_a_faulty_scaler_is_caught_by_its_check(
    runner: Runner, scaler: type[Any], broken: Broken
) -> None:
    # a scaler with other scales needs references of its own, which take most time
    case = checked(runner, scaler, broken.at, broken.law.startswith("parity"))
    assert broken.law in failures(case), case.verdicts


@pytest.mark.slow
def test_faulty_scalers_are_found_early_by_a_default_run(runner: Runner) -> None:
    """Tests some scalers; ``gradparity mutants`` has recorded all of them."""
    ids = [scenario.id for scenario in select("default", Selection())]
    missed = [*FAULTY][1::18]
    for scenario in ids[:60]:  # all share its references
        for scaler in [*missed]:
            parity = FAULTY[scaler].law.startswith("parity")
            if failures(checked(runner, scaler, scenario, parity)):
                missed.remove(scaler)
    assert missed == []


@pytest.mark.parametrize(
    ("scaler", "scenario"),
    [
        *zip(RIGHT, cycle(PLACES), strict=False),
        *((scaler, plain.BAD) for scaler in RIGHT),  # where most others fail
    ],
)
@pytest.mark.few(5)
def test_a_right_scaler_passes_where_others_fail(
    runner: Runner, scaler: type[Any], scenario: str
) -> None:
    assert failures(checked(runner, scaler, scenario)) == {}


def test_every_check_has_a_scaler_or_a_workload_that_fails_it() -> None:
    stacks = FAULTY_STACKS | FAULTY_TRAINERS | FAULTY_STEPS
    every = [*FAULTY.values(), *stacks.values()]
    of_random_layers = {law for law in LAWS if law.startswith(OF_STACKS)}
    assert {broken.law for broken in every} == set(LAWS) - of_random_layers


def test_there_are_enough_of_both_and_each_says_what_it_is() -> None:
    assert len(FAULTY) >= 40 and len(RIGHT) >= 9
    for scaler in [*FAULTY, *RIGHT]:
        assert scaler.__doc__, scaler
        assert getattr(faulty, scaler.__name__) is scaler
