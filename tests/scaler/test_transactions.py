"""A call that raises leaves the scaler unchanged, for every place of the exception.

One clean iteration counts what the scaler calls: kernels, collectives, the optimizer
and its hooks. Then each of them raises once, one after the other, and the batch is
dropped. The iterations after it must be those of a run that never had the batch.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import count, takewhile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradparity import scaler as ours
from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler, PeerFailedError, ShardedGradScaler
from gradparity.tests.products import pairs
from gradparity.tests.stepping import (
    BOTH,
    FUSED,
    device_type,
    exchanged,
)

INF = float("inf")
SOON_S = 60.0  # a hang fails long before the harness's own limit
FOLDER = str(ours.__path__[0])
DTYPES = (torch.float32, torch.float64)
BAD = pytest.mark.parametrize("bad", [False, True])


class Struck(Exception):
    """Exception raised by something that the scaler calls."""


@pytest.fixture(autouse=True)
def functions_of_subclasses() -> Iterator[None]:
    """Restore torch functions of subclasses, which an interrupt may leave disabled."""
    private: Any = torch._C
    before = private._get_torch_function_state()
    yield
    private._set_torch_function_state(before)


# - The calls of an iteration, one after the other

Calls = list[Callable[[Any, Any], Any]]


def _clip(scaler: Any, optimizer: Any) -> Any:
    return scaler.clip_grad_norm_(optimizer, 1e9)


SEQUENCES: dict[str, Calls] = {
    "step": [GradScaler.step],
    "unscale_": [GradScaler.unscale_, GradScaler.step],
    "clip": [_clip, GradScaler.step],
    "both": [GradScaler.unscale_, _clip, GradScaler.step],
    "clip_and_step": [lambda s, optimizer: s.clip_and_step(optimizer, 1e9)],
}
SEQUENCE = pytest.mark.parametrize("name", SEQUENCES)


# - What raises


class RaisesAt(TorchDispatchMode):
    """Raises in one of the scaler's calls of a kernel, a collective or a hook.

    ``at`` is the number of the call. Kernels inside of the optimizer's step do not
    count: half a step is the optimizer's fault. With ``before_sync`` it raises only
    before the first collective.
    """

    def __init__(self, optimizer: Any, at: int, *, before_sync: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.at, self.before_sync = at, before_sync
        self.count, self.struck = 0, False
        self.is_inside = self.is_sent = self.is_on = self.is_stepped = False
        optimizer.register_step_pre_hook(self._enter)
        optimizer.register_step_post_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._event()
        self.is_inside = True

    def _leave(self, *_: Any) -> None:
        self.is_inside = False
        self.is_stepped |= self.is_on
        self._event()

    def _event(self) -> None:
        if not self.is_on or self.is_inside or (self.before_sync and self.is_sent):
            return
        self.count += 1
        if self.count == self.at:
            self.struck = True
            raise Struck

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._event()
        self.is_sent |= func.namespace == "c10d"
        return func(*args, **(kwargs or {}))

    @contextmanager
    def on(self) -> Iterator[None]:
        """Count in this context, and raise at the chosen place."""
        self.is_on = True
        try:
            with self:
                yield
        finally:
            self.is_on = self.is_inside = False


class InterruptsAt:
    """Raises KeyboardInterrupt before one line of the scaler's files."""

    def __init__(self, at: int) -> None:
        self.at, self.count, self.struck = at, 0, False

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                self.struck = True
                raise KeyboardInterrupt
        return self._trace

    @contextmanager
    def on(self) -> Iterator[None]:
        """Count in this context, and raise at the chosen place."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)


# - One training, with a batch that is dropped


class Run:
    """Training of two parameters: a good step reduces one by 1/8, the other by 1/4."""

    def __init__(self, make: Any, fused: bool) -> None:
        self.params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
        self.optimizer: Any = torch.optim.SGD(self.params, lr=1.0, fused=fused)
        self.scaler: Any = make(device=device_type(), init_scale=1024.0)

    def backward(self, bad: bool = False) -> None:
        self.optimizer.zero_grad()
        a, b = self.params
        self.scaler.scale((a / 8 + b / 4).sum()).backward()
        if bad:
            assert a.grad is not None
            a.grad.fill_(INF)

    def iterate(self, calls: Calls) -> None:
        self.backward()
        for call in calls:
            call(self.scaler, self.optimizer)
        self.scaler.update()

    def steps(self) -> float:
        """Return the number of taken steps; check that each was right."""
        a, b = (1.0 - p.item() for p in self.params)
        assert b == 2 * a, (a, b)
        return a * 8

    def state(self) -> tuple[float, float, int]:
        state = self.scaler.state_dict()
        return self.steps(), state["scale"], state["_growth_tracker"]


def drop_a_batch(
    run: Run, calls: Calls, strike: Any, *, before: int, bad: bool, updates: bool
) -> tuple[float, float, int]:
    """Train and drop the batch that raised; return the expected `Run.state`."""
    for _ in range(before):
        run.iterate(calls)
    run.backward(bad)
    try:
        # Without an update, calls before the one that raised have happened, as torch's.
        for call in calls if updates else calls[:1]:
            with strike.on():
                call(run.scaler, run.optimizer)
    except (Struck, KeyboardInterrupt, PeerFailedError):
        pass
    else:
        return (-1.0, 0.0, 0)  # the last call is reached
    steps, scale, tracker = run.state()
    assert steps in ((before,) if bad else (before, before + 1))
    run.optimizer.zero_grad()
    if updates:
        try:
            run.scaler.update()
        except AssertionError as error:  # nothing had begun
            assert "No inf checks" in str(error)
        # It moves nothing, unless what raised was past the last line of a call.
        moved = (scale / 2, 0) if bad else (scale, tracker + 1)
        assert run.state() in ((steps, scale, tracker), (steps, *moved))
        _, scale, tracker = run.state()
    return steps + 2, scale, tracker + 2


@pairs(
    BOTH,
    FUSED,
    BAD,
    SEQUENCE,
    pytest.mark.parametrize(
        ("before", "updates", "how"),
        [
            (0, False, "cpu"),
            (1, True, "cpu"),
            (0, True, "settled"),
            (1, False, "settled"),
        ],
    ),
)
def test_each_call_out_of_the_scaler_raises_once(
    make: Any, fused: bool, bad: bool, name: str, before: int, updates: bool, how: str
) -> None:
    calls = SEQUENCES[name]

    def trial(at: int) -> bool:
        run = Run(make, fused)
        strike = RaisesAt(run.optimizer, at)
        expected = drop_a_batch(
            run, calls, strike, before=before, bad=bad, updates=updates
        )
        if strike.struck:
            for _ in range(2):
                run.iterate(calls)
            assert run.state() == expected, f"call {at} raised"
        return strike.struck

    with exchanged(how):
        assert len(list(takewhile(trial, count(1)))) > 2


@pytest.mark.parametrize(
    ("name", "fused", "bad", "updates"),
    # "both" has the lines of unscale_ and clip; without updates one call is struck
    [
        ("step", False, True, True),
        ("both", False, True, True),
        ("clip_and_step", False, True, True),
        ("step", True, False, False),
        ("unscale_", True, False, False),
        ("clip", True, False, False),
        ("clip_and_step", True, False, False),
    ],
)
@pytest.mark.few(3)
def test_interrupted_before_each_line_it_raises_or_is_right(
    fused: bool, name: str, bad: bool, updates: bool
) -> None:
    calls, at = SEQUENCES[name], 0
    while True:
        at += 1
        run = Run(GradScaler, fused)
        strike = InterruptsAt(at)
        steps = 0.0
        try:
            steps, *_ = drop_a_batch(
                run, calls, strike, before=1, bad=bad, updates=updates
            )
            if not strike.struck:
                break
            for _ in range(2):
                run.iterate(calls)
        except (RuntimeError, AssertionError) as error:  # a refusal, no wrong step
            assert strike.struck
            assert "assert" not in str(error)
            assert run.steps() in (1.0, 2.0, 3.0)
        else:
            assert run.steps() == steps, f"interrupted before line {at}"
        finally:  # the next backward has raised, if it was left off
            torch.set_grad_enabled(True)
    assert at > 20


@BOTH
@FUSED
@BAD
def test_an_update_that_raised_is_called_again(
    make: Any, fused: bool, bad: bool
) -> None:
    at = 0
    while True:
        at += 1
        run = Run(make, fused)
        strike = RaisesAt(run.optimizer, at)
        run.iterate(SEQUENCES["step"])
        run.backward(bad)
        run.scaler.step(run.optimizer)
        try:
            with strike.on():
                run.scaler.update()
        except Struck:
            run.scaler.update()
        expected = (1.0, 512.0, 0) if bad else (2.0, 1024.0, 2)
        assert run.state() == expected, f"call {at} raised"
        if not strike.struck:
            break
    assert at > 1


@BOTH
@pytest.mark.parametrize(
    # After its kernel has run, torch's steps again on what the kernel left.
    ("fused", "when"),
    [(False, "before"), (True, "before"), (False, "after")],
)
def test_a_step_that_raised_is_called_again(make: Any, fused: bool, when: str) -> None:
    """A second call on the same gradients steps as the first would have, or raises."""
    run = Run(make, fused)
    register = getattr(
        run.optimizer,
        "register_step_pre_hook" if when == "before" else "register_step_post_hook",
    )
    hooks: list[Any] = []

    def hook(*_: Any) -> None:
        hooks.pop().remove()
        raise Struck

    hooks.append(register(hook))
    run.backward()
    with pytest.raises(Struck):
        run.scaler.step(run.optimizer)
    moved = run.steps()
    assert moved == (0.0 if when == "before" else 1.0)
    try:
        run.scaler.step(run.optimizer)
    except RuntimeError:
        assert run.steps() == moved
    else:
        assert run.steps() == moved + 1


@BOTH
@FUSED
@SEQUENCE
@pytest.mark.parametrize("scale", [1024.0, 0.25])
def test_a_call_that_raised_is_made_again(
    make: Any, fused: bool, name: str, scale: float
) -> None:
    """The second call divides each gradient once, though they have two dtypes."""
    calls = SEQUENCES[name]

    def trial(at: int) -> bool:
        params = [nn.Parameter(torch.ones(1, dtype=d)) for d in DTYPES]
        optimizer: Any = torch.optim.SGD(params, lr=1.0, fused=fused)
        scaler: Any = make(device=device_type(), init_scale=scale)
        strike = RaisesAt(optimizer, at)
        scaler.scale(sum((p / 8).sum().double() for p in params)).backward()
        for call in calls:
            try:
                with strike.on():
                    call(scaler, optimizer)
            except Struck:
                if strike.is_stepped:
                    return True
                call(scaler, optimizer)
        assert [p.item() for p in params] == [0.875, 0.875], f"call {at} raised"
        return strike.struck

    numbers = takewhile(trial, count(1))
    assert len(list(numbers)) > 3


@FUSED
@SEQUENCE
@pytest.mark.parametrize("updates", [False, True])
def test_the_second_of_two_optimizers_raises(
    name: str, updates: bool, fused: bool
) -> None:
    """The step of the first optimizer stays."""
    calls = SEQUENCES[name]

    def trial(at: int) -> bool:
        first, second = Run(GradScaler, fused), Run(GradScaler, fused)
        second.scaler = scaler = first.scaler
        strike = RaisesAt(second.optimizer, at)
        for drops in (False, True, False):
            for run in (first, second):
                run.backward()
            for call in calls:
                call(scaler, first.optimizer)
            with strike.on() if drops else nullcontext(), suppress(Struck):
                for call in calls:
                    call(scaler, second.optimizer)
            if updates or not (drops and strike.struck):
                scaler.update()
        lost = strike.struck and not strike.is_stepped
        steps = first.steps(), second.steps()
        assert steps == (3.0, 2.0 if lost else 3.0), f"call {at} raised"
        ended = 3 if updates or not strike.struck else 2
        assert scaler.state_dict()["_growth_tracker"] == ended
        return strike.struck

    numbers = takewhile(trial, count(1))
    assert len(list(numbers)) > 3


# - Ranks


@pairs(
    SEQUENCE,
    pytest.mark.parametrize(("before", "updates"), [(0, False), (1, True)]),
    pytest.mark.parametrize(
        ("fused", "alike", "how"),
        [
            (False, True, "cpu"),
            (True, False, "cpu"),
            (True, True, "settled"),
            (False, False, "settling"),
        ],
    ),
)
@pytest.mark.few(4)
def test_each_call_out_raises_once_on_ranks(
    two: Cluster,
    fused: bool,
    name: str,
    before: int,
    updates: bool,
    alike: bool,
    how: str,
) -> None:
    """With ``alike`` both ranks raise; otherwise one does, before its row is sent."""
    calls = SEQUENCES[name]

    def sweep() -> list[str]:
        at, wrong = 0, list[str]()
        while True:
            at += 1
            run = Run(ShardedGradScaler if at % 2 else GradScaler, fused)
            is_struck = alike or dist.get_rank() == 1
            strike = RaisesAt(
                run.optimizer, at if is_struck else -1, before_sync=not alike
            )
            expected = drop_a_batch(
                run, calls, strike, before=before, bad=False, updates=updates
            )
            if expected[0] < 0:
                return [*wrong, f"{at > 3}"]
            for _ in range(2):
                run.iterate(calls)
            if run.state() != expected:
                wrong.append(f"call {at}: {run.state()}, expected {expected}")

    def on_rank() -> list[str]:
        with exchanged(how):
            return sweep()

    assert two.with_options(timeout_s=SOON_S).run(on_rank) == [["True"]] * 2


@pytest.mark.parametrize("name", ["step", "clip", "clip_and_step"])
@pytest.mark.parametrize("lacking", ["struck", "waiting"])
def test_a_call_raises_beside_a_rank_without_an_optimizer(
    two: Cluster, name: str, lacking: str
) -> None:
    """One of the two ranks raises, before its message is sent."""
    calls = SEQUENCES[name]
    without: Calls = [lambda scaler, _: scaler.step(None)]

    def sweep() -> list[str]:
        at, wrong = 0, list[str]()
        lacks = dist.get_rank() == 1
        while True:
            at += 1
            run = Run(GradScaler, False)
            mine = without if lacks else calls
            is_struck = lacks == (lacking == "struck")
            strike = RaisesAt(run.optimizer, at if is_struck else -1, before_sync=True)
            run.iterate(mine)
            run.backward()
            has_raised = False
            try:
                with strike.on():
                    for call in mine:
                        call(run.scaler, run.optimizer)
            except (Struck, PeerFailedError):
                has_raised = True
            run.scaler.update()
            run.iterate(mine)
            steps = 0.0 if lacks else 2.0 if has_raised else 3.0
            tracker = 2 if has_raised else 3
            if run.state() != (steps, 1024.0, tracker):
                wrong.append(f"call {at}: {run.state()}")
            if not has_raised:
                return [*wrong, f"{at > 1}"]

    assert two.with_options(timeout_s=SOON_S).run(sweep) == [["True"]] * 2


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        pytest.param("step", True, marks=pytest.mark.slow),  # its lines are below, too
        ("clip_and_step", False),
    ],
)
@pytest.mark.slow
def test_interrupted_before_each_line_on_ranks(
    two: Cluster, name: str, fused: bool
) -> None:
    """Both ranks are interrupted before one line: both raise, or both are right."""
    calls = SEQUENCES[name]

    def trial(at: int) -> tuple[bool, str]:
        run = Run(GradScaler, fused)
        strike = InterruptsAt(at)
        try:
            steps, *_ = drop_a_batch(
                run, calls, strike, before=1, bad=False, updates=False
            )
            if not strike.struck:
                return False, ""
            for _ in range(2):
                run.iterate(calls)
        except (RuntimeError, AssertionError) as error:  # a refusal, no wrong step
            is_right = "assert" not in str(error) and run.steps() in (1.0, 2.0, 3.0)
            return True, f"refused: {is_right}"
        finally:
            torch.set_grad_enabled(True)
        return True, f"right: {run.steps() == steps}"

    def sweep() -> list[str]:
        found, at = list[str](), 0
        while True:
            at += 1
            was_struck, outcome = trial(at)
            if not was_struck:
                return found
            found.append(outcome)

    first, second = two.with_options(timeout_s=3 * SOON_S).run(sweep)
    assert first == second
    assert len(first) > 100
    assert set(first) <= {"right: True", "refused: True"}
