"""Resume on another world: two runs, one judgement across the seam."""

import copy
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from gradparity.conformance import Evidence, Runner, Scenario, Status
from gradparity.conformance.handover import gathered
from gradparity.conformance.law import Finding
from gradparity.conformance.listing import explain
from gradparity.conformance.parity import demanded_schedule, measure_parity
from gradparity.conformance.record import case_record
from gradparity.conformance.standalone import standalone_script
from gradparity.conformance.trace import RankTrace, Saved
from gradparity.fixtures import TOPOLOGIES
from gradparity.fixtures.faulty import plain
from gradparity.tests import made_up

RIGHT = "gradparity.fixtures.faulty:PlainScaler"
MOVED = Scenario.parse(plain.MOVED)
LEG = made_up.SCENARIO.id.replace("ddp/2", "ddp/4") + ",recipe=resume-elsewhere"
SPLIT = 2


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(folder=".", timeout_s=60) as runner:
        yield runner


# - The scenario


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [
        ("fsdp/2", "fsdp/4"),
        ("fsdp/4", "fsdp/2"),
        ("fsdp/4", "fsdp/8"),
        ("tp/4", "tp/2"),
        ("ddp/2", "single/1"),
        ("single/1", "pp/2"),
        ("fsdp/2", "hsdp/4"),
        ("hsdp+tp/4", "hsdp+tp/8"),
        ("fsdp/2", "fsdp/3"),
    ],
)
def test_where_a_run_begins(begins: str, goes_on: str) -> None:
    recipe = "steps=5,recipe=resume-elsewhere"
    scenario = Scenario.parse(f"{goes_on}/fp32/sgd/none/{recipe}")
    first, second = scenario.legs
    assert second is scenario and Scenario.parse(scenario.id) == scenario
    assert first.id == f"{begins}/fp32/sgd/none/steps=3"
    assert f"begins as: {first.id}" in explain(scenario.id)


def test_every_topology_begins_somewhere_else() -> None:
    for t in TOPOLOGIES.values():
        names = f"{t.name}/{t.default_world}", f"data={t.models[-1]}"
        text = f"{names[0]}/fp32/sgd/none/{names[1]},recipe=resume-elsewhere"
        first, second = Scenario.parse(text).legs
        assert (first.topology, first.world) != (second.topology, second.world)


def test_faults_before_the_seam_strike_where_the_run_begins() -> None:
    plan = "inf@r3s1:up.weight;nan@r2s*:first;inf@r0s4:last;-inf@r*s0:last[last]"
    settings = "steps=5,recipe=resume-elsewhere"
    first, _ = Scenario.parse(f"fsdp/4/fp32/sgd/{plan}/{settings}").legs
    assert first.faults == "inf@r1s1:up.weight;nan@r0s*:first;-inf@r*s0:last[last]"


def test_one_step_is_refused() -> None:
    with pytest.raises(ValueError, match="choose at least 2 steps"):
        Scenario.parse("fsdp/2/fp32/sgd/none/steps=1,recipe=resume-elsewhere")


def test_other_recipes_have_one_leg() -> None:
    alone = Scenario.parse(plain.CLEAN)
    assert alone.legs == (alone,)


def test_no_script_without_a_harness() -> None:
    with pytest.raises(ValueError, match="recipe 'resume-elsewhere'"):
        standalone_script(MOVED, RIGHT)


# - The handover


def test_the_whole_state_is_put_together_from_the_ranks() -> None:
    traces = []
    for rank, places in enumerate(([0, 2], [1], [])):
        trace = made_up.rank_trace(rank, bad=False)
        trace.index = {"w": np.array(places, np.int64)}
        trace.steps[-1].parameters = {"w": np.array(places, np.float32) * 10}
        momentum = np.array(places, np.float32) * 100
        state = {"momentum": momentum, "step": np.array(3.0), "none": None}
        trace.saved = Saved(scaler=b"%d" % rank, optimizers={"w": state})
        traces.append(trace)
    whole = gathered(traces)
    assert whole.scaler == b"0"
    assert whole.parameters["w"].tolist() == [0, 10, 20]
    assert whole.optimizers["w"]["momentum"].tolist() == [0, 100, 200]
    assert whole.optimizers["w"]["step"] == 3.0
    assert whole.optimizers["w"]["none"] is None


def test_without_optimizer_state_there_is_none_to_hand_over() -> None:
    trace = made_up.rank_trace(0, bad=False)
    trace.steps[-1].parameters = {"w": np.ones(2, np.float32)}
    trace.saved = Saved(scaler=b"", optimizers={})
    assert gathered([trace]).optimizers == {}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "adagrad"])
