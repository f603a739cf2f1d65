"""Reported norms, clip factors and dtypes of reductions of workloads."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from gradparity.conformance import Case, Runner, Scenario, Status
from gradparity.conformance.comparison.laws.norm import _used_norm, factor
from gradparity.conformance.comparison.measured import Parity
from gradparity.conformance.comparison.parity import measure_parity
from gradparity.conformance.status import Finding
from gradparity.fixtures import local
from gradparity.fixtures.faulty import stacks
from gradparity.fixtures.faulty.plain import Broken
from gradparity.fixtures.faulty.stacks import FAULTY_STACKS, RIGHT_STACKS
from gradparity.tests.conformance.test_parity import traces_of
from gradparity.tests.made_up import BAD_STEP, add, clip_row, evidence, finding, row

NEW = ("norm.reported", "norm.factor", "dtype.reduction")


def checked(runner: Runner, where: str) -> Case:
    case = runner.run("none", Scenario.parse(where))
    assert not case.problem
    return case


def told(case: Case) -> dict[str, Finding]:
    return {v.law: v for v in case.verdicts}


@pytest.mark.parametrize(
    ("stack", "broken"), FAULTY_STACKS.items(), ids=lambda x: getattr(x, "__name__", "")
)
@pytest.mark.few(5)
def test_a_faulty_workload_is_caught_by_its_check(
    runner: Runner, stack: type[Any], broken: Broken
) -> None:
    case = checked(runner, broken.at)
    assert told(case)[broken.law].status is Status.FAIL, told(case)


RIGHT = [(stack, at) for stack, places in RIGHT_STACKS.items() for at in places]


@pytest.mark.parametrize(("stack", "at"), RIGHT, ids=[at[:40] for _, at in RIGHT])
@pytest.mark.few(5)
def test_a_right_workload_fails_no_check(
    runner: Runner, stack: type[Any], at: str
) -> None:
    found = told(checked(runner, at))
    others = {law: f for law, f in found.items() if f.status is not Status.PASS}
    assert {f.status for f in others.values()} <= {Status.SKIPPED}, others
    decided = {
        stacks.ClipsByTheWholeNorm: {"norm.reported", "norm.factor"},
        stacks.CompressesAsPromised: {"dtype.reduction"},
        stacks.FlatEngine: {*NEW},
        stacks.Replicated: {"dtype.reduction"},
        stacks.ShardedWithAPolicy: {"dtype.reduction"},
        stacks.SumsPartialGradients: {"dtype.reduction"},
    }[stack]
    assert {law for law in NEW if found[law].status is Status.PASS} == decided
    assert all(found[law].compared for law in decided)


def test_right_clipping_of_wrong_gradients_is_inconclusive(runner: Runner) -> None:
    wrong = FAULTY_STACKS[stacks.DoublesOneGradient]
    found = told(checked(runner, wrong.at))
    for law in ("norm.reported", "norm.factor"):
        assert found[law].status is Status.INCONCLUSIVE
        assert "the gradients themselves differ" in found[law].message


def test_a_finding_says_which_factor_came_and_which_was_due(runner: Runner) -> None:
    at = FAULTY_STACKS[stacks.LeavesReplicasUnclipped].at
    found = told(checked(runner, at))["norm.factor"]
    assert found.numbers["got"] == pytest.approx(1.0)
    assert found.numbers["expected"] == pytest.approx(0.25 / 0.85276, rel=1e-4)
    assert "first.weight, first.bias, norm.weight, norm.bias and 1 more" in (
        found.message
    )
    assert "came with 1, due is 0.293165 (clip_norm 0.25, norm 0.85276)" in (
        found.message
    )
    assert (found.step, found.ranks, found.cause) == (0, (0, 1, 2, 3), "not clipped")


@pytest.mark.parametrize(
    "stack", [stacks.LeavesReplicasUnclipped, stacks.CompressesGradients]
)
def test_the_cause_is_reported_before_its_consequences(
    runner: Runner, stack: type[Any]
) -> None:
    broken = FAULTY_STACKS[stack]
    failed = [v.law for v in checked(runner, broken.at).verdicts if v.status == "fail"]
    assert failed[0] == broken.law
    assert "parity.gradient" in failed


def test_a_norm_of_a_gradient_of_zeros_has_no_order() -> None:
    e = evidence()
    for trace in e.ranks:
        for at in trace.steps:
            at.reported_norm = 1.0
    parity = Parity(reference_norm=[0.0] * 4, norm_bound=[0.5] * 4)
    told = finding(replace(e, parity=parity), "norm.reported")
    assert told.status is Status.FAIL
    assert told.message.endswith("reports the norm 1 of a gradient of 0")


def test_the_norm_of_a_scaled_gradient_is_seen(runner: Runner) -> None:
    """The scaler's ``unscale_`` does nothing: only the reported norm shows it."""
    scaler = "gradparity.fixtures.faulty:LeavesExplicitUnscaleOut"
    (where,) = [
        at for at in RIGHT_STACKS[stacks.ClipsByTheWholeNorm] if at[:5] == "tp2/2"
    ]
    case = runner.run(scaler, Scenario.parse(f"{where},scale=1024"))
    found = told(case)
    assert found["norm.reported"].status is Status.FAIL
    assert "1024 times it" in found["norm.reported"].message
    assert found["norm.factor"].status is Status.PASS


