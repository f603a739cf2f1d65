"""``scale()`` and the value of the scale, checked as in torch's public tests.

Each test runs on torch's class and on ours: on torch's it shows that the test is right.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gradparity.tests.beside_torch import (
    CLASSES,
    PAIRS,
    PLAIN,
    SHARDED,
    Pair,
    bits,
    filled,
    outcome,
    scaled_once,
)

INF = float("inf")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


# - scale()


def nests(one: Tensor, two: Tensor) -> list[Any]:
    return [
        one,
        [one, two],
        (one, two),
        (two, (one, two), [one, (two, one)]),
        [two, (one,), [], ()],
        [],
        {"only the keys are seen": 1}.values(),
        None,
        3.0,
        [one, None],
    ]


@PAIRS
@pytest.mark.parametrize(
    "dtype", [*DTYPES, torch.int64, torch.complex64, torch.bool], ids=str
)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (0,), (2, 2)], ids=str)
def test_scale_keeps_nest_shape_and_dtype(
    pair: Pair, dtype: Any, shape: tuple[int, ...]
) -> None:
    one, two = torch.full(shape, 3).to(dtype), torch.full(shape, 5).to(dtype)
    for theirs, ours in zip(nests(one, two), nests(one, two), strict=True):
        for settings in ({"init_scale": 2.0}, {"enabled": False}):
            assert outcome(pair.ours(**settings).scale, ours) == outcome(
                pair.theirs(**settings).scale, theirs
            )


@SHARDED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_the_sharded_class_keeps_the_dtype_of_a_loss(
    make: Any, dtype: Any, shape: tuple[int, ...]
) -> None:
    p = filled(3.0, dtype=dtype)
    scaled = make(init_scale=8.0).scale(p.sum().reshape(shape))
    assert bits(scaled) == bits(torch.full(shape, 48.0, dtype=dtype))
    scaled.sum().backward()
    assert bits(p.grad) == bits(torch.full((2,), 8.0, dtype=dtype))
    in_list = make(init_scale=8.0).scale([torch.ones(shape, dtype=dtype)])
    assert bits(in_list) == bits([torch.full(shape, 8.0, dtype=dtype)])


@SHARDED
def test_an_fp16_loss_may_overflow_while_its_gradient_does_not(make: Any) -> None:
    p = filled(1.0, dtype=torch.float16)
    scaled = make(init_scale=2.0**14).scale((p * 4).sum())
    assert scaled.dtype is torch.float16
    assert scaled.isinf()
    scaled.backward()
    assert bits(p.grad) == bits(torch.full((2,), INF, dtype=torch.float16))
    p.grad = None
    make(init_scale=2.0**14).scale((p * 2).sum()).backward()
    assert p.grad is not None
    assert p.grad.tolist() == [2.0**15, 2.0**15]


@CLASSES
def test_iterators_are_scaled_lazily(make: Any) -> None:
    seen: list[int] = []

    def outputs() -> Iterator[Tensor]:
        for n in range(3):
            seen.append(n)
            yield torch.full((1,), float(n))

    scaled = iter(make(init_scale=2.0).scale(outputs()))
    assert seen == []
    assert next(scaled).tolist() == [0.0]
    assert seen == [0]
    assert [t.tolist() for t in scaled] == [[2.0], [4.0]]


@CLASSES
def test_subclasses_of_list_and_tuple_are_kept(make: Any) -> None:
    class Several(list[Tensor]):
        pass

    class Few(tuple[Tensor, ...]):
        pass

    for kind in (Several, Few):
        scaled: Any = make(init_scale=2.0).scale(kind([torch.ones(1), torch.ones(1)]))
        assert type(scaled) is kind
        assert [t.item() for t in scaled] == [2.0, 2.0]


class Named(NamedTuple):
    a: Tensor
    b: Tensor


@PAIRS
def test_named_tuples(pair: Pair) -> None:
    outputs = Named(torch.ones(1), torch.ones(1))
    theirs = outcome(pair.theirs(init_scale=2.0).scale, outputs)
    assert theirs == "TypeError"  # torch's is no result to keep
    ours = outcome(pair.ours(init_scale=2.0).scale, outputs)
    assert ours in (
        "TypeError",
        bits(Named(torch.full((1,), 2.0), torch.full((1,), 2))),
    )


@SHARDED
def test_a_device_without_values_is_refused(make: Any) -> None:
    for outputs in (torch.ones(1, device="meta"), [torch.ones(1, device="meta")]):
        with pytest.raises(AssertionError):
            make().scale(outputs)


@CLASSES
def test_the_scale_is_made_where_the_loss_is(make: Any) -> None:
    scaler = make(init_scale=2.0)
    scaler.scale([torch.ones(1), (torch.ones(1),)])
    assert scaler._scale.device == torch.device("cpu")
    assert bits(scaler._scale) == bits(torch.tensor(2.0))
    assert bits(scaler._growth_tracker) == bits(torch.tensor(0, dtype=torch.int32))


# - The scale


@CLASSES
@pytest.mark.parametrize("lazy", [True, False])
def test_state_dict(make: Any, lazy: bool) -> None:
    settings = {"growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 2}
    source = make(init_scale=3.0, **settings)
    target = make(
        init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1
    )
    target._init_growth_tracker = 7
    if lazy:
        scaled_once(target)
        assert isinstance(target._scale, torch.FloatTensor)
    state = source.state_dict()
    assert state == {"scale": 3.0, **settings, "_growth_tracker": 0}
    assert [type(value) for value in state.values()] == [float, float, float, int, int]
    target.load_state_dict(state)
    assert target.state_dict() == state
    assert target._init_growth_tracker == 0
    assert (target.get_scale(), target.get_growth_factor()) == (3.0, 4.0)
    assert (target.get_backoff_factor(), target.get_growth_interval()) == (0.5, 2)
    scaled_once(target)
    assert bits(target._scale) == bits(torch.tensor(3.0))
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        target.load_state_dict({})
    assert make(enabled=False).state_dict() == {}
    make(enabled=False).load_state_dict({})


@CLASSES
def test_growth_and_backoff(make: Any) -> None:
    scaler = make(
        init_scale=4.0, growth_factor=2.0, backoff_factor=0.25, growth_interval=2
    )
    p = filled(0.0)
    optimizer = torch.optim.SGD([p], lr=0.0)
    scaled_once(scaler)
    for value, scale, tracker in ((1.0, 4.0, 1), (1.0, 8.0, 0), (INF, 2.0, 0)):
        p.grad = torch.full((2,), value)
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (scale, tracker)


@PLAIN
def test_the_scale_does_not_grow_beyond_fp32(make: Any) -> None:
    scaler = make(init_scale=1e38, growth_factor=2.0**4, growth_interval=1)
    p = filled(0.0)
    scaler.scale(1e-30 * p.sum()).backward()
    scaler.step(torch.optim.Adam([p]))
    scaler.update()
    assert bits(scaler._scale) == bits(torch.tensor(1e38))


@CLASSES
def test_update_with_a_new_scale(make: Any) -> None:
    scaler = scaled_once(make(init_scale=4.0))
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0
    new = torch.tensor(16.0)
    scaler.update(new)
    new.fill_(1.0)
    assert bits(scaler._scale) == bits(torch.tensor(16.0))
    for unfit in (
        torch.ones(2),
        torch.ones(1, device="meta"),
        torch.ones((), requires_grad=True),
    ):
        with pytest.raises(AssertionError, match="new_scale should be a"):
            scaler.update(unfit)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior"):
        scaler.update()
