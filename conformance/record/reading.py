"""Numbers that the recorder reads of one optimizer step.

[Note: Read points of a step]
- When a step begins: the bits of weights, optimizer states and buffers, and sketches of
  running statistics.
- Once its gradients are computed: the gradients, and each weight times the absolute
  value of its gradient.
- After the step: the bits of weights, and each new weight times the absolute value of
  the same gradient.

The difference of the two products is the update weighted by the gradient. Without these
factors, rounding would decide the direction of Adam's updates wherever the gradient is
small. Where the gradient is zero, as in rows of an embedding, the update itself is
read: decay or momentum may move these weights.

The bits of weights are read after a step and again when the next one begins, because a
job may change them in between. A kernel may change the gradients during a step. If a
fused kernel has divided them by the scale, the first product is divided, too. SGD with
Nesterov momentum may add to the gradients, so they are copied.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD

from .files import Call, Settings, Stored, copied
from .kept import BUFFER, IDLE, ORIGINAL, RESULT, Box, Sums, Wanted
from .layouts import parts_of
from .parts import Part, place
from .roots import Roots
from .torch_internals import version_of

__all__ = ["State", "Step", "dense", "states_of_generators"]


@dataclass
class State:
    """Bits of an optimizer's weights and states, and of buffers, between two steps."""

    parts: list[Part]
    bits: Sums[tuple[str, str]]
    """(kind, key of a part) -> bits."""

    @classmethod
    def of(
        cls,
        optimizer: Any,
        roots: Roots,
        begun: Container[tuple[int, str]],
        *,
        buffers: bool,
    ) -> State:
        """Start to read the bits.

        Args:
            optimizer: optimizer whose weights are read.
            roots: modules that name the weights.
            begun: (id of optimizer, key of part) for parts with a recorded step. For
                a part that begins now, the digest of its weight rounded to bf16 is also
                read: a side in 16 bits may begin with the rounded weights. For copies
                of parameters it is always read.
            buffers: true to also read the buffers of the called models.
        """
        parts = list(parts_of(optimizer, roots))
        wanted: dict[tuple[str, str], Wanted] = {}
        # there is no digest after rounding to fp16
        originals = {id(s): p for s, p in roots.copies if p.dtype != torch.float16}
        for part in parts:
            original = originals.get(id(part.stepped))
            is_rounded = original is not None
            is_rounded |= (id(optimizer), part.key) not in begun
            wanted["weight", part.key] = Wanted(
                part.weight, part.box, only_bits=True, rounded=is_rounded
            )
            if original is not None:
                own = part.cut(original)
                wanted[ORIGINAL, part.key] = Wanted(*own, only_bits=True)
            state = getattr(optimizer, "state", None) or {}
            for key, value in state.get(part.stepped, {}).items():
                if isinstance(value, Tensor):
                    has_its_shape = value.shape == part.stepped.shape
                    local, box = part.cut(value) if has_its_shape else place(value)
                    wanted[f"state.{key}", part.key] = Wanted(
                        local, box, only_bits=True
                    )
        for name, local, box, is_statistic in roots.buffers() if buffers else ():
            only_bits = not is_statistic
            wanted[BUFFER, f"0/{name}"] = Wanted(local, box, only_bits=only_bits)
        return cls(parts, Sums(wanted))

    def stored(self, number: int, step: int) -> Iterator[tuple[str, Stored]]:
        """Read the bits from their devices; yield (key, bits) of each tensor.

        Args:
            number: number of the optimizer.
            step: step that begins with this state.
        """
        for (kind, part), each in self.bits.read().items():
            box = self.bits.boxes[kind, part]
            yield f"{number}/{step}/{kind}/{part}", Stored.of(box, each)


