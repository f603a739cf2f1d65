"""clip_grad_norm_: unscale, check and clip from one read of the gradients."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler
from gradparity.scaler.grads import norms
from gradparity.tests.products import pairs
from gradparity.tests.scaler.optimizers import Wrapper
from gradparity.tests.stepping import BOTH, FUSED, exchanged

SCALE = 1024.0


def scaled(make: Any = GradScaler, scale: float = SCALE, **settings: Any) -> Any:
    scaler = make(device="cpu", init_scale=scale, **settings)
    scaler.scale(torch.ones(()))
    return scaler


def parameters_with(gradients: list[Tensor]) -> list[Tensor]:
    params = [torch.zeros_like(g, requires_grad=True) for g in gradients]
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.clone()
    return params


def exact(
    gradients: list[Tensor], scale: float, max_norm: float, order: float
) -> tuple[float, list[Tensor]]:
    unscaled = [g.double() / scale for g in gradients]
    norm = torch.cat([g.flatten() for g in unscaled]).norm(order).item()
    factor = min(1.0, max_norm / (norm + 1e-6))
    return norm, [g * factor for g in unscaled]


@pytest.fixture(params=["cpu", "settled"])
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run each test as on a CPU and as on an accelerator."""
    with exchanged(request.param):
        yield request.param


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


SHAPES: dict[str, Any] = {
    "small": [(16,)] * 40,
    "mixed": [(3, 5), (16,), (), (7, 1), (16,), (300, 40), (2, 3, 4)],
    "large": [(600, 700), (64, 64), (64, 64)],
}


@pairs(
    BOTH,
    FUSED,
    pytest.mark.parametrize("shapes", sorted(SHAPES)),
    pytest.mark.parametrize("order", [2.0, 1.0, 3.0, math.inf]),
    pytest.mark.parametrize("max_norm", [0.5, 1e9]),
)
def test_equals_exact_clipping(
    make: Any, fused: bool, shapes: str, order: float, max_norm: float, where: str
) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(shape) * SCALE for shape in SHAPES[shapes]]
    params = parameters_with(gradients)
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    scaler = scaled(make)
    norm = scaler.clip_grad_norm_(optimizer, max_norm, order)
    scaler.step(optimizer)
    scaler.update()
    expected, clipped = exact(gradients, SCALE, max_norm, order)
    assert norm.shape == () and norm.dtype is torch.float32
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    for p, g in zip(params, clipped, strict=True):
        assert error(-p.detach(), g) < 1e-6


@FUSED
def test_after_unscale(fused: bool, where: str) -> None:
    gradients = [torch.randn(5, 4) * SCALE, torch.randn(3) * SCALE]
    params = parameters_with(gradients)
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    scaler = scaled()
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    for p, g in zip(params, exact(gradients, SCALE, 0.5, 2.0)[1], strict=True):
        assert error(-p.detach(), g) < 1e-6


@FUSED
def test_a_norm_beyond_fp32_is_no_overflow(fused: bool) -> None:
    params = parameters_with([torch.full((100,), 3e37)] * 3)
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    scaler = scaled()
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert norm.item() == pytest.approx(3e37 / SCALE * 300**0.5, rel=1e-6)
    assert not scaler.step_was_skipped(optimizer)
    assert error(-params[0].detach(), torch.full((100,), 300**-0.5)) < 1e-6


@FUSED
def test_a_scale_below_one_can_overflow(fused: bool) -> None:
    params = parameters_with([torch.full((2,), 3e38)])
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    scaler = scaled(scale=0.5)
    assert not math.isfinite(scaler.clip_grad_norm_(optimizer, 1.0))
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer) and params[0].tolist() == [0.0, 0.0]


@FUSED
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_overflow_is_skipped_and_named(fused: bool, bad: float) -> None:
    last = torch.ones(9, dtype=torch.float64)
    params = parameters_with([torch.ones(4), torch.ones(4), last])
    for p in params[1:]:  # the first one is named
        assert p.grad is not None
        p.grad[2] = bad
    named = [(f"weight{i}", p) for i, p in enumerate(params)]
    optimizer = torch.optim.SGD(named, lr=1.0, fused=fused)
    scaler = scaled()
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    assert not math.isfinite(norm.item())
    scaler.step(optimizer)
    scaler.update()
    kind = "nan" if math.isnan(bad) else "inf"
    assert scaler.last_overflow == (0, 1, "weight1", kind)
    assert str(scaler.last_overflow) == f"{kind} in weight1 on rank 0"
    assert all(not p.any() for p in params) and scaler.get_scale() == SCALE / 2


