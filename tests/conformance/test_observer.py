"""Observed training equals unobserved training, to the bit."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import pytest
import torch

from gradparity.conformance import Scenario
from gradparity.conformance.comparison.bounds import expected_choices
from gradparity.conformance.comparison.reference import Schedule
from gradparity.conformance.rank.layout import build_engine, remake_optimizers
from gradparity.conformance.rank.observe import digest
from gradparity.conformance.rank.recording import next_batch
from gradparity.conformance.rank.routing import Choices
from gradparity.conformance.rank.worker import observe_rank
from gradparity.fixtures import resolve_workload
from gradparity.fixtures.specimens import SPECIMENS
from gradparity.multiprocess import Cluster, current_world

STEPS = 2
COMPILED = "gradparity.tests.workloads.compiled_stacks"
STACKS = "gradparity.fixtures.faulty.stacks"


def observed(
    scenario: Scenario, choices: Sequence[Mapping[str, Choices]]
) -> dict[str, str]:
    """Return digests of the weights after an observed run."""
    trace = observe_rank(scenario, "none", ".", choices=choices)
    return trace.steps[-1].digests


def alone(scenario: Scenario) -> dict[str, str]:
    """Return digests of the weights after a plain loop without any observer."""
    world, workload = current_world(), scenario.workload
    torch._dynamo.reset()  # as in a new process: the test before may have compiled it
    shape = scenario.parsed_topology.mesh_shape(scenario.world_size)
    mesh = world.mesh(tuple(shape.values()), tuple(shape))
    engine = build_engine(scenario, mesh, torch.device(world.device))
    autocast = scenario.parsed_precision.autocast(engine.device.type)
    for step in range(scenario.steps):
        batch = next_batch(engine, step)
        if workload.train_step is not None:
            with autocast:
                torch.set_autocast_cache_enabled(False)
                parts = engine.micro_batches(batch)
                workload.train_step(engine.module, parts, None)
        else:
            engine.forward_backward(batch, lambda losses, *_: losses)
            for optimizer in engine.optimizers:
                optimizer.step()
    return {name: digest(part) for name, part in engine.local_tensors().items()}


def agree(clusters: Mapping[int, Cluster], text: str, **choices: Any) -> None:
    scenario = Scenario.parse(text)
    ranks = clusters[scenario.world_size]
    with_it = ranks.run(observed, scenario, choices.get("choices", ()))
    assert with_it == ranks.run(alone, scenario)
    assert all(with_it)


@pytest.fixture(scope="module")
def ranks(two: Cluster, four: Cluster) -> dict[int, Cluster]:
    return {2: two, 4: four}


PLACES = (
    "ddp/2/fp32/adamw",
    "ddp/2/fp16-autocast/sgd",
    "fsdp/2/fp32/sgd",
    "fsdp/2/bf16-params/adamw",
    "tp/2/fp32/sgd",
    "fsdp+tp/4/bf16-autocast/sgd",
    "pp/2/fp32/sgd",
)


@pytest.mark.parametrize(
    ("place", "recipe"), [*zip(PLACES, cycle(("plain", "accumulate", "recompute")))]
)
@pytest.mark.few(3)
def test_models_of_ours(ranks: dict[int, Cluster], place: str, recipe: str) -> None:
    agree(ranks, f"{place}/none/steps={STEPS},recipe={recipe}")


def drawn_in_its_layout(scenario: Scenario) -> tuple[float, float]:
    """Return the number that a layout draws, and the first number after seed 0."""
    world = current_world()
    shape = scenario.parsed_topology.mesh_shape(scenario.world_size)
    mesh = world.mesh(tuple(shape.values()), tuple(shape))
    torch.manual_seed(0)
    engine = build_engine(scenario, mesh, torch.device(world.device))
    torch.manual_seed(0)
    return float(engine.module.drawn), float(torch.rand(()))


def test_the_layout_that_shows_the_map_draws_nothing(two: Cluster) -> None:
    model = "gradparity.tests.workloads.stacks:Draws"
    scenario = Scenario.parse(f"dp2/2/fp32/own/none/model={model}")
    for drawn, first in two.run(drawn_in_its_layout, scenario):
        assert drawn == first


# Compiling takes most of the time: a stack that differs from one of these only in what
# is laid out is checked in the tests of compiled stacks.
@pytest.mark.slow
def test_the_compiled_recipe(ranks: dict[int, Cluster]) -> None:
    agree(ranks, f"ddp/2/fp32/sgd/none/steps={STEPS},recipe=compiled")


def one_of_each_module() -> list[str]:
    first = {pair.name.partition(":")[0]: name for name, pair in SPECIMENS.items()}
    return sorted(first.values())


@pytest.mark.parametrize(
    ("name", "recipe"), [*zip(one_of_each_module(), cycle(("plain", "random")))]
)
@pytest.mark.few(8)
def test_specimens(ranks: dict[int, Cluster], name: str, recipe: str) -> None:
    workload = resolve_workload(SPECIMENS[name].fixed)
    topology = next(t for t in workload.topologies.values() if t.parallel)
    text = f"{topology.name}/{topology.default_world_size}/fp32/own/none/"
    text += f"model={workload.name},steps={STEPS},recipe="
    if name == "U05":  # the others draw nothing
        recipe = "random"
    elif recipe == "random":
        recipe = "accumulate" if workload.micro_batches is None else "plain"
    agree(ranks, text + recipe)


@pytest.mark.parametrize(
    ("stack", "recipe"),
    [
        ("Blocks", "recompute"),
        ("FullyShard", "accumulate"),
        ("OwnStep", "plain"),
        ("CompiledOptimizer", "plain"),
        ("Dropping", "random"),
    ],
)
@pytest.mark.slow
def test_compiled_stacks(ranks: dict[int, Cluster], stack: str, recipe: str) -> None:
    text = f"dp2/2/fp32/own/none/model={COMPILED}:{stack},steps={STEPS},recipe={recipe}"
    agree(ranks, text)


def test_a_learned_router_whose_choices_do_not_tip(ranks: dict[int, Cluster]) -> None:
    model = "gradparity.tests.workloads.routed_stacks:TopTwo"
    text = f"dp2/2/fp32/own/none/model={model},steps=2"
    scenario = Scenario.parse(text)
    schedule = Schedule(skipped=(frozenset(),) * STEPS, scales=(1.0,) * STEPS)
    known = expected_choices(scenario, schedule)
    assert any(known)
    agree(ranks, text, choices=known)


def decayed(scenario: Scenario, *, again: bool) -> float:
    """Return the learning rate after two steps of a schedule.

    ``again`` creates new optimizers after the first step.
    """
    world = current_world()
    mesh = world.mesh((2,), ("dp",))
    engine = build_engine(scenario, mesh, torch.device(world.device))
    for step in range(2):
        engine.forward_backward(next_batch(engine, step), lambda losses, *_: losses)
        for optimizer, scheduler in zip(
            engine.optimizers, engine.schedulers, strict=True
        ):
            optimizer.step()
            scheduler.step()
        if again and not step:
            remake_optimizers(engine)
    return float(engine.optimizers[0].param_groups[0]["lr"])


def test_schedulers_go_on_with_optimizers_that_are_made_again(two: Cluster) -> None:
    # regression: O16
    scenario = Scenario.parse("ddp/2/fp32/sgd/none/recipe=scheduler")
    whole, again = (two.run(decayed, scenario, again=a) for a in (False, True))
    assert again == whole
