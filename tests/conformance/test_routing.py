"""Learned routers: a choice that rounding decides passes, and a real fault fails."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.comparison import bounds, reference
from gradparity.conformance.comparison.bounds import expected_choices
from gradparity.conformance.comparison.compare import HALF
from gradparity.conformance.comparison.noise.sides import BOTH, Sides
from gradparity.conformance.comparison.reference import Reference, Schedule
from gradparity.conformance.comparison.variants import Variant
from gradparity.conformance.rank.routing import ChoiceLog, Choices, chooses_in_forward
from gradparity.conformance.run import runs
from gradparity.tests.made_up import add, doubts_in, evidence, finding, row
from gradparity.tests.workloads import routed_stacks as stacks

MODULE = "gradparity.tests.workloads.routed_stacks"
TIPS = "tp2/2/bf16-autocast", "steps=6,seed=6"
"""Scenario in which rounding of sums over two ranks sends a row to another expert."""


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(folder=".", timeout_s=60) as made:
        yield made


def case(runner: Runner, stack: type, place: str, settings: str = "steps=2") -> Case:
    text = f"{place}/own/none/model={MODULE}:{stack.__name__},{settings}"
    found = runner.run("none", Scenario.parse(text))
    assert not found.problem, found.problem
    return found


def failed(case: Case) -> set[str]:
    return {v.law for v in case.verdicts if v.status == "fail"}


@pytest.mark.slow
def test_a_right_workload_whose_choice_tips_fails_only_without_the_replay(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert case(runner, stacks.TopOne, *TIPS).status == "pass"
    for module in (runs, reference):
        monkeypatch.setattr(module, "chooses_in_forward", lambda _: False)
    reference._train.cache_clear()
    try:
        with Runner(folder=".", timeout_s=60) as other:
            # here, where what is patched is patched
            monkeypatch.setattr(
                other.place, "alone", lambda call, *args, **_: call(*args)
            )
            told = failed(case(other, stacks.TopOne, *TIPS))
            assert told == {"parity.gradient", "parity.loss"}
    finally:
        reference._train.cache_clear()


@pytest.mark.parametrize(
    ("stack", "place", "settings"),
    [
        (stacks.TopTwo, "dp2/2/fp32", "steps=2"),
        (stacks.TopTwo, "tp2/2/fp32", "steps=2"),
        (stacks.TopTwo, "dp2/2/bf16-autocast", "steps=2"),
        (stacks.TopOne, "dp2/2/fp32", "steps=2,recipe=accumulate-uneven"),
        (stacks.TopOne, "tp2/2/bf16-autocast", "steps=2,recipe=accumulate"),
        (stacks.ByMaximum, "tp2/2/bf16-autocast", "steps=2"),
        (stacks.SteppedByAdam, "tp2/2/bf16-autocast", "steps=2"),
        (stacks.Recomputed, "tp2/2/bf16-autocast", "steps=2"),
        (stacks.Masked, "tp2/2/bf16-autocast", "steps=2"),
    ],
)
@pytest.mark.few(3)
def test_right_stacks_pass(
    runner: Runner, stack: type, place: str, settings: str
) -> None:
    assert case(runner, stack, place, settings).status == "pass"


@pytest.mark.parametrize("place", ["dp2/2/fp32", "tp2/2/bf16-autocast"])
@pytest.mark.parametrize(
    "stack",
    [
        stacks.ForgetsTheRouter,
        stacks.ChoosesBySomethingElse,
        stacks.MaskedForgetsTheRouter,
    ],
)
def test_wrong_stacks_are_caught(runner: Runner, stack: type, place: str) -> None:
    assert "parity.gradient" in failed(case(runner, stack, place))


def test_a_run_that_skips_is_made_again_with_a_reference_that_skips(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reference steps where the run skips, so its router differs later."""
    schedules: list[Schedule] = []
    alone = runner.place.alone

    def noted(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if function is expected_choices:
            schedules.append(args[1])
        return alone(function, *args, **options)

    monkeypatch.setattr(runner.place, "alone", noted)
    text = (
        "dp2/2/fp32/own/inf@r0s1:up.weight/"
        f"model={MODULE}:TopOne,steps=4,scale=1024,interval=2"
    )
    found = runner.run("gradparity.scaler:GradScaler", Scenario.parse(text))
    assert found.status == "pass", (found.problem, failed(found))
    skips = [[bool(names) for names in s.skipped] for s in schedules]
    never = [False] * 4
    # the stack alone; with a scaler; and again
    assert skips == [never, never, [False, True, False, False]]


def test_noise_of_scores_contains_half_of_what_flipped_signs_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sides: list[Reference] = []

    def noted(scenario: Scenario, schedule: Schedule, variant: Variant) -> Reference:
        run = reference.train_reference(scenario, schedule, variant)
        if not any(isinstance(each, Sides) for each in variant.noise):
            return run
        # as if their scores had moved by more
        errors = tuple({kind: 8.0 * e for kind, e in at.items()} for at in run.errors)
        sides.append(replace(run, errors=errors))
        return sides[-1]

    monkeypatch.setattr(bounds, "train_reference", noted)
    text = f"dp2/2/bf16-autocast/own/none/model={MODULE}:SteppedByAdam,steps=2"
    schedule = Schedule(skipped=(frozenset(),) * 2, scales=(1.0,) * 2)
    known = expected_choices(Scenario.parse(text), schedule)
    assert len(sides) == len(BOTH)
    for kind, choices in known[1].items():
        largest = max(at[kind] for run in sides for at in run.errors)
        assert choices.noise == HALF * largest


def test_only_forwards_that_choose_by_numbers_are_replayed() -> None:
    assert chooses_in_forward(f"{MODULE}:TopOne")
    assert not chooses_in_forward("gradparity.tests.workloads.stacks:Right")
    assert not chooses_in_forward("digits-experts")  # routes by a hash


# - One call

SCORES = torch.tensor([[0.1, 0.5, 0.49], [0.9, 0.3, 0.2], [0.2, 0.1, 0.8]])
TIPPED = SCORES + torch.tensor([[0.0, -0.01, 0.01], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


def recorded(choose: Callable[[Tensor], object]) -> dict[str, Choices]:
    with ChoiceLog() as log:
        choose(SCORES.double())
    return {
        kind: Choices(scores=c.scores, chosen=c.chosen, noise=0.02, limit=0.05)
        for kind, c in log.choices.items()
    }


def top_one(x: Tensor) -> tuple[Tensor, Tensor]:
    values, chosen = x.topk(1)
    return values, chosen


def top_two(x: Tensor) -> tuple[Tensor, Tensor]:
    values, chosen = x.topk(2, dim=-1)
    return values, chosen


def maximum(x: Tensor) -> tuple[Tensor, Tensor]:
    values, chosen = x.max(-1)
    return values, chosen


def maximum_kept(x: Tensor) -> tuple[Tensor, Tensor]:
    values, chosen = x.max(1, keepdim=True)
    return values, chosen


def transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    values, chosen = x.t().topk(2, dim=0)
    return values, chosen


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    found = x.argmax(-1)
    return x.gather(-1, found.unsqueeze(-1)), found


@pytest.mark.parametrize(
    "choose", [top_one, top_two, maximum, maximum_kept, transposed, argmax]
)
def test_the_choice_is_the_references_and_the_value_and_gradient_ones_own(
    choose: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> None:
    told = recorded(choose)
    # rows in another order, in half the precision, as another rank might have them
    mine = TIPPED.flip(0).bfloat16().requires_grad_()
    with ChoiceLog(told) as log:
        values, chosen = choose(mine)
    _, right = choose(SCORES.flip(0))
    _, own = choose(mine)
    assert torch.equal(chosen, right) and not torch.equal(chosen, own)
    assert values.shape == choose(mine)[0].shape
    values.sum().backward()
    assert mine.grad is not None
    along = chosen.t() if choose is transposed else chosen.reshape(3, -1)
    expected = torch.zeros(3, 3).scatter(1, along, 1.0)
    assert torch.equal(mine.grad.float(), expected)
    taken = mine.detach().gather(1, along)
    got = values.detach().t() if choose is transposed else values.detach()
    assert torch.equal(got.reshape(3, -1), taken.reshape(3, -1))
    assert log.unclear == 0


def test_a_row_that_is_none_of_the_references_is_left_alone() -> None:
    far = SCORES + torch.tensor([0.0, 0.0, 0.06])
    with ChoiceLog(recorded(top_one)):
        assert torch.equal(far.topk(1)[1], torch.tensor([[2], [0], [2]]))


@pytest.mark.parametrize("masked", [torch.finfo(torch.float32).min, -torch.inf])
def test_a_masked_score_is_the_same_in_every_dtype(masked: float) -> None:
    keep = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]]).bool()
    lowest = torch.finfo(torch.float64).min  # as a model in fp64 masks
    with ChoiceLog() as log:
        torch.where(keep, SCORES.double(), lowest).topk(1)
    (kind,) = log.choices
    told = {kind: replace(log.choices[kind], noise=0.02, limit=0.05)}
    # a reference in fp32, which measures the noise, and a rank
    for known in (log.choices, told):
        with ChoiceLog(known) as again:
            _, chosen = torch.where(keep, TIPPED, masked).topk(1)
        assert chosen.tolist() == log.choices[kind].chosen.tolist()
        assert again.errors.get(kind, 0.0) < 0.05
        assert again.unclear == 0


def test_rows_that_could_be_either_of_two_are_counted() -> None:
    told = recorded(top_one)
    (kind,) = told
    near = SCORES[:1] + torch.tensor([[0.0, -0.01, 0.01]])
    scores = torch.cat([SCORES, near]).double().numpy()
    chosen = np.concatenate([told[kind].chosen, [[2]]])
    twice = {kind: Choices(scores=scores, chosen=chosen, noise=0.02, limit=0.05)}
    with ChoiceLog(twice) as log:
        SCORES.topk(1)
    assert log.unclear == 1
    same = np.concatenate([told[kind].chosen, [[1]]])
    alike = {kind: Choices(scores=scores, chosen=same, noise=0.02, limit=0.05)}
    with ChoiceLog(alike) as log:
        SCORES.topk(1)
    assert log.unclear == 0


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (x * 10).long().argmax(-1),  # no scores
        lambda x: x.argmax(),  # of all rows
        lambda x: x[:, :2].topk(1)[1],  # of other experts
        lambda x: x.topk(1, largest=False)[1],
    ],
)
def test_other_calls_are_left_alone(other: Callable[[Tensor], Tensor]) -> None:
    expected = other(TIPPED)
    with ChoiceLog(recorded(top_one)):
        assert torch.equal(other(TIPPED), expected)


def test_a_vocabulary_is_no_set_of_experts() -> None:
    with ChoiceLog() as log:
        nn.Linear(4, 2000)(torch.ones(2, 4)).argmax(-1)
    assert not log.choices


def test_a_departure_after_an_unclear_routing_choice_is_inconclusive() -> None:
    of = evidence()
    assert of.parity is not None
    add(of.parity, row("gradient", error=1.5))
    assert finding(of, "parity.gradient").status == "fail"
    of.ranks[0].steps[3].unclear_choices = 1  # after the step that differs
    of.parity.doubts = doubts_in(of)
    assert finding(of, "parity.gradient").status == "fail"
    of.ranks[0].steps[0].unclear_choices = 1
    of.parity.doubts = doubts_in(of)
    found = finding(of, "parity.gradient")
    assert found.status == "inconclusive" and "learned router" in found.message