@FUSED
@pytest.mark.parametrize("iteration", [0, 1])
def test_gradients_are_clipped_after_a_clip(
    fused: bool, where: str, iteration: int
) -> None:
    """After the scaler's clip, torch's clip reads and changes unscaled gradients."""
    params = parameters_with([torch.zeros(4), torch.zeros(4)])
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    scaler = scaled()
    for number in range(iteration + 1):
        for p in params:
            p.grad = torch.full((4,), SCALE)
        scaler.clip_grad_norm_(optimizer, 0.5)
        before = [p.detach().clone() for p in params]
        if number == iteration:
            norm = torch.nn.utils.clip_grad_norm_(params, 0.25)
            assert norm.item() == pytest.approx(0.5, rel=1e-5)
        scaler.step(optimizer)
        scaler.update()
    moved = sum(
        float((p.detach() - b).square().sum())
        for p, b in zip(params, before, strict=True)
    )
    assert moved == pytest.approx(0.25**2, rel=1e-5)


@FUSED
def test_gradients_made_in_inference_mode_are_clipped_there(fused: bool) -> None:
    [p] = parameters_with([torch.zeros(4)])
    optimizer = torch.optim.SGD([p], lr=1.0, fused=fused)
    scaler = scaled()
    with torch.inference_mode():
        p.grad = torch.full((4,), SCALE)
        scaler.clip_grad_norm_(optimizer, 0.5)
        assert p.grad.norm().item() == pytest.approx(0.5, rel=1e-5)
        scaler.step(optimizer)
    assert p.detach().norm().item() == pytest.approx(0.5, rel=1e-5)


