"""Any mix of gradients in one optimizer or several, over two and four ranks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from gradparity.multiprocess import Cluster
from gradparity.tests.stepping import BOTH, INF

Gradient = Callable[[Any, float], tuple[Tensor, Tensor]]  # (parameter, its gradient)


def placed(value: Tensor, mesh: Any, placements: Any) -> Tensor:
    made: Tensor = DTensor.from_local(value, mesh, placements, run_check=False)
    return made


def dense(dtype: torch.dtype) -> Gradient:
    def make(_: Any, value: float) -> tuple[Tensor, Tensor]:
        p = torch.zeros(3, dtype=dtype, requires_grad=True)
        return p, torch.full((3,), value, dtype=dtype)

    return make


def sparse(_: Any, value: float) -> tuple[Tensor, Tensor]:
    table = torch.zeros(4, 1, requires_grad=True)
    values = torch.full((4, 1), value / 2)  # each index twice: they add up to value
    places = torch.tensor([[0, 1, 0, 1]])
    gradient = torch.sparse_coo_tensor(places, values, (4, 1), check_invariants=True)
    return table, gradient


def dtensor(placements: Callable[[], Any], axes: str = "") -> Gradient:
    def make(mesh: Any, value: float) -> tuple[Tensor, Tensor]:
        mesh = mesh[axes] if axes else mesh
        p = nn.Parameter(placed(torch.zeros(2, 2), mesh, placements()))
        return p, placed(torch.full((2, 2), value), mesh, placements())

    return make


def partial(mesh: Any, value: float) -> tuple[Tensor, Tensor]:
    replicated = [Replicate(), Replicate()]
    p = nn.Parameter(placed(torch.zeros(2), mesh, replicated))
    share = torch.full((2,), value / 2 if value != INF else INF)
    return p, placed(share, mesh, [Replicate(), Partial()])


def empty(mesh: Any, value: float) -> tuple[Tensor, Tensor]:
    rows = 2 if mesh.get_local_rank("dp") == 0 else 0
    kept: dict[str, Any] = {
        "shape": torch.Size([2, 2]),
        "stride": (2, 1),
        "run_check": False,
    }
    where: Any = (mesh["dp"], [Shard(0)])
    p: Any = DTensor.from_local(torch.zeros(rows, 2), *where, **kept)
    g: Any = DTensor.from_local(torch.full((rows, 2), value), *where, **kept)
    return nn.Parameter(p), g


KINDS: dict[str, Gradient] = {
    "fp32": dense(torch.float32),
    "bf16": dense(torch.bfloat16),
    "fp64": dense(torch.float64),
    "sparse": sparse,
    "shard": dtensor(lambda: [Shard(0), Shard(1)]),
    "strided": dtensor(lambda: [_StridedShard(0, split_factor=2), Shard(0)]),
    "replicate": dtensor(lambda: [Replicate(), Replicate()]),
    "submesh dp": dtensor(lambda: [Shard(0)], "dp"),
    "submesh tp": dtensor(lambda: [Shard(0)], "tp"),
    "partial": partial,
    "empty": empty,
}


def stepped(p: Tensor) -> list[float]:
    """Return the distinct nonzero values of the local parameter."""
    local = (p.to_local() if isinstance(p, DTensor) else p).detach()
    return sorted(set(local.flatten().double().tolist()) - {0.0})


def mixed(make: Any, kinds: list[str], bad: tuple[int, str] | None) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    scaler = make(device="cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    params = []
    for kind in kinds:
        struck = bad == (dist.get_rank(), kind)
        p, gradient = KINDS[kind](mesh, INF if struck else 4.0)
        if kind == "replicate" or dist.get_rank() != 2 or kind == "partial":
            p.grad = gradient  # rank 2 has hardly any
        params.append(p)
    frozen = torch.zeros(2)
    optimizer = torch.optim.SGD([*params, frozen], lr=1.0, foreach=False)
    with CommDebugMode() as mode:
        scaler.step(optimizer)
    scaler.update()
    count = mode.get_total_counts()
    return [stepped(p) for p in params], scaler.get_scale(), count


@BOTH
@pytest.mark.parametrize("bad_kind", [None, *sorted(KINDS)])
@pytest.mark.few(8)
def test_everything_in_one_optimizer(
    four: Cluster, make: Any, bad_kind: str | None
) -> None:
    kinds = sorted(KINDS, key=lambda k: (k != bad_kind, k))
    bad = None if bad_kind is None else (1, bad_kind)
    results = four.run(mixed, make, kinds, bad)
    nothing_there = bad_kind == "empty" and not _has_rows(1)
    for values, scale, _ in results:
        if bad is None or nothing_there:
            assert scale == 4.0
            assert all(v in ([-1.0], []) for v in values) and [-1.0] in values
        else:
            assert scale == 2.0 and all(v == [] for v in values)
    assert {count for *_, count in results} == {results[0][2]}


def _has_rows(rank: int) -> bool:
    return rank < 2  # dp coordinate 0 of a 2 x 2 mesh


@BOTH
@pytest.mark.parametrize("reverse", [False, True])
def test_order_does_not_matter(four: Cluster, make: Any, reverse: bool) -> None:
    kinds = sorted(KINDS, reverse=reverse)
    for bad in ((0, "shard"), (3, "submesh tp")):
        for values, scale, _ in four.run(mixed, make, kinds, bad):
            assert scale == 2.0 and all(v == [] for v in values)


@BOTH
def test_wrapped_over_ranks(four: Cluster, make: Any) -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer, self.step = optimizer, optimizer.step
            self.param_groups = optimizer.param_groups

    def run(bad_rank: int) -> Any:
        mesh = init_device_mesh("cpu", (4,))
        shared, own = (
            nn.Parameter(placed(torch.zeros(2), mesh, [Shard(0)])) for _ in range(2)
        )
        optimizers: list[Any] = [
            torch.optim.SGD([shared], lr=1.0),
            torch.optim.SGD([own], lr=1.0),
        ]
        scaler = make(device="cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        for p in (shared, own):
            struck = p is own and dist.get_rank() == bad_rank
            local = torch.full((2,), INF if struck else 4.0)
            p.grad = placed(local, mesh, [Shard(0)])
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(Wrapper(optimizer))
        scaler.update()
        return stepped(shared), stepped(own), scaler.get_scale()

    assert four.run(run, -1) == [([-1.0], [-1.0], 4.0)] * 4
    assert four.run(run, 3) == [([-1.0], [], 2.0)] * 4


@BOTH
def test_cpu_offload(four: Cluster, make: Any) -> None:
    def run(bad_rank: int) -> Any:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        torch.manual_seed(0)
        layer: Any = nn.Linear(8, 8, bias=False)
        nn.init.zeros_(layer.weight)
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
        scaler = make(device="cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        scaler.scale(layer(torch.ones(1, 8)).sum()).backward()
        if dist.get_rank() == bad_rank:
            layer.weight.grad.to_local().fill_(INF)
        scaler.step(optimizer)
        scaler.update()
        return stepped(layer.weight), scaler.get_scale()

    assert four.run(run, -1) == [([-1.0], 4.0)] * 4
    assert four.run(run, 2) == [([], 2.0)] * 4


@BOTH
@pytest.mark.parametrize("iterations", [1, 3])
def test_two_optimizers_clip_in_one_module(
    two: Cluster, make: Any, iterations: int
) -> None:
    """Gradients of FSDP2 are views that share one version counter."""

    def run(make: Any, clips: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        layer: Any = nn.Linear(8, 8)
        fully_shard(layer)
        scaler = make(device="cpu", init_scale=4.0)
        optimizers = [
            torch.optim.AdamW([layer.weight], lr=0.5, fused=True),
            torch.optim.SGD([layer.bias], lr=0.5),
        ]
        for _ in range(iterations):
            scaler.scale(layer(torch.ones(1, 8)).sum()).backward()
            for optimizer in optimizers:
                clips(scaler, optimizer)
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        return [p.full_tensor().tolist() for p in layer.parameters()]

    def by_hand(scaler: Any, optimizer: Any) -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)

    def whole(scaler: Any, optimizer: Any) -> None:
        scaler.clip_grad_norm_(optimizer, 0.5)

    theirs = two.run(run, TorchGradScaler, by_hand)
    for clips in (by_hand, whole):
        torch.testing.assert_close(two.run(run, make, clips), theirs)


# - One process


@BOTH
@pytest.mark.parametrize("fused", [False, True])
def test_several_losses_in_a_nest(make: Any, fused: bool) -> None:
    p, q = (torch.zeros(2, requires_grad=True) for _ in range(2))
    scaler = make(device="cpu", init_scale=4.0)
    optimizers = [torch.optim.SGD([x], lr=1.0, fused=fused) for x in (p, q)]
    first, (second, third) = scaler.scale([p.sum(), (q.sum(), (p * q).sum())])
    first.backward()
    second.backward()
    third.backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == q.tolist() == [-1.0, -1.0]


@BOTH
def test_a_copy_in_mid_training_goes_its_own_way(make: Any) -> None:
    p = torch.zeros(2, requires_grad=True)
    scaler = make(device="cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(p.sum()).backward()
    scaler.step(torch.optim.SGD([p], lr=1.0))
    scaler.update()
    twin = copy.deepcopy(scaler)
    q = torch.zeros(2, requires_grad=True)
    twin.scale(q.sum()).backward()
    twin.step(torch.optim.SGD([q], lr=1.0))
    twin.update()
    assert q.tolist() == [-1.0, -1.0]
    assert (scaler.get_scale(), twin.get_scale()) == (8.0, 16.0)