class LeavesItsScale(stacks.ClipsByTheWholeNorm):
    """Clips gradients before it divides them by its own scale; one is slightly off."""

    def norm(self, named: dict[str, Tensor]) -> float:
        for number, gradient in enumerate(named.values()):
            local(gradient).mul_(256 * (1.0001 if number == 0 else 1.0))
        return super().norm(named)


def test_slightly_wrong_gradients_do_not_explain_a_norm(runner: Runner) -> None:
    """Clipping hides that the gradients were 256 times too large."""
    spec = f"{__name__}:{LeavesItsScale.__name__}"
    found = told(checked(runner, f"dp2/2/fp32/own/none/model={spec},steps=2"))
    assert found["parity.gradient"].status is Status.FAIL
    assert found["norm.reported"].status is Status.FAIL
    assert "256 times it" in found["norm.reported"].message


class Small(stacks.ClipsByTheWholeNorm):
    """The norm of the gradients is far below 0.25 and below ``clip_norm``."""

    clip_norm = 1.0

    def loss(self, output: Any, targets: Any) -> Any:
        return super().loss(output, targets) / 1024


class SmallByShards(Small, stacks.ClipsByTheNormOfItsShards):
    """Each rank clips by its own elements, and reports no norm."""


@pytest.mark.parametrize("stack", [Small, SmallByShards])
def test_the_recipe_clips_small_gradients_too(runner: Runner, stack: type) -> None:
    spec = f"{__name__}:{stack.__name__}"
    case = checked(runner, f"dp2/2/fp32/own/none/model={spec},steps=2,recipe=clip-norm")
    failed = {v.law for v in case.verdicts if v.status is Status.FAIL}
    assert ("norm.factor" in failed) == (stack is SmallByShards), failed
    assert told(case)["norm.factor"].compared


@pytest.mark.parametrize("scaler", ["PlainScaler", "none"])
def test_the_recipe_that_clips_is_looked_at_too(runner: Runner, scaler: str) -> None:
    where = Scenario.parse("fsdp+tp/4/fp32/sgd/none/steps=2,recipe=clip-norm")
    spec = scaler if scaler == "none" else f"gradparity.fixtures.faulty:{scaler}"
    found = told(runner.run(spec, where))
    assert found["norm.factor"].status is Status.PASS
    assert found["norm.factor"].compared == 64
    assert found["norm.reported"].status is Status.SKIPPED


NOISY = (
    "tp/2/bf16-autocast/adagrad/nan@r*s1:last[last];nan@r*s3:last[last]"
    "/steps=5,recipe=clip-norm,interval=2"
)
"""Scenario in which after two steps the noise is half of a gradient, but only 1 % of
its clip factor."""


@pytest.mark.parametrize(
    ("planted", "status", "who"),
    [
        (1.0, Status.PASS, ""),
        (0.5, Status.FAIL, "every gradient"),
        (1.0 / 0.711, Status.FAIL, "every gradient"),
    ],
)
def test_a_factor_is_known_in_noise_that_is_as_large_as_the_gradient(
    runner: Runner, planted: float, status: Status, who: str
) -> None:
    scenario = Scenario.parse(NOISY)
    case = runner.run("gradparity.fixtures.faulty:PlainScaler", scenario)
    assert case.evidence is not None
    traces = copy.deepcopy(case.evidence.ranks)
    for trace in traces:
        for gradient in trace.steps[2].gradients.values():
            gradient *= planted
    measured = measure_parity(scenario, traces)
    found = factor(replace(case.evidence, ranks=traces, parity=measured))
    assert found.status is status, found
    if status is Status.PASS:
        assert found.compared > 40  # of 3 steps, 2 ranks, 8 parameters
    else:
        assert f"step 2: {who} on ranks 0, 1 clipped" in found.message


