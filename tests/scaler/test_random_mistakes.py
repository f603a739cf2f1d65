"""Mistakes of one rank or of all, drawn at random: ranks stay alike, or all raise.

A training of two optimizers makes one or two mistakes: a forgotten step, another order,
an optimizer that raises, a bad bound. Every error is caught, the batch is dropped, and
the next one follows, with an update in between or without. In the end all ranks hold
the same, or each of them has raised in the last batches. None hangs. The first batch is
without mistakes: it shows the ranks how many syncs an iteration has.
"""

import random
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler
from gradparity.tests.scaler.test_after_exceptions import SOON_S, Planted, Training
from gradparity.tests.stepping import WAYS, clip_and_step, step

BATCHES, LAST = 8, 6
MISTAKES = [
    "the first raises",
    "the second raises",
    "the first is forgotten",
    "the second is forgotten",
    "another order",
    "unscale_ twice",
    "a bound that is no number",
    "an infinity",
    "a chosen scale",
]


class Plan(NamedTuple):
    """One training: the calls of both optimizers, and the mistakes by batch."""

    calls: tuple[Any, Any]
    fused: bool
    updates: bool
    mistakes: dict[int, tuple[str, int]]  # and its rank; -1: all

    @classmethod
    def drawn(cls, seed: int) -> "Plan":
        draw = random.Random(seed)
        pairs = [*zip(WAYS, WAYS, strict=True), (step, clip_and_step)]
        mistakes = {
            draw.randrange(1, 5): (draw.choice(MISTAKES), draw.choice([0, 1, -1]))
            for _ in range(draw.randint(1, 2))
        }
        return cls(
            draw.choice(pairs), draw.random() < 0.5, draw.random() < 0.5, mistakes
        )


def trained(plan: Plan) -> tuple[list[int], Any]:
    """Return the batches in which a call raised, and the final state of the rank."""
    run, raised = Training(GradScaler, plan.fused), list[int]()
    for batch in range(BATCHES):
        run.backward()
        mistake, rank = plan.mistakes.get(batch, ("", -1))
        mistake = mistake if rank in (dist.get_rank(), -1) else ""
        try:
            iterate(run, plan, mistake)
        except (RuntimeError, ValueError):
            raised.append(batch)
            run.backward()
            if plan.updates and run.scaler._sync.is_void:
                run.scaler.update()
    return raised, run.state()


def iterate(run: Training, plan: Plan, mistake: str) -> None:
    pairs = list(zip(run.optimizers, plan.calls, strict=True))
    if mistake == "another order":
        pairs.reverse()
    for place, name in enumerate(("first", "second")):
        if mistake == f"the {name} raises":
            run.raises_once(run.optimizers[place])
        if mistake == f"the {name} is forgotten":
            del pairs[place]
    if mistake == "an infinity":
        gradient = run.params[0].grad
        assert gradient is not None
        gradient.fill_(float("inf"))
    if mistake == "a bound that is no number":
        run.scaler.clip_grad_norm_(run.first, float("nan"))
    for optimizer, call in pairs:
        try:
            call(run.scaler, optimizer)
        except Planted:
            continue
        if mistake == "unscale_ twice":
            run.scaler.unscale_(optimizer)
    run.scaler.update(1024.0 if mistake == "a chosen scale" else None)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(40), id="some"),
        pytest.param(range(40, 300), id="many", marks=pytest.mark.slow),
    ],
)
def test_ranks_stay_alike_or_all_raise(two: Cluster, seeds: range) -> None:
    def run() -> list[tuple[list[int], Any]]:
        return [trained(Plan.drawn(seed)) for seed in seeds]

    first, second = two.with_options(timeout_s=SOON_S + len(seeds)).run(run)
    wrong, count = [], 0
    for seed, one, other in zip(seeds, first, second, strict=True):
        is_alike = one[1] == other[1]
        is_loud = all(raised[-1:] >= [LAST] for raised, _ in (one, other))
        count += is_alike
        if not (is_alike or is_loud):
            wrong.append((seed, Plan.drawn(seed), one, other))
    assert not wrong
    assert count > len(seeds) // 2


def test_all_mistakes_are_drawn() -> None:
    plans = [Plan.drawn(seed) for seed in range(40)]
    drawn = {kind for plan in plans for kind, _ in plan.mistakes.values()}
    assert drawn == set(MISTAKES)
    choices = set(product([False, True], repeat=2))
    assert {(plan.fused, plan.updates) for plan in plans} == choices
