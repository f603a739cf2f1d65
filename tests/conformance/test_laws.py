"""Checks on synthetic traces: each passes right ones and fails on its fault."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradparity.conformance import LAWS, Evidence, Scenario, Status
from gradparity.conformance.comparison import law as law_module
from gradparity.conformance.comparison.law import Law, apply_checks
from gradparity.conformance.rank.trace import Decision, Misuse, Problem, StepTrace
from gradparity.conformance.status import Finding
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


def statuses(of: Evidence) -> dict[str, str]:
    return {v.law: v.status for v in apply_checks(of)}


def failures(of: Evidence) -> set[str]:
    return {law for law, status in statuses(of).items() if status == Status.FAIL}


@pytest.mark.parametrize("bad", [False, True])
def test_a_right_run_fails_no_check(bad: bool) -> None:
    found = statuses(evidence(bad=bad))
    assert set(found) == set(LAWS)
    assert {s for s in found.values()} <= {Status.PASS, Status.SKIPPED}
    assert found["skip.all-ranks-skip"] is (Status.PASS if bad else Status.SKIPPED)


def _scale(e: Evidence) -> None:
    e.ranks[1].steps[2].scale_after = 99.0


def _growth(e: Evidence) -> None:
    e.ranks[1].steps[2].growth_after = 9


def _one_rank_skips(e: Evidence) -> None:
    e.ranks[1].steps[2].decisions[0].parameters_changed = False


def _replica(e: Evidence) -> None:
    e.ranks[1].steps[2].digests["w"] = "else"


def _steps_on_bad(e: Evidence) -> None:
    for trace in e.ranks:
        trace.steps[BAD_STEP].decisions[0].parameters_changed = True


def _counts_on_bad(e: Evidence) -> None:
    e.ranks[0].steps[BAD_STEP].decisions[0].state_changed = True


def _all_skip_good(e: Evidence) -> None:
    for trace in e.ranks:
        trace.steps[3].decisions[0].parameters_changed = False


def _no_backoff(e: Evidence) -> None:
    for trace in e.ranks:
        trace.steps[BAD_STEP].scale_after *= 2


def _zero(e: Evidence) -> None:
    for trace in e.ranks:
        trace.steps[3].scale_after = 0.0


def _not_bare(e: Evidence) -> None:
    assert e.control is not None
    e.control[1].steps[3].digests["w"] = "else"


def _flushed(e: Evidence) -> None:
    e.ranks[1].steps[2].gradients["w"][0] = 0.0


def _accepted(e: Evidence) -> None:
    e.ranks[0].misuse = [Misuse(call="a second step()", error="", changed=())]


def _sequence(e: Evidence) -> None:
    e.ranks[1].steps[0].collectives = []


def _crosstalk(e: Evidence) -> None:
    e.ranks[0].steps[3].checked_sum = (4.0, 3.0)


def _raised(e: Evidence) -> None:
    e.ranks[1].problem = Problem(step=3, call="step", error="RuntimeError: no")
    e.ranks[1].steps[3].complete = False


def _parity(kind: str) -> Callable[[Evidence], None]:
    def break_it(e: Evidence) -> None:
        assert e.parity is not None
        add(e.parity, row(kind, error=1.01))

    return break_it


def _changed_between_steps(e: Evidence) -> None:
    for trace in e.ranks:
        trace.steps[2].scale_before *= 2


def _norm(e: Evidence) -> None:
    e.ranks[1].steps[2].reported_norm = 0.4


def _factor(e: Evidence) -> None:
    assert e.parity is not None
    rank_1 = e.parity.clipped[5]
    e.parity.clipped[5] = replace(rank_1, factor=1.0)


def _narrow(e: Evidence) -> None:
    (reduction,) = e.ranks[1].steps[2].reductions
    e.ranks[1].steps[2].reductions = [replace(reduction, dtype="bfloat16")]


def _schedule_on_bad(e: Evidence) -> None:
    e.ranks[1].steps[BAD_STEP].schedule = ("1", "2")


def _schedule_stays(e: Evidence) -> None:
    e.ranks[1].steps[3].schedule = ("2", "2")


def _average_on_bad(e: Evidence) -> None:
    e.ranks[1].steps[BAD_STEP].average = ({"w": (2, "1")}, {"w": (2, "2")})


def _average_differs(e: Evidence) -> None:
    before, _ = e.ranks[1].steps[2].average or ({}, {})
    e.ranks[1].steps[2].average = (before, {"w": (2, "other")})


def _counts_no_skip(e: Evidence) -> None:
    e.ranks[0].steps[BAD_STEP].skips = (0, 0)


def _counts_a_step(e: Evidence) -> None:
    e.ranks[0].steps[2].skips = (1, 2)


def _scale_not_loaded(e: Evidence) -> None:
    assert e.ranks[1].restored is not None
    e.ranks[1].restored = replace(e.ranks[1].restored, loaded=(8.0, 0))


def _begins_again(e: Evidence) -> None:
    e.ranks[1].steps[-1].settings["w"]["lr"] = 0.1


def _rounded(e: Evidence) -> None:
    e.ranks[1].loaded = (0, "w")


FAULTS: list[tuple[str, Callable[[Evidence], None], bool]] = [
    ("agreement.scale", _scale, False),
    ("agreement.growth", _growth, False),
    ("agreement.skip", _one_rank_skips, False),
    ("agreement.replicas", _replica, False),
    ("skip.all-ranks-skip", _steps_on_bad, True),
    ("skip.no-side-effects", _counts_on_bad, True),
    ("skip.all-ranks-step", _all_skip_good, False),
    ("scale.rule", _no_backoff, True),
    ("scale.positive", _zero, False),
    ("scale.continuity", _changed_between_steps, False),
    ("transparency.bitwise", _not_bare, False),
    ("transparency.gradient", _flushed, False),
    ("misuse.refused", _accepted, False),
    ("collectives.same-sequence", _sequence, False),
    ("collectives.no-crosstalk", _crosstalk, False),
    ("liveness.completes", _raised, False),
    ("parity.gradient", _parity("gradient"), False),
    ("parity.update", _parity("update"), False),
    ("parity.loss", _parity("loss"), False),
    ("norm.reported", _norm, False),
    ("norm.factor", _factor, False),
    ("dtype.reduction", _narrow, False),
    ("trainer.schedule", _schedule_on_bad, True),
    ("trainer.schedule", _schedule_stays, True),
    ("trainer.average", _average_on_bad, True),
    ("trainer.average", _average_differs, False),
    ("trainer.skips", _counts_no_skip, True),
    ("trainer.skips", _counts_a_step, True),
    ("trainer.checkpoint", _scale_not_loaded, False),
    ("trainer.settings", _begins_again, True),
    ("trainer.weights", _rounded, False),
]


@pytest.mark.parametrize(("law", "break_it", "bad"), FAULTS, ids=[f[0] for f in FAULTS])
def test_a_fault_fails_its_check(
    law: str, break_it: Callable[[Evidence], None], bad: bool
) -> None:
    broken = evidence(bad=bad)
    break_it(broken)
    assert law in failures(broken)


def test_every_check_has_a_fault_here() -> None:
    # those of stacks alone are broken beside the stacks that break them
    of_scalers = {law for law in LAWS if not law.startswith(OF_STACKS)}
    assert {law for law, _, _ in FAULTS} == of_scalers


def test_evidence_names_step_rank_and_parameter() -> None:
    broken = evidence(bad=True)
    broken.ranks[0].steps[BAD_STEP].decisions[0].parameters_changed = True
    (finding,) = [v for v in apply_checks(broken) if v.law == "skip.all-ranks-skip"]
    assert (finding.step, finding.ranks, finding.parameter) == (1, (0,), "w")
    assert (
        finding.message == "step 1: rank 0 stepped although w is not finite on rank 1"
    )


def test_disagreement_names_both_sides() -> None:
    broken = evidence()
    _scale(broken)
    (finding,) = [v for v in apply_checks(broken) if v.law == "agreement.scale"]
    assert "rank 0 scale 16; rank 1 scale 99" in finding.message
    assert finding.numbers == {"rank 0": 16.0, "rank 1": 99.0}


ALWAYS_KNOWN = {
    "liveness.completes": "that a step came to its end",
    "agreement.scale": "the scale",
    "agreement.growth": "the growth tracker",
    "scale.rule": "the scale",
    "scale.positive": "the scale",
    "scale.continuity": "the scale",
}
"""Check -> the value that it reads, for checks of a value that every trace contains."""


def stopped() -> Evidence:
    """Return evidence of a run in which no step ended."""
    empty = evidence(bad=True)
    for trace in empty.ranks:
        trace.steps[0].complete = False
        del trace.steps[1:]
        trace.misuse = trace.restored = trace.loaded = None
    return replace(empty, control=None, uninterrupted=None, parity=None)


def silent() -> Evidence:
    """Return evidence of a run whose steps ended without recorded events."""
    blind = stopped()
    for trace in blind.ranks:
        trace.shards = {}
        trace.steps = [StepTrace(step=n, complete=True) for n in range(SCENARIO.steps)]
    return replace(blind, parity=parity_without_rows(), control=blind.ranks)


def unknown() -> Evidence:
    """Return evidence of good and bad steps in which no optimizer had parameters."""
    still = evidence(bad=True)
    for trace in still.ranks:
        for seen in trace.steps:
            seen.collectives = []
            for decision in seen.decisions:
                decision.parameters_changed = None
    return replace(still, ranks=still.ranks)


@pytest.mark.parametrize("law", LAWS)
def test_no_check_passes_on_nothing(law: str) -> None:
    assert finding(stopped(), law).status is not Status.PASS
    if law not in ALWAYS_KNOWN:
        assert finding(silent(), law).status is not Status.PASS


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize(("made", "missed"), [(0, 0), (0, 9), (1, 10**6)])
def test_no_check_passes_on_too_little(law: Law, made: int, missed: int) -> None:
    told = Finding(status="pass", message="", compared=made, not_compared=missed)
    blind = replace(law, check=lambda _: told)
    found = law_module._finding(blind, evidence())
    passes = made and law.least == 0.0
    assert found.status == (Status.PASS if passes else Status.INCONCLUSIVE)
    assert (found.compared, found.not_compared) == (made, missed)


@pytest.mark.parametrize(
    "law", ["skip.all-ranks-step", "skip.all-ranks-skip", "agreement.skip"]
)
def test_a_decision_without_an_effect_is_no_comparison(law: str) -> None:
    assert finding(unknown(), law).compared == 0
    assert finding(unknown(), law).status is not Status.PASS


def test_no_collectives_of_a_scaler_have_no_sequence() -> None:
    found = finding(unknown(), "collectives.same-sequence")
    assert found.status is Status.SKIPPED


def test_parity_that_compared_nothing_is_inconclusive() -> None:
    unknown = Evidence(
        scenario=SCENARIO, ranks=evidence().ranks, parity=parity_without_rows()
    )
    found = statuses(unknown)
    assert found["parity.gradient"] is Status.INCONCLUSIVE


def test_a_missing_bare_run_is_inconclusive() -> None:
    e = evidence()
    found = statuses(Evidence(scenario=SCENARIO, ranks=e.ranks, parity=e.parity))
    assert found["transparency.bitwise"] is Status.INCONCLUSIVE


def test_a_refused_call_that_changes_something_is_misuse() -> None:
    e = evidence()
    e.ranks[1].misuse = [
        Misuse(
            call="unscale_() after step()", error="ValueError", changed=("gradients",)
        )
    ]
    (finding,) = [v for v in apply_checks(e) if v.law == "misuse.refused"]
    assert finding.status is Status.FAIL and finding.ranks == (1,)
    assert finding.message == (
        "on rank 1 unscale_() after step() raised ValueError, and it changed gradients"
    )


def test_runs_in_which_no_wrong_call_is_made_are_skipped() -> None:
    e = evidence()
    for trace in e.ranks:
        trace.misuse = []
    assert statuses(e)["misuse.refused"] is Status.SKIPPED


def test_a_missing_gradient_is_no_equal_one() -> None:
    e = evidence()
    e.ranks[0].steps[1].gradients = {}
    assert "transparency.gradient" in failures(e)


@settings(deadline=None)
@given(
    step=st.integers(0, 3),
    rank=st.integers(0, 1),
    factor=st.sampled_from([0.0, -1.0, 1.0 + 2.0**-23, 1.0 - 2.0**-24, 2.0]),
    element=st.integers(0, 1),
)
def test_one_bit_of_one_gradient_is_seen(
    step: int, rank: int, factor: float, element: int
) -> None:
    e = evidence()
    e.ranks[rank].steps[step].gradients["w"][element] *= np.float32(factor)
    (finding,) = [v for v in apply_checks(e) if v.law == "transparency.gradient"]
    assert (finding.status, finding.step) == (Status.FAIL, step)
    assert finding.ranks == (rank,)


def test_gradients_that_the_control_may_have_rounded_to_zero_are_not_compared() -> None:
    e = evidence()
    e.ranks[0].steps[1].gradients["w"][0] = 2.0**-101
    assert e.control is not None
    e.control[0].steps[1].gradients["w"][0] = 0.0
    assert "transparency.gradient" not in failures(e)


def test_after_a_bad_step_a_bare_run_has_nothing_to_say() -> None:
    """After an overflow, the run without a scaler cannot be compared any more."""
    e = evidence(bad=True)
    for trace in e.control or ():
        for seen in trace.steps[BAD_STEP:]:
            seen.digests = {"w": "else"}
    assert "transparency.bitwise" not in failures(e)


NEEDS_A_BAD_STEP = {
    "skip.all-ranks-skip",
    "skip.no-side-effects",
}


@pytest.mark.parametrize("bad", [False, True])
def test_checks_without_a_comparison_are_skipped(bad: bool) -> None:
    expected = {law: Status.PASS for law in LAWS}
    expected |= {x: Status.SKIPPED for x in LAWS if x.startswith(OF_STACKS)}
    if not bad:
        expected |= dict.fromkeys(NEEDS_A_BAD_STEP, Status.SKIPPED)
    assert statuses(evidence(bad=bad)) == expected


def test_one_rank_has_no_other_to_agree_with() -> None:
    e = evidence()
    alone = Evidence(
        scenario=SCENARIO, ranks=e.ranks[:1], control=e.control, parity=e.parity
    )
    found = statuses(alone)
    for law, status in found.items():
        if law.startswith(("agreement.", "collectives.")):
            assert status is Status.SKIPPED, law
    assert found["scale.rule"] is found["transparency.bitwise"] is Status.PASS


def test_a_run_of_bad_steps_only_says_nothing_of_good_ones() -> None:
    e = evidence()
    for trace in e.ranks:
        for seen in trace.steps:
            seen.decisions = [Decision(non_finite=["w"], parameters_changed=False)]
    found = statuses(e)
    assert found["skip.all-ranks-step"] is Status.SKIPPED
    assert found["skip.all-ranks-skip"] is found["skip.no-side-effects"] is Status.PASS


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_from_which_nothing_recovers(value: float) -> None:
    e = evidence()
    e.ranks[1].steps[0].scale_after = value
    (finding,) = [v for v in apply_checks(e) if v.law == "scale.positive"]
    assert (finding.status, finding.step, finding.ranks) == (Status.FAIL, 0, (1,))


@pytest.mark.parametrize(
    ("settings", "compared"),
    [
        ("fp32/sgd/none/steps=4", True),
        ("fp32/sgd/none/steps=4,scale=3", False),
        ("fp32/sgd/none/steps=4,growth=3", False),
        ("fp32/sgd/none/steps=4,backoff=0.3", False),
        ("fp32/sgd/inf@r0s1:first/steps=4", False),
        ("bf16-autocast/sgd/none/steps=4", False),
    ],
)
def test_only_exact_scaling_is_transparent(settings: str, compared: bool) -> None:
    e = evidence()
    scenario = Scenario.parse(f"ddp/2/{settings}")
    found = statuses(
        Evidence(scenario=scenario, ranks=e.ranks, control=e.control, parity=e.parity)
    )
    expected = Status.PASS if compared else Status.SKIPPED
    assert found["transparency.bitwise"] is found["transparency.gradient"] is expected


@pytest.mark.parametrize(
    ("law", "break_it", "bad", "step", "ranks"),
    [
        ("agreement.scale", _scale, False, 2, (0,)),
        ("agreement.skip", _one_rank_skips, False, 2, (0,)),
        ("agreement.replicas", _replica, False, 2, (1,)),
        ("skip.no-side-effects", _counts_on_bad, True, BAD_STEP, (0,)),
        ("skip.all-ranks-step", _all_skip_good, False, 3, (0, 1)),
        ("scale.rule", _no_backoff, True, BAD_STEP, (0,)),
        ("transparency.bitwise", _not_bare, False, 3, (1,)),
        ("collectives.same-sequence", _sequence, False, 0, (1,)),
        ("collectives.no-crosstalk", _crosstalk, False, 3, (0,)),
        ("liveness.completes", _raised, False, 3, (1,)),
        ("norm.reported", _norm, False, 2, (1,)),
        ("norm.factor", _factor, False, 2, (1,)),
        ("dtype.reduction", _narrow, False, 2, (1,)),
    ],
)
def test_a_finding_names_the_step_and_the_ranks(
    law: str,
    break_it: Callable[[Evidence], None],
    bad: bool,
    step: int,
    ranks: tuple[int, ...],
) -> None:
    broken = evidence(bad=bad)
    break_it(broken)
    (finding,) = [v for v in apply_checks(broken) if v.law == law]
    assert (finding.step, finding.ranks) == (step, ranks)
