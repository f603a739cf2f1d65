"""Ranks distinguish any number of optimizers, even if some ranks lack some."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler, RanksDisagreeError
from gradparity.tests.agreeing import give_gradient, parameter, sgd
from gradparity.tests.stepping import INF, scaled


# regression: S10, T15
@pytest.mark.parametrize("apart", [31, 32, 62])
def test_two_of_many_optimizers_swapped_on_one_rank(two: Cluster, apart: int) -> None:
    def run() -> tuple[str, list[float]]:
        params = [parameter(torch.ones(1)) for _ in range(apart + 1)]
        optimizers, scaler = [sgd([p]) for p in params], scaled()
        for p in params:
            give_gradient(p, 4.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        give_gradient(params[0], INF if dist.get_rank() == 0 else 4.0)
        order = [0, apart] if dist.get_rank() == 0 else [apart, 0]
        try:
            for index in order:
                scaler.step(optimizers[index])
        except RanksDisagreeError as error:
            return ", ".join(error.lowest), [params[0].item(), params[-1].item()]
        return "nothing", []

    assert two.run(run) == [("optimizer", [0.75, 0.75])] * 2


# regression: T16
@pytest.mark.parametrize("rebuilds", ["one rank", "all ranks"])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_rank_that_builds_its_optimizer_anew(
    two: Cluster, rebuilds: str, keeps: bool
) -> None:
    """A new optimizer may take the number of an old one that no longer exists."""

    def run() -> str:
        p, scaler, kept = parameter(torch.ones(1)), scaled(), list[Any]()
        optimizer = sgd([p])
        try:
            for iteration in range(4):
                if iteration == 2 and (rebuilds == "all ranks" or dist.get_rank()):
                    kept += [optimizer] if keeps else []
                    optimizer = sgd([p])
                give_gradient(p, 4.0)
                scaler.step(optimizer)
                scaler.update()
        except RanksDisagreeError as error:
            return f"{', '.join(error.lowest)} in {iteration}"
        return f"{p.item()}"

    is_wrong = keeps and rebuilds == "one rank"
    assert two.run(run) == ["optimizer in 2" if is_wrong else "0.0"] * 2


def test_a_new_optimizer_meets_an_old_one_of_a_rank_that_lacked_some(
    two: Cluster,
) -> None:
    """Rank 1 may take the number that it lacks, and no other."""

    def run(again: bool) -> str:
        scaler, a, b = scaled(), parameter(torch.ones(1)), parameter(torch.ones(1))
        first, second = sgd([a]), sgd([b])
        is_lacking = dist.get_rank() == 1
        try:
            for iteration in range(5):
                for p in (a, b):
                    give_gradient(p, 4.0)
                if is_lacking and iteration < 2:
                    scaler.step(None)
                else:
                    scaler.step(first)
                if iteration == 3 and is_lacking and again:
                    second, kept = sgd([b]), second
                    assert kept is not second
                scaler.step(second)
                scaler.update()
        except RanksDisagreeError:
            return f"raised in {iteration}"
        return "went on"

    assert two.run(run, False) == ["went on"] * 2
    assert two.run(run, True) == ["raised in 3"] * 2


def test_a_number_of_its_own_is_refused_on_a_rank_that_lacks_some(
    two: Cluster,
) -> None:
    """The other rank has stepped, and learns of the error in the next sync."""

    def run() -> list[tuple[int, str]]:
        scaler, a, b = scaled(), parameter(torch.ones(1)), parameter(torch.ones(1))
        first, second, raised, kept = sgd([a]), sgd([b]), [], list[Any]()
        for iteration in range(6):
            for p in (a, b):
                give_gradient(p, 4.0)
            if iteration == 3 and dist.get_rank() == 1:
                kept.append(second)
                second = sgd([b])
            try:
                if dist.get_rank() == 1:
                    scaler.step(None)
                else:
                    scaler.step(first)
                scaler.step(second)
                scaler.update()
            except RanksDisagreeError as error:
                raised.append((iteration, ", ".join(error.lowest)))
        return raised

    first, second = two.run(run)
    assert [iteration for iteration, _ in second] == [3, 4, 5]
    assert [iteration for iteration, _ in first] == [4, 5]
    assert second[0][1] == "optimizer"
    assert all("missed" in fields for _, fields in [*first, *second[1:]])


@pytest.mark.parametrize("turns", [False, True])
def test_a_rank_that_lacks_optimizers_costs_no_more(two: Cluster, turns: bool) -> None:
    """The number of collectives is the same, if optimizers step in the same order."""

    def run() -> list[int]:
        params = [parameter(torch.ones(1)) for _ in range(3)]
        optimizers, scaler, counts = [sgd([p]) for p in params], scaled(), []
        for iteration in range(8):
            used = optimizers[iteration % 2 :: 2] if turns else optimizers
            with CommDebugMode() as mode:
                for p in params:
                    give_gradient(p, 4.0)
                for optimizer in used:
                    if dist.get_rank() == 1:
                        scaler.step(None)
                    else:
                        scaler.step(optimizer)
                scaler.update()
            counts.append(mode.get_total_counts() - len(used))
        return counts[-4:]

    # of turns, those with fewer syncs than others are closed
    expected = [0, 1, 0, 1] if turns else [0] * 4
    assert two.run(run) == [expected] * 2


def test_the_lacking_rank_may_change(two: Cluster) -> None:
    def run() -> list[float]:
        p, scaler = parameter(torch.ones(1)), scaled(GradScaler)
        optimizer = sgd([p])
        for iteration in range(6):
            give_gradient(p, 4.0)
            if dist.get_rank() == iteration % 2:
                scaler.step(optimizer)
            else:
                scaler.step(None)
            scaler.update()
        return [p.item(), scaler.get_scale()]

    assert two.run(run) == [[0.25, 4.0]] * 2
