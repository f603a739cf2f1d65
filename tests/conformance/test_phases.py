"""A run on two worlds, on made-up traces: every law is held across the resume."""

import copy
from dataclasses import replace

import pytest

from gradparity.conformance import Evidence, Scenario, Status
from gradparity.conformance.judge.law import LAWS
from gradparity.conformance.judge.parity import demanded_schedule
from gradparity.conformance.rank.trace import RankTrace
from gradparity.conformance.status import Finding
from gradparity.tests import made_up

LEG = made_up.SCENARIO.id.replace("ddp/2", "ddp/4") + ",recipe=resume-resharded"
SPLIT = 2


def parts(*, bad: bool = False) -> Evidence:
    """A right run on 2 ranks that goes on on 4."""
    whole = made_up.evidence(bad=bad, size=4, scenario=Scenario.parse(LEG))
    whole = replace(whole, uninterrupted=None)  # the judge restores it
    first = replace(
        whole,
        ranks=tuple(half(t, slice(0, SPLIT)) for t in whole.ranks[:2]),
        control=tuple(half(t, slice(0, SPLIT)) for t in (whole.control or ())[:2]),
    )
    return replace(
        whole,
        ranks=tuple(half(t, slice(SPLIT, None)) for t in whole.ranks),
        control=tuple(half(t, slice(SPLIT, None)) for t in whole.control or ()),
        before=first,
    )


def half(trace: RankTrace, steps: slice) -> RankTrace:
    part = copy.deepcopy(trace)
    part.steps = part.steps[steps]
    return part


def found(evidence: Evidence, law: str) -> Finding:
    return made_up.finding(evidence, law)


@pytest.mark.parametrize("bad", [False, True])
def test_no_law_accuses_a_right_run(bad: bool) -> None:
    assert made_up.accused(parts(bad=bad)) == {}


def test_comparisons_of_both_phases_are_reported() -> None:
    message = found(parts(), "agreement.scale").message
    text = "4 rank-steps compared by their scale (ddp/2, where it began), then 8"
    assert message.startswith(text)


def test_comparisons_are_added_where_both_phases_say_the_same() -> None:
    # regression: O13
    evidence = parts()
    assert evidence.before is not None
    evidence = replace(evidence, ranks=evidence.ranks[:2])
    law = LAWS["agreement.scale"]
    assert evidence.before is not None
    one, other = law.judge(evidence.before), law.judge(evidence)
    assert one.message == other.message and one.compared
    assert found(evidence, law.id).compared == one.compared + other.compared


def test_a_fault_before_the_resume_is_reported_with_its_place() -> None:
    evidence = parts()
    assert evidence.before is not None
    evidence.before.ranks[1].steps[1].scale_after = 3.0
    finding = found(evidence, "agreement.scale")
    assert finding.status is Status.FAIL and finding.step == 1
    assert finding.message.endswith("(ddp/2, where it began)")


def test_a_fault_after_the_resume_is_reported_with_its_step() -> None:
    evidence = parts()
    evidence.ranks[3].steps[1].scale_after = 3.0
    finding = found(evidence, "agreement.scale")
    assert finding.status is Status.FAIL and finding.step == 3
    assert finding.ranks == (3,) and "began" not in finding.message


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("what", ["scale_before", "growth_before"])
def test_a_state_changed_across_the_resume_breaks_continuity(
    rank: int, what: str
) -> None:
    evidence = parts()
    seen = evidence.ranks[rank].steps[0]
    setattr(seen, what, getattr(seen, what) + 1)
    finding = found(evidence, "scale.continuity")
    assert finding.status is Status.FAIL
    assert (finding.step, finding.ranks) == (SPLIT, (rank,))


def test_a_law_that_only_one_part_can_be_held_to_is_held_there() -> None:
    evidence = parts()
    assert evidence.before is not None
    alone = replace(evidence.before, ranks=evidence.before.ranks[:1])
    finding = found(replace(evidence, before=alone), "agreement.scale")
    assert finding.status is Status.PASS and "began" not in finding.message


def test_transparency_compares_the_same_step() -> None:
    evidence = parts()
    assert evidence.control is not None
    evidence.control[2].steps[1].digests = {"w": "other"}
    finding = found(evidence, "transparency.bitwise")
    assert finding.status is Status.FAIL and finding.step == 3


def test_the_demanded_schedule_covers_both_phases() -> None:
    evidence = parts(bad=True)
    assert evidence.before is not None
    first, second = evidence.before.ranks, evidence.ranks
    for trace in [*first, *second]:
        trace.owned = [["w"]]
    schedule = demanded_schedule(first, second)
    assert [set(names) for names in schedule.skipped] == [set(), {"w"}, set(), set()]
    assert schedule.scales == (8.0, 8.0, 4.0, 4.0)


def test_a_resume_uses_only_the_last_state_of_the_first_phase() -> None:
    """2 ranks have 1 pair of steps there, 4 ranks have 2 here."""
    text = "2 pairs of steps (ddp/2, where it began), then 8 pairs of steps"
    assert found(parts(), "scale.continuity").message == text