# - On made-up traces


def test_a_factor_may_be_off_by_rounding_though_no_reference_rounds() -> None:
    model = "model=gradparity.tests.workloads.stacks:Exact,steps=1,recipe=clip-norm"
    scenario = Scenario.parse(f"single/1/fp32/own/none/{model}")
    (trace,) = traces_of(scenario)
    gradient = trace.steps[0].gradients["weight"]
    np.nextafter(gradient, np.float32(1), out=gradient)
    (found,) = measure_parity(scenario, [trace]).clipped
    assert found.above_noise
    assert 0 < abs(found.factor - found.due) <= found.bound < 1e-6


def norms(reports: dict[int, float | None], *, step: int = 1, size: int = 2) -> Finding:
    """Return the finding if ranks report these norms at a step; 0.5 is right."""
    of = evidence(size=size)
    for rank, norm in reports.items():
        of.ranks[rank].steps[step].reported_norm = norm
    return finding(of, "norm.reported")


@pytest.mark.parametrize(
    ("norm", "right"),
    [
        (0.5, True),
        (0.5 + 0.9e-6, True),
        (0.5 - 0.9e-6, True),
        (0.5 + 1.1e-6, False),
        (0.0, False),
        (float("inf"), False),
        (float("nan"), False),
    ],
)
def test_a_norm_may_be_off_by_its_bound(norm: float, right: bool) -> None:
    found = norms({1: norm})
    assert found.status is (Status.PASS if right else Status.FAIL)
    assert found.ranks == (() if right else (1,))


def test_the_rank_with_another_norm_is_named_and_the_right_one() -> None:
    found = norms({1: 1.0}, size=3)
    assert found.message == (
        "step 1: rank 1 wrong: rank 1 reports the norm 1, that of the whole gradient "
        "is 0.5, 2 times it, bound 1e-06; ranks 0, 2 right"
    )


def test_one_missing_report_is_counted_and_a_rank_without_any_is_none() -> None:
    found = norms({1: None})
    assert (found.status, found.compared, found.not_compared) == ("pass", 7, 1)
    of = evidence()
    for seen in of.ranks[1].steps:
        seen.reported_norm = None
    found = finding(of, "norm.reported")
    assert (found.status, found.compared, found.not_compared) == ("pass", 4, 0)
    for seen in of.ranks[0].steps:
        seen.reported_norm = None
    found = finding(of, "norm.reported")
    assert (found.status, found.message) == ("skipped", "the workload reports no norm")


def test_the_norm_of_a_skipped_step_is_left_out() -> None:
    of = evidence(bad=True)
    for trace in of.ranks:
        trace.steps[BAD_STEP].reported_norm = float("inf")
    assert finding(of, "norm.reported").status is Status.PASS


@pytest.mark.parametrize("law", ["norm.reported", "norm.factor"])
def test_once_the_weights_depart_norms_say_nothing(law: str) -> None:
    of = evidence()
    assert of.parity is not None
    add(of.parity, replace(row("update", error=2.0), step=0))
    for trace in of.ranks:
        trace.steps[1].reported_norm = 9.0
    of.parity.clipped[2:] = [replace(r, factor=1.0) for r in of.parity.clipped[2:]]
    found = finding(of, law)
    assert (found.status, found.compared, found.not_compared) == ("inconclusive", 2, 6)


STOPPED = "gradparity.fixtures.faulty.stacks:{}"


