"""Findings of checks on synthetic traces, with exact messages, counts and steps."""

import math
from dataclasses import replace

import numpy as np
import pytest

from gradparity.conformance import LAWS, Evidence, Scenario, Status
from gradparity.conformance.comparison.law import Finding, apply_checks
from gradparity.conformance.comparison.laws.scale import SMALLEST
from gradparity.conformance.comparison.laws.transparency import SUBNORMAL
from gradparity.conformance.comparison.measured import Lack, Parity
from gradparity.conformance.comparison.parity import _compare
from gradparity.conformance.rank.trace import Collective, Decision, Problem
from gradparity.conformance.space.recipes import MANUAL_STEP
from gradparity.tests.made_up import (
    BAD_STEP,
    OF_STACKS,
    SCENARIO,
    add,
    evidence,
    finding,
    parity_without_rows,
    row,
)

COUNTS = {
    "liveness.completes": "12 rank-steps completed",
    "agreement.scale": "12 rank-steps compared by their scale",
    "agreement.growth": "12 rank-steps compared by their growth tracker",
    "agreement.skip": "12 rank-steps compared by their decision",
    "agreement.replicas": "8 pairs of replicas compared bitwise",
    "skip.all-ranks-skip": "3 rank-steps with a bad gradient somewhere",
    "skip.all-ranks-step": "9 rank-steps with finite gradients",
    "skip.no-side-effects": "3 rank-steps with a bad gradient somewhere",
    "scale.rule": "12 updates equal to the rule",
    "scale.positive": "12 scales looked at",
    "scale.continuity": "9 pairs of steps",
    # until the first bad step
    "transparency.gradient": "3 gradients bitwise equal to the control run",
    "transparency.bitwise": "3 tensors bitwise equal to the control run",
    "parity.gradient": "worst gradient at 0.5 of its bound (w, step 2, rank 1, norm)",
    "parity.update": "worst update at 0.5 of its bound (w, step 2, rank 1, norm)",
    "parity.loss": "worst loss at 0.5 of its bound (w, step 2, rank 1, norm)",
    "random.replicas": "random layers, where there are any, are off: recipe=random",
    "random.data": "random layers, where there are any, are off: recipe=random",
    "random.size": "random layers, where there are any, are off: recipe=random",
    "random.recompute": "random layers, where there are any, are off: recipe=random",
    "collectives.same-sequence": "12 sequences compared",
    "collectives.no-crosstalk": "12 checked collectives",
    "misuse.refused": "3 calls in a wrong order refused",
    "norm.reported": "9 norms within their bound",
    "norm.factor": "9 gradients clipped by their factor",
    "dtype.reduction": "24 elements of gradients reduced in the promised dtype",
    "trainer.schedule": "12 moves of the schedule",
    "trainer.average": "9 averages untouched by a skip, or equal on two ranks",
    "trainer.skips": "12 counts of skipped steps",
    "trainer.checkpoint": "3 states saved and loaded",
    "trainer.settings": "24 settings after a load",
    "trainer.weights": "3 weights loaded as they were saved",
}


def test_a_pass_says_how_much_was_compared() -> None:
    of = evidence(bad=True, size=3)
    assert {v.law: v.message for v in apply_checks(of)} == COUNTS


NUMBERS = {
    "trainer.average": (9, 0),
    "trainer.checkpoint": (3, 0),
    "trainer.settings": (24, 0),
    "trainer.weights": (3, 0),
    "agreement.replicas": (8, 0),
    "skip.all-ranks-skip": (3, 0),
    "skip.all-ranks-step": (9, 0),
    "skip.no-side-effects": (3, 0),
    "scale.continuity": (9, 0),
    "transparency.gradient": (3, 9),  # until the first bad step
    "transparency.bitwise": (3, 9),
    "parity.gradient": (1, 0),
    "parity.update": (1, 0),
    "parity.loss": (1, 0),
    "random.replicas": (0, 0),
    "random.data": (0, 0),
    "random.size": (0, 0),
    "random.recompute": (0, 0),
    "misuse.refused": (3, 0),
    "norm.reported": (9, 0),
    "norm.factor": (9, 0),
    "dtype.reduction": (24, 0),  # elements
}


