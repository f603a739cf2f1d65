"""Checkpoints: torch.distributed.checkpoint, torch's classes, ranks that differ."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp.sharded_grad_scaler import (
    ShardedGradScaler as TorchShardedGradScaler,
)
from torch.distributed.tensor.debug import CommDebugMode

from gradparity.multiprocess import Cluster
from gradparity.scaler import (
    GradScaler,
    Policy,
    RanksDisagreeError,
    ShardedGradScaler,
    TooManySkipsError,
)
from gradparity.tests.agreeing import give_gradient, parameter, sgd
from gradparity.tests.stepping import BOTH, HOW, acting, scaled

TORCHS: dict[Any, Any] = {
    GradScaler: torch.amp.GradScaler,
    ShardedGradScaler: TorchShardedGradScaler,
}


def step(scaler: Any, gradient: float = 4.0) -> Tensor:
    p = torch.zeros(2, requires_grad=True)
    scaler.scale(p.sum()).backward()
    assert p.grad is not None
    p.grad.fill_(gradient)
    scaler.step(torch.optim.SGD([p], lr=1.0))
    scaler.update()
    return p.detach()


def trained(make: Any) -> Any:
    scaler = make(device="cpu", init_scale=4.0, growth_interval=5)
    for _ in range(3):
        step(scaler)
    return scaler


# The writer of torch.distributed.checkpoint uses what torch has deprecated.
QUIET = pytest.mark.filterwarnings("ignore")


@BOTH
@QUIET
def test_distributed_checkpoint(two: Cluster, make: Any, tmp_path: Path) -> None:
    def run() -> Any:
        saved = trained(make)
        assert isinstance(saved, Stateful)
        before = saved.state_dict()
        state_dict_saver.save({"scaler": saved}, checkpoint_id=tmp_path)
        assert saved.state_dict() == before
        seen = []
        for reader in (make, TORCHS[make]):
            scaler = reader(device="cpu")
            scaler.scale(torch.ones(()))
            state_dict_loader.load({"scaler": scaler}, checkpoint_id=tmp_path)
            state = scaler.state_dict()
            assert {key: state[key] for key in before} == before
            for _ in range(2):
                step(scaler)
            seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
        return seen

    assert two.run(run) == [[(8.0, 0)] * 2] * 2


@BOTH
@QUIET
def test_what_torch_saved(two: Cluster, make: Any, tmp_path: Path) -> None:
    def run() -> Any:
        state_dict_saver.save({"scaler": trained(TORCHS[make])}, checkpoint_id=tmp_path)
        scaler = make(device="cpu")
        state_dict_loader.load({"scaler": scaler}, checkpoint_id=tmp_path)
        return scaler.get_scale(), scaler._get_growth_tracker(), step(scaler).tolist()

    assert two.run(run) == [(4.0, 3, [-1.0, -1.0])] * 2


@BOTH
@QUIET
def test_saved_before_the_first_scale(two: Cluster, make: Any, tmp_path: Path) -> None:
    def run() -> Any:
        first = make(device="cpu", init_scale=4.0)
        state_dict_saver.save({"scaler": first}, checkpoint_id=tmp_path)
        second = make(device="cpu", init_scale=16.0)
        state_dict_loader.load({"scaler": second}, checkpoint_id=tmp_path)
        return [(s.get_scale(), step(s).tolist()) for s in (first, second)]

    assert two.run(run) == [[(4.0, [-1.0, -1.0])] * 2] * 2


@BOTH
@pytest.mark.parametrize("what", ["scale", "_growth_tracker", "backoff_factor"])
def test_b11e_ranks_that_loaded_different_states(
    two: Cluster, make: Any, what: str
) -> None:
    values: dict[str, list[Any]] = {
        "scale": [8.0, 4.0],
        "_growth_tracker": [1, 2],
        "backoff_factor": [0.5, 0.25],
    }

    def run() -> Any:
        scaler = make(device="cpu")
        state = trained(make).state_dict() | {what: values[what][dist.get_rank()]}
        try:
            scaler.load_state_dict(state)
        except RanksDisagreeError as error:
            return list(error.lowest), scaler.get_scale()
        return "went on", scaler.get_scale()

    first, second = two.run(run)
    for told, scale in (first, second):
        assert told == [what.strip("_")] and scale == 2.0**16  # unchanged


def test_b11e_a_bad_state_on_one_rank_fails_on_all(two: Cluster) -> None:
    def run() -> str:
        scaler = GradScaler(device="cpu")
        bad = {"scale": 0.0} if dist.get_rank() else {}
        try:
            scaler.load_state_dict(trained(GradScaler).state_dict() | bad)
        except Exception as error:
            return type(error).__name__
        return "loaded"

    assert two.run(run) == ["PeerFailedError", "InvalidSettingError"]


def test_b11e_a_rank_that_does_not_load(two: Cluster) -> None:
    def run() -> Any:
        scaler = trained(GradScaler)
        try:
            if dist.get_rank():
                scaler.load_state_dict(scaler.state_dict())
            step(scaler)
        except RanksDisagreeError as error:
            return "load_state_dict()" in str(error)

    assert two.run(run) == [True, True]


@HOW
def test_a_load_ends_a_row_of_skips_on_every_rank(two: Cluster, how: str) -> None:
    """A replaced rank has counted no skips, but all ranks reach the limit together."""

    def run() -> list[str]:
        def make() -> GradScaler:
            limit = Policy(max_consecutive_skips=3)
            return GradScaler("cpu", init_scale=4.0, policy=limit)

        scaler = make()
        for _ in range(2):
            step(scaler, float("inf"))
        state = scaler.state_dict()
        if dist.get_rank():
            scaler = make()
        scaler.load_state_dict(state)
        seen = []
        for _ in range(3):
            try:
                step(scaler, float("inf"))
                seen.append("skipped")
            except TooManySkipsError as error:
                seen.append(str(error.skips))
        step(GradScaler("cpu"))  # the next one is the second of every rank
        return seen

    assert two.run(acting(how, run)) == [["skipped", "skipped", "3"]] * 2


def test_a_load_numbers_optimizers_anew(two: Cluster) -> None:
    """A replaced rank does not know the numbers of the optimizers."""

    def run() -> float:
        params = [parameter(torch.ones(2)) for _ in "ab"]
        optimizers, scaler = [sgd([p]) for p in params], scaled(GradScaler)

        def step_each() -> None:
            for p, optimizer in zip(params, optimizers, strict=True):
                give_gradient(p, 4.0)
                scaler.step(optimizer)
            scaler.update()

        step_each()
        state = scaler.state_dict()
        if dist.get_rank():
            scaler = scaled(GradScaler)
        scaler.load_state_dict(state)
        params.reverse()
        optimizers.reverse()
        step_each()
        return float(scaler.counters.steps)

    assert two.run(run) == [2.0, 1.0]


def test_hysteresis_is_saved_and_read_by_torch() -> None:
    policy = Policy(hysteresis=3)
    scaler = GradScaler(device="cpu", init_scale=4.0, policy=policy)
    step(scaler, float("inf"))
    state = scaler.state_dict()
    assert state["_hysteresis_left"] == 2 and state["scale"] == 4.0
    torch.amp.GradScaler(device="cpu").load_state_dict(state)
    again = GradScaler(device="cpu", policy=policy)
    again.load_state_dict(state)
    assert again.state_dict() == state


def test_b16c_optimizer_state_is_saved_without_moving_the_scale() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = GradScaler(device="cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(torch.ones(()))
    before = scaler.state_dict(), scaler.counters
    get_optimizer_state_dict(model, optimizer)
    assert (scaler.state_dict(), scaler.counters) == before


# regression: T25
def test_a_refused_load_costs_no_collective_later(two: Cluster) -> None:
    def run() -> list[int]:
        p, scaler, counts = parameter(torch.ones(2)), scaled(GradScaler), []
        optimizer = sgd([p])
        for iteration in range(6):
            give_gradient(p, 4.0)
            with CommDebugMode() as mode:
                if iteration == 2:
                    state = scaler.state_dict() | {"scale": 4.0 + dist.get_rank()}
                    with pytest.raises(RanksDisagreeError):
                        scaler.load_state_dict(state)
                scaler.step(optimizer)
                scaler.update()
            counts.append(mode.get_total_counts())
        return counts[-2:]

    assert two.run(run) == [[1, 1]] * 2
