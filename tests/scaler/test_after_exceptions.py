"""Training goes on after a call that raised, or every rank raises: none hangs."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradparity.multiprocess import Cluster
from gradparity.scaler import (
    GradScaler,
    InvalidSettingError,
    RanksDisagreeError,
    ShardedGradScaler,
)
from gradparity.tests.stepping import (
    BOTH,
    FUSED,
    WAYS,
    acting,
    clip,
    clip_and_step,
)

SOON_S = 20.0  # a hang fails long before the harness's own limit
ERRORS = (RuntimeError, AssertionError, ValueError)  # all that a scaler raises


class Planted(Exception):
    """Exception that a hook of an optimizer raises."""


class Training:
    """Two optimizers with one parameter each, which a good step reduces by 1/8."""

    def __init__(self, make: Any = GradScaler, fused: bool = False, **settings: Any):
        self.params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
        self.optimizers: list[Any] = [
            torch.optim.SGD([p], lr=1.0, fused=fused) for p in self.params
        ]
        self.first, self.second = self.optimizers
        self.scaler: Any = make("cpu", init_scale=1024.0, **settings)

    def backward(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        a, b = self.params
        self.scaler.scale(((a + b) / 8).sum()).backward()

    def raises_once(self, optimizer: Any, *, after: bool = False) -> None:
        """Plant an exception in the next step of an optimizer."""

        def hook(*_: Any) -> None:
            handle.remove()
            raise Planted

        register = "register_step_post_hook" if after else "register_step_pre_hook"
        handle = getattr(optimizer, register)(hook)

    def steps(self) -> list[float]:
        return [(1.0 - p.item()) * 8 for p in self.params]

    def state(self) -> tuple[list[float], float, int]:
        state = self.scaler.state_dict()
        return self.steps(), state["scale"], state["_growth_tracker"]


CALLS = pytest.mark.parametrize("call", WAYS)


# - One process


# regression: S7, T24
@BOTH
@FUSED
@CALLS
@pytest.mark.parametrize("updates", [False, True])
def test_the_second_optimizer_raises_and_the_batch_is_dropped(
    make: Any, fused: bool, call: Any, updates: bool
) -> None:
    run = Training(make, fused)
    for iteration in range(4):
        run.backward()
        if iteration == 1:
            run.raises_once(run.second)
        try:
            call(run.scaler, run.first)
            call(run.scaler, run.second)
        except Planted:
            if not updates:
                continue
        run.scaler.update()
    assert run.state() == ([4.0, 3.0], 1024.0, 4 if updates else 3)


def test_a_first_step_is_not_taken_again_on_the_same_sparse_gradient() -> None:
    run = Training()
    run.backward()
    a, _ = run.params
    a.grad = torch.tensor([128.0]).to_sparse()
    run.raises_once(run.second)
    run.scaler.step(run.first)
    with pytest.raises(Planted):
        run.scaler.step(run.second)
    with pytest.raises(RuntimeError, match="already been called"):
        run.scaler.step(run.first)
    assert run.steps() == [1.0, 0.0]


@FUSED
@pytest.mark.parametrize("drops", ["", "to zero", "to none"])
def test_a_first_step_is_not_taken_again_on_the_same_gradients(
    fused: bool, drops: str
) -> None:
    run = Training(GradScaler, fused)
    run.backward()
    run.raises_once(run.second)
    run.scaler.step(run.first)
    with pytest.raises(Planted):
        run.scaler.step(run.second)
    with pytest.raises(RuntimeError, match="already been called"):
        run.scaler.step(run.first)
    assert run.steps() == [1.0, 0.0]
    if drops:
        run.first.zero_grad(set_to_none=drops == "to none")
    run.scaler.scale((run.params[0] / 8).sum()).backward()
    if drops != "to none":  # a backward adds to the old tensors, cleared or not
        with pytest.raises(RuntimeError, match=r"call update\(\), or zero_grad"):
            run.scaler.step(run.first)
        run.scaler.update()
        run.backward()
    run.scaler.step(run.first)
    with pytest.raises(RuntimeError, match="already been called"):
        run.scaler.step(run.first)
    assert run.steps() == [2.0, 0.0]


@BOTH
@pytest.mark.parametrize("looks", [GradScaler.unscale_, GradScaler.clip_grad_norm_])
@pytest.mark.parametrize("drops", [False, True])
def test_gradients_of_the_first_are_divided_once(
    make: Any, looks: Any, drops: bool
) -> None:
    """The second optimizer raises; gradients of the first had been divided before."""
    run = Training(make)
    asked = [1e9] if looks is GradScaler.clip_grad_norm_ else []
    run.backward()
    looks(run.scaler, run.first, *asked)
    run.raises_once(run.second)
    with pytest.raises(Planted):
        run.scaler.step(run.second)
    if drops:
        run.backward()
    for optimizer in run.optimizers:
        looks(run.scaler, optimizer, *asked)
        run.scaler.step(optimizer)
    run.scaler.update()
    assert run.state() == ([1.0, 1.0], 1024.0, 1)


# regression: T11
@pytest.mark.parametrize("call", [clip, clip_and_step])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sharded_scaler_clips_without_gradients(
    two: Cluster, call: Any, ranks: int
) -> None:
    def run() -> list[float]:
        p = nn.Parameter(torch.ones(1))
        scaler: Any = ShardedGradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        for _ in range(2):
            call(scaler, torch.optim.SGD([p], lr=1.0))
            scaler.update()
        return [p.item(), scaler.get_scale(), scaler._get_growth_tracker()]

    results = [run()] if ranks == 1 else two.run(run)
    assert results == [[1.0, 4.0, 2]] * ranks


def scheduler_of(train: Training) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(train.first, factor=1.0)


NO_OPTIMIZERS = pytest.mark.parametrize(
    "wrong",
    [lambda _: object(), lambda _: nn.Linear(1, 1), scheduler_of],
    ids=["object", "model", "scheduler"],
)


# regression: `update` raised in every later iteration
@NO_OPTIMIZERS
@pytest.mark.parametrize("make", [torch.amp.GradScaler, GradScaler, ShardedGradScaler])
@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_training_goes_on_after_a_call_without_an_optimizer(
    make: Any, call: str, wrong: Any
) -> None:
    train = Training(make)
    for _ in range(3):
        train.backward()
        with pytest.raises(AttributeError, match="param_groups"):
            getattr(train.scaler, call)(wrong(train))
        train.scaler.step(train.first)
        train.scaler.update()
    assert train.state() == ([3.0, 0.0], 1024.0, 3)


# - Ranks


def trained(two: Cluster, run: Callable[[], Any]) -> list[Any]:
    return two.with_options(timeout_s=SOON_S).run(run)


# regression: T10
@FUSED
@pytest.mark.parametrize("lacks", [False, True])
def test_an_optimizer_without_gradients_on_any_rank(
    two: Cluster, fused: bool, lacks: bool
) -> None:
    """The call raises as torch's class does in one process, and training goes on."""

    def run() -> tuple[list[str], Any]:
        train, seen = Training(GradScaler, fused), list[str]()
        is_lacking = lacks and dist.get_rank() == 1
        for _ in range(3):
            train.backward()
            train.second.zero_grad()
            train.scaler.step(train.first)
            try:
                if is_lacking:
                    train.scaler.step(None)
                else:
                    train.scaler.unscale_(train.second)
                    train.scaler.step(train.second)
            except AssertionError as error:
                seen.append(str(error))
            train.scaler.update()
            if fused and not is_lacking:
                assert not train.scaler.step_was_skipped(train.second)
        return seen, train.state()

    message = "No inf checks were recorded for this optimizer."
    refused = [] if fused else [message] * 3
    expected = (refused, ([3.0, 0.0], 1024.0, 3))
    other = ([], expected[1]) if lacks else expected
    assert trained(two, run) == [expected, other]


