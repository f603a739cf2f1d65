"""Scales and gradients at the ends of their range, and other dtypes than fp32."""

from typing import Any

import pytest
import torch
import torch.distributed.fsdp.sharded_grad_scaler
from torch import Tensor

from gradparity.scaler import GradScaler, ShardedGradScaler
from gradparity.tests.stepping import (
    BOTH,
    INF,
    one_step,
    parameter,
    scaled,
    sgd,
)

# - B05: the scale and what it does to finite gradients


@BOTH
def test_b05a_scale_never_grows_to_inf(make: Any) -> None:
    scaler, optimizer = scaled(make, 2.0**125, growth_interval=1), sgd(parameter())
    for _ in range(6):
        one_step(scaler, optimizer, 1.0)
    assert scaler.get_scale() == 2.0**127


@BOTH
@pytest.mark.parametrize("fused", [False, True])
def test_b05b_scale_never_underflows(make: Any, fused: bool) -> None:
    p = parameter()
    scaler, optimizer = scaled(make, 2.0**16, growth_interval=1), sgd(p, fused=fused)
    for _ in range(170):
        one_step(scaler, optimizer, INF)
    assert scaler.get_scale() == 2.0**-126
    one_step(scaler, optimizer, 2.0**-126)
    assert p.tolist() == [0.0, 0.0]
    assert scaler.get_scale() == 2.0**-125


@BOTH
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("scale", "gradient"), [(2.0**-20, 3e38), (2.0**-126, 8.0)])
def test_b05c_unscaled_overflow_is_an_overflow(
    make: Any, fused: bool, scale: float, gradient: float
) -> None:
    p = parameter()
    one_step(scaler := scaled(make, scale), sgd(p, fused=fused), gradient)
    assert p.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == max(scale / 2, 2.0**-126)


@BOTH
def test_b05d_lowered_interval_still_grows(make: Any) -> None:
    scaler, optimizer = scaled(make, growth_interval=10), sgd(parameter())
    for _ in range(6):
        one_step(scaler, optimizer, 1.0)
    scaler.set_growth_interval(3)
    one_step(scaler, optimizer, 1.0)
    assert scaler.get_scale() == 8.0


# - B08: fp16


def test_b08b_in_place_flushes_as_torch_does() -> None:
    torch_sharded = torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler
    p = parameter(0.0, torch.float16)
    for make in (torch_sharded, ShardedGradScaler):
        p.grad = torch.full_like(p, 1e-8 * 2**16)
        found = scaled(make)._unscale_grads_(
            sgd(p), torch.tensor(2.0**-16), torch.zeros(()), True
        )
        assert p.grad.tolist() == [0.0, 0.0]
        assert [flag.item() for flag in found.values()] == [0.0]


@pytest.mark.parametrize("fused", [False, True])
def test_b08c_fp16_gradients_by_choice(fused: bool) -> None:
    p = parameter(1.0, torch.float16)
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaled().unscale_(sgd(p, fused=fused))
    for scaler in (scaled(fp16_gradients="in_place"), scaled(ShardedGradScaler)):
        p.grad = torch.full_like(p, 4.0)
        scaler.unscale_(sgd(p, fused=fused))
        assert p.grad.tolist() == [1.0, 1.0]


@BOTH
def test_b08d_sparse_gradients(make: Any) -> None:
    dtype = torch.float32 if make is GradScaler else torch.float16
    table = torch.zeros(3, 1, dtype=dtype, requires_grad=True)

    def gradient(value: float) -> Tensor:
        values = torch.full((2, 1), value, dtype=dtype)
        return torch.sparse_coo_tensor(
            torch.tensor([[1, 1]]), values, (3, 1), check_invariants=True
        )

    scaler, optimizer = scaled(make), sgd(table)
    table.grad = gradient(4.0)
    scaler.step(optimizer)
    scaler.update()
    assert table.flatten().tolist() == [0.0, -2.0, 0.0]
    table.grad = gradient(40000.0 if dtype is torch.float16 else INF)
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)


@BOTH
def test_frozen_and_mixed_dtypes(make: Any) -> None:
    wide, narrow = parameter(0.0), parameter(0.0, torch.bfloat16)
    frozen = torch.zeros(2)
    optimizer = sgd(wide, frozen, narrow)
    wide.grad, narrow.grad = torch.full((2,), 4.0), torch.full((2,), 4.0).bfloat16()
    scaler = scaled(make)
    scaler.step(optimizer)
    scaler.update()
    assert (wide.tolist(), narrow.tolist()) == ([-1.0, -1.0], [-1.0, -1.0])
    narrow.grad.fill_(INF)
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)


def test_b20_sharded_works_alone() -> None:
    p = parameter(0.0)
    one_step(scaled(ShardedGradScaler), sgd(p), 4.0)
    assert p.tolist() == [-1.0, -1.0]
