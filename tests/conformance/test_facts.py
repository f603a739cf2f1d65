"""Facts of a workload: its needs and its capabilities."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gradparity.conformance import Runner, Scenario
from gradparity.conformance.rank.worker import observe_rank
from gradparity.conformance.space import facts
from gradparity.conformance.space.constraints import why_not
from gradparity.conformance.space.facts import facts_of, probe
from gradparity.conformance.space.recipes import RECIPES
from gradparity.fixtures import (
    MODELS,
    TOPOLOGIES,
    OfModel,
    OfTopology,
    OfWorkload,
    resolve_workload,
)
from gradparity.tests.workloads.stacks import Right

RIGHT = "gradparity.tests.workloads.stacks:Right"
STEPS = "gradparity.fixtures.faulty.own_steps:Steps"
RANDOM = "gradparity.tests.workloads.random_stacks"
COUNTED = "gradparity.tests.conformance.test_workload_parts:Counted"


class Codebook(nn.Linear):
    """A layer that reads a running mean before forward moves it."""

    seen: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("seen", torch.zeros(inputs))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x - self.seen.clone())
        self.seen.lerp_(x.detach().mean(0), 0.5)
        return y


class MovesABuffer(Right):
    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, nn.Sequential)
        assert isinstance(model[0], nn.Linear)
        model[0] = Codebook(model[0].in_features, model[0].out_features)
        return model


def test_ranks_get_the_facts_and_find_out_nothing() -> None:
    scenario = Scenario.parse(f"dp2/2/fp32/own/none/model={RIGHT},steps=1")
    told = replace(probe(resolve_workload(RIGHT)), rows=12345)
    with Runner(folder=".") as runner:
        ranks = runner.place.ranks(2)
        ranks.run(observe_rank, scenario, "none", ".", facts=told)
        assert ranks.run(facts_of, RIGHT) == [told, told]


def test_the_parent_process_probes_no_workload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = f"dp2/2/fp32/own/none/model={RIGHT},steps=2,recipe=recompute"
    scenario = Scenario.parse(text)
    monkeypatch.setattr(facts, "_KNOWN", {})
    monkeypatch.setattr(facts, "probe", lambda _: pytest.fail("it was probed here"))
    with Runner(folder=".") as runner:
        case = runner.run("gradparity.scaler:GradScaler", scenario)
    assert case.status == "pass", case.problem


def test_what_is_declared_of_the_models_is_found_in_them() -> None:
    declared = {OfWorkload.RECOMPUTED, OfWorkload.TWO_KINDS}
    for name in MODELS:
        workload = resolve_workload(name)
        found = probe(workload)
        assert declared <= workload.has
        assert declared.isdisjoint(found.lacks)
        assert not (found.draws or found.counted or found.widens)
        assert not found.differentiates


def test_facts_tell_a_loss_with_a_count_from_a_mean() -> None:
    assert facts_of(COUNTED).counted
    assert not facts_of(RIGHT).counted


def test_every_need_is_had_somewhere_and_lacked_somewhere() -> None:
    for need in OfTopology:
        have = {need in topology.has for topology in TOPOLOGIES.values()}
        assert have == {True, False}, need
    for of_model in OfModel:
        have = {of_model in model.has for model in MODELS.values()}
        assert have == {True, False}, of_model
        assert any(of_model in topology.needs for topology in TOPOLOGIES.values())
    asked = {need for recipe in RECIPES.values() for need in recipe.needs}
    assert asked == {*OfWorkload} - {OfWorkload.LOOP}
    digits, steps = resolve_workload("digits").has, resolve_workload(STEPS).has
    assert OfWorkload.LOOP in digits and OfWorkload.LOOP not in steps


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"topology": "tp+sp", "model": "digits"}, "a sequence in dim 1"),
        ({"topology": "ep", "model": "text"}, "experts: choose digits-experts"),
        ({"topology": "ddp", "precision": "bf16-params"}, "choose fsdp1 or fsdp"),
        ({"topology": "fsdp", "optimizer": "sgd-fused"}, "takes no DTensor"),
        ({"topology": "tp", "optimizer": "adamw-fused"}, "refuse mixed tensors"),
        ({"topology": "tp+sp", "recipe": "clip-norm"}, "cannot be clipped"),
        ({"recipe": "compiled", "model": "text"}, "may take minutes"),
        ({"recipe": "random", "model": "digits"}, "tests a user's training code"),
    ],
)
def test_the_reason_names_what_is_lacking(choices: dict[str, str], reason: str) -> None:
    assert reason in why_not(resolve_workload("digits"), choices)


def test_a_forward_that_moves_a_buffer_draws_nothing() -> None:
    # the second forward differs, but not by random numbers
    workload = resolve_workload(f"{__name__}:MovesABuffer")
    model, batch = workload.model(), workload.batch(0, 0)
    assert not torch.equal(model(batch.inputs), model(batch.inputs))
    assert not probe(workload).draws


@pytest.mark.parametrize("stack", ["Dropout", "RestoresItsOwnGenerator"])
def test_a_forward_that_draws_from_any_generator_is_found(stack: str) -> None:
    assert probe(resolve_workload(f"{RANDOM}:{stack}")).draws
