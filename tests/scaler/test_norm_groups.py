"""Norm of a clip, if the ranks that sync are not those that hold the gradients."""

import zlib
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler, PeerFailedError, ShardedGradScaler
from gradparity.tests.agreeing import give_gradient, local, parameter, sgd
from gradparity.tests.products import pairs
from gradparity.tests.stepping import (
    HOW,
    acting,
    device_type,
    scaled,
)

CLIPS = ("clip_grad_norm_", "clip_and_step")
PLACEMENTS = {
    "replicated and sharded": [Replicate(), Shard(0)],
    "sharded twice": [Shard(0), Shard(0)],
}


# regression: S4, T1
def test_a_mesh_that_the_sync_does_not_cover_is_refused(four: Cluster) -> None:
    """The clip raises before any change; else it would take half of the norm."""

    def run() -> list[str]:
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
        here: list[tuple[Any, dict[str, Any]]] = [
            (ShardedGradScaler, {"process_group": mesh.get_group("tp")}),
            (GradScaler, {"sync_over": mesh.get_group("dp")}),
            (GradScaler, {"sync_over": mesh["tp"]}),
            (GradScaler, {"sync_over": "local"}),
            (GradScaler, {"sync_over": mesh["dp"], "enabled": False}),
        ]
        wrong = []
        for placements in PLACEMENTS.values():
            for make, settings in here:
                for call in CLIPS:
                    p = parameter(torch.ones(2), mesh, placements)
                    give_gradient(p, 4.0)
                    scaler = scaled(make, **settings)
                    case = f"{make.__name__}, {settings}, {call}"
                    try:
                        getattr(scaler, call)(sgd([p]), 1e-3)
                    except ValueError as error:
                        if "ranks [0, 1, 2, 3]" not in str(error):
                            wrong.append(f"{case}: {error}")
                    else:
                        wrong.append(f"{case}: not refused")
                    assert p.grad is not None
                    if (local(p) != 1.0).any() or (local(p.grad) != 4.0).any():
                        wrong.append(f"{case}: changed")
        return wrong

    assert four.run(run) == [[]] * 4


@pytest.mark.parametrize("placements", PLACEMENTS.values(), ids=PLACEMENTS)
def test_the_root_mesh_gives_the_whole_norm(four: Cluster, placements: Any) -> None:
    def run() -> list[float]:
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
        norms = []
        for over in ("world", mesh):
            p = parameter(torch.ones(2), mesh, placements)
            give_gradient(p, 4.0)
            scaler = scaled(sync_over=over)
            norms.append(scaler.clip_grad_norm_(sgd([p]), 1e9).item())
        return norms

    whole = 2.0 if placements[0].is_replicate() else 8**0.5
    for norms in four.run(run):
        assert norms == pytest.approx([whole] * 2)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_a_mesh_of_one_rank_beside_a_plain_parameter(
    two: Cluster, order: float
) -> None:
    def run() -> list[float]:
        mesh = [DeviceMesh(device_type(), [rank]) for rank in range(2)][dist.get_rank()]
        norms = []
        for over in (mesh, "local"):
            params = [parameter(torch.ones(1), mesh, [Shard(0)])]
            params.append(parameter(torch.ones(1)))
            for p, value in zip(params, (12.0, 16.0), strict=True):
                give_gradient(p, value)
            scaler = scaled(sync_over=over)
            norms.append(scaler.clip_grad_norm_(sgd(params), 1e9, order).item())
        return norms

    expected = torch.tensor([3.0, 4.0]).norm(order).item()
    for norms in two.run(run):
        assert norms == pytest.approx([expected] * 2)


# - Replicas beside parameters of one rank, in one optimizer