class AsksForTheScaler(torch.optim.SGD):
    """Fused optimizer of the older contract, whose ``step`` takes the scaler."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]  # that contract
        super().step()


def step_in_a_wrapper(scaler: GradScaler, optimizer: Any) -> None:
    scaler.step(Wrapper(optimizer))  # type: ignore[arg-type]  # has what torch's has


def step_interrupted(scaler: GradScaler, optimizer: Any) -> None:
    def interrupt(*_: Any) -> None:
        handle.remove()
        raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    scaler.step(optimizer)


def step_after_update(scaler: GradScaler, optimizer: Any) -> None:
    scaler.update()
    optimizer.step()  # gradients are unscaled and clipped


def step_asked_for_the_scaler(scaler: GradScaler, optimizer: Any) -> None:
    with pytest.warns(FutureWarning, match="stop passing itself") as warned:
        scaler.step(optimizer)
    assert warned[0].filename == __file__


def test_clip_and_step_hands_over_the_scaler_where_it_is_asked_for() -> None:
    given = []

    class Keeps(AsksForTheScaler):
        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]  # that contract
            given.append(grad_scaler)
            super().step()

    params = parameters_with([torch.full((4,), SCALE)])
    scaler, before = scaled(), params[0].detach().clone()
    with pytest.warns(FutureWarning, match="stop passing itself") as warned:
        scaler.clip_and_step(Keeps(params, lr=1.0), 0.5)
    assert given == [scaler]
    assert warned[0].filename == __file__
    assert (before - params[0]).norm().item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (torch.optim.SGD, step_in_a_wrapper),
        (torch.optim.SGD, step_interrupted),
        (torch.optim.SGD, step_after_update),
        (AsksForTheScaler, step_asked_for_the_scaler),
    ],
)
def test_a_clip_is_applied_once(make: Any, step: Any) -> None:
    params = parameters_with([torch.full((4,), SCALE)])
    before = params[0].detach().clone()
    fused = make is torch.optim.SGD
    optimizer, scaler = make(params, lr=1.0, fused=fused or None), scaled()
    scaler.clip_grad_norm_(optimizer, 0.5)
    step(scaler, optimizer)
    assert (before - params[0]).norm().item() == pytest.approx(0.5, rel=1e-5)


@FUSED
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize(
    "make",
    [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad],
)
def test_what_grad_holds_after_a_step(make: Any, clips: bool, fused: bool) -> None:
    gradients = [torch.randn(shape) * SCALE for shape in [(), (5,), (7, 40)]]
    params, scaler = parameters_with(gradients), scaled()
    optimizer = make(params, fused=fused)
    if clips:
        scaler.clip_and_step(optimizer, 0.5)
    else:
        scaler.step(optimizer)
    _, expected = exact(gradients, SCALE, 0.5 if clips else math.inf, 2.0)
    for p, gradient in zip(params, expected, strict=True):
        assert p.grad is not None and error(p.grad, gradient) < 1e-6


def test_errors() -> None:
    params = parameters_with([torch.full((2,), math.inf)])
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = scaled()
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match="twice since update"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="called after step"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.update()
    with pytest.raises(AssertionError, match="did not use"):
        GradScaler(device="cpu").clip_grad_norm_(optimizer, 1.0)
    half = parameters_with([torch.ones(2).half()])
    with pytest.raises(ValueError, match="FP16"):
        scaler.clip_grad_norm_(torch.optim.SGD(half), 1.0)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_and_step"])
@pytest.mark.parametrize("value", [math.inf, 1.5e308])
def test_a_norm_that_is_refused_is_not_stepped_by(
    value: float, call: str, fused: bool, enabled: bool
) -> None:
    """Gradients are infinite, or only their norm overflows."""
    params = parameters_with([torch.full((4,), value, dtype=torch.float64)])
    before = params[0].detach().clone()
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    scaler = GradScaler(device="cpu", init_scale=2.0, enabled=enabled)
    scaler.scale(torch.ones(1))
    with pytest.raises(RuntimeError, match="is inf, so they cannot be clipped"):
        getattr(scaler, call)(optimizer, 1.0, error_if_nonfinite=True)
    if enabled and call == "clip_grad_norm_":
        scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer) == enabled
    scaler.update()
    assert params[0].equal(before)
    assert scaler.get_scale() == 1.0


def test_disabled_clips_as_torch_does() -> None:
    gradients = [torch.randn(5)]
    ours, theirs = parameters_with(gradients), parameters_with(gradients)
    scaler = GradScaler(device="cpu", enabled=False)
    got = scaler.clip_grad_norm_(torch.optim.SGD(ours), 0.1)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.1)
    torch.testing.assert_close(got, expected)
    assert ours[0].grad is not None and theirs[0].grad is not None
    torch.testing.assert_close(ours[0].grad, theirs[0].grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_norms_of_any_dtype(dtype: torch.dtype, order: float) -> None:
    shapes = [(4,), (400, 500), (4,), (), (0, 3), (0, 3)]
    tensors = [torch.rand(shape).to(dtype) for shape in shapes]
    got = norms(tensors, order)
    for value, tensor in zip(got, tensors, strict=True):
        exactly = tensor.double().flatten().norm(order).item() if tensor.numel() else 0
        assert value == pytest.approx(exactly, rel=1e-6)
    assert norms([], order) == []


# - Over ranks


def placed(local: Tensor, mesh: Any, placements: Any) -> Tensor:
    made: Tensor = DTensor.from_local(local, mesh, placements, run_check=False)
    return made


def clip_and_step(
    scaler: Any, params: list[Tensor], gradients: list[Tensor], fused: bool
) -> tuple[float, list[Tensor], int]:
    for p, g in zip(params, gradients, strict=True):
        p.grad = g
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    with CommDebugMode() as mode:
        norm = scaler.clip_grad_norm_(optimizer, 0.5).item()
        scaler.step(optimizer)
    count = mode.get_total_counts()
    scaler.update()
    steps = [
        -(p.to_local() if isinstance(p, DTensor) else p).detach().double()
        for p in params
    ]
    return norm, steps, count


@BOTH
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_b16b_mixed_meshes(four: Cluster, make: Any, order: float) -> None:
    def step() -> tuple[float, float, float, int]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        generator = torch.Generator().manual_seed(7)

        def whole(*shape: int) -> Tensor:  # the same on every rank
            return torch.randn(*shape, generator=generator) * SCALE

        plain, grid, rows, columns = whole(5), whole(4, 4), whole(4), whole(6)
        i, j = mesh.get_coordinate() or (0, 0)
        locals_ = [
            plain,
            grid[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].contiguous(),
            rows[2 * i : 2 * i + 2].clone(),
            columns[3 * j : 3 * j + 3].clone(),
            rows[2 * i : 2 * i + 2].clone(),
        ]
        where: list[Any] = [
            None,
            (mesh, [Shard(0), Shard(1)]),
            (mesh, [Shard(0), Replicate()]),
            (mesh["tp"], [Shard(0)]),
            (mesh["dp"], [Shard(0)]),
        ]
        gradients = [
            local.clone() if at is None else placed(local.clone(), *at)
            for local, at in zip(locals_, where, strict=True)
        ]
        params: list[Tensor] = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
        for p, g in zip(params, gradients, strict=True):
            p.grad = g
        optimizer = torch.optim.SGD(params, lr=1.0, foreach=False)
        scaler = scaled(make)
        with CommDebugMode() as mode:
            norm = scaler.clip_grad_norm_(optimizer, 0.5, order).item()
            scaler.step(optimizer)
        everything = [plain, grid, rows, columns, rows]
        expected, _ = exact(everything, SCALE, 0.5, order)
        factor = 0.5 / (expected + 1e-6) / SCALE
        worst = max(
            error(-(p.to_local() if isinstance(p, DTensor) else p).detach(), g * factor)
            for p, g in zip(params, [g.double() for g in locals_], strict=True)
        )
        return norm, expected, worst, mode.get_total_counts()

    for norm, expected, worst, collectives in four.run(step):
        assert norm == pytest.approx(expected, rel=1e-6)
        # The parts of the norm come with the row, after that the tables of replicas.
        assert worst < 1e-6 and collectives == (1 if math.isinf(order) else 4)


@FUSED
@pytest.mark.parametrize("replicas", [True, False])
def test_plain_replicas_once_and_stages_each(
    two: Cluster, fused: bool, replicas: bool
) -> None:
    def step() -> tuple[float, list[Tensor], int]:
        torch.manual_seed(0 if replicas else dist.get_rank())
        gradient = torch.randn(8) * SCALE
        params: list[Tensor] = [nn.Parameter(torch.zeros(8))]
        return clip_and_step(scaled(), params, [gradient], fused)

    results = two.run(step)
    torch.manual_seed(0)
    parts = [torch.randn(8).double()]
    if not replicas:
        torch.manual_seed(1)
        parts.append(torch.randn(8).double())
    expected = torch.cat(parts).norm().item()
    for (norm, steps, collectives), part in zip(results, parts * 2, strict=False):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert error(steps[0], part * 0.5 / expected) < 2e-6
        # In the first clip, stages are told from replicas.
        assert collectives == 4


# regression: H27
@pytest.mark.parametrize("order", [1.0, 2.0])
def test_gradients_with_equal_norms_are_no_replicas(two: Cluster, order: float) -> None:
    """Their elements differ in order, in sign, or in the rows that they belong to."""

    def norms() -> list[float]:
        rank, seen = dist.get_rank(), []
        values = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])[rank] * SCALE
        signed = torch.tensor([1.0, -1.0]) * (SCALE if rank else -SCALE)
        row = torch.sparse_coo_tensor(
            torch.tensor([[rank]]), torch.ones(1, 2) * SCALE, (4, 2)
        )
        for gradient in (values, signed, row):
            p = nn.Parameter(torch.zeros(gradient.shape))
            optimizer, scaler = torch.optim.SGD([p], lr=1.0), scaled()
            for _ in range(2):
                p.grad = gradient.clone()
                seen.append(scaler.clip_and_step(optimizer, 1e9, order).item())
                scaler.update()
        return seen

    each = ([3.0, 2.0, 1.0] * 2, [1.0] * 4, [1.0] * 4)
    expected = [torch.tensor(values).norm(order).item() for values in each]
    expected = [norm for norm in expected for _ in range(2)]
    for seen in two.run(norms):
        assert seen == pytest.approx(expected)


# regression: H31-S1, H31-S4
@pytest.mark.parametrize("first", ["zero", "shared", "own"])
def test_parameters_of_one_size_that_train_in_turn(two: Cluster, first: str) -> None:
    """One is held by both ranks, one by this rank alone. Zeros do not show which."""

    def norms() -> list[tuple[float, float]]:
        rank, seen = dist.get_rank(), []
        shared, own = (nn.Parameter(torch.zeros(8)) for _ in range(2))
        optimizer, scaler = torch.optim.SGD([shared, own], lr=0.0), scaled()
        for step in range(8):
            is_own = (step // 2) % 2 == (first != "own")
            shared.grad = own.grad = None
            if first == "zero" and step == 0:
                shared.grad, own.grad, expected = torch.zeros(8), torch.zeros(8), 0.0
            elif is_own:
                own.grad = torch.full((8,), (rank + 1) * SCALE)
                expected = (8 * (1 + 4)) ** 0.5
            else:
                shared.grad = torch.full((8,), (step + 1) * SCALE)
                expected = 8**0.5 * (step + 1)
            seen.append((scaler.clip_and_step(optimizer, 1e9).item(), expected))
            scaler.update()
        return seen

    for seen in two.run(norms):
        for norm, expected in seen:
            assert norm == pytest.approx(expected)


def test_partial_gradients_are_summed_first(two: Cluster) -> None:
    def step() -> tuple[float, list[float]]:
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(placed(torch.zeros(2), mesh, [Replicate()]))
        part = torch.tensor([3.0, 0.0]) if dist.get_rank() else torch.tensor([0.0, 4.0])
        gradient = placed(part * SCALE, mesh, [Partial()])
        norm, steps, _ = clip_and_step(scaled(), [weight], [gradient], False)
        return norm, steps[0].tolist()

    for norm, steps in two.run(step):
        assert norm == pytest.approx(5.0)
        assert steps == pytest.approx([0.3, 0.4], rel=1e-6)


# regression: T19
@FUSED
def test_a_step_pre_hook_sees_what_the_kernel_is_handed(fused: bool) -> None:
    """The hook of a fused optimizer gets scaled gradients, as with torch's scaler."""
    (p,) = parameters_with([torch.full((4,), 2.0 * SCALE)])
    optimizer: Any = torch.optim.SGD([p], lr=1.0, fused=fused)
    seen: list[float] = []
    gradient: Any = p.grad
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradient[0].item()))
    scaler = scaled()
    scaler.clip_and_step(optimizer, 2.0)
    assert seen == [pytest.approx(2.0 * SCALE if fused else 1.0)]
    assert p[0].item() == pytest.approx(-1.0)