@pytest.mark.parametrize(
    ("model", "recipe", "law", "status"),
    [
        # gradparity's own loop reports no norm, and clips in one recipe
        ("digits", "clip-norm", "norm.reported", "skipped"),
        ("digits", "clip-norm", "norm.factor", "inconclusive"),
        ("digits", "plain", "norm.factor", "skipped"),
        (STOPPED.format("FlatEngine"), "plain", "norm.reported", "inconclusive"),
        (STOPPED.format("FlatEngine"), "plain", "norm.factor", "inconclusive"),
        (STOPPED.format("Replicated"), "plain", "norm.reported", "skipped"),
        (STOPPED.format("Replicated"), "plain", "norm.factor", "skipped"),
    ],
)
def test_a_run_that_stopped_is_undecided_only_where_a_norm_was_due(
    model: str, recipe: str, law: str, status: str
) -> None:
    place = "ddp/2/fp32/sgd" if model == "digits" else "dp2/2/fp32/own"
    text = f"{place}/none/model={model},recipe={recipe},steps=2"
    of = replace(evidence(scenario=Scenario.parse(text)), parity=None)
    for trace in of.ranks:
        trace.steps.clear()
    assert finding(of, law).status == status


@pytest.mark.parametrize("law", ["norm.reported", "norm.factor"])
def test_a_step_without_a_bound_is_not_compared(law: str) -> None:
    of = evidence()
    assert of.parity is not None
    of.parity.norm_bound[1:3] = [float("inf")] * 2
    of.parity.clipped[2:4] = [
        replace(r, above_noise=False) for r in of.parity.clipped[2:4]
    ]
    found = finding(of, law)
    missed = 4 if law == "norm.reported" else 2
    assert (found.status, found.not_compared) == ("pass", missed)


def factors(gradients: float, *rows: float, due: float = 0.5) -> Finding:
    """Return the finding for clip factors, of which each rank has two.

    Args:
        gradients: norm of the whole gradient as it was used; the limit is 0.25.
        rows: the factors.
        due: the right factor.
    """
    of = evidence()
    assert of.parity is not None
    of.parity.clipped = [
        replace(clip_row(rank=n // 2, step=0, factor=x), due=due, parameter="wv"[n % 2])
        for n, x in enumerate(rows)
    ]
    for trace in of.ranks:
        trace.steps[0].gradients = {"w": np.array([gradients, 0], np.float32)}
    return finding(of, "norm.factor")


@pytest.mark.parametrize(
    ("used", "rows", "status"),
    [
        (0.25, (0.5, 0.5, 0.5, 0.5), "pass"),
        # above the limit: whatever the gradients are, clipping was wrong
        (0.3, (0.5, 0.5, 1.0, 0.5), "fail"),
        (0.5, (1.0, 1.0, 1.0, 1.0), "fail"),
        # below it by one factor: clipped too much
        (0.2, (0.4, 0.4, 0.4, 0.4), "fail"),
        # at it, by several: what was clipped right is another gradient
        (0.25, (0.4, 0.8, 0.4, 0.8), "inconclusive"),
        # below it, by several
        (0.2, (0.4, 0.8, 0.4, 0.8), "inconclusive"),
    ],
)
def test_wrong_factors_are_distinguished_from_wrong_gradients(
    used: float, rows: tuple[float, ...], status: str
) -> None:
    assert factors(used, *rows).status == status


@pytest.mark.parametrize(
    ("departed", "told"),
    [(False, "rounding is as large as the gradient"), (True, "(parity.gradient)")],
)
def test_factors_that_are_lost_in_noise_are_no_departure(
    departed: bool, told: str
) -> None:
    of = evidence()
    assert of.parity is not None
    of.parity.clipped = [replace(clip_row(rank=0, step=0, factor=1), above_noise=False)]
    if departed:
        add(of.parity, replace(row("gradient", error=2.0), step=0))
    found = finding(of, "norm.factor")
    assert found.status is Status.INCONCLUSIVE
    assert told in found.message
    assert ("rounding" in found.message) != departed


def test_without_clipping_a_factor_is_a_wrong_gradient() -> None:
    assert factors(0.2, 1.0, 1.0, 1.0, 1.0, due=1.0).status is Status.PASS
    assert factors(0.2, 0.5, 0.5, 0.5, 0.5, due=1.0).status is Status.INCONCLUSIVE


def test_an_element_that_two_ranks_hold_counts_once() -> None:
    of = evidence()
    seen = [trace.steps[0] for trace in of.ranks]
    for at in seen:
        at.gradients = {"w": np.array([3, 4], np.float32)}
    assert _used_norm(of, seen) == 5.0
    for at in seen:
        at.partial = {"w": (0, 1)}
    assert _used_norm(of, seen) == 10.0
