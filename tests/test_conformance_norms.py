"""Norms that stacks report, factors they clip by, dtypes they reduce in."""

from collections.abc import Iterator
from typing import Any

import pytest

from gradparity.conformance import Case, Runner, Scenario, Status
from gradparity.conformance.law import Finding
from gradparity.fixtures.faulty import stacks
from gradparity.fixtures.faulty.plain import Broken
from gradparity.fixtures.faulty.stacks import FAULTY_STACKS, RIGHT_STACKS

NEW = ("norm.reported", "norm.factor", "dtype.reduction")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(folder=".", timeout_s=60) as made:
        yield made


def judged(runner: Runner, where: str) -> Case:
    case = runner.run("none", Scenario.parse(where))
    assert not case.problem
    return case


def told(case: Case) -> dict[str, Finding]:
    return {v.law: v.finding for v in case.verdicts}


@pytest.mark.parametrize(
    ("stack", "broken"), FAULTY_STACKS.items(), ids=lambda x: getattr(x, "__name__", "")
)
def test_a_faulty_stack_is_caught_by_its_law(
    runner: Runner, stack: type[Any], broken: Broken
) -> None:
    case = judged(runner, broken.at)
    assert told(case)[broken.law].status is Status.FAIL, told(case)


RIGHT = [(stack, at) for stack, places in RIGHT_STACKS.items() for at in places]


@pytest.mark.parametrize(("stack", "at"), RIGHT, ids=[at[:40] for _, at in RIGHT])
def test_a_right_stack_breaks_no_law(runner: Runner, stack: type[Any], at: str) -> None:
    found = told(judged(runner, at))
    accused = {law: f for law, f in found.items() if f.status is not Status.PASS}
    assert {f.status for f in accused.values()} <= {Status.SKIPPED}, accused
    decided = {
        stacks.ClipsByTheWholeNorm: {"norm.reported", "norm.factor"},
        stacks.FlatEngine: {*NEW},
        stacks.Replicated: {"dtype.reduction"},
        stacks.ShardedWithAPolicy: {"dtype.reduction"},
    }[stack]
    assert {law for law in NEW if found[law].status is Status.PASS} == decided
    assert all(found[law].compared for law in decided)
