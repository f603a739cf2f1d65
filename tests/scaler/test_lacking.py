"""Ranks agree although one rank lacks something, or raise where they cannot agree."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode

from gradparity.multiprocess import Cluster
from gradparity.scaler import (
    GradScaler,
    PeerFailedError,
    RanksDisagreeError,
    ShardedGradScaler,
)
from gradparity.tests.agreeing import (
    Make,
    Seen,
    agreed,
    give_gradient,
    iterate,
    parameter,
    sgd,
)
from gradparity.tests.stepping import (
    BOTH,
    HOW,
    INF,
    acting,
    device_type,
    scaled,
)

# - What ranks lack


@BOTH
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_b06a_rank_without_gradients(
    two: Cluster, make: Make, fused: bool, sharded: bool
) -> None:
    def step(bad: bool) -> Seen:
        mesh = init_device_mesh(device_type(), (2,))
        placed = (mesh, [Shard(0)]) if sharded else ()
        p = parameter(torch.ones(2), *placed)
        if dist.get_rank() == 1:
            give_gradient(p, INF if bad else 4.0)
        optimizer = torch.optim.Adam([p], fused=fused)
        seen = iterate(scaled(make), optimizer)
        return seen._replace(skipped=bad)

    assert agreed(two.run(step, True), skipped=True)
    assert agreed(two.run(step, False), skipped=False)


def test_no_rank_has_gradients(two: Cluster) -> None:
    def step(make: Make) -> str:
        scaler = scaled(make)
        try:
            scaler.step(sgd([parameter(torch.ones(2))]))
        except AssertionError as error:
            return str(error)
        return "stepped"

    message = "No inf checks were recorded for this optimizer."
    assert two.run(step, GradScaler) == [message] * 2
    assert two.run(step, ShardedGradScaler) == ["stepped"] * 2


@BOTH
@pytest.mark.parametrize("fused", [False, True])
def test_b14a_dtypes_depend_on_the_rank(
    two: Cluster, device: str, make: Make, fused: bool
) -> None:
    if device == "cuda":
        pytest.skip("torch's kernel that unscales takes no bf16 there")

    def step(bad_rank: int) -> Seen:
        mesh = init_device_mesh(device_type(), (2,))
        wide = parameter(torch.ones(2), mesh, [Shard(0)])
        narrow = parameter(torch.ones(2, dtype=torch.bfloat16), mesh, [Shard(0)])
        give_gradient(wide, INF if dist.get_rank() == bad_rank else 4.0)
        if dist.get_rank() == 1:
            give_gradient(narrow, 4.0)
        optimizers = [torch.optim.Adam([wide, narrow], fused=fused)]
        return iterate(scaled(make), *optimizers)

    assert agreed(two.run(step, 0), skipped=True)
    assert agreed(two.run(step, 1), skipped=True)
    assert agreed(two.run(step, -1), skipped=False)


@BOTH
def test_b14b_rank_dependent_number_of_steps(two: Cluster, make: Make) -> None:
    def step(counts: list[int]) -> tuple[str, str]:
        scaler = scaled(make)
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
        assert first[0] == "raised" and "call" in first[1]
    assert two.run(step, [2, 2]) == [("went on", "")] * 2


def test_b14b_fewer_steps_later_on(two: Cluster) -> None:
    def step() -> str:
        scaler, p = scaled(GradScaler), parameter(torch.ones(2))
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


@BOTH
def test_rank_without_an_optimizer_takes_part(two: Cluster, make: Make) -> None:
    def step(bad: bool) -> float:
        scaler = make(device=device_type(), init_scale=4.0)
        if dist.get_rank() == 0:
            scaler.scale(torch.ones(()))
            p = parameter(torch.ones(2))
            give_gradient(p, INF if bad else 4.0)
            scaler.step(sgd([p]))
        else:
            scaler.step(None)
        scaler.update()
        return scaler.get_scale()

    assert two.run(step, True) == [2.0, 2.0]
    assert two.run(step, False) == [4.0, 4.0]


@BOTH
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_b04a_b04b_only_the_last_stage_scales(
    two: Cluster, make: Make, fused: bool, bad_rank: int
) -> None:
    def step() -> list[Any]:
        scaler = make(device=device_type(), init_scale=4.0, growth_interval=2)
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


@HOW
def test_an_iteration_without_gradients_leaves_the_next_ones_as_usual(
    two: Cluster, how: str
) -> None:
    """`step` raises; on the rank that lacks the optimizer, `update` does."""

    def run() -> tuple[list[str], list[int]]:
        p, scaler = parameter(torch.ones(2)), scaled(GradScaler)
        optimizer = None if dist.get_rank() else sgd([p])
        errors, counts = [], []
        for iteration in range(4):
            p.grad = None
            if iteration:
                give_gradient(p, 4.0)
            with CommDebugMode() as mode:
                for call in (lambda: scaler.step(optimizer), scaler.update):
                    try:
                        call()
                    except AssertionError as error:
                        errors.append(str(error))
            counts.append(mode.get_total_counts())
        return errors, counts

    nothing = ["No inf checks were recorded for this optimizer."], [2, 1, 1, 1]
    ended = ["No inf checks were recorded prior to update."], [2, 1, 1, 1]
    assert two.run(acting(how, run)) == [nothing, ended]


def test_nobody_scaled(two: Cluster) -> None:
    def step() -> str:
        scaler = GradScaler(device=device_type())
        p = parameter(torch.ones(2))
        give_gradient(p, 4.0)
        with pytest.raises(AssertionError) as caught:
            scaler.step(sgd([p]))
        return str(caught.value)

    for message in two.run(step):
        assert "did not use scaler.scale" in message


def test_b04b_resume_needs_no_scale_call(two: Cluster) -> None:
    def step() -> tuple[float, int]:
        saved = scaled(GradScaler).state_dict() | {"_growth_tracker": 7}
        scaler = GradScaler(device=device_type())
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
@HOW
def test_b15a_disagreement_is_one_error_on_every_rank(
    two: Cluster, what: str, fused: bool, how: str
) -> None:
    def step() -> tuple[dict[str, float], dict[str, float], str]:
        scaler, rank = scaled(GradScaler), dist.get_rank()
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

    (low, high, text), second = two.run(acting(how, step))
    assert (low, high) == second[:2]
    assert list(low) == [what] and low[what] < high[what]
    assert f"on rank 0 of 2: {what} is" in text and "state_dict on every rank" in text
    assert "on rank 0 and" in text and "on rank 1." in text


@HOW
def test_error_on_one_rank_reaches_all(two: Cluster, how: str) -> None:
    def step() -> str:
        dtype = torch.float16 if dist.get_rank() == 0 else torch.float32
        p = parameter(torch.ones(2, dtype=dtype))
        give_gradient(p, 4.0)
        with pytest.raises((ValueError, PeerFailedError)) as caught:
            scaled(GradScaler).step(sgd([p]))
        return type(caught.value).__name__

    assert two.run(acting(how, step)) == ["ValueError", "PeerFailedError"]
