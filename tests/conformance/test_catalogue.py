"""The catalogue covers all it lists, is deterministic, and every id runs alone."""

import itertools
import re

import pytest
import torch

from gradparity.conformance import Scenario
from gradparity.conformance.space import catalogue
from gradparity.conformance.space.catalogue import Selection, select
from gradparity.conformance.space.covering import cover, most_new_first, subsets
from gradparity.conformance.space.recipes import RECIPES
from gradparity.fixtures import MODELS, OPTIMIZERS, PARAM_ORDERS, PRECISIONS, TOPOLOGIES
from gradparity.fixtures.faulty import plain

SOON = 60
"""Number of scenarios that take less than a minute on two quiet cores."""


def allowed(row: dict[str, str]) -> bool:
    # forbids ("b", "z") only where both have been chosen, as a pair does
    return (row.get("first"), row.get("second")) not in {("a", "x"), ("b", "z")}


CHOICES = {"first": "abc", "second": "xyz", "third": "01", "fourth": "+-"}


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_cover_contains_every_combination_that_can_occur(strength: int) -> None:
    wanted = subsets(CHOICES, strength)
    rows = cover({k: list(v) for k, v in CHOICES.items()}, allowed, wanted)
    every = [
        dict(zip(CHOICES, values, strict=True))
        for values in itertools.product(*CHOICES.values())
    ]
    valid = [row for row in every if allowed(row)]
    for columns in wanted:
        possible = {tuple(row[c] for c in columns) for row in valid}
        assert {tuple(row[c] for c in columns) for row in rows} == possible
    assert all(allowed(row) for row in rows)
    assert len(rows) < len(valid)


def test_scenarios_are_ordered_by_new_pairs_for_their_cost() -> None:
    cost = {"ab": 1.0, "abc": 1.0, "bcd": 4.0, "xy": 3.0, "abd": 1.5}
    # abc adds 3 pairs for 1, abd then 2 for 1.5, xy 1 for 3, bcd 1 for 4, ab nothing
    ordered = most_new_first(list(cost), tuple, cost.__getitem__)
    assert ordered == ["abc", "abd", "xy", "bcd", "ab"]


def test_quick_holds_every_choice() -> None:
    quick = select("quick", Selection())
    for field, table in (
        ("topology", TOPOLOGIES),
        ("model", MODELS),
        ("precision", PRECISIONS),
        ("optimizer", OPTIMIZERS),
        ("param_order", PARAM_ORDERS),
        ("recipe", [n for n, recipe in RECIPES.items() if not recipe.of_stacks]),
    ):
        assert {getattr(s, field) for s in quick} == set(table)
    assert len({s.loss_factor for s in quick}) == 3
    for target in ("middle[middle]", "last[last]", "loss", "loss[last]", "inf", "nan"):
        assert any(target in s.faults for s in quick), target


@pytest.mark.parametrize("preset", ["quick", "default"])
@pytest.mark.parametrize(
    "limit", [plain.HIGHEST, plain.LOWEST, plain.SMALL, plain.NO_POWER_OF_TWO]
)
def test_the_scale_is_driven_to_its_limits(preset: str, limit: str) -> None:
    """Each scenario ``limit`` shows the fault of a scaler; see test_faulty.py."""
    assert limit in [s.id for s in select(preset, Selection())]


def test_default_tries_most_choices_soon_and_what_takes_long_later() -> None:
    chosen = select("default", Selection())
    for field, table in (
        ("topology", TOPOLOGIES),
        ("model", MODELS),
        ("precision", PRECISIONS),
        ("optimizer", OPTIMIZERS),
        ("param_order", PARAM_ORDERS),
        ("recipe", [n for n, recipe in RECIPES.items() if not recipe.of_stacks]),
    ):
        late = set(table) - {getattr(s, field) for s in chosen[:SOON]}
        # one that costs much, or goes with few others, may come later
        assert len(late) <= max(1, 0.1 * len(table)), f"{field}: {late} come late"
    for _, settings in catalogue.LIMITS.values():
        assert settings["init_scale"] in [s.init_scale for s in chosen[:SOON]]
    assert all(s.steps < catalogue.LONG for s in chosen[: 3 * SOON])


def test_default_injects_at_every_place_on_every_topology() -> None:
    chosen = select("default", Selection())
    for name in TOPOLOGIES:
        plans = " ".join(s.faults for s in chosen if s.topology == name)
        ranks = ("0",) if name == "single" else ("0", "[1-9]", re.escape("*"))
        for target in catalogue.TARGETS:
            for rank in ranks * (target != "split"):
                assert re.search(f"@r{rank}s.:{re.escape(target)}", plans), target
    long = {s.faults for s in chosen if s.steps == catalogue.LONG}
    assert len(long) == 2 and "none" in long


def test_default_plants_no_fault_where_a_rank_holds_nothing_of_the_parameter() -> None:
    # 3 rows: two for the first of two shards, none for the last of four
    for name, ranks, last in (("ddp", 4, 3), ("fsdp", 2, 1), ("fsdp", 4, 2)):
        holder = catalogue.last_holder(TOPOLOGIES[name], ranks, "digits-uneven")
        assert holder == last
    assert catalogue.last_holder(TOPOLOGIES["hsdp"], 4, "digits-uneven") == 3
    for s in select("default", Selection()):
        name = catalogue.split_parameter(s.model)
        for rank in re.findall(rf"@r(\d+)s.:{re.escape(name)}", s.faults):
            rows = torch.arange(MODELS[s.model].make().get_parameter(name).shape[0])
            shards = s.world_size // (2 if s.topology.startswith("hsdp") else 1)
            held = rows.chunk(shards)
            assert s.topology == "ddp" or int(rank) % shards < len(held), s.id


@pytest.mark.parametrize(
    ("preset", "least"), [("parity", 45), ("quick", 60), ("default", 400)]
)
def test_presets_are_large_enough_deterministic_and_replayable(
    preset: str, least: int
) -> None:
    scenarios = select(preset, Selection())
    assert len(scenarios) >= least
    assert scenarios == select(preset, Selection())
    assert [Scenario.parse(s.id) for s in scenarios] == scenarios


def test_a_selection_is_kept() -> None:
    chosen = select("quick", Selection(topologies=["fsdp"], models=["text"], seed=3))
    assert {(s.topology, s.dataset, s.seed) for s in chosen} == {("fsdp", "text", 3)}


def test_a_world_size_is_taken_over() -> None:
    assert {
        s.world_size
        for s in select("parity", Selection(topologies=["fsdp"], world_size=4))
    } == {4}