def gradient(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a random gradient that depends only on the name and the shape."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(shape, generator=generator, device="cpu")
    return drawn.to(device_type())


class Mixed(NamedTuple):
    """Names of the parameters on each rank; equal names are replicas."""

    ranks: list[list[str]]
    shape: tuple[int, ...] = (4, 3)


LAYOUTS = {
    "replicas only": Mixed([["norm", "bias"]] * 4),
    "stages": Mixed([["a"], ["b"], ["c"], ["d"]]),
    "tensor parallel by hand": Mixed(
        [["norm", "w0"], ["norm", "w1"], ["norm", "w2"], ["norm", "w3"]]
    ),
    "another order": Mixed(
        [["norm", "w0"], ["w1", "norm"], ["w2", "norm", "v"], ["norm"]]
    ),
    "experts": Mixed(
        [["norm", "e0", "e1"], ["norm", "e2", "e3"], ["norm", "e0", "e1"], ["norm"]]
    ),
    "a small part of its own": Mixed([["norm", "tiny0"], ["norm"], ["norm"], ["norm"]]),
    "a rank without parameters": Mixed([["norm", "w0"], ["norm", "w1"], [], ["norm"]]),
}


def plain(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    value = gradient(name, shape)
    return value * 1e-4 if "tiny" in name else value


def exact_norm(layout: Mixed, order: float) -> float:
    names = {name for rank in layout.ranks for name in rank}
    parts = [plain(name, layout.shape).double().flatten() for name in sorted(names)]
    return float(torch.cat(parts).norm(order))


# regression: S2, T2
@pairs(
    pytest.mark.parametrize("order", [2.0, 3.0, float("inf")]),
    pytest.mark.parametrize("call", CLIPS),
    pytest.mark.parametrize("name", LAYOUTS),
    HOW,
)
def test_each_parameter_is_counted_once(
    four: Cluster, name: str, call: str, order: float, how: str
) -> None:
    layout = LAYOUTS[name]

    def run() -> tuple[list[float], list[int]]:
        names = layout.ranks[dist.get_rank()]
        params = [parameter(torch.zeros(layout.shape)) for _ in names]
        scaler, optimizer = scaled(GradScaler), sgd(params) if params else None
        norms, counts = [], []
        for _ in range(3):
            for p, each in zip(params, names, strict=True):
                p.grad = plain(each, layout.shape) * 4.0
            with CommDebugMode() as mode:
                norms.append(getattr(scaler, call)(optimizer, 1e9, order).item())
            if call == "clip_grad_norm_":
                scaler.step(optimizer)
            scaler.update()
            counts.append(mode.get_total_counts())
        return norms, counts

    expected = exact_norm(layout, order)
    for norms, counts in four.run(acting(how, run)):
        assert norms == pytest.approx([expected] * 3, rel=1e-5)
        assert counts[1:] == [1, 1]  # what is known is not asked again


def test_replicas_are_identified_again_when_gradients_change(two: Cluster) -> None:
    """Zero or missing gradients cannot show which ranks hold replicas."""

    def run() -> list[tuple[float, float]]:
        rank = dist.get_rank()
        names = ["norm", f"w{rank}", "late", f"v{rank}"]
        params = [parameter(torch.zeros(4, 3)) for _ in names]
        scaler, optimizer, seen = scaled(GradScaler), sgd(params), []
        for have in ([0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 3], [0, 1, 2, 3], [2, 3]):
            for how in ("None", "zero"):
                optimizer.zero_grad()
                there = set[str]()
                for index, (p, name) in enumerate(zip(params, names, strict=True)):
                    if index in have:
                        p.grad = plain(name, (4, 3)) * 4.0
                        there |= {name, name.replace("0", "1"), name.replace("1", "0")}
                    elif how == "zero":
                        p.grad = torch.zeros(4, 3)
                norm = scaler.clip_and_step(optimizer, 1e9).item()
                scaler.update()
                seen.append((norm, exact_norm(Mixed([sorted(there)]), 2.0)))
        return seen

    for seen in two.run(run):
        for norm, expected in seen:
            assert norm == pytest.approx(expected, rel=1e-5)


def test_identified_replicas_stay_so_without_a_gradient(two: Cluster) -> None:
    """If parameters train in turns, each set of them needs a table only once."""

    def run() -> list[int]:
        names = ["norm", "late", f"w{dist.get_rank()}"]
        params = [parameter(torch.zeros(4, 3)) for _ in names]
        scaler, optimizer, counts = scaled(GradScaler), sgd(params), []
        for without in (1, 0, 1, 0):
            for index, (p, name) in enumerate(zip(params, names, strict=True)):
                p.grad = None if index == without else plain(name, (4, 3)) * 4.0
            with CommDebugMode() as mode:
                scaler.clip_and_step(optimizer, 1e9)
            counts.append(mode.get_total_counts())
            scaler.update()
        return counts

    assert two.run(run) == [[4, 4, 1, 1]] * 2


def test_replicas_on_submeshes_beside_parts_of_one(four: Cluster) -> None:
    """Tensor parallel by hand under ``fully_shard``: all DTensors have the mesh dp."""

    def run() -> list[float]:
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
        i, j = mesh.get_coordinate() or (0, 0)
        names, norms = ["norm", f"w{j}"], []
        params = [parameter(torch.zeros(2, 3), mesh["dp"], [Shard(0)]) for _ in names]
        scaler, optimizer = scaled(GradScaler), sgd(params)
        for _ in range(3):
            for p, name in zip(params, names, strict=True):
                part = (plain(name, (4, 3)) * 4.0)[2 * i : 2 * i + 2].contiguous()
                p.grad = DTensor.from_local(part, mesh["dp"], [Shard(0)])
            norms.append(scaler.clip_grad_norm_(optimizer, 1e9).item())
            scaler.step(optimizer)
            scaler.update()
        return norms

    expected = exact_norm(Mixed([["norm", "w0", "w1"]]), 2.0)
    for norms in four.run(run):
        assert norms == pytest.approx([expected] * 3, rel=1e-5)


PLACED: dict[str, Any] = {
    "sharded": [Replicate(), Shard(0)],
    "whole": [Replicate(), Replicate()],
}


# regression: two placements on one mesh counted as two meshes, a replica as four
@pytest.mark.parametrize("order", [2.0, 3.0])
@HOW
def test_five_layouts_on_four_meshes(four: Cluster, order: float, how: str) -> None:
    """One mesh with two placements is one mesh, so all five fit into a row."""

    def run() -> list[float]:
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
        zeros, norms = torch.zeros(4, 3), []
        params = [parameter(zeros), parameter(zeros)]
        places: list[Any] = [(mesh["tp"], [Shard(0)])]
        for place in [*places, *((mesh, each) for each in PLACED.values())]:
            params.append(nn.Parameter(distribute_tensor(zeros, *place)))
        scaler, optimizer = scaled(GradScaler), sgd(params)
        names = ["replica", f"w{dist.get_rank()}", "part", *PLACED]
        for _ in range(3):
            for p, name in zip(params, names, strict=True):
                value = plain(name, (4, 3)) * 4.0
                if isinstance(p, DTensor):
                    value = distribute_tensor(value, p.device_mesh, p.placements)
                p.grad = value
            norms.append(scaler.clip_and_step(optimizer, 1e9, order).item())
            scaler.update()
        return norms

    held = ["replica", "w0", "w1", "w2", "w3", "part", *PLACED]
    expected = exact_norm(Mixed([held]), order)
    for norms in four.run(acting(how, run)):
        assert norms == pytest.approx([expected] * 3, rel=1e-5)


def test_a_gradient_of_zeros_beside_parameters_held_in_four_ways(
    four: Cluster,
) -> None:
    """It may be a fifth way until it shows who holds it, and changes no norm."""
    held = ["abcdz", "abz", "acz", "az"]

    def run() -> list[float]:
        names, norms = list(held[dist.get_rank()]), []
        params = [parameter(torch.zeros(4, 3)) for _ in names]
        scaler, optimizer = scaled(GradScaler), sgd(params)
        for is_zero in (True, True, False, False):
            for p, name in zip(params, names, strict=True):
                value = plain(name, (4, 3)) * 4.0
                p.grad = torch.zeros(4, 3) if is_zero and name == "z" else value
            norms.append(scaler.clip_and_step(optimizer, 1e9).item())
            scaler.update()
        return norms

    expected = [exact_norm(Mixed([list(names)]), 2.0) for names in ("abcd", "abcdz")]
    for norms in four.run(run):
        assert norms[:2] == pytest.approx([expected[0]] * 2, rel=1e-5)
        assert norms[2:] == pytest.approx([expected[1]] * 2, rel=1e-5)


def test_parameters_held_in_too_many_ways_are_refused_on_all_ranks(
    four: Cluster,
) -> None:
    held = ["abcdef", "abcx", "adx", "bey"]  # a of three ranks, b of three others ...

    def run() -> str:
        names = list(held[dist.get_rank()])
        params = [parameter(torch.zeros(4, 3)) for _ in names]
        for p, name in zip(params, names, strict=True):
            p.grad = plain(name, (4, 3))
        with pytest.raises(ValueError, match="in 6 different ways") as caught:
            scaled(GradScaler).clip_grad_norm_(sgd(params), 1e9)
        return str(caught.value)

    for message in four.run(run):
        assert "another one for the rest" in message


class NoBits(torch.Tensor):
    """Gradient with unreadable bits."""

    def view(self, *size: Any) -> Any:
        raise LookupError("no bits")


def test_a_rank_that_cannot_read_bits_is_heard_of(two: Cluster) -> None:
    def run() -> list[str]:
        rank, seen = dist.get_rank(), []
        params = [parameter(torch.zeros(4, 3)) for _ in range(2)]
        scaler, optimizer = scaled(GradScaler), sgd(params)
        for iteration in range(2):
            for p, name in zip(params, ("norm", f"w{rank}"), strict=True):
                p.grad = plain(name, (4, 3))
                if rank == 1 and iteration == 0:
                    p.grad = p.grad.as_subclass(NoBits)
            try:
                scaler.clip_and_step(optimizer, 1e9)
            except (LookupError, PeerFailedError) as error:
                seen.append(type(error).__name__)
            scaler.update()
        return [*seen, str(scaler._get_growth_tracker())]

    assert two.run(run) == [["PeerFailedError", "1"], ["LookupError", "1"]]
