"""Resume on another world: two runs, one judgement across the resume."""

import copy
from dataclasses import replace

import numpy as np
import pytest

from gradparity.conformance import Runner, Scenario, Status
from gradparity.conformance.cli.listing import explain
from gradparity.conformance.judge.parity import measure_parity
from gradparity.conformance.rank.reshard import gathered
from gradparity.conformance.rank.trace import Saved
from gradparity.conformance.run.recorder import case_record
from gradparity.fixtures import TOPOLOGIES
from gradparity.fixtures.faulty import plain
from gradparity.tests import made_up

RIGHT = "gradparity.fixtures.faulty:PlainScaler"
MOVED = Scenario.parse(plain.MOVED)


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
def test_a_resharded_run_begins_on_another_world(begins: str, goes_on: str) -> None:
    recipe = "steps=5,recipe=resume-resharded"
    scenario = Scenario.parse(f"{goes_on}/fp32/sgd/none/{recipe}")
    first, second = scenario.phases
    assert second is scenario and Scenario.parse(scenario.id) == scenario
    assert first.id == f"{begins}/fp32/sgd/none/steps=3"
    assert f"begins as: {first.id}" in explain(scenario.id)


def test_every_topology_resumes_from_another_world() -> None:
    for t in TOPOLOGIES.values():
        names = f"{t.name}/{t.default_world_size}", f"model={t.models[-1]}"
        text = f"{names[0]}/fp32/sgd/none/{names[1]},recipe=resume-resharded"
        first, second = Scenario.parse(text).phases
        assert (first.topology, first.world_size) != (
            second.topology,
            second.world_size,
        )


def test_faults_before_the_resume_belong_to_the_first_phase() -> None:
    plan = "inf@r3s1:up.weight;nan@r2s*:first;inf@r0s4:last;-inf@r*s0:last[last]"
    settings = "steps=5,recipe=resume-resharded"
    first, _ = Scenario.parse(f"fsdp/4/fp32/sgd/{plan}/{settings}").phases
    assert first.faults == "inf@r1s1:up.weight;nan@r0s*:first;-inf@r*s0:last[last]"


def test_one_step_is_refused() -> None:
    with pytest.raises(ValueError, match="choose at least 2 steps"):
        Scenario.parse("fsdp/2/fp32/sgd/none/steps=1,recipe=resume-resharded")


def test_a_plain_recipe_has_one_phase() -> None:
    alone = Scenario.parse(plain.CLEAN)
    assert alone.phases == (alone,)


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
    text = f"pp/2/fp32/{optimizer}/{faults}/{settings},recipe=resume-resharded"
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


# - Real runs


def test_parity_is_measured_on_both_worlds(runner: Runner) -> None:
    evidence = runner.run(RIGHT, MOVED).evidence
    assert evidence is not None and evidence.before is not None
    phases = evidence.before.ranks, evidence.ranks
    assert [len(traces) for traces in phases] == [2, 4]
    assert measure_parity(MOVED, *phases).first_bad == {}
    for phase, step in ((0, 1), (1, 0)):
        spoilt = copy.deepcopy(phases)
        spoilt[phase][1].steps[step].gradients["up.weight"] *= 1.001
        bad = measure_parity(MOVED, *spoilt).first_bad["gradient"]
        assert (bad.step, bad.rank) == (1 if phase == 0 else 2, 1)


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


def test_a_resume_that_needs_too_many_ranks_is_not_run(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_few(world: int) -> str:
        return "too few ranks" if world > 2 else ""

    monkeypatch.setattr(runner.place, "not_runnable", too_few)
    two = Scenario.parse("fsdp/2/fp32/sgd/none/steps=4,recipe=resume-resharded")
    case = runner.run(RIGHT, two)
    assert {v.status for v in case.verdicts} == {Status.SKIPPED}
