"""Programs in which a scaler must not guess which backward made a gradient.

Whatever happens between a backward and a step, the gradients are divided by the scale
that holds when they are unscaled, as torch's class does in the same program.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradparity.tests.beside_torch import (
    CLASSES,
    PAIRS,
    Pair,
    bits,
    ours_plain,
    ours_sharded,
    torch_plain,
    torch_sharded,
)
from gradparity.tests.stepping import scalar_weight, sgd

# torch's own, of graphs that break
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


# - F52: scale() unseen


@CLASSES
@pytest.mark.parametrize("how", ["compiled", "needs no gradient"])
def test_an_eager_iteration_then_others(make: Any, how: str) -> None:
    p = scalar_weight()
    optimizer, scaler = sgd(p), make(init_scale=4.0, growth_interval=1)
    torch._dynamo.reset()

    def eager() -> Any:
        return scaler.scale((p * 0.5).sum())

    def by_hand() -> Any:
        return (p * 0.5).sum() * scaler.scale(torch.ones(()))

    unseen: Callable[[], Any] = by_hand
    if how == "compiled":
        unseen = torch.compile(eager, backend="eager")
    values = []
    for loss in (eager, unseen, unseen, unseen):
        optimizer.zero_grad()
        loss().backward()
        scaler.step(optimizer)
        scaler.update()
        values.append(p.item())
    assert values == [0.5, 0.0, -0.5, -1.0]
    assert scaler.get_scale() == 64.0


# - F59: accumulation while the scale moves


def twice(scaler: Any, p: Any, between: Callable[[], Any]) -> None:
    scaler.scale((p * 0.5).sum()).backward()
    between()
    scaler.scale((p * 0.25).sum()).backward()


def in_two_optimizers(scaler: Any) -> Any:
    p, q = scalar_weight(), scalar_weight()
    first, second = sgd(p), sgd(p, q)
    for optimizer in (first, second):  # both are known
        scaler.scale((p * 0.0 + q * 0.0).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    twice(scaler, p, lambda: scaler.update(16.0))
    scaler.step(first)
    scaler.update()
    return p, q


def in_a_discarded_optimizer(scaler: Any) -> Any:
    p = scalar_weight()
    old, new = sgd(p), sgd(p)
    scaler.scale((p * 0.0).sum()).backward()
    scaler.step(old)
    scaler.update()
    twice(scaler, p, lambda: scaler.update(16.0))
    scaler.step(new)
    scaler.update()
    return p, old.param_groups[0]["params"][0]


def unscaled_and_never_stepped(scaler: Any) -> Any:
    p = scalar_weight()
    optimizer = sgd(p)

    def between() -> None:
        scaler.unscale_(optimizer)
        scaler.update()

    twice(scaler, p, between)
    scaler.step(optimizer)
    scaler.update()
    return p, p.grad


def not_yet_stepped(scaler: Any) -> Any:
    p = scalar_weight()
    optimizer = sgd(p)
    twice(scaler, p, lambda: scaler.update(16.0))
    scaler.step(optimizer)
    scaler.update()
    return p, p.grad


def moved_before_the_step(scaler: Any) -> Any:
    p = scalar_weight()
    optimizer = sgd(p)
    scaler.scale((p * 0.5).sum()).backward()
    scaler.update(16.0)
    scaler.step(optimizer)
    scaler.update()
    return p, p.grad


def loaded_before_the_step(scaler: Any) -> Any:
    p = scalar_weight()
    optimizer = sgd(p)
    scaler.scale((p * 0.5).sum()).backward()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 16.0})
    scaler.step(optimizer)
    return p, p.grad


def added_after_unscale(scaler: Any) -> Any:
    p = scalar_weight()
    optimizer = sgd(p)
    twice(scaler, p, lambda: scaler.unscale_(optimizer))
    scaler.step(optimizer)
    return p, p.grad


@PAIRS
@pytest.mark.parametrize(
    "program",
    [
        in_two_optimizers,
        in_a_discarded_optimizer,
        unscaled_and_never_stepped,
        not_yet_stepped,
        moved_before_the_step,
        loaded_before_the_step,
        added_after_unscale,
    ],
)
def test_accumulation_while_the_scale_moves(
    pair: Pair, program: Callable[[Any], Any]
) -> None:
    theirs, ours = (bits(list(program(make(init_scale=4.0)))) for make in pair)
    assert ours == theirs


# Left to a fused kernel that never runs; torch has unscale_ and a clip by hand.


def added_after_clip(scaler: Any, clip: Callable[[Any], None]) -> Any:
    p = scalar_weight()
    optimizer = sgd(p, fused=True)

    def between() -> None:
        clip(optimizer)
        scaler.update()

    twice(scaler, p, between)
    scaler.step(optimizer)
    return p, p.grad


def cleared_after_clip(scaler: Any, clip: Callable[[Any], None]) -> Any:
    p = scalar_weight()
    optimizer = sgd(p, fused=True)

    def between() -> None:
        clip(optimizer)
        optimizer.zero_grad(set_to_none=False)

    twice(scaler, p, between)
    scaler.update()
    scaler.step(optimizer)
    return p, p.grad


@PAIRS
@pytest.mark.parametrize("program", [added_after_clip, cleared_after_clip])
@pytest.mark.parametrize("max_norm", [0.125, 1e9])
def test_a_clip_for_a_kernel_that_never_ran(
    pair: Pair, program: Callable[[Any, Any], Any], max_norm: float
) -> None:
    torchs, ours = (make(init_scale=1024.0) for make in pair)

    def by_hand(optimizer: Any) -> None:
        torchs.unscale_(optimizer)
        held = optimizer.param_groups[0]["params"]
        torch.nn.utils.clip_grad_norm_(held, max_norm)

    theirs = program(torchs, by_hand)
    mine = program(ours, lambda o: ours.clip_grad_norm_(o, max_norm))
    # one factor where torch multiplies twice: a rounding each
    torch.testing.assert_close(list(mine), list(theirs), rtol=3e-7, atol=0)


# - F66: no accumulation


@CLASSES
@pytest.mark.parametrize("moved", [True, False])
def test_a_dropped_batch(make: Any, moved: bool) -> None:
    p, q = scalar_weight(), scalar_weight()
    optimizer, other = sgd(p), sgd(q)
    scaler = make(init_scale=4.0, growth_interval=1)
    scaler.scale((p * 8.0 + q * 0.5).sum()).backward()
    scaler.step(other)  # the batch counts for one model and not for the other
    scaler.update()
    if moved:
        scaler.update(16.0)
    for turn in range(1, 4):
        optimizer.zero_grad(set_to_none=False)
        scaler.scale((p * 0.5).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert p.item() == 1.0 - turn * 0.5


@CLASSES
def test_a_dropped_first_batch(make: Any) -> None:
    p = scalar_weight()
    optimizer, scaler = sgd(p), make(init_scale=4.0)
    scaler.scale((p * 8.0).sum()).backward()
    scaler.update(16.0)
    for turn in range(1, 4):
        optimizer.zero_grad(set_to_none=False)
        scaler.scale((p * 0.5).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert p.item() == 1.0 - turn * 0.5


# - F67, F69: unusual backwards


@pytest.mark.parametrize("make", [torch_plain, ours_plain, torch_sharded, ours_sharded])
@pytest.mark.parametrize("max_norm", [1e9, 0.25])
@pytest.mark.filterwarnings("ignore:Using backward.*create_graph=True:UserWarning")
def test_clipping_after_a_backward_that_made_a_graph(
    make: Any, max_norm: float
) -> None:
    p, q = scalar_weight(3.0), scalar_weight(4.0)
    optimizer, scaler = sgd(p, q), make(init_scale=4.0)
    scaler.scale(((p * p + q * q) / 8).sum()).backward(create_graph=True)
    if make in (torch_plain, torch_sharded):
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_([p, q], max_norm)
    else:
        norm = scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.step(optimizer)
    scaler.update()
    assert float(norm) == 1.25
    factor = min(max_norm / 1.25, 1.0)
    torch.testing.assert_close(
        [p.item(), q.item()], [3.0 - 0.75 * factor, 4.0 - factor], rtol=1e-5, atol=0.0
    )
    optimizer.zero_grad()  # ends the cycle of the graph


@CLASSES
def test_compiled_autograd_of_another_model_after_unscale(make: Any) -> None:
    from torch._dynamo import compiled_autograd

    p, q = scalar_weight(), scalar_weight()
    first, second = sgd(p), sgd(q)
    scaler = make(init_scale=4.0)
    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        scaler.scale((p * 0.5).sum()).backward()
        scaler.unscale_(first)
        scaler.scale((q * 0.25).sum()).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert (p.item(), q.item()) == (0.5, 0.75)