# regression: T4
@FUSED
@CALLS
@pytest.mark.parametrize("ends", ["second", "update", "chosen scale"])
@pytest.mark.parametrize(("after", "how"), [(False, "settling"), (True, "cpu")])
def test_a_step_that_raised_on_one_rank_is_heard_of(
    two: Cluster, fused: bool, call: Any, ends: str, after: bool, how: str
) -> None:
    """A later call reports the failed step: weights now differ between ranks."""

    def run() -> tuple[int, int, Any]:
        train, raised, planted = Training(GradScaler, fused), 0, 0
        for iteration in range(4):
            train.backward()
            if iteration == 1 and dist.get_rank() == 1:
                train.raises_once(train.first, after=after)
            try:
                try:
                    call(train.scaler, train.first)
                except Planted:
                    planted += 1
                if ends == "second":
                    call(train.scaler, train.second)
                train.scaler.update(1024.0 if ends == "chosen scale" else None)
            except RanksDisagreeError as error:
                assert "Load a checkpoint" in str(error)
                raised += 1
        state = {**train.scaler.state_dict(), "scale": 1024.0}
        train.scaler.load_state_dict(state | {"_growth_tracker": 0})
        train.backward()
        for optimizer in train.optimizers:
            call(train.scaler, optimizer)
        train.scaler.update()
        return planted, raised, train.state()[1:]

    first, second = trained(two, acting(how, run))
    assert [first[0], second[0]] == [0, 1]
    assert first[1] == second[1] == (3 if ends == "second" else 2)
    assert first[2] == second[2] == (1024.0, 1)


