"""Data sets, faults and orders: real, deterministic, and exact in what they do."""

import numpy as np
import pytest
import torch
from torch import nn

from gradparity.fixtures import (
    DATASETS,
    MODELS,
    OPTIMIZERS,
    TOPOLOGIES,
    aim,
    inject,
    loss,
    order_parameters,
    parse_faults,
)
from gradparity.fixtures.datasets import corpus, digits


def test_digits_are_the_real_ones() -> None:
    pixels, labels = digits()
    assert pixels.shape == (1797, 64)
    assert pixels.dtype == np.float32
    assert 0 <= pixels.min() and pixels.max() == 1.0
    assert np.bincount(labels).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip


def test_the_corpus_is_english_text() -> None:
    text = corpus()
    assert len(text) > 300_000
    assert bytes(text[:4000].astype(np.uint8)).decode().lower().count(" the ") > 10


@pytest.mark.parametrize("name", DATASETS)
def test_batches_depend_on_step_and_seed_alone(name: str) -> None:
    data = DATASETS[name]
    first = data.batch(3, seed=1)
    again = data.batch(3, seed=1)
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.targets, again.targets)
    assert not torch.equal(first.inputs, data.batch(4, seed=1).inputs)
    assert not torch.equal(first.inputs, data.batch(3, seed=2).inputs)


@pytest.mark.parametrize("name", DATASETS)
def test_shards_make_up_the_batch(name: str) -> None:
    batch = DATASETS[name].batch(0, seed=0)
    parts = [batch.shard(i, 4).inputs for i in range(4)]
    assert torch.equal(torch.cat(parts), batch.inputs)
    with pytest.raises(ValueError, match="cannot be split over 3 ranks"):
        batch.shard(0, 3)


@pytest.mark.parametrize("name", MODELS)
def test_models_learn(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        batch = DATASETS[name.split("-")[0]].batch(0, seed=0)
        optimizer.zero_grad()
        value = loss(model(batch.inputs), batch.targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < 0.8 * losses[0]


def test_cut_models_hold_every_parameter_once() -> None:
    for name in ("digits", "text"):
        whole = {n for n, _ in MODELS[name]().named_parameters()}
        stages = [MODELS[name]().cut(i, 2) for i in range(2)]
        names = [n for s in stages for n, _ in s.named_parameters()]
        assert sorted(names) == sorted(whole)


def test_vectors_first_puts_matrices_last() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    names = [n for n, _ in order_parameters("vectors-first", model.named_parameters())]
    assert names == ["0.bias", "1.weight", "1.bias", "0.weight"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step(name: str) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS[name]([("weight", parameter)])
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert not torch.equal(parameter, torch.ones(3))


# - Faults


def test_a_fault_strikes_the_replicas_of_its_elements() -> None:
    holdings = [{"a": "x", "b": "0"}, {"a": "x", "b": "1"}]
    (replicated,) = aim(parse_faults("inf@r1s2:a"), holdings)
    assert replicated.ranks == {0, 1}
    (sharded,) = aim(parse_faults("inf@r1s2:b"), holdings)
    assert sharded.ranks == {1}
    (alone,) = aim(parse_faults("inf@r1s2:a!"), holdings)
    assert alone.ranks == {1}


def test_first_and_last_are_what_the_named_rank_holds() -> None:
    holdings = [{"a": "0"}, {"b": "0", "c": "0"}]
    strikes = aim(parse_faults("nan@r*s*:last"), holdings)
    assert [(s.parameter, set(s.ranks)) for s in strikes] == [("a", {0}), ("c", {1})]
    assert aim(parse_faults("nan@r0s0:c"), holdings) == ()


@pytest.mark.parametrize(
    ("kind", "check"),
    [("inf", torch.isposinf), ("-inf", torch.isneginf), ("nan", torch.isnan)],
)
def test_inject_writes_one_element_at_the_right_time(kind: str, check: object) -> None:
    strikes = aim(parse_faults(f"{kind}@r1s2:a"), [{"a": "0"}, {"a": "1"}])
    gradients = {"a": torch.zeros(2, 3).t()}
    assert inject(strikes, gradients, rank=1, step=1) == []
    assert inject(strikes, gradients, rank=0, step=2) == []
    assert gradients["a"].isfinite().all()
    assert inject(strikes, gradients, rank=1, step=2) == [f"{kind}@r1s2:a=a"]
    assert check(gradients["a"][0, 0])  # type: ignore[operator]  # a torch function
    assert gradients["a"].isfinite().sum() == 5


def test_every_topology_takes_its_own_default_world() -> None:
    for topology in TOPOLOGIES.values():
        shape = topology.mesh_shape(topology.default_world)
        assert np.prod(list(shape.values())) == topology.default_world
