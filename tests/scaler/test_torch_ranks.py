"""Tests of torch for its scalers on several ranks, run on ours as well.

Each test runs on torch's class and on ours: on torch's it shows that the test is right.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp.sharded_grad_scaler import (
    ShardedGradScaler as TorchShardedGradScaler,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler, ShardedGradScaler
from gradparity.tests.beside_torch import NAN, bits

INF = float("inf")
SOON_S = 60.0  # a hang fails before the harness's own limit
Make = Callable[..., Any]
SCALES = {None: [64.0, 128.0, 128.0, 256.0], 1: [64.0, 32.0, 32.0, 64.0]}

BOTH_PLAIN = pytest.mark.parametrize("make", [torch.amp.GradScaler, GradScaler])
BOTH_SHARDED = pytest.mark.parametrize(
    "make",
    [TorchShardedGradScaler, ShardedGradScaler],
    ids=["torch", "ours"],
)


class MLP(nn.Module):
    """Two layers that tensor parallelism splits by columns, then by rows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(size, 4 * size)
        self.out_proj = nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Any:
        return self.out_proj(torch.relu(self.in_proj(x)))


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor."""
    held: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.detach()


def one_dimension() -> nn.Module:
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(2)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def two_dimensions() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(MLP(4), MLP(4), MLP(4))
    plan: dict[str, Any] = {
        f"{n}.{name}": style
        for n in range(3)
        for name, style in (
            ("in_proj", ColwiseParallel()),
            ("out_proj", RowwiseParallel()),
        )
    }
    parallelize_module(model, mesh["tp"], plan)
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def unscale_step_update(make: Make, build: Any, bad_rank: int | None) -> str:
    """Run one iteration; return a description of the error, or ""."""
    torch.manual_seed(0)
    model, has_inf = build(), bad_rank is not None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = make("cpu", init_scale=2.0)
    scaler.scale(model(torch.randn(4, 4)).sum()).backward()
    params = list(model.parameters())
    if dist.get_rank() == bad_rank:
        local(params[0].grad).view(-1)[0] = INF
    before = [local(p).clone() for p in params]
    grads = [local(p.grad).clone() for p in params]
    state = copy.copy(optimizer.state)

    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]
    if found["stage"] is not OptState.UNSCALED:
        return f"stage {found['stage']}"
    if [float(f) for f in found["found_inf_per_device"].values()] != [float(has_inf)]:
        return f"found {found['found_inf_per_device']}"
    if bits([local(p.grad) for p in params]) != bits([g * 0.5 for g in grads]):
        return "gradients"

    scaler.step(optimizer)
    stepped = [bool((local(p) != b).any()) for p, b in zip(params, before, strict=True)]
    if has_inf and (any(stepped) or copy.copy(optimizer.state) != state):
        return f"stepped {stepped}"
    if not has_inf and not any(stepped):  # a ReLU may hold some back
        return f"stepped {stepped}"
    scaler.update()
    return "" if scaler.get_scale() == (1.0 if has_inf else 2.0) else "scale"


@BOTH_PLAIN
@pytest.mark.parametrize("bad_rank", [None, 0, 1])
def test_fully_shard(two: Cluster, make: Make, bad_rank: int | None) -> None:
    args = make, one_dimension, bad_rank
    assert (
        two.with_options(timeout_s=SOON_S).run(unscale_step_update, *args) == [""] * 2
    )


@BOTH_PLAIN
@pytest.mark.parametrize("bad_rank", [None, 1])
@pytest.mark.few(1)
def test_fully_shard_over_tensor_parallel(
    four: Cluster, make: Make, bad_rank: int | None
) -> None:
    if make is torch.amp.GradScaler and bad_rank is not None:
        pytest.skip("torch's class lets the ranks of two axes disagree (B01c)")
    args = make, two_dimensions, bad_rank
    assert (
        four.with_options(timeout_s=SOON_S).run(unscale_step_update, *args) == [""] * 4
    )


# - ShardedGradScaler


def train(
    make: Make | None, wrap: Callable[[nn.Module], nn.Module], bad_step: int | None
) -> tuple[list[list[float]], list[float]]:
    """Train and return the whole parameters and the scales."""
    torch.manual_seed(3)
    rank = dist.get_rank()
    model = wrap(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    batches = torch.randn(4, 2, 4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scaler = None if make is None else make("cpu", init_scale=64.0, growth_interval=2)
    scales = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = model(batch[rank]).square().mean()
        if scaler is None:
            loss.backward()
            for p in model.parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad)
                p.grad /= 2
            if step != bad_step:
                optimizer.step()
            continue
        scaled = scaler.scale(loss)
        assert scaled.dtype is loss.dtype
        scaled.backward()
        if step == bad_step and rank == 1:
            first: Any = next(iter(model.parameters()))
            local(first.grad).fill_(NAN)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    whole = [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten().tolist()
        for p in model.parameters()
    ]
    return whole, scales


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def sharded(
    param_dtype: Any = None, reduce_dtype: Any = None, offload: bool = False
) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        policy = MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype
        )
        place = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
        settings: dict[str, Any] = {"mp_policy": policy, "offload_policy": place}
        for layer in (model[0], model[2]):  # type: ignore[index]
            fully_shard(layer, **settings)
        fully_shard(model, **settings)
        return model

    return wrap


@BOTH_SHARDED
@pytest.mark.parametrize("bad_step", [None, 1])
@pytest.mark.parametrize("offload", [False, True])
def test_sharded_training_is_replicated_training(
    two: Cluster, make: Make, bad_step: int | None, offload: bool
) -> None:
    wrap = sharded(offload=offload)
    ours = two.with_options(timeout_s=SOON_S).run(train, make, wrap, bad_step)
    plain = two.with_options(timeout_s=SOON_S).run(train, None, as_it_is, bad_step)
    assert ours[0] == ours[1]
    assert ours[0][1] == SCALES[bad_step]
    torch.testing.assert_close(ours[0][0], plain[0][0], rtol=1e-5, atol=1e-6)


@BOTH_SHARDED
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduced", [True, False])
def test_mixed_precision_keeps_the_dtype_of_the_loss(
    two: Cluster, make: Make, dtype: Any, reduced: bool
) -> None:
    wrap = sharded(dtype, dtype if reduced else torch.float32)
    first, second = two.with_options(timeout_s=SOON_S).run(train, make, wrap, 1)
    plain = two.with_options(timeout_s=SOON_S).run(train, None, as_it_is, 1)
    assert first == second
    assert first[1] == SCALES[1]
    torch.testing.assert_close(first[0], plain[0][0], rtol=0.05, atol=0.02)


@BOTH_SHARDED
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("orig", [False, True])
def test_the_older_fsdp(two: Cluster, make: Make, dtype: Any, orig: bool) -> None:
    def run() -> tuple[str, str, list[str], float]:
        torch.manual_seed(3)
        mixed = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype)
        model = FullyShardedDataParallel(
            nn.Linear(4, 4),
            mixed_precision=None if dtype is None else mixed,
            device_id=torch.device("cpu"),
            use_orig_params=orig,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        scaler = make("cpu", init_scale=64.0)
        loss = model(torch.ones(2, 4)).sum()
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        kinds = sorted({str(p.dtype) for p in model.parameters()})
        return str(loss.dtype), str(scaled.dtype), kinds, scaler.get_scale()

    kind = str(dtype or torch.float32)
    expected = kind, kind, ["torch.float32"], 64.0
    assert two.with_options(timeout_s=SOON_S).run(run) == [expected] * 2
