"""Limits of ``clip_grad_norm_``: counted gradients, overflows, and ranks."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from gradparity.multiprocess import Cluster
from gradparity.scaler import (
    GradScaler,
    PeerFailedError,
    RanksDisagreeError,
    global_norm,
    history,
)
from gradparity.scaler.grads import _norms_cuda
from gradparity.tests.beside_torch import (
    ours_plain,
    ours_sharded,
    scaled_once,
    torch_plain,
)
from gradparity.tests.stepping import FUSED, INF, sgd

OURS = pytest.mark.parametrize("make", [ours_plain, ours_sharded])
SOON_S = 20.0  # a hang fails long before the harness's own limit


def with_gradient(gradient: Tensor) -> nn.Parameter:
    p = nn.Parameter(torch.ones(gradient.shape, dtype=gradient.dtype))
    p.grad = gradient
    return p


# - What is counted


@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_an_empty_shard_has_norm_0_by_the_kernel_of_accelerators(
    norm_type: float,
) -> None:
    pair = [torch.full((1,), -2.0), torch.ones(0)]
    assert _norms_cuda(pair, norm_type).tolist() == [2.0, 0.0]
    assert _norms_cuda(pair[1:], norm_type).tolist() == [0.0]


def test_an_empty_shard_hides_no_norm_and_no_overflow_of_an_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (global_norm, history):
        monkeypatch.setattr(module, "norms", _norms_cuda)
    full, empty = with_gradient(torch.ones(3)), with_gradient(torch.ones(0))
    optimizer, scaler = sgd(empty, full), GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    assert float(scaler.clip_and_step(optimizer, 1.0, INF)) == 1.0
    scaler.update()
    full.grad = torch.full((3,), INF)
    scaler.step(optimizer)
    scaler.update()
    assert str(scaler.last_overflow) == "inf in parameter 1 on rank 0"


@OURS
@pytest.mark.parametrize(
    ("norm_type", "norm"),
    [(2.0, 8.0**0.5), (1.0, 4.0), (INF, 2.0), (3.0, 2 * 2 ** (1 / 3))],
)
def test_sparse_gradients_are_added_up_first(
    make: Any, norm_type: float, norm: float
) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(4, 1, sparse=True)
    optimizer, scaler = sgd(embedding.weight), make(init_scale=4.0)
    before = embedding.weight.detach().clone()
    scaler.scale(embedding(torch.tensor([0, 0, 1, 1])).sum()).backward()
    found = scaler.clip_grad_norm_(optimizer, 1.0, norm_type)
    torch.testing.assert_close(float(found), norm, rtol=1e-6, atol=0.0)
    scaler.step(optimizer)
    moved = (before - embedding.weight.detach()).flatten()
    expected = torch.tensor([2.0, 2.0, 0.0, 0.0]) / norm
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-6)


@OURS
def test_complex_gradients_are_refused_as_by_torch(make: Any) -> None:
    def run(make: Any, call: Callable[[Any, Any], Any]) -> tuple[type[Exception], Any]:
        p, q = (with_gradient(torch.tensor([1 + 2j, 3 - 4j])) for _ in "pq")
        scaler = scaled_once(make(init_scale=4.0))
        with pytest.raises(Exception) as caught:  # the kind is asked below
            call(scaler, sgd(p, q))
        assert p.grad is not None
        return caught.type, p.grad.tolist()

    wanted, left = run(torch_plain, lambda s, o: s.unscale_(o))
    assert issubclass(wanted, RuntimeError)
    kind, ours = run(make, lambda s, o: s.clip_grad_norm_(o, 1.0))
    assert issubclass(kind, wanted)
    assert ours == left


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
def test_a_replica_counts_once_whatever_the_order_of_its_ranks(
    four: Cluster, norm_type: float
) -> None:
    def norm() -> float:
        meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [3, 2])]
        mesh = meshes[dist.get_rank() // 2]
        whole = torch.ones(3)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        local = whole.chunk(2)[coordinate[0]]
        placed: dict[str, Any] = {
            "run_check": False,
            "shape": whole.shape,
            "stride": (1,),
        }
        p = nn.Parameter(DTensor.from_local(local.clone(), mesh, [Shard(0)], **placed))
        p.grad = DTensor.from_local(local * 8.0, mesh, [Shard(0)], **placed)
        scaler = scaled_once(GradScaler("cpu", init_scale=4.0))
        return float(scaler.clip_grad_norm_(sgd(p), 1e9, norm_type))

    expected = {2.0: math.sqrt(12.0), 1.0: 6.0, INF: 2.0}[norm_type]
    for found in four.with_options(timeout_s=SOON_S).run(norm):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)


def test_a_shard_that_cannot_be_placed_is_no_plain_tensor(two: Cluster) -> None:
    # What a torch release does that renames an attribute of DTensor.
    def norm() -> Any:
        mesh = init_device_mesh("cpu", (2,))
        p = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
        p.grad = DTensor.from_local(torch.full((2,), 4.0), mesh, [Shard(0)])
        del p.grad._spec
        scaler = scaled_once(GradScaler("cpu", init_scale=4.0))
        try:
            return float(scaler.clip_grad_norm_(sgd(p), 1e9))
        except Exception as error:
            return type(error).__name__

    found = two.with_options(timeout_s=SOON_S).run(norm)
    assert all(isinstance(each, str) for each in found), found


# - What overflows


@OURS
@FUSED
@pytest.mark.parametrize("norm_type", [64.0, 200.0])
def test_a_norm_of_high_order_is_finite(
    make: Any, fused: bool, norm_type: float
) -> None:
    p = with_gradient(torch.full((2,), 65536.0))
    optimizer = sgd(p, fused=fused)
    scaler = scaled_once(make(init_scale=65536.0))
    norm = scaler.clip_grad_norm_(optimizer, 1e9, norm_type)
    torch.testing.assert_close(float(norm), 2 ** (1 / norm_type), rtol=1e-6, atol=0.0)
    scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == [0.0, 0.0]
    assert scaler.get_scale() == 65536.0


@OURS
def test_fp64_gradients_beyond_the_root_of_fp64(make: Any) -> None:
    p = with_gradient(torch.full((2,), 4e160, dtype=torch.float64))
    optimizer = sgd(p, lr=1e-160)
    scaler = scaled_once(make(init_scale=4.0))
    scaler.clip_grad_norm_(optimizer, 1e300)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(p.detach(), torch.zeros(2, dtype=torch.float64))
    assert not scaler.step_was_skipped(optimizer)
    assert scaler.get_scale() == 4.0


@OURS
@FUSED
def test_a_high_scale_and_a_low_bound(make: Any, fused: bool) -> None:
    scale, max_norm = 2.0**120, 1e-7

    def run(make: Any) -> Tensor:
        p = with_gradient(torch.tensor([0.6, 0.8]) * scale)
        optimizer = sgd(p, lr=5e6, fused=fused)
        scaler = scaled_once(make(init_scale=scale))
        if make is torch_plain:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([p], max_norm)
        else:
            scaler.clip_grad_norm_(optimizer, max_norm)
        scaler.step(optimizer)
        return p.detach()

    theirs = run(torch_plain)
    torch.testing.assert_close(theirs, torch.tensor([0.7, 0.6]), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(run(make), theirs, rtol=1e-6, atol=0.0)


# - Which ranks take part


@OURS
def test_a_disabled_scaler_raises_if_the_norm_is_not_finite(make: Any) -> None:
    p = with_gradient(torch.tensor([INF, 1.0]))
    scaler = make(enabled=False)
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        scaler.clip_grad_norm_(sgd(p), 1.0, error_if_nonfinite=True)
    assert p.grad is not None
    assert p.grad.tolist() == [INF, 1.0]
    assert not math.isfinite(scaler.clip_grad_norm_(sgd(p), 1.0))


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("layout", ["stages", "mixed", "empty stage"])
def test_turning_the_scaler_off_keeps_the_norm(
    two: Cluster, enabled: bool, layout: str
) -> None:
    def run() -> tuple[float, list[list[float]]]:
        rank, scale = dist.get_rank(), 4.0 if enabled else 1.0
        params = [with_gradient(torch.tensor([[3.0, 4.0][rank]]) * scale)]
        if layout == "mixed":
            mesh = init_device_mesh("cpu", (2,))
            shard = nn.Parameter(DTensor.from_local(torch.ones(1), mesh, [Shard(0)]))
            local = torch.tensor([[3.0, 4.0][rank]]) * scale
            shard.grad = DTensor.from_local(local, mesh, [Shard(0)])
            same = with_gradient(torch.tensor([12.0]) * scale)
            params = [shard, same]
        scaler = scaled_once(GradScaler("cpu", init_scale=4.0, enabled=enabled))
        if layout == "empty stage" and rank == 1:
            return float(scaler.clip_grad_norm_(None, 1.0)), []
        norm = float(scaler.clip_grad_norm_(sgd(*params), 1.0))
        grads: list[Any] = [p.grad for p in params]
        local_grads = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        return norm, [g.tolist() for g in local_grads]

    norm = {"stages": 5.0, "mixed": 13.0, "empty stage": 3.0}[layout]
    of_ranks = [[[3.0]], [[4.0]]]
    if layout == "mixed":
        of_ranks = [[[3.0], [12.0]], [[4.0], [12.0]]]
    if layout == "empty stage":
        of_ranks = [[[3.0]], []]
    found = two.with_options(timeout_s=SOON_S).run(run)
    for (got, grads), before in zip(found, of_ranks, strict=True):
        torch.testing.assert_close(got, norm, rtol=1e-6, atol=0.0)
        clipped = [[g / norm for g in each] for each in before]
        torch.testing.assert_close(grads, clipped, rtol=1e-5, atol=0.0)


def test_a_rank_without_parameters_clips_as_often_as_its_peers(
    two: Cluster,
) -> None:
    def run() -> tuple[list[float], list[float], float]:
        scaler = scaled_once(GradScaler("cpu", init_scale=4.0))
        norms: list[float] = []
        left: list[float] = []
        for _ in range(2):
            if dist.get_rank() == 1:
                norms += [float(scaler.clip_grad_norm_(None, 1e9)) for _ in "ab"]
                for _ in "ab":
                    scaler.step(None)
            else:
                both = [with_gradient(torch.tensor([v])) for v in (2.0, 3.0)]
                optimizers = [sgd(p) for p in both]
                norms += [float(scaler.clip_grad_norm_(o, 1e9)) for o in optimizers]
                for optimizer in optimizers:
                    scaler.step(optimizer)
                left += [p.item() for p in both]
            scaler.update()
        return norms, left, scaler.get_scale()

    first, second = two.with_options(timeout_s=SOON_S).run(run)
    assert first == ([0.5, 0.75] * 2, [0.5, 0.25] * 2, 4.0)
    assert second == ([0.5, 0.75] * 2, [], 4.0)


@pytest.mark.parametrize("call", ["step", "clip_grad_norm_", "clip_and_step"])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_rank_on_its_own_lacks_no_optimizer(enabled: bool, call: str) -> None:
    scaler = scaled_once(GradScaler("cpu", enabled=enabled))
    with pytest.raises(AttributeError, match="'NoneType' object"):
        getattr(scaler, call)(None, *([1.0] if "clip" in call else []))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_disabled_scaler_is_copied_after_a_clip(copied: Any) -> None:
    """The scaler's private object for clips is left out of the copy."""
    scaler = GradScaler("cpu", enabled=False)
    for each in (scaler, copied(scaler)):
        p = with_gradient(torch.full((1,), 4.0))
        for _ in range(2):
            assert each.clip_and_step(torch.optim.SGD([p], lr=1.0), 2.0) > 1.9
        assert type(each) is GradScaler
        assert (each.is_enabled(), each.state_dict()) == (False, {})
        scaler = each
    assert copied(scaler).get_scale() == 1.0


