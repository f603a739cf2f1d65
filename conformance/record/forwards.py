"""Calls of the outermost models: their rows, outputs and random numbers.

Hooks of all modules find the outermost models in their first forward. Then the weights
of a model may be replaced, nudged or written. After that nothing is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from .backward import Rounding
from .files import Recording, Stored, this_rank
from .layouts import find_copies
from .modules import Blocks, is_traced
from .orders import Orders
from .parts import trains
from .reading import states_of_generators
from .roots import Roots
from .rows import keep_rows, tensors_in
from .torch_internals import around_compiled
from .weights import begin_from, nudge, write_start

__all__ = ["Forwards"]

IN_16_BITS = {torch.bfloat16, torch.float16}


class Forwards:
    """Reads calls of the outermost models into a recording."""

    def __init__(
        self,
        orders: Orders,
        recording: Recording,
        roots: Roots,
        declared: set[int],
        next_step: Callable[[], int | None],
        noting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Create the reader; ``install`` adds its hooks.

        Args:
            orders: steps to record, and changes of the weights at the start.
            recording: object that gets rows, losses and outputs.
            roots: outermost modules; this class adds the called ones.
            declared: ids of the modules and parameters to record; empty for all.
            next_step: function that returns the number of the next optimizer step, or
                None if that step is not recorded.
            noting: takes the name of an action and returns a context manager, which
                notes an error of the action and lets the job go on.
        """
        self.orders = orders
        self.recording = recording
        self.roots = roots
        self.declared = declared
        self.next_step = next_step
        self.noting = noting
        self.prepared: set[int] = set()
        """ids of all parameters of prepared models."""
        self.models = 0
        """Number of prepared models."""
        self.outer: set[int] = set()
        """ids of the called models."""
        self.inner: set[int] = set()
        """ids of the called models and of all modules inside them."""
        self.entered: dict[int, tuple[int, list[Tensor]]] = {}
        """id of a running model -> next step, and states of the random generators, when
        the model was called."""
        self.in_16_bits: dict[torch.dtype, dict[int, nn.Module]] = {}
        """Dtype of 16 bits -> modules, by id, that returned this dtype."""
        self.rounding = Rounding(noting) if orders.rounds else None
        self.blocks = Blocks(noting) if orders.modules else None
        if self.blocks is not None and self.rounding is not None:
            self.blocks.of_loss = self.rounding.of_loss
        self.patches = ExitStack()
        """Removes hooks, and puts torch's own functions back."""

    def install(self) -> None:
        """Hook the forward of all modules.

        Hooks on a model itself would be saved and copied with the model.
        """
        compile_in_place = nn.Module.compile

        @wraps(compile_in_place)
        def compiles(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            compile_in_place(module, *args, **kwargs)
            around_compiled(module, self._called, self._left)

        undo = self.patches.callback
        undo(register_module_forward_pre_hook(self._called).remove)
        undo(register_module_forward_hook(self._left, always_call=True).remove)
        undo(setattr, nn.Module, "compile", compile_in_place)
        nn.Module.compile = compiles  # type: ignore[method-assign,assignment]
        if self.blocks is not None:
            undo(self.blocks.remove)
        if self.rounding is not None:
            undo(self.rounding.remove)
            self.rounding.install()

    def remove(self) -> None:
        """Remove all hooks."""
        self.patches.close()

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
            position = self._forget_parts(module, ids)
            self.inner |= ids
            # a job may also call the module inside of DDP
            is_wrapper = isinstance(module, DistributedDataParallel)
            model: nn.Module = module.module if is_wrapper else module  # type: ignore[assignment]  # that of DDP is a module
            self.roots.called.insert(position, model)
            self.outer.add(id(model))
            self.prepare(module)
            if self.blocks is not None and self.roots.called[0] is model:
                with self.noting("--modules"):
                    self.blocks.hook(model)
            if not is_wrapper:  # DDP's hook calls this hook again for the module inside
                self._enters(model, args)

    def _forget_parts(self, module: nn.Module, ids: set[int]) -> int:
        """Forget recorded models that turn out to be parts of a larger one.

        A layer may be called by itself while the model is built, to infer its size. The
        rows recorded so far are kept if the new module only wraps the model.

        Returns:
            Position of the larger model among the called ones: that of its first part.
        """
        called = self.roots.called
        if called and id(called[0]) in ids:
            before, now = (len([*m.parameters()]) for m in (called[0], module))
            if before < now:
                self.recording.forget_rows()
            if self.blocks is not None:
                self.blocks.remove()
        self.outer -= ids
        is_part = [id(each) in ids for each in called]
        position = [*is_part, True].index(True)
        called[:] = [each for each in called if id(each) not in ids]
        return position

    def prepare(self, module: nn.Module) -> None:
        """Write, replace or nudge the weights of a model, once, whatever wraps it."""
        own = {id(parameter) for parameter in module.parameters()}
        if own <= self.prepared:
            return
        number = self.models
        self.models += 1
        self.prepared |= own
        find_copies(module, self.roots)
        if self.orders.start:
            note = begin_from(Path(self.orders.start), number, module, self.roots)
            self.recording.notes += [note] if note else []
        if self.orders.keep_start:
            write_start(Path(self.orders.out), this_rank(), module, self.roots)
        if self.orders.nudge:
            nudge(module, self.orders.nudge, self.roots)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self.inner or is_traced():
            return
        if self.next_step() is not None:
            with self.noting("the output of a module"):
                for dtype in {t.dtype for t in tensors_in(output)} & IN_16_BITS:
                    self.in_16_bits.setdefault(dtype, {})[id(module)] = module
        if id(module) in self.outer:
            if self.rounding is not None:
                self.rounding.see(output)
            self._leaves(module, output)

    def _enters(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or (step := self.next_step()) is None:
            return
        with self.noting("rows"):
            # inputs of a second model may be outputs of the first one
            if module is self.roots.called[0]:
                inputs = [*args, *_keywords_of_caller().values()]
                if not all(_has_values(t) for each in inputs for t in tensors_in(each)):
                    return
                digests = keep_rows(self.recording, step, inputs)
                if self.blocks is not None:
                    self.blocks.begin(step, digests, inputs)
            self.entered[id(module)] = step, _generators(module)

    def _leaves(self, module: nn.Module, output: Any) -> None:
        if self.blocks is not None and module is self.roots.called[0]:
            self.blocks.end()
        if (entered := self.entered.pop(id(module), None)) is None:
            return
        step, before = entered
        with self.noting("the output of the model"):
            if not all(map(torch.equal, before, _generators(module))):
                self.recording.drew.add(step)
            floats = (t for t in tensors_in(output) if t.is_floating_point())
            main = next((t for t in floats if t.numel() > 1), None)
            if main is not None:
                self.recording.outputs.add(str(main.dtype).removeprefix("torch."))
            loss = getattr(output, "loss", output)
            if isinstance(loss, Tensor) and loss.numel() == 1 and _has_values(loss):
                self.recording.losses.setdefault(step, []).append(loss.detach())

    def fill(self) -> None:
        """Read all numbers from their devices into the recording."""
        out = self.recording
        out.drops = sorted(
            name
            for module in self.roots.called
            for name, each in module.named_modules()
            if isinstance(getattr(each, "p", None), float) and 0 < each.p < 1
        )
        out.in_16_bits = {
            str(dtype).removeprefix("torch."): sorted(
                self.roots.names_of(
                    p for m in modules.values() for p in m.parameters(recurse=False)
                )
            )
            for dtype, modules in self.in_16_bits.items()
        }
        if self.blocks is not None:
            out.rows_of_blocks, outputs = self.blocks.read()
            for (at, kind, name), (box, sums) in outputs.items():
                out.tensors[f"0/{at}/{kind}/0/{name}"] = Stored.of(box, sums)

    def let_go(self) -> None:
        """Drop all modules and tensors: the job may train another model."""
        self.roots, self.in_16_bits, self.blocks = Roots(), {}, None
        self.entered.clear()


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


def _keywords_of_caller() -> dict[str, Any]:
    """Return the keyword arguments of the module call whose global hook runs."""
    frame: Any = sys._getframe(3)
    while frame is not None and frame.f_code.co_name not in ("inner", "_call_impl"):
        frame = frame.f_back
    keywords = {} if frame is None else frame.f_locals.get("kwargs", {})
    return keywords if isinstance(keywords, dict) else {}
