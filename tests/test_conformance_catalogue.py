"""The catalogue covers what it says, the same every time, and every id runs alone."""

import itertools

import pytest

from gradparity.conformance import Scenario
from gradparity.conformance.catalogue import Selection, select
from gradparity.conformance.covering import cover


def allowed(row: tuple[str, ...]) -> bool:
    return not (row[0] == "a" and row[1] == "x")


@pytest.mark.parametrize("strength", [2, 3])
def test_cover_contains_every_combination_that_can_occur(strength: int) -> None:
    choices = ["abc", "xyz", "01", "+-"]
    rows = cover([list(c) for c in choices], allowed, strength)
    valid = [r for r in itertools.product(*choices) if allowed(r)]
    for columns in itertools.combinations(range(4), strength):
        wanted = {tuple(r[i] for i in columns) for r in valid}
        assert {tuple(r[i] for i in columns) for r in rows} == wanted
    assert all(allowed(r) for r in rows)
    assert len(rows) < len(valid)


@pytest.mark.parametrize(
    ("preset", "least"), [("parity", 45), ("quick", 60), ("full", 300)]
)
def test_presets_are_large_enough_deterministic_and_replayable(
    preset: str, least: int
) -> None:
    scenarios = select(preset, Selection())
    assert len(scenarios) >= least
    assert scenarios == select(preset, Selection())
    assert [Scenario.parse(s.id) for s in scenarios] == scenarios


def test_a_selection_is_kept() -> None:
    chosen = select("quick", Selection(topologies=["fsdp"], data=["text"], seed=3))
    assert {(s.topology, s.data, s.seed) for s in chosen} == {("fsdp", "text", 3)}


def test_a_world_size_is_taken_over() -> None:
    assert {
        s.world for s in select("parity", Selection(topologies=["fsdp"], world=4))
    } == {4}