def test_a_pass_says_in_numbers_how_much_was_compared_and_how_much_was_not() -> None:
    found = {v.law: v for v in apply_checks(evidence(bad=True, size=3))}
    assert {law: (f.compared, f.not_compared) for law, f in found.items()} == {
        law: NUMBERS.get(law, (12, 0)) for law in LAWS
    }


def test_steps_of_a_run_that_stopped_were_not_compared() -> None:
    of = evidence(size=3)
    for trace in of.ranks:
        del trace.steps[3:]
    for law in ("scale.rule", "agreement.scale", "collectives.no-crosstalk"):
        found = finding(of, law)
        assert (found.compared, found.not_compared) == (9, 3), law


def test_a_violation_says_how_much_was_compared_up_to_it() -> None:
    of = evidence(size=3)
    of.ranks[1].steps[2].scale_after = 99.0
    assert finding(of, "agreement.scale").compared == 9


def test_a_value_of_one_rank_alone_counts_as_not_compared() -> None:
    of = evidence()
    of.ranks[0].steps[1].decisions[0].parameters_changed = None
    found = finding(of, "agreement.skip")
    assert (found.compared, found.not_compared) == (6, 2)


def test_a_run_without_steps_passes_no_check() -> None:
    of = evidence()
    for trace in of.ranks:
        trace.steps.clear()
        trace.misuse = trace.restored = trace.loaded = None
    blind = Evidence(scenario=SCENARIO, ranks=of.ranks)
    told = {law: finding(blind, law).status for law in LAWS}
    expected = dict.fromkeys(LAWS, Status.INCONCLUSIVE)
    expected |= {
        law: Status.SKIPPED  # a plain step reports no norm and clips by none
        for law in LAWS
        if law.startswith((*OF_STACKS, "trainer.", "norm."))
    }
    assert told == expected


# - Agreement


def test_the_smaller_group_is_the_one_that_departs() -> None:
    of = evidence(size=3)
    of.ranks[0].steps[1].scale_after = 3.0
    found = finding(of, "agreement.scale")
    assert found.ranks == (0,)
    assert found.message == "step 1: rank 0 scale 3; ranks 1, 2 scale 16"
    assert found.numbers == {"rank 0": 3.0, "rank 1": 16.0, "rank 2": 16.0}


def test_ranks_that_stepped_and_ranks_that_skipped() -> None:
    of = evidence(bad=True, size=3)
    of.ranks[0].steps[BAD_STEP].decisions[0].parameters_changed = True
    assert finding(of, "agreement.skip").message == (
        "step 1: rank 0 stepped; ranks 1, 2 skipped (w is not finite on rank 1)"
    )


def test_a_torn_replica_is_named_with_its_equal_replicas() -> None:
    for rank, others in ((1, "0, 2"), (2, "0, 1")):
        of = evidence(size=3)
        of.ranks[rank].steps[3].digests["w"] = "else"
        assert finding(of, "agreement.replicas").message == (
            f"step 3: w on rank {rank} differs from its replica on ranks {others}"
        )


def test_replicas_of_a_run_that_stopped_on_one_rank_were_not_excused() -> None:
    of = evidence()
    for rank, trace in enumerate(of.ranks):
        trace.shards = {"w": f"part {rank}"}
    assert finding(of, "agreement.replicas").status is Status.SKIPPED
    of.ranks[1].problem = Problem(step=3, call="step", error="RuntimeError: no")
    assert finding(of, "agreement.replicas").status is Status.INCONCLUSIVE


def test_empty_shards_are_no_replicas() -> None:
    of = evidence()
    for trace in of.ranks:
        trace.index = {"w": np.arange(0)}
    assert finding(of, "agreement.replicas").status is Status.SKIPPED


# - Collectives


def test_both_sequences_are_reported() -> None:
    of = evidence()
    of.ranks[1].steps[2].collectives = []
    assert finding(of, "collectives.same-sequence").message == (
        "step 2: rank 1 issued none, rank 0 allreduce[6:float64] over ranks 0, 1, 2, 3"
    )
    of.ranks[1].steps[2].collectives = [Collective("barrier", (0, 1))] * 2
    text = "rank 1 issued barrier over ranks 0, 1 + barrier over ranks 0, 1, rank 0"
    assert text in finding(of, "collectives.same-sequence").message


PAIRS = ((0, 1), (2, 3))