@FUSED
@pytest.mark.parametrize("how", ["cpu", "settled"])
def test_a_load_follows_an_error_that_others_have_not_read(
    two: Cluster, fused: bool, how: str
) -> None:
    def run() -> Any:
        train = Training(fused=fused)
        state = train.scaler.state_dict()
        for iteration in range(4):
            train.backward()
            if iteration == 1 and dist.get_rank() == 1:
                train.scaler._unscale_grads_ = None
            with suppress(TypeError, RuntimeError):
                train.scaler.step(train.first)
                train.scaler.update()
            train.scaler.__dict__.pop("_unscale_grads_", None)
            if iteration == 1:
                train.scaler.load_state_dict(state)
                for p in train.params:
                    p.detach().fill_(1.0)
        return train.state()

    assert trained(two, acting(how, run)) == [([2.0, 0.0], 1024.0, 2)] * 2


@pytest.mark.parametrize("how", ["cpu", "settling", "settled"])
def test_a_load_before_update_keeps_what_was_checked(two: Cluster, how: str) -> None:
    def run() -> Any:
        train = Training()
        state = train.scaler.state_dict()
        for iteration in range(4):
            train.backward()
            train.scaler.step(train.first)
            if iteration == 1:
                train.scaler.load_state_dict(state)
            train.scaler.update()
        return train.state()

    assert trained(two, acting(how, run)) == [([4.0, 0.0], 1024.0, 3)] * 2


@pytest.mark.parametrize("how", ["cpu", "settled"])
def test_training_goes_on_after_the_checkpoint(two: Cluster, how: str) -> None:
    """The load also works on the rank that is still in the failed iteration."""

    def run() -> tuple[str, Any]:
        train, raised = Training(), "none"
        state = train.scaler.state_dict()
        for iteration in range(14):  # what is read late is heard of later
            train.backward()
            if iteration == 1 and dist.get_rank() == 1:
                train.raises_once(train.first)
            try:
                train.scaler.step(train.first)
                train.scaler.update()
            except (Planted, RanksDisagreeError) as error:
                raised = type(error).__name__
            if iteration == 3:
                train.scaler.load_state_dict(state)
                for p in train.params:
                    p.detach().fill_(1.0)
                assert raised == "RanksDisagreeError"
                raised = "none"
        return raised, train.state()

    assert trained(two, acting(how, run)) == [("none", ([10.0, 0.0], 1024.0, 10))] * 2


