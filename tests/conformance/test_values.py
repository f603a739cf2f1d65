"""Values as text: values of equal content have equal texts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradparity.conformance.rank.values import by_value


class Warmup:
    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.factor = lambda step: step / steps


class Slotted:
    __slots__ = ("at",)

    def __init__(self, at: int) -> None:
        self.at = at


def scheduler(moves: int) -> Any:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    made = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(moves):
        optimizer.step()
        made.step()
    return made


def long(last: float) -> torch.Tensor:
    return torch.cat([torch.zeros(10_000), torch.tensor([last])])


@pytest.mark.parametrize(
    ("made", "one", "other"),
    [
        (scheduler, 1, 2),
        (Warmup, 1, 2),
        (Slotted, 1, 2),
        (lambda n: {"of": object(), "at": n}, 1, 2),
        (lambda n: [{"lr": (n, {n})}], 1, 2),
        (long, 1.0, 2.0),  # repr leaves the middle out
        (lambda x: np.full(3, x), 1.0, np.nextafter(1.0, 2.0)),
        (lambda x: torch.tensor(x, dtype=torch.float64), 1.0, np.nextafter(1.0, 2.0)),
    ],
)
def test_a_value_is_what_it_holds(
    made: Callable[[Any], Any], one: Any, other: Any
) -> None:
    assert by_value(made(one)) == by_value(made(one))
    assert by_value(made(one)) != by_value(made(other))
    assert "0x" not in by_value(made(one))


def test_a_value_that_holds_itself_comes_to_an_end() -> None:
    value: list[Any] = [1]
    value.append(value)
    assert by_value(value) == "[1, ...]"
