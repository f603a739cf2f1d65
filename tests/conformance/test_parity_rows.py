"""Rows that parity compares: made-up traces against made-up bounds."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from gradparity.conformance.comparison import parity as parity_module
from gradparity.conformance.comparison.bounds import ParityBounds
from gradparity.conformance.comparison.measured import Parity
from gradparity.conformance.comparison.parity import measure_parity
from gradparity.conformance.comparison.reference import Reference
from gradparity.conformance.rank.trace import Decision, RankTrace, StepTrace
from gradparity.conformance.run.recorder import _curves
from gradparity.conformance.space.scenario import Scenario
from gradparity.tests import made_up
from gradparity.tests.made_up import add, row

ONE = Scenario.parse("ddp/2/fp32/sgd/none/steps=1")
BOUND = (0.5, 0.5)
NAMES = ("a", "b")
TRUTH = {name: np.array([3.0, 4.0]) for name in NAMES}


def rank(number: int, held: Sequence[int] = (0, 1), **coordinate: int) -> RankTrace:
    """Return the trace of a rank whose elements of both parameters are right."""
    index = {name: np.array(held, np.int64) for name in NAMES}
    trace = RankTrace(
        rank=number, coordinate=coordinate or {"dp": number}, index=index, shards={}
    )
    trace.owned = [[*NAMES]]
    trace.start = {n: np.ones(len(held), np.float32) for n in NAMES}
    seen = StepTrace(step=0, complete=True, loss=2.0, decisions=[Decision()])
    mine = {n: TRUTH[n][index[n]].astype(np.float32) for n in NAMES}
    seen.gradients = dict(mine)
    seen.parameters = {n: mine[n] + 1 for n in NAMES}
    trace.steps = [seen]
    return trace


@pytest.fixture
def parity_bounds(monkeypatch: pytest.MonkeyPatch) -> ParityBounds:
    made = ParityBounds(
        truth=Reference((2.0,), (dict(TRUTH),), (dict(TRUTH),), dict(TRUTH)),
        weights=[{name: np.ones(2) for name in NAMES}],
        gradient=[dict.fromkeys(NAMES, BOUND)],
        update=[dict.fromkeys(NAMES, BOUND)],
        loss=[{"loss": BOUND}],
    )
    monkeypatch.setattr(parity_module, "make_parity_bounds", lambda *_: made)
    return made


@pytest.mark.usefixtures("parity_bounds")
def test_right_ranks_are_compared_completely_and_pass_parity() -> None:
    parity = measure_parity(ONE, [rank(0), rank(1)])
    # a loss, and on two ranks two gradients and two updates of two elements
    assert parity.compared == {"loss": 1, "gradient": 8, "update": 8}
    assert (parity.not_compared.total(), parity.first_bad) == (0, {})
    assert parity.per_step == [0.0]
    assert parity.per_parameter == {"loss": 0.0, "a": 0.0, "b": 0.0}
    assert parity.worst["loss"].rank == 0
    assert parity.reference_loss == [2.0]


@pytest.mark.usefixtures("parity_bounds")
def test_errors_are_relative_to_the_whole_tensor() -> None:
    trace = rank(1, held=(1,))
    trace.steps[0].gradients["b"][0] += 1.0
    worst = measure_parity(ONE, [rank(0), trace]).worst["gradient"]
    assert (worst.parameter, worst.rank, worst.measure) == ("b", 1, "norm")
    assert (worst.error, worst.bound, worst.ratio) == (0.2, 0.1, 2.0)


@pytest.mark.parametrize("bounds", [(math.inf, 0.5), (0.5, math.inf), (math.nan,) * 2])
@pytest.mark.parametrize("kind", ["gradient", "update", "loss"])
def test_without_a_bound_nothing_is_compared(
    parity_bounds: ParityBounds, kind: str, bounds: tuple[float, float]
) -> None:
    name = "loss" if kind == "loss" else "a"
    getattr(parity_bounds, kind)[0][name] = bounds
    parity = measure_parity(ONE, [rank(0)])
    missed = 1 if kind == "loss" else 2
    assert parity.not_compared == {kind: missed}
    assert parity.compared.total() == 1 + 4 + 4 - missed


@pytest.mark.usefixtures("parity_bounds")
def test_parameters_after_an_empty_shard_are_compared() -> None:
    trace = rank(0)
    trace.index["a"] = np.array([], np.int64)
    trace.steps[0].gradients["b"] *= 2
    trace.steps[0].parameters["b"] *= 2
    first = measure_parity(ONE, [trace]).first_bad
    assert {first[kind].parameter for kind in ("gradient", "update")} == {"b"}


def test_parameters_after_an_update_of_weight_zero_are_compared(
    parity_bounds: ParityBounds,
) -> None:
    parity_bounds.weights[0]["a"][:] = 0.0
    trace = rank(0)
    trace.steps[0].parameters["b"] *= 2
    assert measure_parity(ONE, [trace]).first_bad["update"].parameter == "b"
    trace.steps[0].parameters["b"] /= 2
    trace.steps[0].parameters["a"] *= 2
    assert measure_parity(ONE, [trace]).first_bad == {}


@pytest.mark.usefixtures("parity_bounds")
def test_gradients_of_a_skipped_step_are_not_compared() -> None:
    trace = rank(0)
    trace.steps[0].decisions = [Decision(non_finite=["a"])]
    trace.steps[0].gradients["b"] *= 2
    assert "gradient" not in measure_parity(ONE, [trace]).worst


@pytest.mark.usefixtures("parity_bounds")
def test_a_gradient_that_a_rank_has_not_is_not_compared() -> None:
    trace = rank(0)
    del trace.steps[0].gradients["a"]
    parity = measure_parity(ONE, [trace])
    assert parity.compared == {"loss": 1, "gradient": 2, "update": 4}
    assert parity.not_compared == {"gradient": 2}


@pytest.mark.usefixtures("parity_bounds")
def test_ranks_without_a_loss_do_not_count() -> None:
    first, second = rank(0), rank(1)
    first.steps[0].loss = None
    assert "loss" not in measure_parity(ONE, [first, second]).first_bad
    second.steps[0].loss = None
    assert "loss" not in measure_parity(ONE, [first, second]).worst


def partial(dp: int, tp: int, share: float) -> RankTrace:
    trace = rank(2 * dp + tp, dp=dp, tp=tp)
    trace.steps[0].gradients["a"] = (TRUTH["a"] * share).astype(np.float32)
    trace.steps[0].partial = {"a": (2 * dp, 2 * dp + 1)}
    return trace


SHARES = ((0, 0, 0.25), (0, 1, 0.75), (1, 0, 0.5), (1, 1, 0.5))


@pytest.mark.usefixtures("parity_bounds")
def test_a_partial_gradient_is_summed_over_its_ranks_alone() -> None:
    traces = [partial(*share) for share in SHARES]
    assert measure_parity(ONE, traces).first_bad == {}
    traces[3].steps[0].gradients["a"] *= 2
    first = measure_parity(ONE, traces).first_bad["gradient"]
    assert (first.parameter, first.rank) == ("a", 2)


@pytest.mark.usefixtures("parity_bounds")
def test_a_part_that_a_rank_has_not_is_not_in_the_sum() -> None:
    traces = [partial(*share) for share in SHARES]
    del traces[1].steps[0].gradients["a"]
    traces[0].steps[0].gradients["a"] *= 4
    assert measure_parity(ONE, traces).first_bad == {}


def test_the_first_of_equal_rows_is_reported() -> None:
    parity = Parity(per_step=[0.0] * 3)
    rows = [row("gradient", error=2.0) for _ in range(2)]
    for each in rows:
        add(parity, each)
    assert parity.worst["gradient"] is rows[0]
    assert parity.first_bad["gradient"] is rows[0]


def test_a_parameter_is_reported_with_its_own_ratio() -> None:
    parity = Parity(per_step=[0.0] * 3)
    add(parity, row("gradient", error=0.5))
    assert parity.per_parameter == {"w": 0.5}
    assert parity.per_step == [0.0, 0.0, 0.5]


@pytest.mark.parametrize("kind", ["gradient", "update", "loss"])
@pytest.mark.parametrize(
    ("error", "bound", "size", "compared"),
    [
        (0.5, 0.99, 1.0, 1),
        (1.0, 1.0, 1.0, 0),  # so far off are zeros
        (1.5, 2.0, 1.0, 0),
        (3.0, 2.0, 1.0, 1),  # a departure is one whatever the bound
        (1.5, 2.0, 0.0, 1),  # zeros are right
    ],
)
def test_within_a_bound_of_its_own_size_a_value_proves_nothing(
    kind: str, error: float, bound: float, size: float, compared: int
) -> None:
    parity = Parity(per_step=[0.0] * 3)
    add(parity, replace(row(kind, error), bound=bound, size=size))
    assert (parity.compared[kind], parity.not_compared[kind]) == (
        compared,
        1 - compared,
    )


def test_one_measure_that_tells_compares_a_tensor() -> None:
    parity = Parity(per_step=[0.0] * 3)
    blind = replace(row("update", 1.5), bound=2.0, size=1.0)
    parity.add("update", [blind, replace(blind, bound=0.5, error=0.1)], 7)
    assert (parity.compared["update"], parity.not_compared["update"]) == (7, 0)


def test_elements_of_weight_zero_are_counted(parity_bounds: ParityBounds) -> None:
    parity_bounds.weights[0]["a"][0] = 0.0
    parity_bounds.weights[0]["b"][:] = 0.0
    parity = measure_parity(ONE, [rank(0)])
    assert (parity.compared["update"], parity.not_compared["update"]) == (1, 3)


def test_losses_are_weighted_wherever_they_are_shown() -> None:
    # regression: O6, curves showed the mean without weights
    evidence = made_up.evidence()
    for trace, loss, weight in zip(evidence.ranks, (1.0, 4.0), (1.0, 0.5), strict=True):
        for at in trace.steps:
            at.loss, at.weight = loss, weight
    curves = _curves(evidence)
    assert curves is not None and curves.loss == [2.0] * made_up.SCENARIO.steps


def test_no_norm_is_compared_where_nothing_can_be() -> None:
    # regression: O16
    evidence = made_up.evidence()
    assert evidence.parity is not None
    evidence.parity.undecided = "the reference has no half precision"
    found = made_up.finding(evidence, "norm.reported")
    assert (found.status, found.message) == ("inconclusive", evidence.parity.undecided)