# regression: T5
WRONG = {
    "another order": [["first", "second"], ["second", "first"]],
    "a forgotten step": [["first", "second"], ["first"]],
    "a step too many": [["first", "second"], ["first", "second", "extra"]],
    "no step": [["first", "second"], []],
}


@FUSED
@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize(
    ("wrong", "at"),
    [
        # The order cannot be told before ranks have a number for their optimizers, and
        # a step too many is heard of one iteration later.
        *((wrong, 0) for wrong in WRONG if wrong != "another order"),
        *((wrong, 2) for wrong in WRONG if wrong != "a step too many"),
    ],
)
def test_training_goes_on_after_a_disagreement(
    two: Cluster, fused: bool, wrong: str, at: int, updates: bool
) -> None:
    """On one rank the call that raises may be ``update``."""

    def run() -> tuple[list[int], Any]:
        train, raised = Training(GradScaler, fused), list[int]()
        extra = nn.Parameter(torch.ones(1))
        others = {"extra": torch.optim.SGD([extra], lr=1.0, fused=fused)}
        named = {"first": train.first, "second": train.second, **others}
        for iteration in range(at + 4):
            train.backward()
            extra.grad = torch.zeros(1)
            try:
                for name in WRONG[wrong][dist.get_rank() if iteration == at else 0]:
                    train.scaler.step(named[name])
                train.scaler.update()
            except RanksDisagreeError:
                raised.append(iteration)
                if updates:
                    try:
                        train.scaler.update()
                    except AssertionError as error:  # nothing had begun
                        assert "No inf checks" in str(error)
        return raised, train.state()

    first, second = trained(two, run)
    assert first == second
    raised, (steps, scale, _) = first
    assert raised == [at] and scale == 1024.0
    assert steps[1] in (at + 3, at + 4) and steps[0] in (at + 3, at + 4)


# regression: T6
@pytest.mark.parametrize("at", [0, 2])
def test_a_forgotten_step_before_a_chosen_scale(two: Cluster, at: int) -> None:
    def run() -> tuple[list[int], Any]:
        train, raised = Training(), []
        for iteration in range(at + 3):
            train.backward()
            try:
                if iteration != at or dist.get_rank() == 0:
                    train.scaler.step(train.first)
                train.scaler.update(1024.0)
            except RanksDisagreeError:
                raised.append(iteration)
        return raised, train.state()

    expected = ([at], ([float(at + 2), 0.0], 1024.0, 0))
    assert trained(two, run) == [expected] * 2


# regression: T7
def forgotten_update(train: Training) -> None:
    train.scaler.step(train.first)
    train.backward()
    train.scaler.step(train.first)


def unscaled_twice(train: Training) -> None:
    train.scaler.unscale_(train.first)
    train.scaler.unscale_(train.first)


def clipped_twice(train: Training) -> None:
    train.scaler.clip_grad_norm_(train.first, 1.0)
    train.scaler.clip_grad_norm_(train.first, 1.0)


def clipped_after_step(train: Training) -> None:
    train.scaler.step(train.first)
    train.scaler.clip_and_step(train.first, 1.0)


def closure(train: Training) -> None:
    train.scaler.step(train.first, closure=lambda: None)


def wrong_scale(train: Training) -> None:
    train.scaler.step(train.first)
    train.scaler.update(-1.0)


MISTAKES = [
    *(forgotten_update, unscaled_twice, clipped_twice, clipped_after_step, closure),
    wrong_scale,
]


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("settled", [False, True])
def test_a_mistake_of_one_rank_is_reported_to_the_others(
    two: Cluster, mistake: Any, settled: bool
) -> None:
    def run() -> list[str]:
        train = Training()
        is_wrong, raised = dist.get_rank() == 1, list[str]()
        for iteration in range(2 + settled):
            train.backward()
            try:
                if iteration == int(settled) and is_wrong:
                    mistake(train)
                elif mistake is clipped_twice and iteration >= int(settled):
                    train.scaler.clip_and_step(train.first, 1.0)
                else:
                    train.scaler.step(train.first)
                train.scaler.update()
            except ERRORS as error:
                return [*raised, type(error).__name__]
        return raised

    first, second = trained(two, run)
    assert first == ["PeerFailedError"] or (not settled and "Error" in str(first))
    wrong = InvalidSettingError if mistake is wrong_scale else RuntimeError
    assert second == [wrong.__name__]


