"""Calls that ranks make together or apart, and calls after an exception."""

import threading
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler, PeerFailedError, RanksDisagreeError
from gradparity.tests.beside_torch import scaled_once, torch_plain
from gradparity.tests.products import pairs
from gradparity.tests.stepping import (
    FUSED,
    HOW,
    INF,
    acting,
    device_type,
    exchanged,
    scalar_weight,
    sgd,
)

SOON_S = 20.0  # a hang fails long before the harness's own limit


def give(p: nn.Parameter, value: float) -> None:
    p.grad = torch.tensor([value], dtype=p.dtype)


def ready(scale: float = 4.0, **settings: Any) -> Any:
    return scaled_once(GradScaler(device_type(), init_scale=scale, **settings))


# - Calls, as a rank makes them in one iteration


def _step(scaler: Any, optimizer: Any) -> None:
    scaler.step(optimizer)


def _unscale_and_step(scaler: Any, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def _clip(scaler: Any, optimizer: Any) -> None:
    scaler.clip_grad_norm_(optimizer, 1e9)
    scaler.step(optimizer)


def _clip_and_step(scaler: Any, optimizer: Any) -> None:
    scaler.clip_and_step(optimizer, 1e9)


def _unscale_and_clip(scaler: Any, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    _clip(scaler, optimizer)


def _step_none(scaler: Any, _: Any) -> None:
    scaler.step(None)


def _clip_none(scaler: Any, _: Any) -> None:
    scaler.clip_grad_norm_(None, 1e9)
    scaler.step(None)


def _unscale_none(scaler: Any, _: Any) -> None:
    scaler.unscale_(None)
    scaler.step(None)


def _unscale_and_clip_none(scaler: Any, _: Any) -> None:
    scaler.unscale_(None)
    scaler.clip_grad_norm_(None, 1e9)
    scaler.step(None)


def _clip_and_step_none(scaler: Any, _: Any) -> None:
    scaler.clip_and_step(None, 1e9)


def _nothing(scaler: Any, _: Any) -> None:
    """Make no call before ``update``."""


def _load(scaler: Any, optimizer: Any) -> None:
    scaler.load_state_dict(scaler.state_dict())
    scaler.step(optimizer)


Call = Callable[[Any, Any], None]
MAIN: list[Call] = [_step, _unscale_and_step, _clip, _clip_and_step]
TOGETHER: list[tuple[Call, Call]] = [
    (_step, _step_none),
    (_step, _unscale_and_step),
    (_unscale_and_step, _step_none),
    (_step, _unscale_none),
    (_unscale_and_step, _unscale_none),
    (_unscale_and_clip, _unscale_and_clip_none),
    (_clip, _clip_none),
    (_clip, _step_none),
    (_clip_and_step, _step_none),
    (_clip_and_step, _clip_and_step_none),
]
STEPS: set[Call] = {_step, _unscale_and_step, _step_none}
CLIPS: set[Call] = {_clip, _clip_and_step, _clip_none, _clip_and_step_none}
APART: list[tuple[Call, Call]] = [
    (first, second)
    for first, second in combinations(
        [*MAIN, _step_none, _clip_none, _clip_and_step_none, _nothing, _load], 2
    )
    if not {first, second} <= STEPS
    # clip_and_step on one rank, a clip and then a step on another: either is right.
    and not {first, second} <= CLIPS
    # "one call that takes part in whatever the others do"
    and not (_clip_and_step_none in (first, second) and {first, second} & STEPS)
    and not (_step_none in (first, second) and {first, second} & (STEPS | CLIPS))
]


# - G12: two scalers


@pytest.mark.parametrize("call", MAIN)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("bad", [False, True])
def test_two_scalers_in_another_order(
    two: Cluster, call: Call, at: int, bad: bool
) -> None:
    def run() -> tuple[str, list[float]]:
        scalers, params = [ready(), ready()], [scalar_weight(), scalar_weight()]
        optimizers = [sgd(p) for p in params]
        for iteration in range(at + 1):
            order = [0, 1]
            for p in params:
                give(p, 4.0)
            if iteration == at and dist.get_rank() == 1:
                order.reverse()
            elif iteration == at and bad:
                give(params[0], INF)
            try:
                for index in order:
                    call(scalers[index], optimizers[index])
                for scaler in scalers:
                    scaler.update()
            except RanksDisagreeError:
                return f"raised in {iteration}", [p.item() for p in params]
        return "nothing", [p.item() for p in params]

    found = two.with_options(timeout_s=SOON_S).run(run)
    assert [raised for raised, _ in found] == [f"raised in {at}"] * 2
    if at:  # before that they have no number: the second of them is the first to know
        assert [weights for _, weights in found] == [[1.0 - at] * 2] * 2


def test_two_scalers_in_one_order_are_no_disagreement(two: Cluster) -> None:
    def run() -> list[float]:
        scalers, params = [ready(4.0), ready(8.0)], [scalar_weight(), scalar_weight()]
        for _ in range(3):
            for scaler, p, value in zip(scalers, params, (1.0, 2.0), strict=True):
                give(p, value)
                scaler.step(sgd(p))
            for scaler in reversed(scalers):
                scaler.update()
        return [p.item() for p in params]

    assert two.with_options(timeout_s=SOON_S).run(run) == [[0.25, 0.25]] * 2


# - G13: calls that do not belong together


def name_of(call: Call) -> str:
    return call.__name__.strip("_")


def pair_name(pair: tuple[Call, Call]) -> str:
    return "-".join(map(name_of, pair))


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("pair", APART, ids=pair_name)
@HOW
def test_calls_that_do_not_belong_together(
    two: Cluster, pair: tuple[Call, Call], settled: bool, how: str
) -> None:
    def run() -> tuple[str, float]:
        scaler, p = ready(), scalar_weight()
        optimizer = sgd(p)
        if settled:
            give(p, 4.0)
            scaler.step(optimizer)
            scaler.update()
        give(p, 4.0)
        try:
            pair[dist.get_rank()](scaler, optimizer)
            scaler.update()
        except RanksDisagreeError as error:
            return type(error).__name__, p.item()
        return "nothing", p.item()

    expected = ("RanksDisagreeError", 0.0 if settled else 1.0)
    found = two.with_options(timeout_s=SOON_S).run(acting(how, run))
    assert found == [expected] * 2


@pytest.mark.parametrize("pair", TOGETHER, ids=pair_name)
@pytest.mark.parametrize("first", [0, 1])
def test_calls_that_belong_together(
    two: Cluster, pair: tuple[Call, Call], first: int
) -> None:
    def run() -> tuple[list[bool], list[float]]:
        call = pair[(dist.get_rank() + first) % 2]
        scaler, p, good, scales = ready(), scalar_weight(), [], []
        optimizer = sgd(p)
        for gradient in (1.0, INF, 2.0, 1.0):
            give(p, 1.0)
            if dist.get_rank() == first:  # the one that has an optimizer
                give(p, gradient)
            before = p.item()
            call(scaler, optimizer)
            scaler.update()
            good.append(p.item() != before)
            scales.append(scaler.get_scale())
        has_optimizer = "none" not in name_of(call)
        return (good if has_optimizer else [True, False, True, True]), scales

    expected = ([True, False, True, True], [4.0, 2.0, 2.0, 2.0])
    assert two.with_options(timeout_s=SOON_S).run(run) == [expected] * 2


@pytest.mark.parametrize("call", MAIN)
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("forgets", [0, 1])
@HOW
def test_a_forgotten_call(
    two: Cluster, call: Call, settled: bool, forgets: int, how: str
) -> None:
    def run() -> str:
        scaler, params = ready(), [scalar_weight(), scalar_weight()]
        optimizers = [sgd(p) for p in params]
        for iteration in range(1 + settled):
            for p, optimizer in zip(params, optimizers, strict=True):
                give(p, 4.0)
                is_last = iteration == settled
                if is_last and p is params[1] and dist.get_rank() == forgets:
                    continue
                try:
                    call(scaler, optimizer)
                except RanksDisagreeError:
                    return "raised"
            try:
                scaler.update()
            except RanksDisagreeError:
                return "raised"
        return "nothing"

    found = two.with_options(timeout_s=SOON_S).run(acting(how, run))
    assert found == ["raised", "raised"]


# - G14: after an exception


class Failing(GradScaler):
    """Scaler that raises on reading gradients while ``fails`` is set."""

    fails = False

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails:
            raise ValueError("cannot be read")
        return super()._unscale_grads_(*args, **kwargs)


@pairs(
    FUSED,
    pytest.mark.parametrize("call", MAIN),
    pytest.mark.parametrize("at", [0, 1]),
    pytest.mark.parametrize("updates", [False, True]),
    pytest.mark.parametrize("cause", ["one rank fails", "ranks disagree"]),
)
def test_the_batch_after_an_exception(
    two: Cluster, fused: bool, call: Call, at: int, updates: bool, cause: str
) -> None:
    """After an error, training on every rank goes on as without the dropped batch."""

    def run() -> tuple[list[str], float, dict[str, Any]]:
        p, narrow = scalar_weight(), scalar_weight(dtype=torch.float16)
        optimizer = sgd(p, narrow, fused=fused)
        scaler = Failing(device_type(), init_scale=1024.0, growth_interval=100)
        odd, seen = dist.get_rank() == 1, []
        for iteration in range(4):
            optimizer.zero_grad()
            scaler.scale((p / 8).sum()).backward()
            if iteration == at and cause == "ranks disagree":
                scaler.set_growth_interval(100 + dist.get_rank())
            elif iteration == at and odd:
                scaler.fails = True
                give(narrow, 1.0)
            try:
                call(scaler, optimizer)
            except (ValueError, PeerFailedError, RanksDisagreeError) as error:
                seen.append(type(error).__name__)
            else:
                scaler.update()
                continue
            optimizer.zero_grad()
            scaler.fails = False
            scaler.set_growth_interval(100)
            if updates:
                try:
                    scaler.update()
                except AssertionError as error:  # as torch's, without any step
                    assert "No inf checks" in str(error)
        return seen, p.item(), scaler.state_dict()

    first, second = two.with_options(timeout_s=SOON_S).run(run)
    names = ["RanksDisagreeError"] * 2
    if cause == "one rank fails":
        names = ["PeerFailedError", "ValueError"]
    assert [first[0], second[0]] == [[name] for name in names]
    for _, weight, state in (first, second):
        assert (weight, state["scale"], state["_growth_tracker"]) == (0.625, 1024.0, 3)


@FUSED
@pytest.mark.parametrize("call", MAIN)
def test_the_second_of_two_optimizers_fails(
    two: Cluster, fused: bool, call: Call
) -> None:
    def run() -> tuple[list[str], list[float], dict[str, Any]]:
        a, b, narrow = (
            scalar_weight(),
            scalar_weight(),
            scalar_weight(dtype=torch.float16),
        )
        first, second = sgd(a, fused=fused), sgd(b, narrow, fused=fused)
        scaler, seen = Failing(device_type(), init_scale=1024.0), []
        for iteration in range(4):
            first.zero_grad()
            second.zero_grad()
            scaler.scale(((a + b) / 8).sum()).backward()
            call(scaler, first)
            if iteration == 1 and dist.get_rank() == 1:
                scaler.fails = True
                give(narrow, 1.0)
            try:
                call(scaler, second)
            except (ValueError, PeerFailedError) as error:
                seen.append(type(error).__name__)
                scaler.fails = False
            scaler.update()
        return seen, [a.item(), b.item()], scaler.state_dict()

    for (seen, weights, state), name in zip(
        two.with_options(timeout_s=SOON_S).run(run),
        ["PeerFailedError", "ValueError"],
        strict=True,
    ):
        assert seen == [name]
        assert weights == [0.5, 0.625]
        assert (state["scale"], state["_growth_tracker"]) == (1024.0, 4)


# - G15: a rank that lacks an optimizer


def without(call: Call) -> Call:
    if call is _clip:
        return _clip_none
    return _clip_and_step_none if call is _clip_and_step else _step_none


@pytest.mark.parametrize("call", MAIN)
@pytest.mark.parametrize("lacking", [0, 1])
@pytest.mark.parametrize("idle", [None, 0, 2])
@pytest.mark.parametrize("bad", [False, True])
def test_a_rank_lacks_one_of_two_optimizers(
    two: Cluster, call: Call, lacking: int, idle: int | None, bad: bool
) -> None:
    """With ``idle`` the rank lacks the optimizer in that iteration only."""

    def run() -> tuple[list[float], float]:
        scaler, params = ready(1024.0), [scalar_weight(), scalar_weight()]
        optimizers = [sgd(p) for p in params]
        for iteration in range(4):
            for index, (p, optimizer) in enumerate(
                zip(params, optimizers, strict=True)
            ):
                is_bad = bad and (iteration, index, dist.get_rank()) == (1, 1, 1)
                give(p, INF if is_bad else 128.0)
                is_without = dist.get_rank() == 1 and index == lacking
                if idle is not None:
                    is_without = is_without and iteration == idle
                (without(call) if is_without else call)(scaler, optimizer)
            scaler.update()
            if bad and iteration == 1:
                scaler.update(1024.0)
        return [p.item() for p in params], scaler.get_scale()

    first, second = two.with_options(timeout_s=SOON_S).run(run)
    missed = 4 if idle is None else 1
    # The second is skipped where any rank that holds it has found inf.
    held = not (lacking == 1 and idle is None)
    skips = [0, int(bad and held)]
    assert first == ([1 - (4 - skips[i]) / 8 for i in range(2)], 1024.0)
    counts = [4 - skips[i] - (missed if i == lacking else 0) for i in range(2)]
    assert second == ([1 - count / 8 for count in counts], 1024.0)


# - G16: replicas, and rounding


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 1.5, 2.0, 3.0, INF])
@pytest.mark.parametrize("odd", ["threads", "layout"])
def test_replicas_are_counted_once_however_they_are_added_up(
    two: Cluster, norm_type: float, odd: str
) -> None:
    def run() -> float:
        drawn = torch.Generator().manual_seed(0)
        values = torch.rand(601, 499, generator=drawn, device="cpu").to(device_type())
        p, threads = nn.Parameter(values), torch.get_num_threads()
        p.grad = values.clone()
        is_odd = dist.get_rank() == 1
        if is_odd and odd == "layout":  # the same numbers, in another order in memory
            p = nn.Parameter(values.t().contiguous().t())
            p.grad = p.detach().clone()
        scaler = ready()
        try:
            if odd == "threads":
                torch.set_num_threads(2 if is_odd else 1)
            return float(scaler.clip_grad_norm_(sgd(p), 1e30, norm_type))
        finally:
            torch.set_num_threads(threads)

    values = torch.rand(601, 499, generator=torch.Generator().manual_seed(0)).double()
    expected = float(torch.linalg.vector_norm(values, norm_type)) / 4.0
    assert (
        two.with_options(timeout_s=SOON_S).run(run)
        == [pytest.approx(expected, rel=1e-4)] * 2
    )