def test_groups_without_a_common_rank_have_sequences_of_their_own() -> None:
    of = evidence(size=4)
    for trace in of.ranks:
        mine = Collective("barrier", PAIRS[trace.rank // 2])
        trace.steps[1].collectives = [mine] * (1 + trace.rank // 2)
    assert finding(of, "collectives.same-sequence").status is Status.PASS
    of.ranks[3].steps[1].collectives.pop()
    broken = finding(of, "collectives.same-sequence")
    assert (broken.status, broken.ranks) == (Status.FAIL, (3,))
    assert "rank 2 barrier over ranks 2, 3 + barrier over" in broken.message


def test_groups_that_are_mixed_up_are_seen() -> None:
    of = evidence()
    of.ranks[0].steps[1].collectives = [Collective("barrier", (0, 1))]
    of.ranks[1].steps[1].collectives = [Collective("barrier", (0, 1, 2))]
    assert finding(of, "collectives.same-sequence").status is Status.FAIL


def test_a_rank_without_a_checked_collective_hides_no_other() -> None:
    of = evidence()
    of.ranks[0].steps[1].checked_sum = None
    of.ranks[1].steps[1].checked_sum = (2.0, 3.0)
    found = finding(of, "collectives.no-crosstalk")
    assert (found.status, found.step, found.ranks) == (Status.FAIL, 1, (1,))
    assert found.numbers == {"got": 2.0, "expected": 3.0}


# - Liveness


@pytest.mark.parametrize(
    ("steps", "words", "step", "ranks"),
    [
        ((-1, -1), "before step 0: step raised on ranks 0, 1: E: no", 0, (0, 1)),
        ((0, 2), "step 0: step raised on rank 0: E: no", 0, (0,)),
        ((2, 1), "step 1: step raised on rank 1: E: no", 1, (1,)),
    ],
)
def test_the_earliest_problem_is_reported(
    steps: tuple[int, int], words: str, step: int, ranks: tuple[int, ...]
) -> None:
    of = evidence()
    for trace, at in zip(of.ranks, steps, strict=True):
        trace.problem = Problem(step=at, call="step", error="E: no")
    found = finding(of, "liveness.completes")
    assert (found.message, found.step, found.ranks) == (words, step, ranks)


@pytest.mark.parametrize(
    ("hung", "words"),
    [
        ((1,), "rank 1 hangs: still running after 40.0 s; ranks 0, 2 only wait for it"),
        ((0, 2), "ranks 0, 2 hang: still running after 40.0 s; rank 1 only waits for"),
        ((0, 1, 2), "ranks 0, 1, 2 hang: still running after 40.0 s"),
    ],
)
def test_a_hang_names_the_ranks_that_hang_and_those_that_wait(
    hung: tuple[int, ...], words: str
) -> None:
    of = evidence(size=3)
    for trace in of.ranks:
        trace.steps.clear()
    for rank in hung:
        of.ranks[rank].hung = "still running after 40.0 s"
    found = finding(of, "liveness.completes")
    assert found.message.startswith(words) and "raised" not in found.message
    # the steps of a hung rank are lost with its process
    assert (found.status, found.step, found.ranks) == (Status.FAIL, None, hung)
    assert found.cause == "a rank hangs"


def test_a_rank_that_raised_explains_one_that_hung() -> None:
    of = evidence()
    of.ranks[0].problem = Problem(step=1, call="step", error="E: no")
    of.ranks[1].hung = "still running after 40.0 s"
    found = finding(of, "liveness.completes")
    assert found.message == "step 1: step raised on rank 0: E: no"


# - Misuse


def test_wrong_calls_that_one_rank_did_not_get_to_are_not_excused() -> None:
    of = evidence()
    of.ranks[0].misuse, of.ranks[1].misuse = [], None
    assert finding(of, "misuse.refused").status is Status.INCONCLUSIVE


# - Parity


@pytest.mark.parametrize(
    ("lack", "words", "absent"),
    [
        (Lack.UNSEEN, "write optimizers(stack) to name", "use more rows"),
        (Lack.NOISE, "use more rows or a smaller", "optimizers(stack)"),
        (Lack.NOT_FINITE, "a precision with a larger range", "use more rows"),
    ],
)
def test_a_gradient_that_is_not_compared_has_one_reason(
    lack: Lack, words: str, absent: str
) -> None:
    of = parity_of(evidence(), ("gradient", 0.5))
    assert of.parity is not None
    of.parity.lacks("gradient", lack, step=2, elements=6)
    of.parity.lacks("gradient", lack, step=1, elements=2)
    of.parity.lacks("gradient", Lack.UNSEEN, step=0, elements=1)
    found = finding(of, "parity.gradient")
    assert found.status is Status.INCONCLUSIVE
    since = 0 if lack is Lack.UNSEEN else 1
    assert f"them: from step {since} on {lack.value}: " in found.message
    assert words in found.message and absent not in found.message


@pytest.mark.parametrize(
    ("kind", "lack", "words"),
    [
        ("update", Lack.DIRECTION, "use a precision with less rounding"),
        ("update", Lack.NOISE, "below the rounding of the weights (use a larger"),
        ("loss", Lack.NOISE, "use more rows or a smaller learning rate"),
        ("loss", Lack.COUNTS, "return the loss of the whole batch on all ranks"),
    ],
)
def test_an_update_and_a_loss_have_one_reason_as_well(
    kind: str, lack: Lack, words: str
) -> None:
    of = parity_of(evidence(), (kind, 0.5))
    assert of.parity is not None
    of.parity.lacks(kind, lack, step=1, elements=99)
    found = finding(of, f"parity.{kind}")
    assert found.status is Status.INCONCLUSIVE
    assert f": from step 1 on {lack.value}: " in found.message
    assert words in found.message and "train_step" not in found.message


def test_a_pass_says_why_an_element_was_not_compared() -> None:
    of = parity_of(evidence(), ("update", 0.5))
    assert of.parity is not None
    of.parity.compared["update"] = 90
    of.parity.lacks("update", Lack.NOISE, step=2, elements=1)
    of.parity.lacks("update", Lack.DIRECTION, step=1, elements=9)
    found = finding(of, "parity.update")
    assert found.status is Status.PASS
    left = f"; 10 elements not compared, from step 1 on: {Lack.DIRECTION.value}"
    assert found.message.endswith(left)


def test_a_loss_that_nobody_returns_is_reported() -> None:
    found = finding(parity_of(evidence()), "parity.loss")
    assert found.message.endswith("train_step returned no loss on any rank")


def parity_of(of: Evidence, *rows: tuple[str, float]) -> Evidence:
    parity = parity_without_rows()
    for kind, error in rows:
        add(parity, row(kind, error=error))
    return Evidence(
        scenario=of.scenario, ranks=of.ranks, control=of.control, parity=parity
    )


def test_a_parity_failure_names_parameter_rank_and_bound() -> None:
    of = parity_of(evidence(), ("gradient", 2.0), ("update", 3.0), ("loss", 4.0))
    bound = "differs from the fp64 truth: its true value is 0, and here it is off by"
    for law, subject, error in (
        ("gradient", "the gradient of w on rank 1", 2),
        ("update", "the update of w on rank 1", 3),
        ("loss", "the loss", 4),
    ):
        found = finding(of, f"parity.{law}")
        assert found.message == f"step 2: {subject} {bound} {error}, bound 1"
        assert found.ranks == (() if law == "loss" else (1,))
    of = parity_of(evidence())
    assert of.parity is not None
    add(of.parity, replace(row("gradient", error=0.5), bound=0.25, size=2.0))
    assert finding(of, "parity.gradient").message == (
        "step 2: the gradient of w on rank 1 differs from the fp64 truth "
        "by 0.5 of its norm, bound 0.25"
    )
    of = parity_of(evidence())
    assert of.parity is not None
    add(of.parity, replace(row("loss", error=math.inf), size=2.0))
    assert finding(of, "parity.loss").message == (
        "step 2: the loss differs from the fp64 truth: it is inf or nan"
    )


def test_parity_of_gradients_is_skipped_if_all_steps_are_bad() -> None:
    of = evidence()
    for seen in of.ranks[1].steps:
        seen.decisions[0].non_finite = ["w"]
    nothing = parity_of(of)
    assert finding(nothing, "parity.gradient").status is Status.SKIPPED
    assert finding(nothing, "parity.update").status is Status.INCONCLUSIVE
    of.ranks[1].steps[2].decisions[0].non_finite = []
    assert finding(nothing, "parity.gradient").status is Status.INCONCLUSIVE


@pytest.mark.parametrize(
    ("kind", "missed", "status"),
    [
        ("gradient", 3, "pass"),
        ("gradient", 4, "inconclusive"),
        ("loss", 3, "pass"),
        ("loss", 4, "inconclusive"),
        ("update", 27, "pass"),
        ("update", 28, "inconclusive"),
    ],
)
def test_parity_over_less_than_its_least_share_is_no_pass(
    kind: str, missed: int, status: str
) -> None:
    of = parity_of(evidence(), *[(kind, 0.5)] * 3)
    assert of.parity is not None
    for _ in range(missed):
        add(of.parity, replace(row(kind, np.nan), bound=np.inf))
    found = finding(of, f"parity.{kind}")
    assert (found.status, found.compared, found.not_compared) == (status, 3, missed)
    if status != "pass":
        least = "10" if kind == "update" else "50"
        assert found.message.startswith(
            f"3 of {3 + missed} comparisons could be made, and a pass "
            f"needs {least}% of them: "
        )


def test_a_departure_is_reported_even_after_few_comparisons() -> None:
    of = parity_of(evidence(), ("gradient", 2.0))
    assert of.parity is not None
    for _ in range(9):
        assert of.parity is not None
    add(of.parity, replace(row("gradient", np.nan), bound=np.inf))
    assert finding(of, "parity.gradient").status is Status.FAIL


@pytest.mark.parametrize(
    ("error", "bound", "ratio"),
    [(0.0, 0.0, 0.0), (0.0, 2.0, 0.0), (1.0, 2.0, 0.5), (0.5, 0.0, np.inf)],
)
def test_the_ratio_of_a_row_is_its_error_over_its_bound(
    error: float, bound: float, ratio: float
) -> None:
    assert replace(row("gradient", error), bound=bound).ratio == ratio


def test_parity_keeps_counts_worst_and_first_bad_rows() -> None:
    parity = Parity(per_step=[0.0] * 4)
    errors = [(1, "w", 1.0), (2, "w", 3.0), (2, "b", 5.0), (2, "w", 4.0), (3, "w", 9.0)]
    rows = [
        replace(row("gradient", error), step=step, parameter=name)
        for step, name, error in errors
    ]
    for each in [*rows, row("update", error=0.25)]:
        add(parity, each)
    assert parity.compared == {"gradient": 5, "update": 1}
    assert parity.not_compared.total() == 0
    assert parity.worst["gradient"] is rows[4]
    assert parity.first_bad == {"gradient": rows[2]}  # the worst of its first step
    assert parity.per_step == [0.0, 1.0, 5.0, 9.0]
    assert parity.per_parameter == {"w": 9.0, "b": 5.0}


def test_errors_are_absolute_if_the_truth_is_zero() -> None:
    where, truth = ("gradient", 0, "w", 0), (np.zeros(2), np.arange(2))
    rows = list(_compare(where, np.array([0.0, 0.5]), truth, (2.0, 4.0)))
    assert [(r.measure, r.error, r.bound) for r in rows] == [
        ("norm", 0.5, 2.0),
        ("largest element", 0.5, 4.0),
    ]


def test_a_bound_itself_is_kept_and_no_error_is_worst_of_none() -> None:
    parity = Parity(per_step=[0.0] * 4)
    add(parity, row("gradient", error=0.0))
    add(parity, row("gradient", error=1.0))
    add(parity, row("gradient", error=0.5))
    assert parity.first_bad == {}
    assert parity.worst["gradient"].error == 1.0
    add(parity, row("gradient", error=np.nextafter(1.0, 2.0)))
    assert set(parity.first_bad) == {"gradient"}


# - Scale


def one_step(
    settings: str, before: tuple[float, int], after: tuple[float, int], *, bad: bool
) -> Finding:
    """Return the finding of ``scale.rule`` for one step of a run on two ranks.

    ``before`` and ``after`` are scale and growth tracker around the step.
    """
    of = evidence(scenario=Scenario.parse(f"ddp/2/fp32/sgd/none/steps=1,{settings}"))
    for trace in of.ranks:
        trace.steps = [trace.steps[MANUAL_STEP]]
        (seen,) = trace.steps
        seen.scale_before, seen.growth_before = before
        seen.scale_after, seen.growth_after = after
        seen.decisions[0].non_finite = ["w"] * bad
    return finding(of, "scale.rule")


LAST = 2.0**127
PLAIN, MANUAL = "interval=3", "interval=3,recipe=manual-scale"
OFF = "interval=3,recipe=disabled"


@pytest.mark.parametrize(
    ("settings", "before", "after", "bad", "right"),
    [
        (PLAIN, (8.0, 0), (8.0, 1), False, True),
        (PLAIN, (8.0, 1), (8.0, 2), False, True),
        (PLAIN, (8.0, 2), (16.0, 0), False, True),
        (PLAIN, (8.0, 2), (8.0, 0), False, False),
        (PLAIN, (8.0, 2), (16.0, 1), False, False),
        (PLAIN, (8.0, 1), (16.0, 0), False, False),
        (PLAIN, (8.0, 2), (4.0, 0), True, True),
        (PLAIN, (8.0, 2), (4.0, 2), True, False),
        (PLAIN, (8.0, 2), (8.0, 0), True, False),
        # growth that would not be finite does not happen, and counts anew
        (PLAIN, (LAST, 2), (LAST, 0), False, True),
        (PLAIN, (LAST, 2), (LAST, 2), False, False),
        # below the smallest normal number a floor is one's own choice
        (PLAIN, (SMALLEST, 1), (SMALLEST, 0), True, True),
        (PLAIN, (SMALLEST, 1), (SMALLEST / 2, 0), True, True),
        (PLAIN, (SMALLEST, 1), (SMALLEST, 1), True, False),
        (PLAIN, (SMALLEST, 1), (SMALLEST * 2, 0), True, False),
        (PLAIN, (SMALLEST * 2, 1), (SMALLEST * 2, 0), True, False),
        (PLAIN, (SMALLEST * 2, 1), (SMALLEST, 0), True, True),
        # a scale set by hand leaves the count
        (MANUAL, (8.0, 2), (64.0, 2), False, True),
        (MANUAL, (8.0, 2), (64.0, 0), False, False),
        (MANUAL, (8.0, 2), (64.0, 2), True, True),
        (MANUAL, (8.0, 2), (16.0, 0), False, False),
        (OFF, (1.0, 0), (1.0, 0), False, True),
        (OFF, (1.0, 0), (1.0, 1), False, False),
        (OFF, (1.0, 0), (0.5, 0), True, False),
    ],
)
def test_one_update_follows_the_rule(
    settings: str,
    before: tuple[float, int],
    after: tuple[float, int],
    bad: bool,
    right: bool,
) -> None:
    expected = Status.PASS if right else Status.FAIL
    assert one_step(settings, before, after, bad=bad).status is expected


def untold(of: Evidence) -> Evidence:
    """Return the run with a scaler whose state_dict has no growth tracker."""
    for trace in of.ranks:
        for seen in trace.steps:
            seen.growth_before = seen.growth_after = None
    return of


@pytest.mark.parametrize("bad", [False, True])
def test_a_scaler_need_not_report_its_growth_tracker(bad: bool) -> None:
    of = untold(evidence(bad=bad))
    assert finding(of, "agreement.growth").status is Status.SKIPPED
    told = finding(of, "agreement.growth").message
    assert told == "no two ranks have a growth tracker"
    for law in ("scale.rule", "scale.continuity", "agreement.scale"):
        assert finding(of, law).status is Status.PASS, law


def test_a_tracker_on_one_rank_alone_agrees_with_nothing() -> None:
    of = evidence()
    for seen in of.ranks[0].steps:
        seen.growth_before = seen.growth_after = None
    assert finding(of, "agreement.growth").status is Status.SKIPPED


def test_agreement_is_skipped_if_one_rank_alone_trains() -> None:
    of = evidence()
    for seen in of.ranks[1].steps:
        seen.decisions[0].parameters_changed = None
    found = finding(of, "agreement.skip")
    assert found.status is Status.SKIPPED
    assert found.message == "no two ranks have a decision"


@pytest.mark.parametrize(
    ("bad", "step", "factor"),
    [(False, 0, 2.0), (False, 1, 0.5), (True, BAD_STEP, 2.0), (True, 2, 2.0)],
)
def test_a_tracker_that_is_not_reported_is_counted(
    bad: bool, step: int, factor: float
) -> None:
    of = untold(evidence(bad=bad))
    for trace in of.ranks:
        trace.steps[step].scale_after *= factor
    found = finding(of, "scale.rule")
    assert (found.status, found.step) == (Status.FAIL, step)


@pytest.mark.parametrize(
    ("factor", "status"), [(1.0, "pass"), (2.0, "pass"), (4.0, "fail"), (0.5, "fail")]
)
def test_a_count_that_a_load_may_have_lost_is_not_held_against_a_scaler(
    factor: float, status: str
) -> None:
    resumed = replace(SCENARIO, recipe="resume")
    of = untold(evidence(scenario=resumed))
    for trace in of.ranks:
        later = trace.steps[resumed.resume_step :]
        later[0].scale_after = later[0].scale_before * factor
        later[1].scale_before = later[0].scale_after
        later[1].scale_after = later[0].scale_after * (1.0 if factor == 2.0 else 2.0)
    assert finding(of, "scale.rule").status == status


def test_a_scale_is_set_by_hand_at_one_step_only() -> None:
    of = evidence(scenario=Scenario.parse(f"ddp/2/fp32/sgd/none/steps=4,{MANUAL}"))
    of.ranks[0].steps[0].scale_after = 64.0
    of.ranks[0].steps[0].growth_after = 0
    assert finding(of, "scale.rule").step == 0


def test_a_scale_set_by_hand_is_named_as_such() -> None:
    found = one_step(MANUAL, (8.0, 2), (64.0, 0), bad=True)
    assert found.message == (
        "step 2: after update(64) rank 0 went from scale 8, tracker 2 to 64, 0; the "
        "rule says 64, 2"
    )


def test_any_scale_above_zero_is_positive() -> None:
    of = evidence()
    of.ranks[1].steps[0].scale_after = 2.0**-149
    assert finding(of, "scale.positive").status is Status.PASS


def test_the_rules_value_is_reported() -> None:
    of = evidence(bad=True)
    of.ranks[1].steps[BAD_STEP].scale_after = 8.0
    found = finding(of, "scale.rule")
    assert found.message == (
        "step 1: after a bad step rank 1 went from scale 8, tracker 1 to 8, 0; the "
        "rule says 4, 0"
    )
    assert found.numbers == {"got": 8.0, "expected": 4.0}
    of = evidence()
    of.ranks[0].steps[0].growth_after = 0
    assert "after a good step rank 0" in finding(of, "scale.rule").message


def test_a_state_that_changes_between_steps_breaks_continuity() -> None:
    of = evidence()
    of.ranks[1].steps[2].growth_before = 1
    found = finding(of, "scale.continuity")
    assert found.message == (
        "step 2: rank 1 left step 1 with scale 16, tracker 0, and starts with 16, 1"
    )
    assert (found.step, found.ranks) == (2, (1,))
    assert found.numbers == {"got": 16.0, "expected": 16.0}


def test_continuity_of_a_single_step_is_skipped() -> None:
    of = evidence()
    for trace in of.ranks:
        del trace.steps[1:]
    assert finding(of, "scale.continuity").status is Status.SKIPPED


def test_steps_that_were_not_finished_are_not_compared() -> None:
    of = evidence()
    for trace in of.ranks:
        trace.steps[3].complete = False
        trace.steps[3].scale_before = 99.0
        trace.steps[3].scale_after = float("nan")
    for law in ("scale.continuity", "scale.positive", "scale.rule", "agreement.scale"):
        assert finding(of, law).status is Status.PASS, law


# - Skip


def test_a_good_step_after_a_bad_one_is_looked_at() -> None:
    of = evidence(bad=True)
    of.ranks[0].steps[BAD_STEP + 1].decisions[0].parameters_changed = False
    found = finding(of, "skip.all-ranks-step")
    assert found.message == (
        "step 2: rank 0 did not step although all gradients are finite"
    )


def test_a_step_without_gradients_is_reported() -> None:
    of = replace(evidence(), scaler=False)
    for trace in of.ranks:
        trace.steps[2].decisions[0].parameters_changed = False
        trace.steps[2].gradients = {}
    text = "step 2: ranks 0, 1 did not step because no parameter has a gradient"
    assert finding(of, "skip.all-ranks-step").message == text
    for trace in of.ranks:
        trace.steps[2].gradients = {"w": np.ones(1)}
    assert "all gradients are finite" in finding(of, "skip.all-ranks-step").message


def test_parameters_that_are_not_stepped_beside_others_are_named() -> None:
    of = evidence()
    for trace in of.ranks:
        trace.owned = [["a"], ["b", "c", "d", "e"]]
        decision = trace.steps[2].decisions[0]
        decision.others, decision.names = 1, ["a"]
        still = Decision(parameters_changed=False, others=1, names=["b", "c", "d", "e"])
        trace.steps[2].decisions.append(still)
    found = finding(of, "skip.all-ranks-step")
    assert found.message == (
        "step 2: ranks 0, 1 did not step b, c, d and 1 more, although all gradients "
        "are finite"
    )


def planted(plan: str, *, injected: str = "") -> Evidence:
    """Return a right run with the planted faults ``plan``; at most one was injected."""
    of = evidence(
        bad=bool(injected), scenario=replace(SCENARIO, faults="inf@r1s1:first")
    )
    object.__setattr__(of.scenario, "faults", plan)  # of a model with one parameter
    if injected:
        of.ranks[1].steps[BAD_STEP].faults = [injected]
    return of


@pytest.mark.parametrize("law", ["skip.all-ranks-skip", "skip.no-side-effects"])
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("inf@r1s1:w", "w had no gradient on rank 1"),
        ("inf@r1s1:head", "no element of head is on rank 1"),
        ("nan@r*s1:head", "no element of head is on any rank"),
        ("nan@r*s1:last", "the last parameter had no gradient on any rank"),
        ("inf@r0s1:loss", "no loss was on rank 0"),
    ],
)
def test_a_planted_fault_that_was_not_injected_is_reported(
    law: str, plan: str, why: str
) -> None:
    found = finding(planted(plan), law)
    assert found.status is Status.INCONCLUSIVE
    assert found.message == f"{plan} was due at step 1 and was not injected: {why}"
    assert (found.step, found.compared, found.not_compared) == (1, 0, 2)


@pytest.mark.parametrize("law", ["skip.all-ranks-skip", "skip.no-side-effects"])
def test_one_fault_that_struck_does_not_hide_another(law: str) -> None:
    one, other = "inf@r1s1:w", "nan@r0s*:w"
    assert finding(planted(one, injected=f"{one}=w"), law).status is Status.PASS
    found = finding(planted(f"{one};{other}", injected=f"{one}=w"), law)
    assert (found.status, found.compared, found.not_compared) == ("inconclusive", 2, 8)


def test_a_violation_goes_before_a_fault_that_did_not_strike() -> None:
    of = planted("inf@r1s1:w;nan@r0s2:w", injected="inf@r1s1:w=w")
    of.ranks[0].steps[BAD_STEP].decisions[0].parameters_changed = True
    assert finding(of, "skip.all-ranks-skip").status is Status.FAIL


def test_a_fault_of_a_step_that_was_not_reached_was_not_due() -> None:
    of = planted("inf@r1s3:w")
    for trace in of.ranks:
        trace.steps[3].complete = False
    assert finding(of, "skip.all-ranks-skip").status is Status.SKIPPED


# - Transparency


@pytest.mark.parametrize(
    ("got", "want", "equal"),
    [
        (SUBNORMAL, 0.0, False),
        (0.0, SUBNORMAL, False),
        (SUBNORMAL / 2, 0.0, True),
        (0.0, SUBNORMAL / 2, True),
        (SUBNORMAL / 2, SUBNORMAL / 4, True),
    ],
)
def test_transparency_compares_down_to_its_subnormal_limit(
    got: float, want: float, equal: bool
) -> None:
    of = evidence()
    assert of.control is not None
    of.ranks[0].steps[1].gradients["w"][0] = got
    of.control[0].steps[1].gradients["w"][0] = want
    expected = Status.PASS if equal else Status.FAIL
    assert finding(of, "transparency.gradient").status is expected


def test_the_element_that_differs_is_reported() -> None:
    of = evidence()
    of.ranks[1].steps[2].gradients["w"][1] = 0.5
    found = finding(of, "transparency.gradient")
    assert found.message == (
        "step 2: the gradient of w (0.5 for -0.5, 1 of 2 elements) on rank 1 is not "
        "bitwise what the run without a scaler gives"
    )
    assert (found.step, found.ranks, found.parameter) == (2, (1,), "w")


@pytest.mark.parametrize("law", ["transparency.gradient", "transparency.bitwise"])
def test_a_bad_gradient_on_one_rank_ends_the_comparison(law: str) -> None:
    of = evidence()
    of.ranks[1].steps[1].decisions[0].non_finite = ["w"]
    assert finding(of, law).message.startswith("2 ")