@pytest.mark.parametrize("mistake", [unscaled_twice, clipped_twice, closure])
def test_a_mistake_of_all_ranks_is_refused_as_in_one_process(
    two: Cluster, mistake: Any
) -> None:
    def run() -> Any:
        train = Training()
        for _ in range(3):
            train.backward()
            with pytest.raises(RuntimeError):
                mistake(train)
            train.scaler.step(train.first)
            train.scaler.step(train.second)
            train.scaler.update()
            with pytest.raises(InvalidSettingError):
                train.scaler.update(-1.0)
        return train.state()

    (alone,) = [run()]
    assert trained(two, run) == [alone] * 2


@pytest.mark.parametrize("mistake", [unscaled_twice, closure, wrong_scale])
@pytest.mark.parametrize("goes_on", [False, True])
def test_training_goes_on_after_a_mistake_of_one_rank(
    two: Cluster, mistake: Any, goes_on: bool
) -> None:
    """With ``goes_on`` the iteration continues with the other optimizer."""

    def run() -> tuple[int, Any]:
        train, raised = Training(), 0
        for iteration in range(6):
            train.backward()
            try:
                if iteration == 2 and dist.get_rank() == 1:
                    mistake(train)
                else:
                    train.scaler.unscale_(train.first)
                    if mistake is not unscaled_twice or iteration != 2:
                        train.scaler.step(train.first)
                    if mistake is not closure and iteration == 2:
                        train.scaler.unscale_(train.second)
            except (RuntimeError, InvalidSettingError):
                raised += 1
                train.backward()
            if goes_on:
                train.scaler.step(train.second)
            with suppress(AssertionError):  # nothing had begun
                train.scaler.update()
        return raised, train.state()

    first, second = trained(two, run)
    assert first == second
    assert first[0] == 1 and first[1][0][0] >= 4.0


# - A step that was left out


def steps_of(
    train: Training, call: Any, leaves_out: Callable[[int], bool], *, fails: bool
) -> list[int]:
    """Train; return the iterations that raised."""
    raised = []
    for iteration in range(6):
        train.backward()
        try:
            call(train.scaler, train.first)
            if leaves_out(iteration) and fails:
                train.first.zero_grad()
            elif not leaves_out(iteration):
                train.scaler.step(train.first)
            train.scaler.update()
        except RanksDisagreeError as error:
            assert "left out on some ranks only" in str(error)
            assert error.values["missed"] == (0.0, 1.0)
            raised.append(iteration)
    return raised


def only_clips(scaler: Any, optimizer: Any) -> None:
    scaler.clip_grad_norm_(optimizer, 1e9)


LOOKS = pytest.mark.parametrize("call", [GradScaler.unscale_, only_clips])


# regression: H27
@FUSED
@LOOKS
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("how", ["cpu", "settling", "settled"])
def test_a_step_left_out_on_one_rank_is_heard_of(
    two: Cluster, fused: bool, call: Any, fails: bool, how: str
) -> None:
    """With ``fails`` this rank drops the batch, after an error of the caller's own."""

    def run() -> tuple[list[int], Any]:
        train = Training(GradScaler, fused)
        raised = steps_of(
            train, call, lambda i: (i, dist.get_rank()) == (1, 1), fails=fails
        )
        state = {**train.scaler.state_dict(), "scale": 1024.0, "_growth_tracker": 0}
        train.scaler.load_state_dict(state)
        train.backward()
        train.scaler.step(train.first)
        train.scaler.update()
        return raised, train.state()[1:]

    first, second = trained(two, acting(how, run))
    assert first == second and first[1] == (1024.0, 1)
    assert first[0][-3:] == [3, 4, 5] and (how == "settled" or first[0][0] == 2)


