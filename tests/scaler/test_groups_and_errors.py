"""Ranks that sync, their compared state, and texts of errors."""

import copy
import logging
import pickle
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from gradparity.multiprocess import Cluster
from gradparity.scaler import (
    GradScaler,
    PeerFailedError,
    RanksDisagreeError,
    TooManySkipsError,
    sync_group,
)
from gradparity.scaler.grads import norms
from gradparity.scaler.sync_group import message_device
from gradparity.tests.beside_torch import GroupOfOne, scaled_once
from gradparity.tests.stepping import (
    INF,
    device_type,
    scalar_weight,
    sgd,
)

SOON_S = 20.0  # a hang fails long before the harness's own limit


# - Which ranks agree


@pytest.mark.parametrize("bad_rank", [None, 0, 1])
def test_a_rank_that_never_scales_agrees_over_its_mesh(
    two: Cluster, bad_rank: int | None
) -> None:
    def run() -> tuple[bool, float, list[float]]:
        model = nn.Linear(2, 2, bias=False)
        nn.init.ones_(model.weight)
        mesh = init_device_mesh(device_type(), (2,))
        fully_shard(model, mesh=mesh)
        optimizer = sgd(*model.parameters())
        scaler = GradScaler(device_type(), init_scale=4.0, sync_over=mesh)
        loss = model(torch.full((1, 2), 0.25)).sum()
        is_last = dist.get_rank() == 0
        (scaler.scale(loss) if is_last else loss * 4.0).backward()
        gradient: Any = model.weight.grad
        if dist.get_rank() == bad_rank:
            gradient.to_local().fill_(INF)
        scaler.step(optimizer)
        scaler.update()
        weight: Any = model.weight
        skipped = scaler.step_was_skipped(optimizer)
        return skipped, scaler.get_scale(), weight.to_local().flatten().tolist()

    skipped = bad_rank is not None
    expected = (True, 2.0, [1.0, 1.0]) if skipped else (False, 4.0, [0.75, 0.75])
    assert two.with_options(timeout_s=SOON_S).run(run) == [expected] * 2


@pytest.mark.parametrize("over", ["mesh", None, 3])
def test_what_names_no_ranks_is_refused(over: Any) -> None:
    with pytest.raises(ValueError, match="sync_over must be"):
        GradScaler(device_type(), sync_over=over)


@pytest.mark.parametrize("over", ["world", "local", GroupOfOne()])
def test_the_ranks_that_sync_have_one_argument(over: Any) -> None:
    scaled_once(GradScaler(device_type(), sync_over=over))


def test_another_accelerator_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sync_group, "device_types", lambda _: ["mps"])
    with pytest.raises(NotImplementedError, match=r"this process group serves .*mps"):
        message_device(GroupOfOne(), "mps", 1.0)
    with pytest.raises(NotImplementedError, match="CPU and CUDA, got meta"):
        norms([torch.ones(2, device="meta")], 2.0)


def test_messages_leave_from_the_device_of_the_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sync_group, "device_types", lambda _: ["cuda"])
    with FakeTensorMode():  # the current device is cuda:0
        scale = torch.ones((), device="cuda:1")
    assert message_device(GroupOfOne(), "cuda", scale) == torch.device("cuda:1")


# - What the ranks compare


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_ranks_that_step_in_another_order_raise(
    two: Cluster, fused: bool, clip: bool
) -> None:
    def run() -> tuple[str, list[float]]:
        scaler = scaled_once(GradScaler(device_type(), init_scale=4.0))
        a, b = scalar_weight(gradient=4.0), scalar_weight(gradient=4.0)
        optimizers = [sgd(a, fused=fused), sgd(b, fused=fused)]
        for optimizer in optimizers:  # the order in which they become known
            scaler.step(optimizer)
        scaler.update()
        a.grad, b.grad = torch.tensor([INF]), torch.tensor([4.0])
        if dist.get_rank() == 1:
            a.grad = torch.tensor([4.0])
            optimizers.reverse()
        try:
            for optimizer in optimizers:
                if clip:
                    scaler.clip_grad_norm_(optimizer, 1e9)
                scaler.step(optimizer)
            scaler.update()
        except RanksDisagreeError as error:
            return type(error).__name__, [a.item(), b.item()]
        return "nothing", [a.item(), b.item()]

    found = two.with_options(timeout_s=SOON_S).run(run)
    assert found == [("RanksDisagreeError", [0.0, 0.0])] * 2


def warm(scaler: GradScaler) -> GradScaler:
    scaled_once(scaler)
    for _ in range(2):
        scaler.step(sgd(scalar_weight(gradient=4.0)))
        scaler.update()
    return scaler


@pytest.mark.parametrize("how", ["before the group", "elsewhere"])
def test_a_scaler_that_lived_longer_loads_what_the_others_load(
    two: Cluster, how: str
) -> None:
    state = warm(GradScaler(device_type(), init_scale=8.0)).state_dict()
    old = warm(GradScaler(device_type(), init_scale=4.0))

    def run() -> tuple[float, int, float]:
        scaler = GradScaler(device_type(), init_scale=4.0)
        if dist.get_rank() == 1:
            if how == "elsewhere":
                scaler = copy.deepcopy(old)
            else:
                with mock.patch.object(dist, "is_initialized", return_value=False):
                    warm(scaler)
        scaler.load_state_dict(state)
        p = scalar_weight(gradient=8.0)
        scaled_once(scaler)
        scaler.step(sgd(p))
        scaler.update()
        return scaler.get_scale(), scaler._get_growth_tracker(), p.item()

    assert two.with_options(timeout_s=SOON_S).run(run) == [(8.0, 3, 0.0)] * 2