# - G17: inference mode


@FUSED
@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_", "step"])
@pytest.mark.parametrize("bad_rank", [None, 0, 1])
def test_calls_in_inference_mode(
    two: Cluster, fused: bool, call: str, bad_rank: int | None
) -> None:
    def run() -> tuple[float, float]:
        p, scaler = scalar_weight(), ready()
        optimizer = sgd(p, fused=fused)
        for iteration in range(2):
            bad = iteration == 1 and bad_rank == dist.get_rank()
            give(p, INF if bad else 1.0)
            if call == "step":
                scaler.unscale_(optimizer)
            with torch.inference_mode():
                if call == "unscale_":
                    scaler.unscale_(optimizer)
                elif call == "clip_grad_norm_":
                    scaler.clip_grad_norm_(optimizer, 1e9)
                else:
                    scaler._found_inf_per_device(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return p.item(), scaler.get_scale()

    expected = (0.5, 4.0) if bad_rank is None else (0.75, 2.0)
    assert two.with_options(timeout_s=SOON_S).run(run) == [expected] * 2


# - G18: threads


@pytest.mark.parametrize(
    ("own", "call"),
    # Two collectives a clip, of two threads on one group: nothing can order them.
    [*((True, call) for call in MAIN), (False, _step), (False, _unscale_and_step)],
)
def test_threads_that_train_with_groups_of_their_own(
    two: Cluster, device: str, own: bool, call: Call
) -> None:
    """Results are right with a group; without one they are right, or ranks raise."""
    if device == "cuda":
        pytest.skip("NCCL hangs where threads begin collectives in another order")

    def run() -> list[str]:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        seen = ["", ""]

        def train(index: int) -> None:
            settings = {"sync_over": groups[index]} if own else {}
            p, scaler = scalar_weight(), ready(1024.0, **settings)
            optimizer = sgd(p)
            try:
                for _ in range(40):
                    scaler.scale((p / 64).sum()).backward()
                    call(scaler, optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                seen[index] = "right" if p.item() == 0.375 else f"wrong: {p.item()}"
            except RanksDisagreeError as error:
                seen[index] = type(error).__name__

        threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return seen

    found = two.with_options(timeout_s=SOON_S).run(run)
    allowed = {"right"} if own else {"right", "RanksDisagreeError"}
    assert {each for seen in found for each in seen} <= allowed


# regression: T8
def test_threads_that_clip_over_one_group_are_right_or_refused(two: Cluster) -> None:
    """A clip may take several collectives, to identify replicas."""

    def run() -> list[str]:
        seen = ["", ""]

        def train(index: int) -> None:
            shared, own, scaler = scalar_weight(), scalar_weight(), ready(1024.0)
            optimizer = sgd(shared, own)
            try:
                for _ in range(10):
                    give(shared, 1024.0)
                    give(own, 1024.0 * (2 + dist.get_rank()))
                    norm = float(scaler.clip_and_step(optimizer, 1e9))
                    assert norm == pytest.approx(14**0.5)
                    scaler.update()
                seen[index] = "right"
            except RanksDisagreeError:
                seen[index] = "refused"

        threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return seen

    found = two.with_options(timeout_s=SOON_S).run(run)
    assert {each for seen in found for each in seen} <= {"right", "refused"}


# - G20: where the host reads later


def test_ranks_stay_together_after_an_error_that_one_caught(two: Cluster) -> None:
    def run() -> tuple[int, float, float]:
        with exchanged("settled"):
            p, scaler = scalar_weight(), Failing(device_type(), init_scale=1024.0)
            optimizer, errors = sgd(p), 0
            for iteration in range(8):
                optimizer.zero_grad()
                scaler.scale((p / 16).sum()).backward()
                scaler.fails = iteration == 2 and dist.get_rank() == 1
                try:
                    scaler.step(optimizer)
                    scaler.update()
                except (ValueError, PeerFailedError, RanksDisagreeError):
                    errors += 1
            return errors, p.item(), scaler.get_scale()

    first, second = two.with_options(timeout_s=SOON_S).run(run)
    assert first[1:] == second[1:]
    # Every rank hears of it; at most the batch that follows is dropped as well.
    assert first[0] > 0 and second[0] > 0
    assert first[1] in (1 - 7 / 16, 1 - 6 / 16)
    assert first[2] == 1024.0


# - G22: an error that is swallowed


def test_a_swallowed_error_is_raised_again_by_the_step(two: Cluster) -> None:
    def run() -> tuple[list[str], float]:
        p, narrow = scalar_weight(), scalar_weight(dtype=torch.float16)
        scaler, optimizer, seen = ready(1024.0), sgd(p, narrow), []
        for iteration in range(3):
            optimizer.zero_grad()
            scaler.scale((p / 8).sum()).backward()
            if iteration == 1 and dist.get_rank() == 1:
                give(narrow, 1.0)
            try:
                scaler.unscale_(optimizer)
                try:
                    scaler.last_overflow  # noqa: B018  # whoever only logs it
                except Exception as error:
                    seen.append(f"log: {type(error).__name__}")
                scaler.step(optimizer)
                scaler.update()
            except (ValueError, PeerFailedError) as error:
                seen.append(type(error).__name__)
        return seen, p.item()

    (first, weight), (second, other) = two.with_options(timeout_s=SOON_S).run(run)
    assert weight == other == 0.75
    assert second == ["ValueError"]
    assert first in (["log: PeerFailedError", "PeerFailedError"], ["PeerFailedError"])


# - What torch does, for the numbers above


def test_torch_after_an_exception() -> None:
    """torch's class in one process gives the numbers that tests of G14 expect."""
    p, narrow = scalar_weight(), scalar_weight(dtype=torch.float16)
    optimizer, scaler = sgd(p, narrow), torch_plain(init_scale=1024.0)
    for iteration in range(4):
        optimizer.zero_grad()
        scaler.scale((p / 8).sum()).backward()
        if iteration == 1:
            give(narrow, 1.0)
            with pytest.raises(ValueError, match="FP16"):
                scaler.step(optimizer)
            continue
        scaler.step(optimizer)
        scaler.update()
    assert p.item() == 0.625