def test_a_scaler_that_is_switched_off_clips_without_its_scale() -> None:
    """Each call reads `_enabled` anew, as in torch's class."""
    p = with_gradient(torch.full((1,), 4.0))
    scaler = scaled_once(GradScaler("cpu", init_scale=8.0))
    scaler._enabled = False
    assert scaler.clip_grad_norm_(torch.optim.SGD([p]), 1.0) == 4.0
    scaler._enabled = True
    p.grad = torch.full((1,), 4.0)
    assert scaler.clip_grad_norm_(torch.optim.SGD([p]), 1.0) == 0.5


# - Bound and order


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("max_norm", "order", "name"),
    [
        (math.nan, 2.0, "max_norm"),
        (-1.0, 2.0, "max_norm"),
        (1.0, 0.0, "norm_type"),
        (1.0, -math.inf, "norm_type"),
        (1.0, math.nan, "norm_type"),
    ],
)
def test_what_is_no_bound_or_no_norm_is_refused(
    enabled: bool, max_norm: float, order: float, name: str
) -> None:
    gradient = torch.ones(3)
    p = with_gradient(gradient.clone())
    scaler = scaled_once(GradScaler("cpu", enabled=enabled))
    with pytest.raises(ValueError, match=name):
        scaler.clip_grad_norm_(sgd(p), max_norm, order)
    assert p.grad is not None
    assert torch.equal(p.grad, gradient)