# - What an error says


ERRORS = [
    RanksDisagreeError(
        "the ranks differ",
        rank=1,
        world_size=4,
        call="step",
        here={"scale": 2.0},
        lowest={"scale": 2.0},
        highest={"scale": 4.0},
    ),
    PeerFailedError("a peer raised", rank=2, call="unscale_"),
    TooManySkipsError("three skips", skips=3, scales=[4.0, 2.0, 1.0]),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_survive_pickling(error: Exception, protocol: int) -> None:
    error.__notes__ = ["in the agreement of step"]
    after = pickle.loads(pickle.dumps(error, protocol))
    assert type(after) is type(error)
    assert str(after) == str(error)
    assert vars(after) == vars(error)
    assert len(vars(after)) > 1


def test_an_error_reaches_the_parent_as_itself(two: Cluster) -> None:
    def run() -> bytes:
        scaler = GradScaler(device_type(), init_scale=4.0 * (1 + dist.get_rank()))
        scaled_once(scaler)
        try:
            scaler.step(sgd(scalar_weight(gradient=4.0)))
        except RanksDisagreeError as error:
            return pickle.dumps(error)
        return b""

    errors = [
        pickle.loads(each) for each in two.with_options(timeout_s=SOON_S).run(run)
    ]
    assert [error.rank for error in errors] == [0, 1]
    for error in errors:
        assert (error.lowest["scale"], error.highest["scale"]) == (4.0, 8.0)


def test_loading_does_not_silence_the_log(two: Cluster) -> None:
    def run() -> list[int]:
        lines: list[str] = []
        log = logging.getLogger("gradparity.scaler")
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        meshes = [DeviceMesh(device_type(), [rank]) for rank in range(2)]
        mesh, level, counts = meshes[dist.get_rank()], log.level, []
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            for load in (False, True):
                lines.clear()
                p = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
                p.grad = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
                scaler = scaled_once(GradScaler(device_type(), init_scale=4.0))
                if load:
                    scaler.load_state_dict(scaler.state_dict())
                scaler.step(sgd(p))
                scaler.update()
                counts.append(len(lines))
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
        return counts

    for without, after_load in two.with_options(timeout_s=SOON_S).run(run):
        assert after_load == without


def told(two: Cluster, fused: bool, clip: bool) -> list[tuple[str, str, list[str]]]:
    def run() -> tuple[str, str, list[str]]:
        rank = dist.get_rank()
        scale = 4.0 if clip else 4.0 * (1 + rank)
        scaler = scaled_once(GradScaler(device_type(), init_scale=scale))
        optimizer = sgd(scalar_weight(gradient=4.0), fused=fused)
        try:
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.5 + rank)
            scaler.step(optimizer)
        except RanksDisagreeError as error:
            return str(error), error.call, sorted(error.lowest)
        return "nothing", "", []

    return two.with_options(timeout_s=SOON_S).run(run)


def test_errors_on_fused_steps_name_no_private_name(two: Cluster) -> None:
    for message, call, fields in told(two, fused=True, clip=False):
        assert "scale" in fields
        assert call == "step"
        assert "_check_inf_per_device" not in message
        assert "step" in message


@pytest.mark.parametrize("fused", [False, True])
def test_a_differing_max_norm_is_called_max_norm(two: Cluster, fused: bool) -> None:
    for message, call, fields in told(two, fused=fused, clip=True):
        assert call == "clip_grad_norm_"
        assert "max_norm" in message
        assert "1.5" in message
        assert "2.5" in message
        assert "policy" not in [*fields, *message.split()]


# - What an import costs


@pytest.mark.slow
def test_the_scaler_imports_neither_dynamo_nor_fsdp() -> None:
    program = """
import sys, torch
torch.amp.GradScaler("cpu", init_scale=4.0).scale(torch.ones(1))
before = set(sys.modules)
from gradparity.scaler import GradScaler
assert GradScaler("cpu", init_scale=4.0).scale(torch.ones(1)).item() == 4.0
heavy = "torch._dynamo", "torch.distributed.fsdp"
print(sorted(name for name in heavy if name in set(sys.modules) - before))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]"]


# - Shared DTensors, written to in different ways


@pytest.mark.parametrize("write", ["autograd", "local", "new"])
def test_a_shared_dtensor_with_a_fresh_gradient(two: Cluster, write: str) -> None:
    """Autograd accumulates into the DTensor, ``fully_shard`` into its local tensor."""

    def train() -> list[list[float]]:
        mesh = init_device_mesh(device_type(), (2,))
        shared, own = (
            nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
            for _ in range(2)
        )
        first = torch.optim.SGD([shared], lr=1.0)
        second = torch.optim.SGD([shared, own], lr=1.0)
        scaler = GradScaler(device_type(), init_scale=1024.0)

        def backward() -> None:
            before: Any = shared.grad
            if write != "local" or before is None:
                total: Any = (shared * 0.25).sum()
                scaler.scale(total.to_local()).backward()
                return
            before.to_local().add_(scaler.scale(torch.tensor(0.25)))

        backward()
        scaler.step(first)
        second.zero_grad(set_to_none=write == "new")
        backward()
        own.grad = DTensor.from_local(torch.full((2,), 256.0), mesh, [Shard(0)])
        scaler.step(second)
        scaler.update()
        parts: list[Any] = [shared.detach(), own.detach()]
        return [part.to_local().tolist() for part in parts]

    assert two.run(train) == [[[0.5, 0.5], [0.75, 0.75]]] * 2
