"""A scaler resumes from a state that was saved on another number of ranks."""

from pathlib import Path

import pytest

from gradparity.conformance import Runner, Scenario, Status
from gradparity.conformance.__main__ import main
from gradparity.conformance.cli.listing import explain
from gradparity.conformance.report.records import read_report
from gradparity.conformance.run.recorder import case_record
from gradparity.fixtures import TOPOLOGIES
from gradparity.fixtures.faulty import plain
from gradparity.tests import made_up

RIGHT = "gradparity.fixtures.faulty:PlainScaler"
MOVED = Scenario.parse(plain.MOVED)


# - The scenario


@pytest.mark.parametrize(
    ("saves", "loads"),
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
def test_a_state_comes_from_another_world(saves: str, loads: str) -> None:
    recipe = "steps=5,recipe=resume-resharded"
    scenario = Scenario.parse(f"{loads}/fp32/sgd/inf@r0s1:up.weight/{recipe}")
    assert Scenario.parse(scenario.id) == scenario
    assert scenario.saved_by is not None
    assert scenario.saved_by.id == f"{saves}/fp32/sgd/none/steps=3"
    assert scenario.most_ranks == max(int(w.split("/")[1]) for w in (saves, loads))
    assert f"loads:     what {scenario.saved_by.id} saved" in explain(scenario.id)


def test_every_topology_loads_from_another_world() -> None:
    for t in TOPOLOGIES.values():
        names = f"{t.name}/{t.default_world_size}", f"model={t.models[-1]}"
        text = f"{names[0]}/fp32/sgd/none/{names[1]},recipe=resume-resharded"
        scenario = Scenario.parse(text)
        saves = scenario.saved_by
        assert saves is not None
        place = scenario.topology, scenario.world_size
        assert (saves.topology, saves.world_size) != place


def test_one_step_saves_after_one_step() -> None:
    text = "fsdp/2/fp32/sgd/none/steps=1,recipe=resume-resharded"
    saves = Scenario.parse(text).saved_by
    assert saves is not None and saves.steps == 1


def test_a_plain_recipe_loads_nothing() -> None:
    alone = Scenario.parse(plain.CLEAN)
    assert alone.saved_by is None and alone.most_ranks == alone.world_size


# - The check, on made-up traces


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", [0, 1])
def test_another_state_than_the_saved_one_breaks_continuity(
    rank: int, place: int
) -> None:
    evidence = made_up.evidence()
    for trace in evidence.ranks:
        at = trace.steps[0]
        trace.loaded_state = at.scale_before, at.growth_before
    right = made_up.finding(evidence, "scale.continuity")
    # a pair more on each rank than without a load
    assert (right.status, right.compared) == (Status.PASS, 8)
    scale, growth = evidence.ranks[rank].loaded_state or (0.0, 0)
    loaded = [(scale + 1, growth), (scale, (growth or 0) + 1)]
    evidence.ranks[rank].loaded_state = loaded[place]
    found = made_up.finding(evidence, "scale.continuity")
    assert (found.status, found.step) == (Status.FAIL, 0)
    assert found.ranks == (rank,)
    assert f"rank {rank} loaded, from another number of ranks, scale" in found.message


def test_a_count_of_good_steps_that_was_loaded_is_unknown() -> None:
    """A scaler that reports no tracker may grow at any one step after a load."""
    evidence = made_up.evidence()
    for trace in evidence.ranks:
        for at in trace.steps:
            at.growth_before = at.growth_after = None
        at = trace.steps[0]
        at.scale_after *= 2
        for later in trace.steps[1:]:
            later.scale_before = later.scale_after = at.scale_after
    assert made_up.finding(evidence, "scale.rule").status is Status.FAIL
    for trace in evidence.ranks:
        trace.loaded_state = trace.steps[0].scale_before, None
    # the growth makes the count known again, and the interval is two steps
    found = made_up.finding(evidence, "scale.rule")
    assert (found.status, found.step) == (Status.FAIL, 2)


# - Real runs


def test_a_right_scaler_continues_with_the_state(runner: Runner) -> None:
    case = runner.run(RIGHT, MOVED)
    assert case.status is Status.PASS and case.evidence is not None
    assert [t.loaded_state for t in case.evidence.ranks] == [(1024.0, 2)] * 4
    # two good steps before the load and two after it make an interval
    assert [s.scale_after for s in case.evidence.ranks[0].steps][:2] == [1024.0, 2048.0]
    record = case_record(case)
    assert record.curves is not None
    assert [len(row) for row in record.curves.scale] == [4] * 4
    assert len(record.curves.parity) == len(record.curves.loss) == 4


def test_a_run_that_stops_in_the_world_that_saves_is_reported_there(
    runner: Runner, tmp_path: Path
) -> None:
    longer = "fsdp/4/fp32/sgd/none/steps=8,recipe=resume-resharded"
    scaler = "gradparity.fixtures.faulty:RaisesOnOneRank"
    case = runner.run(scaler, Scenario.parse(longer))
    assert case.status is Status.FAIL and case.evidence is not None
    assert len(case.evidence.ranks) == 2
    (finding,) = [v for v in case.verdicts if v.law == "liveness.completes"]
    assert finding.message.endswith(" (fsdp/2, which saves the state to load)")
    assert case_record(case).curves is None  # ranks of another world have no rows
    path = tmp_path / "report.jsonl"
    assert main(["replay", longer, f"--scaler={scaler}", f"--report={path}"]) == 1
    assert read_report(path).cases[0].status == "fail"


def test_a_load_that_raises_is_reported_with_its_call(runner: Runner) -> None:
    scaler = "gradparity.fixtures.faulty:SavesATrackerForEachRank"
    case = runner.run(scaler, MOVED)
    (finding,) = [v for v in case.verdicts if v.law == "liveness.completes"]
    told = "before step 0: load_state_dict raised on ranks 2, 3: IndexError"
    assert finding.message.startswith(told)
    assert "saves the state" not in finding.message


def test_a_load_that_needs_too_many_ranks_is_not_run(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_few(world: int) -> str:
        return "too few ranks" if world > 2 else ""

    monkeypatch.setattr(runner.place, "not_runnable", too_few)
    two = Scenario.parse("fsdp/2/fp32/sgd/none/steps=4,recipe=resume-resharded")
    case = runner.run(RIGHT, two)
    assert {v.status for v in case.verdicts} == {Status.SKIPPED}
