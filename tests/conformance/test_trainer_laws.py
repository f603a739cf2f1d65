"""Checks of schedules, averages, counts of skips and checkpoints of trainers."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gradparity.conformance import Case, Evidence, Runner, Scenario, Status
from gradparity.conformance.status import Finding
from gradparity.fixtures import WorkloadError, resolve_workload
from gradparity.fixtures.faulty import trainers
from gradparity.fixtures.faulty.plain import Broken
from gradparity.fixtures.faulty.stacks import Base
from gradparity.fixtures.faulty.trainers import FAULTY_TRAINERS, RIGHT_TRAINERS
from gradparity.tests.made_up import BAD_STEP, evidence, finding

PLAIN = "gradparity.fixtures.faulty:PlainScaler"
LAWS = ("schedule", "average", "skips", "checkpoint")


def checked(runner: Runner, where: str) -> Case:
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
def test_a_faulty_trainer_is_caught_by_its_check(
    runner: Runner, trainer: type[Any], broken: Broken
) -> None:
    failed = {
        law
        for law, f in told(checked(runner, broken.at)).items()
        if f.status is Status.FAIL
    }
    assert failed == {broken.law}


@pytest.mark.parametrize("at", RIGHT_TRAINERS[trainers.WaitsForTheStep])
def test_a_right_trainer_fails_no_check(runner: Runner, at: str) -> None:
    found = told(checked(runner, at))
    assert {f.status for f in found.values()} <= {Status.PASS, Status.SKIPPED}
    for law in LAWS:
        assert found[f"trainer.{law}"].status is Status.PASS, law


def test_a_step_that_only_some_optimizers_take_fails_no_check_of_trainers() -> None:
    e = evidence(bad=True)
    for trace in e.ranks:
        trace.steps[BAD_STEP].decisions[0].parameters_changed = True
        trace.steps[BAD_STEP].schedule = ("1", "2")
        trace.steps[BAD_STEP].skips = (0, 0)
        trace.steps[BAD_STEP].average = ({"w": (2, "1")}, {"w": (2, "2")})
    assert finding(e, "skip.all-ranks-skip").status is Status.FAIL
    for law in LAWS[:3]:
        assert finding(e, f"trainer.{law}").status is not Status.FAIL


def averages(e: Evidence, rank: int, *digests: str, elements: int = 2) -> None:
    """Give a rank a running average that has these digests, one after another."""
    for at, (was, now) in zip(e.ranks[rank].steps, pairwise(digests), strict=True):
        at.average = ({"w": (elements, was)}, {"w": (elements, now)})


def test_one_rank_without_a_skip_says_nothing_of_the_average() -> None:
    alone = evidence(size=1)
    assert finding(alone, "trainer.average").status is Status.SKIPPED


@pytest.mark.parametrize(
    ("digests", "elements"),
    [
        ("00000", 2),  # rank 0 alone keeps one
        ("0abcd", 1),  # each rank has its own part of the same weights
        ("zabcd", 2),  # other bits from the start: not the same average
    ],
)
def test_an_average_that_need_not_be_equal_is_not_compared(
    digests: str, elements: int
) -> None:
    e = evidence()
    averages(e, 1, *digests, elements=elements)
    assert finding(e, "trainer.average").status is not Status.FAIL


def test_an_average_that_stays_on_one_rank_is_asked_about() -> None:
    e = evidence()
    averages(e, 1, *"00000")
    found = finding(e, "trainer.average")
    assert found.status is Status.INCONCLUSIVE
    assert "moves on rank 0 and stays on rank 1" in found.message
    assert "let ema(stack) return {} there" in found.message


def test_averages_that_drift_apart_are_reported_at_the_first_step() -> None:
    e = evidence()
    averages(e, 1, *"01abc")
    found = finding(e, "trainer.average")
    assert (found.status, found.step, found.ranks) == (Status.FAIL, 1, (1,))
    assert "the running average of w on rank 1 differs from that on rank 0" in (
        found.message
    )


RESUMED = Scenario.parse("ddp/2/fp32/sgd/none/steps=4,scale=8,interval=2,recipe=resume")
KEPT = pytest.mark.parametrize("what", ["average", "schedule"])


@KEPT
def test_loads_from_a_checkpoint_are_counted(what: str) -> None:
    plain, e = evidence(), evidence(scenario=RESUMED)
    found, without = finding(e, f"trainer.{what}"), finding(plain, f"trainer.{what}")
    assert (found.status, found.compared) == (Status.PASS, without.compared + 2)
    assert found.message.endswith("with 2 loads from a checkpoint")


@KEPT
def test_a_saved_state_of_a_new_stack_is_not_compared(what: str) -> None:
    e = evidence(scenario=RESUMED)
    for trace in e.ranks:
        (new, _), at = getattr(trace.steps[0], what), trace.steps[RESUMED.resume_step]
        for seen in trace.steps[: RESUMED.resume_step]:  # all skipped: nothing moves
            seen.decisions[0].non_finite = ["w"]
            seen.decisions[0].parameters_changed = False
            setattr(seen, what, (new, new))
        setattr(at, what, (new, getattr(at, what)[1]))
    found = finding(e, f"trainer.{what}")
    assert (found.status, found.not_compared) == (Status.PASS, 2)
    assert "with 0 loads from a checkpoint" in found.message


@KEPT
def test_a_resume_without_a_load_is_no_pass(what: str) -> None:
    e = evidence(scenario=RESUMED)
    for trace in e.ranks:
        del trace.steps[RESUMED.resume_step :]
    found = finding(e, f"trainer.{what}")
    assert found.status is Status.INCONCLUSIVE
    assert "with 0 loads from a checkpoint" in found.message
    assert found.compared > 0


@pytest.mark.parametrize(
    ("what", "law"), [("average", "trainer.average"), ("schedule", "trainer.schedule")]
)
def test_a_state_lost_in_a_checkpoint_is_reported(what: str, law: str) -> None:
    id = "ddp/2/fp32/sgd/none/steps=4,scale=8,interval=2,recipe=resume"
    e = evidence(scenario=Scenario.parse(id))
    assert finding(e, law).status is Status.PASS
    at = e.ranks[1].steps[e.scenario.resume_step]
    first = getattr(e.ranks[1].steps[0], what)
    setattr(at, what, (first[0], getattr(at, what)[1]))
    found = finding(e, law)
    assert (found.status, found.step, found.ranks) == (Status.FAIL, 2, (1,))
    assert "not the one that was saved" in found.message


def test_settings_after_a_load_are_those_of_the_whole_run() -> None:
    e = evidence(scenario=RESUMED)
    for seen in e.ranks[1].steps:
        seen.copies.reverse()  # nothing says whose a copy is
    found = finding(e, "trainer.settings")
    steps = RESUMED.steps - RESUMED.resume_step
    assert (found.status, found.compared) == (Status.PASS, steps * 2 * 4)
    last = e.ranks[1].steps[-1]
    last.settings["w"]["betas"] = (0.9, 0.98)
    found = finding(e, "trainer.settings")
    assert (found.status, found.step, found.ranks) == (Status.FAIL, last.step, (1,))
    assert "betas of w is (0.9, 0.98), and (0.9, 0.99) in the" in found.message


def test_settings_of_copies_are_compared_too() -> None:
    e = evidence(scenario=RESUMED)
    e.ranks[0].steps[-1].copies[0]["lr"] = 0.2
    assert finding(e, "trainer.settings").status is Status.FAIL


def test_settings_that_differ_before_a_load_prove_nothing() -> None:
    e = evidence(scenario=RESUMED)
    e.ranks[0].steps[0].settings["w"]["lr"] = 0.05
    found = finding(e, "trainer.settings")
    assert found.status is Status.INCONCLUSIVE
    assert "lr of w is 0.05, and 0.1 in a second run, before anything" in found.message


def test_after_other_skips_a_schedule_may_be_another() -> None:
    e = evidence(scenario=RESUMED)
    for trace in e.ranks:
        trace.steps[1].decisions[0].non_finite = ["w"]
        trace.steps[-1].settings["w"]["lr"] = 0.7
    found = finding(e, "trainer.settings")
    assert (found.status, found.compared) == (Status.INCONCLUSIVE, 0)
    assert found.not_compared == 2 * (RESUMED.steps - 1)


def test_weights_that_a_load_has_rounded_are_reported() -> None:
    e = evidence(scenario=RESUMED)
    assert finding(e, "trainer.weights").compared == 2
    e.ranks[1].loaded = (3, "w")
    found = finding(e, "trainer.weights")
    assert (found.status, found.ranks, found.parameter) == (Status.FAIL, (1,), "w")
    assert found.step == RESUMED.resume_step
    for trace in e.ranks:
        trace.loaded = (0, "")
    found = finding(e, "trainer.weights")
    assert found.status is Status.INCONCLUSIVE and "moved no weight" in found.message
    for trace in e.ranks:
        trace.loaded = None  # gradparity's own loop has loaded it
    assert finding(e, "trainer.weights").status is Status.SKIPPED


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
