"""Ranks agree, whatever each of them holds: one collective, one verdict, one scale."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from gradparity.multiprocess import Cluster
from gradparity.scaler import (
    GradScaler,
    PeerFailedError,
    RanksDisagreeError,
    ShardedGradScaler,
)

SCALERS = pytest.mark.parametrize("make", [GradScaler, ShardedGradScaler])
Make = Callable[..., GradScaler]
INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    with Cluster(4) as cluster:
        yield cluster


class Seen(NamedTuple):
    """What one rank ended up with after one iteration."""

    skipped: bool
    scale: float
    tracker: int
    finite: bool
    checked: float  # a collective after the step: cross-talk would change it


def parameter(local: Tensor, mesh: Any = None, placements: Any = None) -> nn.Parameter:
    if mesh is None:
        return nn.Parameter(local)
    return nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False))


def give_gradient(p: nn.Parameter, value: float, placements: Any = None) -> None:
    if isinstance(p, DTensor):
        local = torch.full_like(p.to_local(), value)
        p.grad = DTensor.from_local(
            local, p.device_mesh, placements or p.placements, run_check=False
        )
    else:
        p.grad = torch.full_like(p, value)


def local(p: Tensor) -> Tensor:
    return (p.to_local() if isinstance(p, DTensor) else p).detach()


def iterate(scaler: GradScaler, *optimizers: Any, clip: bool = False) -> Seen:
    held = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    before = [local(p).clone() for p in held]
    for optimizer in optimizers:
        if clip:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()
    after = [local(p) for p in held]
    check = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(check)
    return Seen(
        all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        scaler.get_scale(),
        scaler._get_growth_tracker(),
        all(bool(p.isfinite().all()) for p in after),
        check.item(),
    )


def agreed(results: list[Seen], *, skipped: bool) -> bool:
    first = results[0]
    right = sum(range(len(results)))
    return (
        all(result == first for result in results)
        and first.skipped == skipped
        and first.finite
        and first.checked == right
        and first.scale == (2.0 if skipped else 4.0)
        and first.tracker == (0 if skipped else 1)
    )


def scaler_of(make: Make, **settings: Any) -> GradScaler:
    scaler = make(device="cpu", init_scale=4.0, **settings)
    scaler.scale(torch.ones(()))
    return scaler


def sgd(params: list[nn.Parameter], fused: bool = False) -> Any:
    return torch.optim.SGD(params, lr=0.25, fused=fused)


# - One mesh


def ordered(make: Make, order: list[str], bad: dict[int, str]) -> Seen:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"replicated": [Replicate()], "sharded": [Shard(0)]}
    named = {
        name: parameter(torch.ones(2), mesh, placements.get(name)) for name in order
    }
    if "plain" in named:
        named["plain"] = parameter(torch.ones(2))
    for name, p in named.items():
        give_gradient(p, INF if bad.get(dist.get_rank()) == name else 4.0)
    return iterate(scaler_of(make), sgd(list(named.values())))


@SCALERS
@pytest.mark.parametrize("order", ["replicated sharded", "sharded replicated"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_b01a_order_of_placements(
    two: Cluster, make: Make, order: str, bad_rank: int
) -> None:
    bad = {bad_rank: "sharded"}
    assert agreed(two.run(ordered, make, order.split(), bad), skipped=True)
    assert agreed(two.run(ordered, make, order.split(), {}), skipped=False)


@SCALERS
@pytest.mark.parametrize("order", ["plain sharded", "sharded plain"])
@pytest.mark.parametrize("bad", ["plain", "sharded"])
def test_b03a_plain_beside_dtensor(
    two: Cluster, make: Make, order: str, bad: str
) -> None:
    assert agreed(two.run(ordered, make, order.split(), {1: bad}), skipped=True)
    assert agreed(two.run(ordered, make, order.split(), {}), skipped=False)


@SCALERS
@pytest.mark.parametrize("bad_rank", [0, 1, None])
def test_b01b_partial_before_sharded(
    two: Cluster, make: Make, bad_rank: int | None
) -> None:
    # As the norms of sequence parallelism: torch is right there, and so are we.
    def step() -> Seen:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        norm = parameter(torch.ones(2), mesh, [Replicate()])
        weight = parameter(torch.ones(2), mesh, [Shard(0)])
        give_gradient(norm, 4.0, [Partial()])
        give_gradient(weight, INF if dist.get_rank() == bad_rank else 4.0)
        return iterate(scaler_of(make), sgd([norm, weight]))

    assert agreed(two.run(step), skipped=bad_rank is not None)


@SCALERS
def test_b06b_empty_local_shard(two: Cluster, make: Make) -> None:
    def step(bad: bool, fused: bool) -> Seen:
        mesh = init_device_mesh("cpu", (2,))
        rows = 1 if dist.get_rank() == 0 else 0
        p = nn.Parameter(
            DTensor.from_local(
                torch.ones(rows, 2),
                mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size([1, 2]),
                stride=(2, 1),
            )
        )
        p.grad = DTensor.from_local(
            torch.full((rows, 2), INF if bad else 4.0),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=p.shape,
            stride=p.stride(),
        )
        optimizer = torch.optim.Adam([p], fused=fused)
        return iterate(scaler_of(make), optimizer)._replace(skipped=bad)

    for fused in (False, True):
        assert agreed(two.run(step, True, fused), skipped=True)
        assert agreed(two.run(step, False, fused), skipped=False)


@SCALERS
@pytest.mark.parametrize("value", [4.0, INF])
def test_b07_partial_gradients(two: Cluster, make: Make, value: float) -> None:
    def step() -> Seen:
        mesh = init_device_mesh("cpu", (2,))
        p = parameter(torch.ones(2), mesh, [Replicate()])
        here = value if dist.get_rank() == 1 else 3e38
        give_gradient(p, here, [Partial()])
        seen = iterate(scaler_of(make), sgd([p]))
        return seen

    assert agreed(two.run(step), skipped=value == INF)


@SCALERS
@pytest.mark.parametrize("bad_ranks", [[0], [1], [0, 1]])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "adagrad"])
def test_b02_b09_b13_fused(
    two: Cluster, make: Make, bad_ranks: list[int], clip: bool, kind: str
) -> None:
    kinds = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
    }

    def step() -> list[Any]:
        p = parameter(torch.ones(3))
        optimizer: Any = kinds[kind]([p], lr=0.25, fused=True)
        scaler = scaler_of(make)
        seen: list[Any] = []
        for bad in (False, True, False):
            nan_here = bad and dist.get_rank() in bad_ranks
            give_gradient(p, NAN if nan_here else 4.0)
            seen.append((iterate(scaler, optimizer, clip=clip), p.detach().clone()))
            steps = optimizer.state[p].get("step")
            seen.append(None if steps is None else float(steps))
        return seen

    first, second = two.run(step)
    assert str(first) == str(second)
    good, skipped, again = first[0][0], first[2][0], first[4][0]
    assert (good.skipped, skipped.skipped, again.skipped) == (False, True, False)
    assert skipped.finite and skipped.scale == 2.0 and again.tracker == 1
    if kind != "sgd":
        assert (first[1], first[3], first[5]) == (1.0, 1.0, 2.0)


def test_b09_found_inf_is_a_scalar(two: Cluster) -> None:
    def found(bad: bool) -> Any:
        p = parameter(torch.ones(3))
        give_gradient(p, INF if bad else 4.0)
        scaler, optimizer = scaler_of(ShardedGradScaler), sgd([p])
        scaler.unscale_(optimizer)
        (value,) = scaler._found_inf_per_device(optimizer).values()
        return value

    for bad in (True, False):  # on both ranks at once: a sum would be 2
        for value in two.run(found, bad):
            assert value.shape == () and value.dtype is torch.float32
            assert value.item() == float(bad)


# - Several meshes


@SCALERS
@pytest.mark.parametrize("where", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("fused", [False, True])
def test_b01c_two_axes(
    four: Cluster, make: Make, where: tuple[int, int], fused: bool
) -> None:
    def step(bad: bool) -> Seen:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        norm = parameter(torch.ones(2), mesh, [Shard(0), Replicate()])
        weight = parameter(torch.ones(2, 2), mesh, [Shard(0), Shard(1)])
        give_gradient(norm, 4.0)
        bad_here = bad and tuple(mesh.get_coordinate() or ()) == where
        give_gradient(weight, INF if bad_here else 4.0)
        kind = torch.optim.Adam([norm, weight], fused=True) if fused else None
        return iterate(scaler_of(make), kind or sgd([norm, weight]))

    assert agreed(four.run(step, True), skipped=True)
    assert agreed(four.run(step, False), skipped=False)


@SCALERS
@pytest.mark.parametrize("order", [("dp", "tp"), ("tp", "dp")])
@pytest.mark.parametrize("bad_rank", range(4))
def test_b03b_parameters_on_submeshes(
    four: Cluster, make: Make, order: tuple[str, str], bad_rank: int
) -> None:
    def step() -> Seen:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        params = [parameter(torch.ones(2), mesh[axis], [Shard(0)]) for axis in order]
        for p in params:
            give_gradient(p, 4.0)
        if dist.get_rank() == bad_rank:
            give_gradient(params[1], INF)
        return iterate(scaler_of(make), sgd(params))

    assert agreed(four.run(step), skipped=True)


def experts(make: Make, bad_rank: int, together: bool) -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    dense = parameter(torch.ones(2), mesh, [Shard(0), Replicate()])
    expert = parameter(torch.ones(2), mesh["dp"], [Shard(0)])
    give_gradient(dense, 4.0)
    give_gradient(expert, INF if dist.get_rank() == bad_rank else 4.0)
    scaler, optimizers = scaler_of(make), [sgd([dense]), sgd([expert])]
    if together:
        scaler.step_together(*optimizers)
    else:
        for optimizer in optimizers:
            scaler.step(optimizer)
    scaler.update()
    stepped = [bool((local(p) != 1).all()) for p in (dense, expert)]
    return [*stepped, scaler.get_scale() == 2.0, scaler._get_growth_tracker() == 0]


@SCALERS
@pytest.mark.parametrize("bad_rank", [0, 3])
def test_b03c_experts_in_their_own_optimizer(
    four: Cluster, make: Make, bad_rank: int
) -> None:
    results = four.run(experts, make, bad_rank, False)
    assert results == [[True, False, True, True]] * 4


@SCALERS
@pytest.mark.parametrize("bad_rank", [0, 3])
def test_b03d_optimizers_step_all_or_none(
    four: Cluster, make: Make, bad_rank: int
) -> None:
    results = four.run(experts, make, bad_rank, True)
    assert results == [[False, False, True, True]] * 4
    assert four.run(experts, make, -1, True) == [[True, True, False, False]] * 4


@SCALERS
def test_b14c_parameters_on_a_mesh_that_others_are_not_in(
    four: Cluster, make: Make
) -> None:
    def step(bad_rank: int) -> Seen:
        first, second = [
            dist.new_group([0, 1]),
            dist.new_group([2, 3]),
        ]
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh.from_group(first if dist.get_rank() < 2 else second, "cpu")
        p = parameter(torch.ones(2), mesh, [Shard(0)])
        give_gradient(p, INF if dist.get_rank() == bad_rank else 4.0)
        return iterate(scaler_of(make), sgd([p]))

    assert agreed(four.run(step, 0), skipped=True)
    assert agreed(four.run(step, 3), skipped=True)


def test_independent_models_need_not_agree(four: Cluster) -> None:
    def step(how: str) -> tuple[float, int]:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = dist.get_rank() // 2
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh.from_group(groups[mine], "cpu")
        choices: dict[str, dict[str, Any]] = {
            "rule": {"agree_over": "mesh"},
            "mesh": {"mesh": mesh},
            "group": {"process_group": groups[mine]},
        }
        settings = choices[how]
        scaler = scaler_of(GradScaler, **settings)
        p = parameter(torch.ones(2), mesh, [Shard(0)])
        for _ in range(3 + mine):  # not even the same number of iterations
            give_gradient(p, INF if dist.get_rank() == 0 else 4.0)
            scaler.step(sgd([p]))
            scaler.update()
        return scaler.get_scale(), scaler._get_growth_tracker()

    for how in ("rule", "mesh", "group"):
        assert four.run(step, how) == [(0.5, 0)] * 2 + [(4.0, 4)] * 2


def test_a_mesh_of_two_axes_that_is_not_the_world(four: Cluster) -> None:
    def step() -> tuple[float, bool]:
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]])[:, :1])
        scaler = scaler_of(GradScaler, mesh=mesh)
        p = parameter(torch.ones(2))
        give_gradient(p, INF if dist.get_rank() == 2 else 4.0)
        scaler.step(sgd([p]))
        scaler.update()
        return scaler.get_scale(), dist.get_rank() % 2 == 0

    assert four.run(step) == [(2.0, True), (4.0, False)] * 2


# - What ranks lack


@SCALERS
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_b06a_rank_without_gradients(
    two: Cluster, make: Make, fused: bool, sharded: bool
) -> None:
    def step(bad: bool) -> Seen:
        mesh = init_device_mesh("cpu", (2,))
        placed = (mesh, [Shard(0)]) if sharded else ()
        p = parameter(torch.ones(2), *placed)
        if dist.get_rank() == 1:
            give_gradient(p, INF if bad else 4.0)
        optimizer = torch.optim.Adam([p], fused=fused)
        seen = iterate(scaler_of(make), optimizer)
        return seen._replace(skipped=bad)

    assert agreed(two.run(step, True), skipped=True)
    assert agreed(two.run(step, False), skipped=False)


def test_no_rank_has_gradients(two: Cluster) -> None:
    def step(make: Make) -> str:
        scaler = scaler_of(make)
        try:
            scaler.step(sgd([parameter(torch.ones(2))]))
        except AssertionError as error:
            return str(error)
        return "stepped"

    message = "No inf checks were recorded for this optimizer."
    assert two.run(step, GradScaler) == [message] * 2
    assert two.run(step, ShardedGradScaler) == ["stepped"] * 2


@SCALERS
@pytest.mark.parametrize("fused", [False, True])
def test_b14a_dtypes_depend_on_the_rank(two: Cluster, make: Make, fused: bool) -> None:
    def step(bad_rank: int) -> Seen:
        mesh = init_device_mesh("cpu", (2,))
        wide = parameter(torch.ones(2), mesh, [Shard(0)])
        narrow = parameter(torch.ones(2, dtype=torch.bfloat16), mesh, [Shard(0)])
        give_gradient(wide, INF if dist.get_rank() == bad_rank else 4.0)
        if dist.get_rank() == 1:
            give_gradient(narrow, 4.0)
        optimizers = [torch.optim.Adam([wide, narrow], fused=fused)]
        return iterate(scaler_of(make), *optimizers)

    assert agreed(two.run(step, 0), skipped=True)
    assert agreed(two.run(step, 1), skipped=True)
    assert agreed(two.run(step, -1), skipped=False)


@SCALERS
def test_b14b_rank_dependent_number_of_steps(two: Cluster, make: Make) -> None:
    def step(counts: list[int]) -> tuple[str, str]:
        scaler = scaler_of(make)
        try:
            for _ in range(counts[dist.get_rank()]):
                p = parameter(torch.ones(2))
                give_gradient(p, 4.0)
                scaler.step(sgd([p]))
            scaler.update()
        except RanksDisagreeError as error:
            return "raised", f"{error.lowest} {error.highest}"
        return "went on", ""

    for counts in ([2, 1], [1, 2], [0, 1], [3, 1]):
        first, second = two.run(step, counts)
        assert first == second
        assert first[0] == "raised" and "agreement" in first[1]
    assert two.run(step, [2, 2]) == [("went on", "")] * 2


def test_b14b_fewer_steps_later_on(two: Cluster) -> None:
    def step() -> str:
        scaler, p = scaler_of(GradScaler), parameter(torch.ones(2))
        for iteration, steps in enumerate([(1, 1), (2, 2), (1, 1), (2, 1)]):
            try:
                for _ in range(steps[dist.get_rank()]):
                    give_gradient(p, 4.0)
                    scaler.step(sgd([p]))
                scaler.update()
            except RanksDisagreeError:
                return f"raised in {iteration}"
        return "went on"

    assert two.run(step) == ["raised in 3"] * 2


@SCALERS
def test_rank_without_an_optimizer_takes_part(two: Cluster, make: Make) -> None:
    def step(bad: bool) -> float:
        scaler = make(device="cpu", init_scale=4.0)
        if dist.get_rank() == 0:
            scaler.scale(torch.ones(()))
            p = parameter(torch.ones(2))
            give_gradient(p, INF if bad else 4.0)
            scaler.step(sgd([p]))
        else:
            scaler.step_without_optimizer()
        scaler.update()
        return scaler.get_scale()

    assert two.run(step, True) == [2.0, 2.0]
    assert two.run(step, False) == [4.0, 4.0]


@SCALERS
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_b04a_b04b_only_the_last_stage_scales(
    two: Cluster, make: Make, fused: bool, bad_rank: int
) -> None:
    def step() -> list[Any]:
        scaler = make(device="cpu", init_scale=4.0, growth_interval=2)
        p = parameter(torch.ones(2 + dist.get_rank()))
        optimizer = torch.optim.Adam([p], fused=fused)
        seen = []
        for iteration in range(3):
            if dist.get_rank() == 1:
                scaler.scale(torch.ones(()))
            bad = iteration == 1 and dist.get_rank() == bad_rank
            give_gradient(p, INF if bad else 4.0)
            seen.append(iterate(scaler, optimizer))
        return [(s.skipped, s.scale, s.tracker) for s in seen]

    right = [(False, 4.0, 1), (True, 2.0, 0), (False, 2.0, 1)]
    assert two.run(step) == [right] * 2


def test_nobody_scaled(two: Cluster) -> None:
    def step() -> str:
        scaler = GradScaler(device="cpu")
        p = parameter(torch.ones(2))
        give_gradient(p, 4.0)
        with pytest.raises(AssertionError) as caught:
            scaler.step(sgd([p]))
        return str(caught.value)

    for message in two.run(step):
        assert "did not use scaler.scale" in message


def test_b04b_resume_needs_no_scale_call(two: Cluster) -> None:
    def step() -> tuple[float, int]:
        saved = scaler_of(GradScaler).state_dict() | {"_growth_tracker": 7}
        scaler = GradScaler(device="cpu")
        scaler.load_state_dict(saved)
        p = parameter(torch.ones(2))
        give_gradient(p, 4.0)
        scaler.unscale_(optimizer := sgd([p]))
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), scaler._get_growth_tracker()

    assert two.run(step) == [(4.0, 8)] * 2


# - Ranks that already disagree


@pytest.mark.parametrize("what", ["scale", "growth_tracker", "growth_interval"])
@pytest.mark.parametrize("fused", [False, True])
def test_b15a_disagreement_is_one_error_on_every_rank(
    two: Cluster, what: str, fused: bool
) -> None:
    def step() -> tuple[dict[str, float], dict[str, float], str]:
        scaler, rank = scaler_of(GradScaler), dist.get_rank()
        if what == "scale":
            scaler.update(4.0 * (1 + rank))
        elif what == "growth_tracker":
            assert scaler._growth_tracker is not None
            scaler._growth_tracker.fill_(rank)
        else:
            scaler.set_growth_interval(5 + rank)
        p = parameter(torch.ones(2))
        give_gradient(p, 4.0)
        with pytest.raises(RanksDisagreeError) as caught:
            scaler.step(sgd([p], fused))
        assert bool((p == 1).all())
        return caught.value.lowest, caught.value.highest, str(caught.value)

    (low, high, text), second = two.run(step)
    assert (low, high) == second[:2]
    assert list(low) == [what] and low[what] < high[what]
    assert f"on rank 0 of 2: {what} is" in text and "state_dict on every rank" in text


def test_error_on_one_rank_reaches_all(two: Cluster) -> None:
    def step() -> str:
        dtype = torch.float16 if dist.get_rank() == 0 else torch.float32
        p = parameter(torch.ones(2, dtype=dtype))
        give_gradient(p, 4.0)
        with pytest.raises((ValueError, PeerFailedError)) as caught:
            scaler_of(GradScaler).unscale_(sgd([p]))
        return type(caught.value).__name__

    assert two.run(step) == ["ValueError", "PeerFailedError"]


def test_b10f_recheck_is_agreed_on(two: Cluster) -> None:
    def step(bad_rank: int) -> tuple[Seen, int]:
        scaler, p = scaler_of(GradScaler, recheck=True), parameter(torch.ones(2))
        give_gradient(p, 4.0)
        optimizer = sgd([p])
        with CommDebugMode() as mode:
            scaler.unscale_(optimizer)
            if dist.get_rank() == bad_rank:
                give_gradient(p, INF)
            scaler.step(optimizer)
        scaler.update()
        return Seen(
            bool((p == 1).all()),
            scaler.get_scale(),
            scaler._get_growth_tracker(),
            bool(p.isfinite().all()),
            1.0,
        ), mode.get_total_counts()

    for bad_rank in (0, 1, -1):
        results = two.run(step, bad_rank)
        assert agreed([seen for seen, _ in results], skipped=bad_rank >= 0)
        assert [count for _, count in results] == [2, 2]


# - What it costs


@SCALERS
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_one_collective_a_step(
    four: Cluster, make: Make, fused: bool, clip: bool
) -> None:
    def step() -> tuple[int, int, int]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        norm = parameter(torch.ones(2), mesh, [Shard(0), Replicate()])
        weight = parameter(torch.ones(2, 2), mesh, [Shard(0), Shard(1)])
        narrow = parameter(torch.ones(2).bfloat16(), mesh, [Shard(0), Replicate()])
        params = [norm, weight, narrow]
        scaler, optimizer = scaler_of(make), torch.optim.Adam(params, fused=fused)
        counts = []
        for _ in range(3):
            for p in params:
                give_gradient(p, 4.0)
            with CommDebugMode() as mode:
                if clip:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            counts.append(mode.get_total_counts())
        return counts[0], counts[1], counts[2]

    # The first iteration closes with a second message: nobody knows yet how many come.
    assert four.run(step) == [(2, 1, 1)] * 4


def test_local_agreement_is_no_collective(two: Cluster) -> None:
    def step() -> tuple[int, float]:
        scaler = scaler_of(GradScaler, agree_over="local")
        p = parameter(torch.ones(2))
        give_gradient(p, INF if dist.get_rank() else 4.0)
        with CommDebugMode() as mode:
            scaler.step(sgd([p]))
            scaler.update()
        return mode.get_total_counts(), scaler.get_scale()

    assert two.run(step) == [(0, 4.0), (0, 2.0)]


@pytest.mark.parametrize("make", [GradScaler, ShardedGradScaler])
@pytest.mark.parametrize(("fused", "syncs"), [(True, 0), (False, 1)])
def test_host_synchronisations(
    two: Cluster, make: Make, fused: bool, syncs: int
) -> None:
    def step() -> int:
        from torch.profiler import ProfilerActivity, profile

        scaler, p = scaler_of(make), parameter(torch.ones(2))
        optimizer = sgd([p], fused)
        for _ in range(2):
            give_gradient(p, 4.0)
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                scaler.step(optimizer)
                scaler.update()
        events = {e.key: e.count for e in seen.key_averages()}
        return int(events.get("aten::_local_scalar_dense", 0))

    assert all(count <= syncs for count in two.run(step))


# - Copies


@SCALERS
def test_b11d_copies_and_pickles_with_a_process_group(
    four: Cluster, make: Make
) -> None:
    def step() -> list[float]:
        import copy
        import pickle

        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = groups[dist.get_rank() % 2]
        original = scaler_of(make, process_group=group)
        scales = []
        for scaler in (
            original,
            copy.deepcopy(original),
            pickle.loads(pickle.dumps(original)),
        ):
            scaler.scale(torch.ones(()))
            p = parameter(torch.ones(2))
            give_gradient(p, INF if dist.get_rank() == 2 else 4.0)
            scaler.step(sgd([p]))
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    assert four.run(step) == [[2.0] * 3, [4.0] * 3] * 2
