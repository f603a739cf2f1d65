"""Gradients are divided by the scale that their backward used, never a later one."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler, RanksDisagreeError
from gradparity.tests.stepping import BOTH, FUSED, sgd


def zeros() -> Tensor:
    return torch.zeros(2, requires_grad=True)


def four(make: Any = GradScaler, **settings: Any) -> Any:
    return make(device="cpu", init_scale=4.0, **settings)


def backward(scaler: Any, *params: Tensor, slope: float = 1.0) -> None:
    loss = torch.stack([(p * slope).sum() for p in params]).sum()
    scaler.scale(loss).backward()


Finish = Callable[[Any, Any], None]
FINISH: dict[str, Finish] = {
    "step": lambda scaler, optimizer: None,
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "clip": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1e9),
    "together": lambda scaler, optimizer: None,
}


def finish(scaler: Any, optimizer: Any, how: str) -> None:
    FINISH[how](scaler, optimizer)
    if how == "together":
        scaler.step_together(optimizer)
    else:
        scaler.step(optimizer)


@BOTH
@FUSED
@pytest.mark.parametrize("how", sorted(FINISH))
@pytest.mark.parametrize("new", [8.0, 0.5])
def test_b10e_update_before_step(make: Any, fused: bool, how: str, new: float) -> None:
    p, scaler = zeros(), four(make)
    optimizer = sgd(p, fused=fused)
    backward(scaler, p)
    scaler.update(new)
    assert scaler.get_scale() == new
    finish(scaler, optimizer, how)
    assert p.tolist() == [-1.0, -1.0]
    scaler.update()
    optimizer.zero_grad()
    backward(scaler, p)
    assert p.grad is not None and p.grad.tolist() == [new, new]
    finish(scaler, optimizer, how)
    assert p.tolist() == [-2.0, -2.0]


@BOTH
@FUSED
@pytest.mark.parametrize("how", sorted(FINISH))
@pytest.mark.parametrize("set_to_none", [False, True])
def test_b10e_accumulation_across_an_update(
    make: Any, fused: bool, how: str, set_to_none: bool
) -> None:
    p, scaler = zeros(), four(make)
    optimizer = sgd(p, fused=fused)
    backward(scaler, p)  # so that the scaler knows the optimizer
    finish(scaler, optimizer, how)
    scaler.update()
    optimizer.zero_grad(set_to_none=set_to_none)
    for new in (8.0, 2.0, 4.0):
        backward(scaler, p)
        scaler.update(new)
    finish(scaler, optimizer, how)
    assert p.tolist() == [-4.0, -4.0]


@FUSED
def test_b10e_accumulation_over_steps_of_another_optimizer(fused: bool) -> None:
    # The first steps each time, the second every other time; the scale grows each time.
    p, q, scaler = zeros(), zeros(), four(growth_interval=1)
    often, seldom = sgd(p, fused=fused), sgd(q, fused=fused)
    for iteration in range(6):
        backward(scaler, p, q)
        scaler.step(often)
        if iteration % 2 or not iteration:
            scaler.step(seldom)
            seldom.zero_grad()
        scaler.update()
        often.zero_grad()
    assert p.tolist() == [-6.0, -6.0] and q.tolist() == [-6.0, -6.0]
    assert scaler.get_scale() == 4.0 * 2**6


def test_b10e_update_after_each_optimizer() -> None:
    # As accelerate does: the second optimizer's gradients are older than the scale.
    p, q, scaler = zeros(), zeros(), four(growth_interval=1)
    first, second = sgd(p), sgd(q)
    for _ in range(3):
        backward(scaler, p, q)
        for optimizer in (first, second):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert p.tolist() == q.tolist() == [-3.0, -3.0]


def test_b10e_loss_scaled_before_an_update_and_used_after() -> None:
    p, scaler = zeros(), four()
    loss, (nested,) = scaler.scale(p.sum()), scaler.scale([p.sum()])
    scaler.update(8.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # autograd itself refuses, as with torch's class
    nested.backward()
    scaler.step(sgd(p))
    assert p.tolist() == [-1.0, -1.0]


def test_b10e_alternating_optimizers_keep_their_leftovers() -> None:
    # As GANs do: gradients that were stepped with stay until their own zero_grad.
    p, q, scaler = zeros(), zeros(), four(growth_interval=1)
    optimizers = sgd(p), sgd(q)
    for iteration in range(6):
        mine = optimizers[iteration % 2]
        mine.zero_grad()
        backward(scaler, p, q)  # also reaches the other one
        scaler.step(mine)
        scaler.update()
    assert p.tolist() == q.tolist() == [-3.0, -3.0]


def test_b10e_gradients_that_were_stepped_with_stay_as_they_are() -> None:
    p, q, scaler = zeros(), zeros(), four(growth_interval=1)
    optimizer = sgd(p)
    backward(scaler, p)
    scaler.step(optimizer)
    scaler.update()
    backward(scaler, q)
    assert p.grad is not None and p.grad.tolist() == [1.0, 1.0]


def test_b10e_unscaled_but_never_stepped() -> None:
    p, scaler = zeros(), four()
    optimizer = sgd(p)
    for _ in range(2):  # accumulates onto what was unscaled in an earlier iteration
        backward(scaler, p)
        scaler.unscale_(optimizer)
        scaler.update()
    backward(scaler, p)
    scaler.step(optimizer)
    assert p.tolist() == [-3.0, -3.0]


@BOTH
@FUSED
@pytest.mark.parametrize("how", ["step", "clip", "together"])
def test_b10e_backward_after_unscale_raises(make: Any, fused: bool, how: str) -> None:
    p, scaler = zeros(), four(make)
    optimizer = sgd(p, fused=fused)
    backward(scaler, p)
    scaler.unscale_(optimizer)
    backward(scaler, p)
    with pytest.raises(RuntimeError, match="after the last backward"):
        finish(scaler, optimizer, how)
    assert p.tolist() == [0.0, 0.0]


def test_b10e_backward_of_another_optimizer_after_unscale_is_fine() -> None:
    p, q, scaler = zeros(), zeros(), four()
    first, second = sgd(p), sgd(q)
    backward(scaler, p)
    scaler.unscale_(first)
    backward(scaler, q)
    torch.nn.utils.clip_grad_norm_([p], 1e9)
    for optimizer in (first, second):
        scaler.step(optimizer)
    assert p.tolist() == q.tolist() == [-1.0, -1.0]


def test_b10e_unknown_optimizer_in_a_mixed_accumulation_raises() -> None:
    p, scaler = zeros(), four()
    optimizer = sgd(p)
    backward(scaler, p)
    scaler.update(8.0)
    backward(scaler, p)
    with pytest.raises(RuntimeError, match="mix several scales"):
        scaler.step(optimizer)
    optimizer.zero_grad()  # the way out that the message names
    backward(scaler, p)
    scaler.step(optimizer)
    assert p.tolist() == [-1.0, -1.0]


def test_b10e_abandoned_batch_of_an_unknown_optimizer() -> None:
    p, scaler = zeros(), four()
    optimizer = sgd(p)
    backward(scaler, p)
    scaler.update(2.0)
    optimizer.zero_grad()
    backward(scaler, p)
    scaler.step(optimizer)
    assert p.tolist() == [-1.0, -1.0]


def test_b10e_copies_start_afresh() -> None:
    p, scaler = zeros(), four()
    backward(scaler, p)
    scaler.step(sgd(p))
    scaler.update(8.0)
    for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        q = zeros()
        backward(twin, q)
        assert q.grad is not None and q.grad.tolist() == [8.0, 8.0]
        twin.step(sgd(q))
        assert q.tolist() == [-1.0, -1.0]


# - Over ranks


def test_b10e_ranks_that_carry_different_scales_raise(two: Cluster) -> None:
    def step(both: bool) -> Any:
        p, scaler = zeros(), four()
        if both or dist.get_rank():
            backward(scaler, p)  # a last stage; the other one has no loss
        else:
            p.grad = torch.full((2,), 4.0)
        scaler.update(8.0)
        try:
            scaler.step(sgd(p))
        except RanksDisagreeError as error:
            return error.lowest, error.highest
        return p.tolist()

    assert two.run(step, True) == [[-1.0, -1.0]] * 2
    assert two.run(step, False) == [({"divisor": 4.0}, {"divisor": 8.0})] * 2


@BOTH
@FUSED
def test_b10e_rank_without_gradients_carries_nothing(
    two: Cluster, make: Any, fused: bool
) -> None:
    def step() -> Any:
        p, scaler = zeros(), four(make, growth_interval=1)
        optimizer = sgd(p, fused=fused)
        for iteration in range(4):
            if iteration == 0 or dist.get_rank():
                backward(scaler, p)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return p.tolist(), scaler.get_scale()

    assert two.run(step) == [([-1.0, -1.0], 64.0), ([-4.0, -4.0], 64.0)]


def test_b10e_fully_shard(two: Cluster) -> None:
    def step(unscale: bool) -> Any:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        torch.manual_seed(0)
        layer: Any = nn.Linear(4, 4, bias=False)
        nn.init.zeros_(layer.weight)
        fully_shard(layer)
        scaler, optimizer = four(), torch.optim.SGD(layer.parameters(), lr=1.0)
        for again in (False, True):
            scaler.scale(layer(torch.ones(1, 4)).sum()).backward()
            if not again:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scaler.scale(layer(torch.ones(1, 4)).sum()).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                else:
                    scaler.update(8.0)
        try:
            scaler.step(optimizer)
        except RuntimeError as error:
            return "after the last backward" in str(error)
        weight = layer.weight
        assert isinstance(weight, DTensor)
        return weight.to_local().unique().tolist()

    assert two.run(step, False) == [[-3.0]] * 2
    assert two.run(step, True) == [True] * 2
