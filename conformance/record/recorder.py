"""Recorder: runs inside a training job and records some steps of its optimizers.

It hooks every optimizer of torch, and calls of the outermost model. At the start it may
replace or nudge the weights. After that it writes into no tensor. It does not
communicate, and never makes training wait for a device: numbers stay on their device
until the last recorded step. An error of the recorder is noted, and the job goes on.
"""

from __future__ import annotations

import atexit
import inspect
import math
import os
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import FunctionType, MemberDescriptorType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..status import counted
from .clipping import call_of
from .files import Recording, as_numbers, this_rank, write_rank
from .forwards import Forwards
from .modules import is_traced
from .orders import LATE, ORDERS, TWICE, Orders, Unrecorded
from .reading import State, Step, dense
from .roots import Places, Roots, living
from .steps import StepHooks, parameters_of
from .torch_internals import around_clipping, scale_of
from .weights import nudge_gradients

__all__ = ["Recorder", "install", "record"]

NOTES = 20
"""Largest number of notes: a failing hook fails at every step."""


class Recorder:
    """Recorder of one process of a job."""

    def __init__(self, orders: Orders):
        self.orders = orders
        self.out = Path(orders.out)
        self.steps = range(*orders.steps)
        self.roots = Roots()
        self.recording = Recording()
        self.optimizers: dict[tuple[int, int], tuple[int, Any, Any]] = {}
        """(id of an optimizer, id of its first parameter) -> number of the optimizer,
        and both objects. Numbers follow the order of first calls. ZeRO 3 gives one
        optimizer different parameters in turn."""
        self.calls = Counter[int]()
        """Number of an optimizer -> count of its calls."""
        self.running: dict[int, Step] = {}
        """id of an optimizer -> its running step, if that is recorded."""
        self.preparing: set[int] = set()
        """ids of optimizers whose running step only creates their states."""
        self.starts: dict[int, State] = {}
        """id of an optimizer -> the start of its step, until gradients are computed."""
        self.replaced: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """id of an optimizer -> parameters, and their gradients without a nudge."""
        self.done: list[Step] = []
        self.begun: set[tuple[int, str]] = set()
        """(id of an optimizer, key of a part) with a recorded step."""
        self.others: list[Any] | None = None
        """Weak references to all optimizers of torch; None until one optimizer has made
        its recorded steps."""
        self.late: set[int] = set()
        """ids of optimizers created after ``others`` was set: an inner loop may create
        many."""
        self.recorded: dict[int, Any] = {}
        """id of a parameter -> weak reference to it, for the recorded optimizers; set
        once the recording is written."""
        self.later: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers that stepped after the recording was written."""
        self.finals: list[tuple[int, State]] = []
        """Number of an optimizer and its state after its last recorded step."""
        self.declared: set[int] = set()
        """ids of the parameters and modules passed to :func:`record`; others, such as
        those of an inner loop, are not recorded. Empty if ``record`` was not called."""
        self.trained: set[int] = set()
        """ids of the trained parameters in ``declared``."""
        self.records_all = False
        """True if a block of :func:`record` has no optimizers, or some that are not
        torch's. Then ``declared`` stays empty."""
        self.open_blocks = 0
        """Number of blocks of :func:`record` that have begun and not ended."""
        self.is_told = False
        """True once the user was told that a block of ``record`` is not recorded."""
        self.process = os.getpid()
        """Process that recorded the last step: a fork of it writes nothing."""
        self.rank = this_rank()
        """Rank at the last recorded step; the job may destroy its process group."""
        self.written = False
        self.forwards = Forwards(
            orders,
            self.recording,
            self.roots,
            self.declared,
            self._next_step,
            self.noting,
        )
        self.patches = ExitStack()
        """Puts torch's own functions back."""
        self.scaler: Any = None
        """Scaler of torch whose ``step`` runs."""
        self.limits: set[float] = set()
        """Limits by which torch has clipped norms since the last optimizer step."""
        noted = self._noting_errors
        self.hooks = StepHooks(
            noted(self._begins),
            noted(self._before),
            noted(self._ended),
            only_plain=True,
        )

    def install(self) -> None:
        """Hook optimizers and the outermost model."""
        scaled_step = GradScaler.step

        @wraps(scaled_step)
        def steps(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            self.scaler = scaler
            try:
                return scaled_step(scaler, *args, **kwargs)
            finally:
                self.scaler = None

        undo = self.patches.callback
        undo(setattr, GradScaler, "step", scaled_step)
        GradScaler.step = steps  # type: ignore[method-assign,assignment]
        undo(around_clipping(self._clips))
        self.hooks.install()
        undo(self.forwards.remove)
        self.forwards.install()
        atexit.register(self.write)

    def remove(self) -> None:
        """Remove all hooks; the recorder then holds no reference to the model."""
        self.patches.close()
        self.hooks.remove()
        atexit.unregister(self.write)

    def _next_step(self) -> int | None:
        """Return the number of the next step; None if it is not recorded.

        The first optimizer counts the steps.
        """
        step = self.calls[0] if self.optimizers else self.orders.first
        return None if self.written or step not in self.steps else step

    # - Optimizers

    def _clips(self, norm: Any, limit: float) -> None:
        if is_traced() or (step := self._next_step()) is None:
            return
        with self.noting("the norm of clipped gradients"):
            calls = self.recording.norms.setdefault(step, [])
            calls.append(call_of(norm, limit))
            self.limits.add(float(limit))

    def _begins(self, optimizer: Any) -> None:
        """Read an optimizer's weights when its step begins.

        Later, the closure of a sharpness-aware optimizer moves the weights before it
        computes gradients.
        """
        # a step that raised an error may have left its entry
        self.running.pop(id(optimizer), None)
        self.starts.pop(id(optimizer), None)
        if self.written:
            self._note_late(optimizer)
        if self.written or not self.roots.called:
            return  # the model is first called by the closure
        number = self._number(optimizer)
        if number is not None and self.calls[number] in self.steps:
            with self.noting("the weights"), torch.no_grad():
                self.starts[id(optimizer)] = self._state_of(optimizer)

    def _note_late(self, optimizer: Any) -> None:
        """Leave a mark if an optimizer trains parameters that were not recorded."""
        if self.declared or optimizer in self.later or os.getpid() != self.process:
            return
        self.later.add(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        refs = ((self.recorded.get(id(p)), p) for p in params if p.requires_grad)
        count = sum(ref is None or ref() is not p for ref, p in refs)
        if count and self.recorded:
            text = f"{type(optimizer).__name__} of {counted(count, 'tensor')}"
            (self.out / f"{LATE}{self.rank}").write_text(text)

    def _prepares(self, optimizer: Any) -> bool:
        """Return True for a step that only creates states, before any forward.

        Torch's checkpoint functions make such a step at rate 0, and Megatron-FSDP makes
        one with gradients of zero.
        """
        if self.roots.called or getattr(optimizer, "state", None):
            return False
        rates = [group.get("lr") for group in optimizer.param_groups]
        numbers = [rate for rate in rates if isinstance(rate, int | float)]
        if not any(numbers) and len(numbers) == len(rates):
            return True
        every = (p.grad for group in optimizer.param_groups for p in group["params"])
        locals_ = [
            g.to_local() if hasattr(g, "to_local") else g
            for g in every
            if g is not None
        ]
        return bool(locals_) and not any(map(torch.any, map(dense, locals_)))

    def _before(self, optimizer: Any) -> None:
        self.preparing.discard(id(optimizer))
        if self.written:
            return
        with self.noting("a step before any forward"):
            if self._prepares(optimizer):
                self.preparing.add(id(optimizer))
                return
        if (running := self.running.get(id(optimizer))) is not None:
            running.call.evaluations += 1  # the closure ran again
            return
        number = self._number(optimizer)
        if number is None:
            return
        start = self.starts.pop(id(optimizer), None)
        with self.noting("the gradients"), torch.no_grad():
            if self.calls[number] in self.steps:
                start = start or self._state_of(optimizer)
                also = dict[str, Any]()
                if self.scaler is not None:
                    also["loss scale"] = scale_of(self.scaler)
                if len(self.limits) == 1 and math.isfinite(min(self.limits)):
                    also["limit of clip_grad_norm_"] = min(self.limits)
                count = self.calls[number]
                step = Step.of(optimizer, number, count, start, also)
                self.running[id(optimizer)] = step
        if self.orders.nudge:
            with self.noting("the rounding of gradients"):
                own = nudge_gradients(optimizer, self.orders.nudge)
                self.replaced[id(optimizer)] = own

    def _ended(self, optimizer: Any) -> None:
        """Read the results of a step; after the last recorded one write the file."""
        step = self.running.pop(id(optimizer), None)
        self.limits.clear()
        for parameter, gradient in self.replaced.pop(id(optimizer), ()):
            parameter.grad = gradient
        if self.written or id(optimizer) in self.preparing:
            return
        number = self._number(optimizer)
        if number is None:
            return
        self.calls[number] += 1
        if step is not None:
            with self.noting("the update"), torch.no_grad():
                step.end()
                self.done.append(step)
                self.process, self.rank = os.getpid(), this_rank()
                if dist.is_initialized():
                    self.recording.world_size = dist.get_world_size()
                self.begun |= {(id(optimizer), part.key) for part in step.start.parts}
        if self.calls[number] == self.steps.stop:
            if self.others is None:
                self.others = [weakref.ref(each) for each in living(Optimizer)]
            with self.noting("the weights after the last step"), torch.no_grad():
                self.finals.append((number, self._state_of(optimizer)))
        if self._is_complete():
            self.write()
            if self.orders.stop:
                self._end()

    def _is_complete(self) -> bool:
        """Return True if all optimizers have made their recorded steps.

        An optimizer may begin later than others.
        """
        if any(count < self.steps.stop for count in self.calls.values()):
            return False
        called = [parameters_of(each) for _, each, _ in self.optimizers.values()]
        stepped = set[int]().union(*called)
        if self.declared:
            return self.trained <= stepped
        living = (o for ref in self.others or () if (o := ref()) is not None)
        # an optimizer of the same parameters wraps one that was called
        return all(parameters_of(each) <= stepped for each in living)

    @contextmanager
    def watching(self, optimizer: Any) -> Iterator[None]:
        """Record the ``step`` of an optimizer that is not a subclass of torch's.

        The class is changed, because jobs save and copy the instance. If ``step`` is
        not a method of the class, such as an attribute or a slot, the instance is
        changed instead.
        """
        kind = type(optimizer)
        member = inspect.getattr_static(kind, "step", None)
        is_slot = isinstance(member, MemberDescriptorType)
        is_own = is_slot or "step" in getattr(optimizer, "__dict__", {})
        is_method = isinstance(member, FunctionType) and not is_own
        owner: Any = kind if is_method else optimizer
        run, is_inherited = owner.step, not is_own and "step" not in vars(owner)
        begins, before, ended = self.hooks.begins, self.hooks.uses, self.hooks.ended

        @wraps(run)
        def step(*args: Any, **kwargs: Any) -> Any:
            if is_method and args[0] is not optimizer:
                return run(*args, **kwargs)
            begins(optimizer)
            before(optimizer)
            result = run(*args, **kwargs)
            ended(optimizer)
            return result

        owner.step = step
        try:
            yield
        finally:
            if is_inherited:
                del owner.step
            else:
                owner.step = run

    def _number(self, optimizer: Any) -> int | None:
        """Return the number of an optimizer; None if it is not recorded."""
        # compared by parameters: a declared optimizer may wrap one of torch
        if self.declared and self.declared.isdisjoint(parameters_of(optimizer)):
            return None
        groups = optimizer.param_groups
        first = next((p for group in groups for p in group["params"]), None)
        key = id(optimizer), id(first)
        if key not in self.optimizers:
            if self.others is not None and isinstance(optimizer, Optimizer):
                if not any(ref() is optimizer for ref in self.others):
                    self.late.add(id(optimizer))
                    return None
            number = len(self.optimizers)
            self.optimizers[key] = number, optimizer, first
            self.calls[number] = self.orders.first
        return self.optimizers[key][0]

    def _state_of(self, optimizer: Any) -> State:
        # the first optimizer steps with the model
        is_first = self._number(optimizer) == 0
        return State.of(optimizer, self.roots, self.begun, buffers=is_first)

    # - The end

    def close_block(self) -> None:
        """Write the recording when the last open block of ``record`` ends."""
        self.open_blocks -= 1
        if not self.open_blocks:
            self.write()

    def tell_block_after_the_end(self) -> None:
        """Say once that a block is not recorded, because an earlier one has ended."""
        steps = self.calls[0] - self.orders.first
        if self.is_told or self.rank or steps >= len(self.steps):
            return
        self.is_told = True
        print(
            "gradparity: a block of record() has ended before, after "
            f"{counted(steps, 'step')}, and this one is not recorded: put one block "
            "around the whole training",
            file=sys.stderr,
        )

    def write(self) -> None:
        """Write the recording once; without a recorded step write the reason."""
        if self.written or (self.done and os.getpid() != self.process):
            return
        if not self.done:
            with self.noting("writing"):
                self._write_why_not()
            return
        # hooks of steps stay, because one of them may be the caller
        self.written = True
        self.patches.close()
        is_written = False
        with self.noting("writing"):
            self._fill()
            try:
                write_rank(self.out, self.rank, self.recording)
            except FileExistsError:
                (self.out / f"{TWICE}{self.rank}").touch()
                raise
            is_written = True
            for _, optimizer, _ in self.optimizers.values():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        self.recorded[id(parameter)] = weakref.ref(parameter)
        self._let_go()
        if not is_written:
            why = self.recording.notes[-1]
            print(f"gradparity: nothing was recorded: {why}", file=sys.stderr)

    def _let_go(self) -> None:
        """Drop all tensors: a job may train another model after this one."""
        self.done, self.finals, self.roots, self.optimizers = [], [], Roots(), {}
        self.running.clear()
        self.starts.clear()
        self.forwards.let_go()

    def _write_why_not(self) -> None:
        calls = {
            type(optimizer).__name__: self.calls[number] - self.orders.first
            for number, optimizer, _ in self.optimizers.values()
        }
        if calls or self.recording.notes or self.roots.called:
            self.out.mkdir(parents=True, exist_ok=True)
            why = Unrecorded(calls=calls, notes=self.recording.notes)
            path = self.out / f"unrecorded-{this_rank()}.json"
            path.write_bytes(msgspec.json.encode(why))

    def _fill(self) -> None:
        """Read all numbers from their devices into the recording."""
        self.forwards.fill()
        out = self.recording
        stepped = {part.name for step in self.done for part in step.start.parts}
        out.unstepped = self.roots.unstepped(stepped)
        for step in self.done:
            out.calls.append(step.call)
            step.call.settings = [s.read() for s in step.call.settings]
            step.call.scale = as_numbers(step.call.scale)
            step.call.found_inf = as_numbers(step.call.found_inf)
            out.tensors.update(step.stored())
        out.notes += self.roots.notes
        if self.late:
            out.notes.append(
                "optimizers that were made after another one had made its steps are "
                "not recorded. If a loop makes optimizers, name yours: put the loop "
                "into `with gradparity.record(model, optimizer):`"
            )
        for number, final in self.finals:
            out.tensors.update(final.stored(number, self.steps.stop))
        for by_step in (out.bags, out.shares):
            for calls in by_step.values():
                calls[:] = [[*map(int, numbers)] for numbers in calls]
        out.norms = {step: as_numbers(calls) for step, calls in out.norms.items()}
        out.losses = {step: list(map(float, each)) for step, each in out.losses.items()}

    def _end(self) -> None:
        """End the process after the last recorded step; all ranks do so."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _noting_errors(self, hook: Callable[[Any], None]) -> Callable[[Any], None]:
        def noted(optimizer: Any) -> None:
            with self.noting("a step"):
                hook(optimizer)

        return noted

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Note an error of the recorder and let the job go on."""
        try:
            yield
        except Exception as error:  # any error: recording must not end the job
            if len(self.recording.notes) < NOTES:
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(last.filename).name}:{last.lineno}"
                text = f"{what}: {type(error).__name__}: {error} ({where})"
                self.recording.notes.append(text[:400])


@contextmanager
def record(
    model: nn.Module, *optimizers: Any, places: Places | None = None
) -> Iterator[None]:
    """Record the training in this block, where ``gradparity record`` cannot find it.

    Does nothing outside of ``gradparity record``. Use it if an optimizer is not a
    subclass of torch's, or if Python is started with ``-I``. Use it also if an inner
    loop trains other models. If all ``optimizers`` are torch's, the optimizers of other
    parameters are then not recorded.

    Args:
        model: module from which the parameters' names are taken.
        optimizers: objects with ``param_groups`` and ``step``. Blocks may be nested,
            each with its own model and optimizers; after the outermost one has ended
            nothing more is recorded.
        places: position of a rank's part, for parameters that are not DTensors: (name,
            parameter) -> (name in the whole model, shape of the whole tensor, position
            of the first element), or None. Needed for shards that are plain tensors,
            and for stages or experts that have one name on several ranks. For a tensor
            of several ranges, a list of these, each with the shape of its range.
    """
    install()
    if recorder is None:
        yield
        return
    every = [o for each in optimizers for o in _listed(each)]
    if recorder.written:
        recorder.tell_block_after_the_end()
        yield
        return
    recorder.roots.places = places or recorder.roots.places
    with recorder.noting("the model of record()"), torch.no_grad():
        recorder.roots.add(model)
        recorder.forwards.prepare(model)
    if not every or not all(isinstance(each, Optimizer) for each in every):
        recorder.records_all = True
        recorder.declared.clear()
    elif not recorder.records_all:  # blocks may be nested, each with its optimizers
        recorder.trained |= set[int]().union(*map(parameters_of, every))
        with recorder.noting("the model of record()"):
            ids = {id(each) for each in model.modules()}
            recorder.declared |= recorder.trained | ids
    recorder.open_blocks += 1
    with ExitStack() as stack:
        stack.callback(recorder.close_block)
        for optimizer in every:
            if not isinstance(optimizer, Optimizer):
                with recorder.noting("an optimizer of record()"):
                    stack.enter_context(recorder.watching(optimizer))
        yield


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


recorder: Recorder | None = None
"""Recorder of this process, or None."""


def install() -> None:
    """Start the recorder if the environment variable ``ORDERS`` is set."""
    global recorder
    if recorder is None and ORDERS in os.environ:
        recorder = Recorder(msgspec.json.decode(os.environ[ORDERS], type=Orders))
        recorder.install()
