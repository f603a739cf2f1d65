"""Record where the random generators stand at calls of modules.

The random numbers of a call follow from its generator's state at the start of the call.
So states show which calls draw the same numbers. No operator is intercepted, and user
code is compiled as without gradparity. A layer without parameters applies the numbers
to its input. Ranks on which that input is bitwise equal hold the same activation, in
any layout, so no knowledge of placements is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..record.parts import bare
from ..space.random_layers import generators_of
from ..space.recomputation import Recomputed
from .modules import modules_in, names_of, with_layers_beside
from .observe import digest, local_part
from .torch_internals import in_backward
from .trace import Draw

__all__ = ["DrawLog"]

VARIED = 64
"""Number of nonzero values that are read to decide if a tensor is varied enough to
identify an activation. So a large tensor is not read in full at every call."""


@dataclass(kw_only=True)
class _Call:
    """A running call of a module."""

    module: nn.Module
    states: tuple[str, ...]
    """State of each generator at the start of the call."""
    recomputed: bool
    applied: str = ""
    varied: bool = False
    given: Tensor | None = None
    """Input of the call, which it may change in place; None if the module has
    parameters."""
    drew: set[int] = field(default_factory=set)
    """Indices of the generators that the call moved."""


class DrawLog:
    """Records which calls of modules draw random numbers while it is active.

    Covers torch's default generators and generators that are attributes of modules. A
    call during backward counts if gradients are enabled: it is a recomputed forward
    (activation checkpointing).
    """

    def __init__(
        self,
        stack: object,
        recomputed: Recomputed | None = None,
        whole: Set[str] = frozenset(),
        parameters: Mapping[str, Tensor] = {},
        dropouts: Mapping[str, float] = {},
    ) -> None:
        """Take the object whose modules are observed.

        Args:
            stack: a module, or an object that holds modules.
            recomputed: parts whose forward gradparity recomputes.
            whole: names of the modules of the full model.
            parameters: name in the full model -> laid-out parameter.
            dropouts: name of a dropout in the full model -> its probability.
        """
        self.draws: list[Draw] = []
        self.outside = 0
        """Number of draws outside of any observed module's call."""
        self._names: dict[nn.Module, str] = {}
        for root in modules_in(stack):
            self._names |= _full_names(root, whole, parameters)
        self._dropouts = {name for name, probability in dropouts.items() if probability}
        self._generators = _generators(self._names)
        self._recomputed = recomputed
        self._open: list[_Call] = []
        self._hooks = ExitStack()
        self._last = self._states()
        self._seen: set[str] = set()

    def __enter__(self) -> Self:
        """Begin to record."""
        for module in self._names:
            # Registered after the hooks of the stack, which lay out the inputs. A call
            # also ends if forward raises.
            for hook in (
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave, always_call=True),
            ):
                self._hooks.callback(hook.remove)
        if self._recomputed is not None:
            self._hooks.callback(
                setattr, self._recomputed, "around", self._recomputed.around
            )
            self._recomputed.around = self._part
        self._last = self._states()
        self._seen.update(self._last)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop recording."""
        self._hooks.close()
        self._open.clear()
        self._look()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # a hook must add nothing to the graph
            return
        self._look()
        again = in_backward()
        call = _Call(module=module, states=self._last, recomputed=again)
        if next(module.parameters(), None) is None:
            inputs = [*_floating((args, kwargs))]
            call.applied, call.varied = _applied(inputs)
            call.given = inputs[0].detach().clone() if inputs else None
        self._open.append(call)

    @contextmanager
    def _part(self, module: nn.Module) -> Iterator[None]:
        """Observe the forward of a recomputed part, whose hooks do not run again."""
        self._enter(module, (), {})
        try:
            yield
        finally:
            self._leave(module, (), None)

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._meet(module)
        self._look()
        # an exception that stops a recomputation may leave several calls open
        while self._open:
            call = self._open.pop()
            if call.module is module:
                break
        else:
            return
        trains = torch.is_grad_enabled()
        # without gradients it was no recomputation: a hook has called the module
        if call.drew and call.recomputed and not trains:
            return
        # also record a dropout that drops nothing: it may be in eval mode
        drops = trains and not call.recomputed and self._names[module] in self._dropouts
        if not (call.drew or drops):
            return
        draw = Draw(
            module=self._names[module],
            layer=type(module).__name__,
            state=" ".join(call.states[number] for number in sorted(call.drew)),
            applied=call.applied,
            varied=call.varied,
            recomputed=call.recomputed,
            **_dropped(call.given, next(_floating(output), None)),
        )
        self.draws.append(draw)

    def _meet(self, module: nn.Module) -> None:
        """Also observe the generators that a module created during its call."""
        for generator in generators_of(module):
            if not any(generator is each for each in self._generators):
                # the generator's state before the first number
                fresh = torch.Generator(generator.device).manual_seed(
                    generator.initial_seed()
                )
                state = (digest(fresh.get_state()),)
                self._generators.append(generator)
                self._last += state
                for call in self._open:
                    call.states += state

    def _look(self) -> None:
        """Assign the draws since the last look to the innermost running call."""
        now = self._states()
        moved = {
            n for n, (a, b) in enumerate(zip(self._last, now, strict=True)) if a != b
        }
        if self._open:
            self._open[-1].drew |= moved
        else:  # a state that was seen before was restored by checkpointing, not drawn
            self.outside += len({now[n] for n in moved} - self._seen)
        self._seen.update(now)
        self._last = now

    def _states(self) -> tuple[str, ...]:
        states = (generator.get_state() for generator in self._generators)
        return tuple(map(digest, states))


def _full_names(
    root: nn.Module, whole: Set[str], parameters: Mapping[str, Tensor]
) -> dict[nn.Module, str]:
    """Return each module's name in the full model, or in the stack if it has none."""
    full = names_of(root, whole, parameters) if whole else {}
    full = with_layers_beside(root, full, whole)
    plain = {module: bare(name) for name, module in root.named_modules()}
    # a stage that numbers its layers from 0 uses names of other layers
    if any(plain[module] != name for module, name in full.items()):
        plain = {module: f"{name} of its stage" for module, name in plain.items()}
    return plain | full