@pytest.mark.parametrize("what", ["max_norm", "norm_type"])
def test_ranks_that_clip_differently_all_raise(four: Cluster, what: str) -> None:
    def clip() -> str:
        asked = {"max_norm": 1.0, what: 1.0 + dist.get_rank() % 2}
        p = with_gradient(torch.full((3,), 4.0))
        scaler = scaled_once(GradScaler("cpu", init_scale=4.0))
        with pytest.raises(RanksDisagreeError) as caught:
            scaler.clip_grad_norm_(sgd(p), **asked)
        return str(caught.value)

    for message in four.run(clip):
        assert "max_norm and norm_type" in message


def test_a_bad_bound_on_one_rank_leaves_no_rank_waiting(four: Cluster) -> None:
    def clip() -> str:
        max_norm = math.nan if dist.get_rank() == 1 else 1.0
        p = with_gradient(torch.full((3,), 4.0))
        scaler = scaled_once(GradScaler("cpu", init_scale=4.0))
        with pytest.raises((ValueError, PeerFailedError)) as caught:
            scaler.clip_grad_norm_(sgd(p), max_norm)
        return type(caught.value).__name__

    raised = four.with_options(timeout_s=30).run(clip)
    others = ["PeerFailedError"] * 2
    assert raised == [others[0], "InvalidSettingError", *others]
