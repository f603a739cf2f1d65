"""Laws of what a trainer does beside its step, on real ranks and at their edges."""

from dataclasses import replace
from typing import Any

import pytest

from gradparity.conformance import Case, Runner, Scenario, Status
from gradparity.conformance.status import Finding
from gradparity.fixtures import WorkloadError, resolve_workload
from gradparity.fixtures.faulty import trainers
from gradparity.fixtures.faulty.plain import Broken
from gradparity.fixtures.faulty.stacks import Base
from gradparity.fixtures.faulty.trainers import FAULTY_TRAINERS, RIGHT_TRAINERS
from gradparity.tests.made_up import BAD_STEP, evidence, finding

PLAIN = "gradparity.fixtures.faulty:PlainScaler"
LAWS = ("schedule", "average", "skips", "checkpoint")


def judged(runner: Runner, where: str) -> Case:
    case = runner.run(PLAIN, Scenario.parse(where))
    assert not case.problem
    return case


def told(case: Case) -> dict[str, Finding]:
    return {v.law: v for v in case.verdicts}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "broken"),
    FAULTY_TRAINERS.items(),
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_faulty_trainer_is_caught_by_its_law(
    runner: Runner, trainer: type[Any], broken: Broken
) -> None:
    failed = {
        law
        for law, f in told(judged(runner, broken.at)).items()
        if f.status is Status.FAIL
    }
    assert failed == {broken.law}


@pytest.mark.parametrize("at", RIGHT_TRAINERS[trainers.WaitsForTheStep])
def test_a_right_trainer_breaks_no_law(runner: Runner, at: str) -> None:
    found = told(judged(runner, at))
    assert {f.status for f in found.values()} <= {Status.PASS, Status.SKIPPED}
    for law in LAWS:
        assert found[f"trainer.{law}"].status is Status.PASS, law


def test_a_step_that_only_some_optimizers_take_is_not_judged() -> None:
    e = evidence(bad=True)
    for trace in e.ranks:
        trace.steps[BAD_STEP].decisions[0].parameters_changed = True
        trace.steps[BAD_STEP].schedule = ("1", "2")
        trace.steps[BAD_STEP].skips = (0, 0)
        trace.steps[BAD_STEP].average = ("1", "2")
    assert finding(e, "skip.all-ranks-skip").status is Status.FAIL
    for law in LAWS[:3]:
        assert finding(e, f"trainer.{law}").status is not Status.FAIL


def test_a_run_without_a_skip_says_nothing_of_the_average() -> None:
    assert finding(evidence(), "trainer.average").status is Status.SKIPPED


def test_a_saved_state_that_a_new_scaler_has_anyway_proves_nothing() -> None:
    e = evidence()
    for trace in e.ranks:
        assert trace.restored is not None
        trace.restored = type(trace.restored)(
            saved=(8.0, 0), loaded=(8.0, 0), new=(8.0, 0)
        )
    assert finding(e, "trainer.checkpoint").status is Status.SKIPPED


def test_a_trainer_that_stopped_before_a_step_is_inconclusive() -> None:
    (at,) = RIGHT_TRAINERS[trainers.WaitsForTheStep][:1]
    of = evidence()
    for trace in of.ranks:
        trace.steps.clear()
        trace.restored = None
    stopped = replace(of, scenario=Scenario.parse(at))
    for law in LAWS:
        assert finding(stopped, f"trainer.{law}").status is Status.INCONCLUSIVE, law
    for law in LAWS:  # a built-in model has nothing of the kind
        assert finding(of, f"trainer.{law}").status is Status.SKIPPED, law


class SavesOnly(trainers.WaitsForTheStep):
    load_checkpoint = None  # type: ignore[assignment]


class CountsWithoutAStep(Base):
    def parallelize(self, model: Any, mesh: Any) -> Any:
        return model

    def skipped_steps(self, stack: Any) -> int:
        return 0


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("SavesOnly", "needs save_checkpoint and load_checkpoint"),
        ("CountsWithoutAStep", "train_step"),
    ],
)
def test_half_of_what_is_needed_is_refused(name: str, told: str) -> None:
    with pytest.raises(WorkloadError, match=told):
        resolve_workload(f"{__name__}:{name}")