def test_a_run_that_moves_is_bitwise_that_of_its_layout(
    runner: Runner, optimizer: str
) -> None:
    """On one process before and after, nothing may differ from the whole run."""
    faults, settings = "inf@r0s1:up.weight", "steps=6,interval=2"
    text = f"pp/2/fp32/{optimizer}/{faults}/{settings},recipe=resume-elsewhere"
    moved = runner.run(RIGHT, Scenario.parse(text)).evidence
    whole = runner.run(
        RIGHT, Scenario.parse(f"single/1/fp32/{optimizer}/{faults}/{settings}")
    ).evidence
    assert moved is not None and moved.before is not None and whole is not None
    (alone,) = moved.before.ranks
    for seen, step in zip(alone.steps, whole.ranks[0].steps[:3], strict=True):
        assert seen.digests == step.digests
    first = [t.steps[0] for t in moved.ranks]
    assert {s.step for s in first} == {3}
    assert {s.scale_before for s in first} == {alone.steps[-1].scale_after}


# - The judgement


def parts(*, bad: bool = False) -> Evidence:
    """A right run on 2 ranks that goes on on 4."""
    whole = made_up.evidence(bad=bad, size=4, scenario=Scenario.parse(LEG))
    first = replace(
        whole,
        ranks=tuple(half(t, slice(0, SPLIT)) for t in whole.ranks[:2]),
        bare=tuple(half(t, slice(0, SPLIT)) for t in (whole.bare or ())[:2]),
    )
    return replace(
        whole,
        ranks=tuple(half(t, slice(SPLIT, None)) for t in whole.ranks),
        bare=tuple(half(t, slice(SPLIT, None)) for t in whole.bare or ()),
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


def test_what_both_parts_compared_is_told() -> None:
    message = found(parts(), "agreement.scale").message
    text = "4 rank-steps compared by their scale (ddp/2, where it began), then 8"
    assert message.startswith(text)


def test_a_fault_before_the_seam_is_told_with_its_place() -> None:
    evidence = parts()
    assert evidence.before is not None
    evidence.before.ranks[1].steps[1].scale_after = 3.0
    finding = found(evidence, "agreement.scale")
    assert finding.status is Status.FAIL and finding.step == 1
    assert finding.message.endswith("(ddp/2, where it began)")


def test_a_fault_behind_the_seam_is_told_with_its_step() -> None:
    evidence = parts()
    evidence.ranks[3].steps[1].scale_after = 3.0
    finding = found(evidence, "agreement.scale")
    assert finding.status is Status.FAIL and finding.step == 3
    assert finding.ranks == (3,) and "began" not in finding.message


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("what", ["scale_before", "growth_before"])
def test_the_state_goes_on_across_the_seam(rank: int, what: str) -> None:
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
    assert evidence.bare is not None
    evidence.bare[2].steps[1].digests = {"w": "other"}
    finding = found(evidence, "transparency.bitwise")
    assert finding.status is Status.FAIL and finding.step == 3


def test_the_schedule_of_both_parts() -> None:
    evidence = parts(bad=True)
    assert evidence.before is not None
    first, second = evidence.before.ranks, evidence.ranks
    for trace in [*first, *second]:
        trace.owned = [["w"]]
    schedule = demanded_schedule(first, second)
    assert [set(names) for names in schedule.skipped] == [set(), {"w"}, set(), set()]
    assert schedule.scales == (8.0, 8.0, 4.0, 4.0)


# - Real runs


def test_parity_is_measured_on_both_worlds(runner: Runner) -> None:
    evidence = runner.run(RIGHT, MOVED).evidence
    assert evidence is not None and evidence.before is not None
    legs = evidence.before.ranks, evidence.ranks
    assert [len(traces) for traces in legs] == [2, 4]
    assert measure_parity(MOVED, *legs).first_bad == {}
    for leg, step in ((0, 1), (1, 0)):
        spoilt = copy.deepcopy(legs)
        spoilt[leg][1].steps[step].gradients["up.weight"] *= 1.001
        bad = measure_parity(MOVED, *spoilt).first_bad["gradient"]
        assert (bad.step, bad.rank) == (1 if leg == 0 else 2, 1)


def test_the_record_has_a_row_a_rank_and_every_step(runner: Runner) -> None:
    record = case_record(runner.run(RIGHT, MOVED))
    assert record.curves is not None and record.status == "pass"
    assert [len(row) for row in record.curves.scale] == [4] * 4
    assert len(record.curves.parity) == len(record.curves.loss) == 4


def test_a_run_that_stops_where_it_began_is_judged_there(runner: Runner) -> None:
    case = runner.run("gradparity.fixtures.faulty:RaisesOnOneRank", LONGER)
    assert case.status is Status.FAIL and case.evidence is not None
    assert case.evidence.before is None and len(case.evidence.ranks) == 2
    record = case_record(case)
    assert record.curves is not None and len(record.curves.scale) == 4


LONGER = replace(MOVED, steps=8)


def test_more_ranks_than_there_are(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_few(world: int) -> str:
        return "too few ranks" if world > 2 else ""

    monkeypatch.setattr(runner.place, "not_runnable", too_few)
    two = Scenario.parse("fsdp/2/fp32/sgd/none/steps=4,recipe=resume-elsewhere")
    case = runner.run(RIGHT, two)
    assert {v.status for v in case.verdicts} == {Status.SKIPPED}