def _generators(modules: Mapping[nn.Module, str]) -> list[torch.Generator]:
    own = {id(g): g for module in modules for g in generators_of(module)}
    # before CUDA is initialised, torch has no generators for GPUs
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *cuda, *own.values()]


def _floating(tree: Any) -> Iterator[Tensor]:
    """Yield the local parts of all floating-point tensors in a value."""
    if isinstance(tree, Tensor):
        if tree.is_floating_point():
            yield local_part(tree)
    elif isinstance(tree, Mapping):
        yield from _floating([*tree.values()])
    elif isinstance(tree, list | tuple):
        for branch in tree:
            yield from _floating(branch)


def _applied(tensors: list[Tensor]) -> tuple[str, bool]:
    """Return (digest, is varied) of the tensors to which random numbers are applied.

    Tensors with few different values, such as zeros, may be equal by accident on ranks
    with different activations. Only varied tensors identify an activation.
    """
    if not tensors:
        return "", False
    largest = max(tensors, key=Tensor.numel)
    values = largest[largest != 0].reshape(-1)[:VARIED]
    # true if a third of the values differ, and at least three
    varied = 3 * values.unique().numel() >= max(values.numel(), 8)
    return "-".join(map(digest, tensors)), varied


def _dropped(given: Tensor | None, output: Tensor | None) -> dict[str, Any]:
    """Return the fields ``by_row`` and ``kept`` of a call's ``Draw``.

    Rows may share one draw on purpose, for example if a whole layer is dropped or
    features are masked. Then the same elements are dropped in all rows, and ``by_row``
    is False. Returns {} if input and output have different shapes.
    """
    if given is None or output is None or output.shape != given.shape or not given.ndim:
        return {}
    dropped = (output == 0) & (given != 0)
    both = (output != 0) & (given != 0)
    factors = output.detach()[both].double() / given[both].double()
    alike = None
    if len(factors):
        middle = factors.median()
        off = 4 * torch.finfo(output.dtype).eps  # rounding of a product
        if bool(((factors - middle).abs() <= off * middle.abs()).all()):
            alike = middle.item()
    return {"by_row": bool((dropped != dropped[:1]).any()), "kept": alike}