@LOOKS
@pytest.mark.parametrize("lacks", [False, True])
def test_a_step_left_out_on_all_ranks_is_no_error(
    two: Cluster, call: Any, lacks: bool
) -> None:
    def run() -> tuple[list[int], list[float]]:
        train = Training()
        if lacks and dist.get_rank() == 1:
            train.first = None
        return steps_of(train, call, lambda i: i % 2 == 0, fails=False), train.steps()

    first, second = trained(two, run)
    assert first == ([], [3.0, 0.0])
    assert second == ([], [0.0 if lacks else 3.0, 0.0])


# regression: H31-S2
@pytest.mark.parametrize("case", ["no step", "no gradients", "a load", "refused"])
def test_right_calls_miss_no_step(two: Cluster, case: str) -> None:
    """Rank 1 passes None, or has no gradients: then its weights cannot differ."""

    def run() -> float:
        train, rank = Training(), dist.get_rank()
        lacks = rank == 1 and case != "no gradients"
        for iteration in range(5):
            train.backward()
            is_odd = iteration == 2
            if rank == 1 and case == "no gradients" and is_odd:
                train.first.zero_grad()
            optimizer = None if lacks else train.first
            if is_odd and case == "refused":
                if not lacks:
                    train.params[0].grad = torch.full((1,), float("inf"))
                with pytest.raises(RuntimeError, match="total norm"):
                    train.scaler.clip_grad_norm_(optimizer, 1.0, 2.0, True)
                train.scaler.update(1024.0)
                continue
            train.scaler.unscale_(optimizer)
            if is_odd and case == "a load":
                train.scaler.load_state_dict(train.scaler.state_dict())
            elif not (lacks and case == "no step") and not (
                rank == 1 and is_odd and case == "no gradients"
            ):
                train.scaler.step(optimizer)
            train.scaler.update()
        return train.steps()[0]

    steps, _ = trained(two, run)
    assert steps == (5.0 if case in {"no step", "no gradients"} else 4.0)


def test_a_rank_that_dropped_what_another_has_stepped_is_heard_of(
    two: Cluster,
) -> None:
    """A rank unscales twice and drops the batch; the other one has stepped it."""

    def run() -> list[str]:
        train, seen = Training(), []
        for iteration in range(5 - dist.get_rank()):  # a refusal makes one sync more
            train.backward()
            try:
                if (iteration, dist.get_rank()) == (1, 1):
                    train.scaler.unscale_(train.first)
                train.scaler.unscale_(train.first)
                train.scaler.step(train.first)
                train.scaler.update()
            except RuntimeError as error:
                seen.append(type(error).__name__)
                for optimizer in train.optimizers:
                    optimizer.zero_grad()
                train.scaler.update()
        return seen

    first, second = trained(two, run)
    assert first == ["PeerFailedError", "RanksDisagreeError", "RanksDisagreeError"]
    assert second[0] == "RuntimeError" and set(second[1:]) == {"RanksDisagreeError"}


# regression: S16
def test_a_rank_that_never_comes_is_found_within_the_limit_of_the_group(
    two: Cluster,
) -> None:
    def run() -> str:
        group = dist.new_group(timeout=timedelta(seconds=1))
        notes = ""
        if dist.get_rank() == 0:
            train = Training(GradScaler, sync_over=group)
            train.backward()
            with pytest.raises(RuntimeError) as caught:
                train.scaler.step(train.first)
            assert train.steps() == [0.0, 0.0]
            notes = " ".join(caught.value.__notes__)
        dist.barrier()
        return notes

    notes, _ = trained(two, run)
    assert "If only this rank has a scaler" in notes
    assert 'pass sync_over="local"' in notes
    assert "on rank 0 of 2" in notes