# regression: T23
@pytest.mark.parametrize("lacking", ["clip_and_step", "step"])
@pytest.mark.parametrize("call", ["clip_and_step", "clip_grad_norm_"])
def test_a_norm_that_is_refused_reduces_the_scale_of_all_ranks(
    two: Cluster, call: str, lacking: str
) -> None:
    def run() -> float:
        scaler = scaled(scale=4.0)
        p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        p.grad = torch.full_like(p, 1e308)  # finite, and its norm is not
        refuses = {"error_if_nonfinite": True}
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="is inf"):
                getattr(scaler, call)(torch.optim.SGD([p]), 1.0, **refuses)
        elif lacking == "clip_and_step":
            with pytest.raises(RuntimeError, match="is inf"):
                scaler.clip_and_step(None, 1.0, **refuses)
        else:
            scaler.step(None)
        scaler.update()
        return float(scaler.get_scale())

    assert two.run(run) == [2.0] * 2


def test_rank_without_parameters_and_overflow(two: Cluster) -> None:
    def step(bad: bool) -> tuple[float, float]:
        scaler = GradScaler(device="cpu", init_scale=4.0)
        if dist.get_rank():
            norm = scaler.clip_grad_norm_(None, 1.0)
            scaler.step(None)
        else:
            scaler.scale(torch.ones(()))
            (p,) = parameters_with([torch.full((4,), math.inf if bad else 4.0)])
            optimizer = torch.optim.SGD([p], lr=1.0)
            norm = scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
        scaler.update()
        return norm.item(), scaler.get_scale()

    assert two.run(step, False) == [(2.0, 4.0)] * 2
    assert two.run(step, True) == [(math.inf, 2.0)] * 2


def test_first_nonfinite_is_known_on_every_rank(four: Cluster) -> None:
    def step() -> Any:
        params = parameters_with([torch.ones(2), torch.ones(2)])
        if dist.get_rank() in (0, 2):
            assert params[1].grad is not None
            params[1].grad[0] = math.nan if dist.get_rank() == 2 else math.inf
        named = [(f"p{i}", p) for i, p in enumerate(params)]
        optimizer = torch.optim.SGD(named, lr=1.0)
        scaler = scaled()
        scaler.step(optimizer)
        return scaler.last_overflow

    results = four.run(step)
    assert results[2] == (2, 1, "p1", "nan")
    assert [results[i] for i in (0, 1, 3)] == [(2, 1, None, "nan")] * 3


def test_local_agreement_cannot_clip_shards(two: Cluster) -> None:
    def step() -> None:
        mesh = init_device_mesh("cpu", (2,))
        p = nn.Parameter(placed(torch.ones(2), mesh, [Shard(0)]))
        p.grad = placed(torch.ones(2), mesh, [Shard(0)])
        with pytest.raises(ValueError, match="syncs with no other rank"):
            scaled(sync_over="local").clip_grad_norm_(torch.optim.SGD([p]), 1.0)

    two.run(step)
