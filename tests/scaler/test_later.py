"""unscale_ does not wait for the other ranks; whoever asks for their verdict does."""

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradparity.multiprocess import Cluster, current_world
from gradparity.scaler import GradScaler, PeerFailedError, RanksDisagreeError
from gradparity.tests.agreeing import Make, give_gradient, parameter, sgd
from gradparity.tests.stepping import BOTH, INF, scaled

Ask = Callable[[Any, Any], Any]


def _found(scaler: Any, optimizer: Any) -> Any:
    return scaler._found_inf_per_device(optimizer)


ASKS: dict[str, Ask] = {
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "clip_grad_norm_": lambda s, optimizer: s.clip_grad_norm_(optimizer, 1.0),
    "another unscale_": lambda s, _: s.unscale_(sgd([with_gradient(1.0)])),
    "update": lambda scaler, _: scaler.update(),
    "last_overflow": lambda scaler, _: scaler.last_overflow,
    "_found_inf_per_device": _found,
    "_per_optimizer_states": lambda scaler, _: scaler._per_optimizer_states,
}


def with_gradient(value: float) -> Any:
    p = parameter(torch.ones(2))
    give_gradient(p, value)
    return p


@BOTH
def test_unscale_does_not_wait_for_the_other_ranks(two: Cluster, make: Make) -> None:
    def step() -> list[float]:
        p = with_gradient(4.0)
        scaler, optimizer, store = scaled(make), sgd([p]), current_world().store
        if dist.get_rank() == 1:
            store.wait(["rank 0 has unscaled"])  # and so it returned without rank 1
        scaler.unscale_(optimizer)
        divided: list[float] = p.grad.tolist()
        store.set("rank 0 has unscaled", "1")
        scaler.step(optimizer)
        scaler.update()
        return divided

    assert two.run(step) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("ask", ASKS)
def test_whoever_asks_first_hears_all_ranks(two: Cluster, ask: str) -> None:
    def step() -> tuple[float, float]:
        p = with_gradient(INF if dist.get_rank() == 1 else 4.0)
        scaler, optimizer = scaled(GradScaler), sgd([p])
        scaler.unscale_(optimizer)
        ASKS[ask](scaler, optimizer)
        scaler.update() if ask != "update" else None
        return scaler.get_scale(), float((p != 1).sum())

    assert two.run(step) == [(2.0, 0.0)] * 2


def test_the_finding_of_one_rank_alone_is_never_seen(two: Cluster) -> None:
    def step() -> tuple[float, float, Any]:
        p = with_gradient(INF if dist.get_rank() == 1 else 4.0)
        scaler, optimizer = scaled(GradScaler), sgd([p])
        scaler.unscale_(optimizer)
        overflow = scaler.last_overflow
        (by_name,) = scaler._found_inf_per_device(optimizer).values()
        state = scaler._per_optimizer_states[id(optimizer)]
        (by_state,) = state["found_inf_per_device"].values()
        return by_name.item(), by_state.item(), overflow

    first, second = two.run(step)
    assert first == second
    assert first[:2] == (1.0, 1.0) and first[2].rank == 1


@pytest.mark.parametrize("ask", ASKS)
def test_a_difference_is_raised_where_it_is_asked_for(two: Cluster, ask: str) -> None:
    def step() -> str:
        scaler = scaled(GradScaler, scale=4.0 * (1 + dist.get_rank()))
        optimizer = sgd([with_gradient(4.0)])
        scaler.unscale_(optimizer)
        with pytest.raises(RanksDisagreeError) as caught:
            ASKS[ask](scaler, optimizer)
        return str(caught.value)

    for rank, text in enumerate(two.run(step)):
        assert text.startswith(f"unscale_ on rank {rank} of 2: scale is")


def test_an_error_of_one_rank_is_raised_where_the_others_ask(two: Cluster) -> None:
    def step(ask: str) -> str:
        dtype = torch.float16 if dist.get_rank() == 0 else torch.float32
        p = parameter(torch.ones(2, dtype=dtype))
        give_gradient(p, 4.0)
        scaler, optimizer = scaled(GradScaler), sgd([p])
        with pytest.raises((ValueError, PeerFailedError)) as caught:
            scaler.unscale_(optimizer)
            ASKS[ask](scaler, optimizer)
        return type(caught.value).__name__

    for ask in ("step", "update", "clip_grad_norm_"):
        assert two.run(step, ask) == ["ValueError", "PeerFailedError"]


def test_a_scaler_is_not_copied_on_the_way(two: Cluster) -> None:
    def step() -> float:
        p = with_gradient(4.0)
        scaler, optimizer = scaled(GradScaler), sgd([p])
        scaler.unscale_(optimizer)
        with pytest.raises(AssertionError, match="beginning of an iteration"):
            copy.deepcopy(scaler)
        scaler.step(optimizer)
        scaler.update()
        return float(copy.deepcopy(scaler).get_scale())

    assert two.run(step) == [4.0, 4.0]


def test_a_backward_in_between_does_not_ask(two: Cluster) -> None:
    def step() -> list[float]:
        p, other = with_gradient(4.0), torch.ones(2, requires_grad=True)
        scaler, optimizer, store = scaled(GradScaler), sgd([p]), current_world().store
        if dist.get_rank() == 1:
            store.wait(["rank 0 went on"])
        scaler.unscale_(optimizer)
        scaler.scale(other.sum()).backward()
        store.set("rank 0 went on", "1")
        scaler.step(optimizer)
        divided: list[float] = p.grad.tolist()
        return divided

    assert two.run(step) == [[1.0, 1.0]] * 2


def test_what_is_lost_on_the_way_says_in_which_call(two: Cluster) -> None:
    def step() -> str:
        group = dist.new_group(timeout=timedelta(milliseconds=500))
        if dist.get_rank() == 1:
            return ""  # and takes no part
        scaler = scaled(GradScaler, process_group=group)
        optimizer = sgd([with_gradient(4.0)])
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError) as caught:
            scaler.step(optimizer)
        return "".join(caught.value.__notes__)

    assert "in the sync of unscale_ on rank 0 of 2" in two.run(step)[0]
