"""Recorder: runs inside a training job and records some steps of its optimizers.

It hooks every optimizer of torch, and calls of the outermost model. At the start it may
replace or nudge the weights. After that it writes into no tensor. It does not
communicate, and never makes training wait for a device: numbers stay on their device
until the last recorded step. An error of the recorder is noted, and the job goes on.
"""

from __future__ import annotations

import atexit
import gc
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
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..status import counted
from .backward import Rounding
from .clipping import call_of
from .files import Recording, Stored, as_numbers, write_rank
from .modules import Blocks, is_traced
from .orders import LATE, ORDERS, TWICE, Orders, Unrecorded
from .parts import trains
from .reading import State, Step, dense, states_of_generators
from .roots import Places, Roots
from .rows import keep_rows, tensors_in
from .steps import StepHooks, parameters_of
from .torch_internals import around_clipping, around_compiled, scale_of
from .weights import begin_from, nudge, nudge_gradients, write_start

__all__ = ["Recorder", "install", "record"]

IN_16_BITS = {torch.bfloat16, torch.float16}
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
        self.prepared: set[int] = set()
        """ids of all parameters of prepared models."""
        self.models = 0
        """Number of prepared models."""
        self.inner: set[int] = set()
        """ids of the called models and of all modules inside them."""
        self.rounding = Rounding(self.noting) if orders.rounds else None
        self.blocks = Blocks(self.noting) if orders.modules else None
        if self.blocks is not None and self.rounding is not None:
            self.blocks.of_loss = self.rounding.of_loss
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
        self.generators: dict[int, list[Tensor]] = {}
        """id of a model -> states of the random generators when it was called."""
        self.process = os.getpid()
        """Process that recorded the last step: a fork of it writes nothing."""
        self.rank = _rank()
        """Rank at the last recorded step; the job may destroy its process group."""
        self.written = False
        self.outer: set[int] = set()
        """ids of the called models."""
        self.in_16_bits: dict[torch.dtype, dict[int, nn.Module]] = {}
        """Dtype of 16 bits -> modules, by id, that returned this dtype."""
        self.patches = ExitStack()
        """Removes global module hooks, and puts torch's own functions back. Hooks on
        the model itself would be saved and copied with it."""
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
        compile_in_place, scaled_step = nn.Module.compile, GradScaler.step

        @wraps(compile_in_place)
        def compiles(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            compile_in_place(module, *args, **kwargs)
            around_compiled(module, self._called, self._left)

        @wraps(scaled_step)
        def steps(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            self.scaler = scaler
            try:
                return scaled_step(scaler, *args, **kwargs)
            finally:
                self.scaler = None

        undo = self.patches.callback
        undo(register_module_forward_pre_hook(self._called).remove)
        undo(register_module_forward_hook(self._left, always_call=True).remove)
        undo(setattr, nn.Module, "compile", compile_in_place)
        nn.Module.compile = compiles  # type: ignore[method-assign,assignment]
        undo(setattr, GradScaler, "step", scaled_step)
        GradScaler.step = steps  # type: ignore[method-assign,assignment]
        undo(around_clipping(self._clips))
        self.hooks.install()
        if self.rounding is not None:
            undo(self.rounding.remove)
            self.rounding.install()
        atexit.register(self.write)

    def remove(self) -> None:
        """Remove all hooks; the recorder then holds no reference to the model."""
        self._look_away()
        self.hooks.remove()
        atexit.unregister(self.write)

    # - The model

    def _called(self, module: nn.Module, args: Any) -> None:
        """Find outermost models, and read their inputs; a global forward pre-hook.

        An outermost model is a trained module that no recorded model contains.
        """
        if is_traced():
            return
        if id(module) in self.inner:
            if id(module) in self.outer:
                self._enters(module, args)
            return
        with self.noting("the first forward"):
            if not torch.is_grad_enabled() or not trains(module):
                return
            if _passes_a_method_on(module):
                return  # which calls the models
            if any(map(is_lazy, module.parameters())):
                return  # this call makes the parameters
            if any(p.grad_fn is not None for p in module.parameters()):
                return  # functional_call has put other tensors in their place
            ids = {id(each) for each in module.modules()}
            own = {id(each) for each in module.parameters()} | ids
            if self.declared and self.declared.isdisjoint(own):
                return
            self._forget_parts(module, ids)
            self.inner |= ids
            # a job may call the module that DDP wraps, too
            is_wrapper = isinstance(module, DistributedDataParallel)
            model: nn.Module = module.module if is_wrapper else module  # type: ignore[assignment]  # that of DDP is a module
            self.roots.called.append(model)
            self.outer.add(id(model))
            self.prepare(module)
            if self.blocks is not None and len(self.roots.called) == 1:
                with self.noting("--modules"):
                    self.blocks.hook(model)
            if not is_wrapper:  # DDP's hook calls this hook again for the module inside
                self._enters(model, args)

    def _forget_parts(self, module: nn.Module, ids: set[int]) -> None:
        """Forget recorded models that turn out to be parts of a larger one.

        A layer may be called by itself while the model is built, to infer its size. The
        rows recorded so far are kept if the new module only wraps the model.
        """
        called = self.roots.called
        if called and id(called[0]) in ids:
            before, now = (len([*m.parameters()]) for m in (called[0], module))
            if before < now:
                self.recording.forget_rows()
            if self.blocks is not None:
                self.blocks.remove()
        self.outer -= ids
        called[:] = [each for each in called if id(each) not in ids]

    def prepare(self, module: nn.Module) -> None:
        """Write, replace or nudge the weights of a model, once, whatever wraps it."""
        own = {id(parameter) for parameter in module.parameters()}
        if own <= self.prepared:
            return
        number = self.models
        self.models += 1
        self.prepared |= own
        if self.orders.start:
            note = begin_from(Path(self.orders.start), number, module, self.roots)
            self.recording.notes += [note] if note else []
        if self.orders.keep_start:
            write_start(self.out, _rank(), module, self.roots)
        if self.orders.nudge:
            nudge(module, self.orders.nudge, self.roots)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self.inner or is_traced():
            return
        if self._records_next():
            with self.noting("the output of a module"):
                for dtype in {t.dtype for t in tensors_in(output)} & IN_16_BITS:
                    self.in_16_bits.setdefault(dtype, {})[id(module)] = module
        if id(module) in self.outer:
            if self.rounding is not None:
                self.rounding.see(output)
            self._leaves(module, output)

    def _look_away(self) -> None:
        self.patches.close()
        if self.blocks is not None:
            self.blocks.remove()

    def _enters(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or not self._records_next():
            return
        with self.noting("rows"):
            # inputs of a second model may be outputs of the first one
            if module is self.roots.called[0]:
                inputs = [*args, *_keywords_of_caller().values()]
                if not all(_has_values(t) for each in inputs for t in tensors_in(each)):
                    return
                digests = keep_rows(self.recording, self._next(), inputs)
                if self.blocks is not None:
                    self.blocks.begin(self._next(), digests, inputs)
            self.generators[id(module)] = _generators(module)

    def _leaves(self, module: nn.Module, output: Any) -> None:
        if self.blocks is not None and module is self.roots.called[0]:
            self.blocks.end()
        before = self.generators.pop(id(module), None)
        if before is None:
            return
        with self.noting("the output of the model"):
            if not all(map(torch.equal, before, _generators(module))):
                self.recording.drew.add(self._next())
            floats = (t for t in tensors_in(output) if t.is_floating_point())
            main = next((t for t in floats if t.numel() > 1), None)
            if main is not None:
                self.recording.outputs.add(str(main.dtype).removeprefix("torch."))
            loss = getattr(output, "loss", output)
            if isinstance(loss, Tensor) and loss.numel() == 1 and _has_values(loss):
                self.recording.losses.setdefault(self._next(), []).append(loss.detach())

    def _clips(self, norm: Any, limit: float) -> None:
        if is_traced() or not self._records_next():
            return
        with self.noting("the norm of clipped gradients"):
            calls = self.recording.norms.setdefault(self._next(), [])
            calls.append(call_of(norm, limit))
            self.limits.add(float(limit))

    def _next(self) -> int:
        """Return the number of the next step; the first optimizer counts the steps."""
        return self.calls[0] if self.optimizers else self.orders.first

    def _records_next(self) -> bool:
        return not self.written and self._next() in self.steps

    # - Optimizers

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
                self.process, self.rank = os.getpid(), _rank()
                if dist.is_initialized():
                    self.recording.world_size = dist.get_world_size()
                self.begun |= {(id(optimizer), part.key) for part in step.start.parts}
        if self.calls[number] == self.steps.stop:
            if self.others is None:
                every = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
                self.others = [weakref.ref(each) for each in every]
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
        self._look_away()
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
        self.done, self.finals, self.roots = [], [], Roots()
        self.optimizers, self.in_16_bits, self.blocks = {}, {}, None
        for each in (self.running, self.starts, self.generators):
            each.clear()

    def _write_why_not(self) -> None:
        calls = {
            type(optimizer).__name__: self.calls[number] - self.orders.first
            for number, optimizer, _ in self.optimizers.values()
        }
        if calls or self.recording.notes or self.roots.called:
            self.out.mkdir(parents=True, exist_ok=True)
            why = Unrecorded(calls=calls, notes=self.recording.notes)
            path = self.out / f"unrecorded-{_rank()}.json"
            path.write_bytes(msgspec.json.encode(why))

    def _fill(self) -> None:
        """Read all numbers from their devices into the recording."""
        out = self.recording
        out.drops = sorted(
            name
            for module in self.roots.called
            for name, each in module.named_modules()
            if isinstance(getattr(each, "p", None), float) and 0 < each.p < 1
        )
        stepped = {part.name for step in self.done for part in step.start.parts}
        out.unstepped = self.roots.unstepped(stepped)
        out.in_16_bits = {
            str(dtype).removeprefix("torch."): sorted(
                self.roots.names_of(
                    p for m in modules.values() for p in m.parameters(recurse=False)
                )
            )
            for dtype, modules in self.in_16_bits.items()
        }
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
        if self.blocks is not None:
            out.rows_of_blocks, outputs = self.blocks.read()
            for (at, kind, name), (box, sums) in outputs.items():
                out.tensors[f"0/{at}/{kind}/0/{name}"] = Stored.of(box, sums)
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


def _generators(module: nn.Module) -> list[Tensor]:
    """Return the states of the generators that the forward of a model may use."""
    return states_of_generators(next(module.parameters()).device)


def _passes_a_method_on(module: nn.Module) -> bool:
    """Return True for a call of Lightning that leads to ``training_step``.

    Lightning replaces ``forward`` for the call, so that DDP or FSDP sees it. On one
    process it calls ``training_step`` itself.
    """
    inner = getattr(module, "module", module)
    forward = vars(inner).get("forward")
    return str(getattr(forward, "__module__", "")).endswith(".strategies.strategy")


def _has_values(tensor: Tensor) -> bool:
    """Return False for a fake tensor, and inside ``vmap``."""
    if type(tensor).__name__ == "FakeTensor":  # reading a FakeTensor would warn
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def _keywords_of_caller() -> dict[str, Any]:
    """Return the keyword arguments of the module call whose global hook runs."""
    frame: Any = sys._getframe(3)
    while frame is not None and frame.f_code.co_name not in ("inner", "_call_impl"):
        frame = frame.f_back
    keywords = {} if frame is None else frame.f_locals.get("kwargs", {})
    return keywords if isinstance(keywords, dict) else {}


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
        recorder.prepare(model)
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