@dataclass
class Step:
    """One running call of an optimizer."""

    call: Call
    start: State
    sums: Sums[tuple[str, str]]
    """Tensors read once the gradients are computed, by (kind, key of a part)."""
    gradients: dict[str, tuple[Tensor, Box, int | None]]
    """Key of a part -> gradient, its box and its version, until the step has ended. The
    version is None where a kernel may write without counting."""
    after: Sums[tuple[str, str]] | None = None
    """Tensors read after the step, by (kind, key of a part)."""

    @classmethod
    def of(
        cls,
        optimizer: Any,
        number: int,
        step: int,
        start: State,
        also: Mapping[str, Any],
    ) -> Step:
        """Start to read settings and gradients, once these are computed.

        Args:
            optimizer: optimizer that steps.
            number: number of the optimizer.
            step: number of this step of the optimizer.
            start: state in which the step began.
            also: settings that no param group has.
        """
        parts = start.parts
        groups = optimizer.param_groups
        names_by_id: dict[int, list[str]] = {}
        for part in parts:
            names_by_id.setdefault(id(part.stepped), []).append(part.name)
        of_group = [
            [name for p in group["params"] for name in names_by_id.get(id(p), ())]
            for group in groups
        ]
        call = Call(
            optimizer=number,
            kind=type(optimizer).__name__,
            step=step,
            settings=[
                Settings.of(names, {**group, **also})
                for names, group in zip(of_group, groups, strict=True)
            ],
            scale=copied(getattr(optimizer, "grad_scale", None)),
            found_inf=copied(getattr(optimizer, "found_inf", None)),
            unnamed=sum(id(p) not in names_by_id for g in groups for p in g["params"]),
        )
        is_overwritten = any(map(partial(_writes_gradients, optimizer), groups))
        # a fused kernel of torch writes without counting
        counts = type(optimizer).__module__.startswith("torch.optim.")
        counts = counts and not any(group.get("fused") for group in groups)
        gradients: dict[str, tuple[Tensor, Box, int | None]] = {}
        wanted: dict[tuple[str, str], Wanted] = {}
        for part in parts:
            if part.stepped.grad is None:
                call.without_gradient.append(part.name)
                continue
            gradient, box = part.cut(dense(part.stepped.grad))
            if is_overwritten:
                gradient = gradient.clone()
            version = version_of(gradient) if counts else None
            gradients[part.key] = gradient, box, version
            wanted["gradient", part.key] = Wanted(gradient, box)
            if box == part.box:
                wanted |= _weighted("before", part, gradient)
        return cls(call, start, Sums(wanted), gradients)

    def end(self) -> None:
        """Start to read weights after the step, and gradients that may have changed."""
        wanted: dict[tuple[str, str], Wanted] = {}
        for part in self.start.parts:
            if ("before", part.key) not in self.sums.boxes:
                continue
            gradient, box, version = self.gradients[part.key]
            wanted |= _weighted("after", part, gradient)
            if version is None or version != version_of(gradient):
                only_bits = self.call.scale is None
                wanted["again", part.key] = Wanted(gradient, box, only_bits=only_bits)
            wanted[RESULT, part.key] = Wanted(part.weight, part.box, only_bits=True)
        self.after = Sums(wanted)
        self.gradients.clear()

    def stored(self) -> Iterator[tuple[str, Stored]]:
        """Read all numbers from their devices; yield (key, numbers) of each tensor."""
        number, step = self.call.optimizer, self.call.step
        yield from self.start.stored(number, step)
        boxes, kept = self.sums.boxes, self.sums.read()
        for (kind, part), each in kept.items():
            if not kind.startswith("before"):
                key = f"{number}/{step}/{kind}/{part}"
                yield key, Stored.of(boxes[kind, part], each)
        units = {p.key: torch.finfo(p.weight.dtype).eps for p in self.start.parts}
        after = {} if self.after is None else self.after.read()
        for part in (part for kind, part in after if kind == RESULT):
            result = Stored.of(boxes["before", part], after[RESULT, part])
            yield f"{number}/{step}/{RESULT}/{part}", result
            first = kept["gradient", part]
            again = after.get(("again", part), first)
            scale = 1.0
            if not torch.equal(again.digest, first.digest):
                # a fused kernel divides gradients by the scale, in place
                scale = float(self.call.scale or 0.0)
                if not again.is_share_of(first, scale):
                    continue  # something else has changed the gradient
            for end, kind in _UPDATES.items():
                before = kept[f"before{end}", part]
                if kind != IDLE:
                    before = before.divided(scale)
                update = after[f"after{end}", part].update(before, units[part])
                if kind == IDLE and not update.digest:  # no gradient is zero
                    update = replace(update, sketch=None)
                key = f"{number}/{step}/{kind}/{part}"
                yield key, Stored.of(boxes["before", part], update)


_UPDATES = {"": "update", " idle": IDLE}
"""Suffix of the kinds ``before`` and ``after`` of two readings of weights -> kind of
the difference of the readings."""


def _weighted(when: str, part: Part, gradient: Tensor) -> dict[tuple[str, str], Wanted]:
    """Return requests for the weights whose difference is an update.

    Args:
        when: ``before`` or ``after`` the step.
        part: weights that are read.
        gradient: gradient of the weights, in their layout.
    """
    return {
        (f"{when}{end}", part.key): Wanted(
            part.weight, part.box, weight=gradient, idle=kind == IDLE
        )
        for end, kind in _UPDATES.items()
    }


def _writes_gradients(optimizer: Any, group: dict[str, Any]) -> bool:
    """Return True if a step may add momentum to the gradients themselves.

    The foreach kernel of torch's SGD does so with Nesterov momentum. On a GPU it is the
    default.
    """
    return (
        isinstance(optimizer, SGD)
        and bool(group["nesterov"])
        and group["foreach"] is not False
    )


def dense(gradient: Tensor) -> Tensor:
    """Return a sparse gradient as a dense copy, and any other one as it is."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def states_of_generators(device: torch.device) -> list[Tensor]:
    """Return the states of Python's, numpy's and torch's random generators.

    torch has one on the CPU, and one on the given device.
    """
    own = [] if device.type in ("cpu", "meta") else [torch.get_device_module(device)]
    # a job may have given numpy another generator, with a state of other keys
    others = pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))
    digest = hashlib.blake2b(others).digest()
    states = [torch.get_rng_state(), *(each.get_rng_state(device) for each in own)]
    return [torch.tensor([*digest], device="cpu"), *states]
