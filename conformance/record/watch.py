"""Watch a training job in production: compare ranks that must be equal, at each step.

[Note: One small message]
After each step every rank puts some numbers into one vector, and the complement of each
number beside it. One all-reduce with MAX gives the largest of each number, and from the
complements the smallest. If both are equal, all ranks agree. A rank without a number
sends the smallest possible one. A number has 48 bits of a digest and 16 bits of the
rank, so the report can name two ranks that differ.

Messages have a process group of their own, and no rank waits for them: a message is
read at the first step after it arrived. A rank that skips a step falls behind by one
message and disturbs no other rank. Its weights then differ, which is reported.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from .kept import Box, digest_of
from .landing import Landing, send
from .modules import is_traced
from .parts import bare, place
from .roots import Roots
from .topics import (
    Answer,
    Clipped,
    Data,
    Number,
    Numbers,
    RanksDifferError,
    Read,
    Topic,
    Weights,
    rank_here,
    warn,
    weights_of,
)
from .torch_internals import in_join, joinable

__all__ = ["RanksDifferError", "Watch", "watch"]

NONE = -(2**63)
"""Placeholder sent by a rank that has no number."""
ODD = 0x1E3779B97F4A7C15
"""Odd factor that mixes the bits of a digest into its upper ones, which are sent."""
MOST = 60
"""Upper limit of the numbers in a message: with 16 bytes for each it stays below 1
KB."""
LAST_S = 5.0
"""Seconds to wait for the last messages."""
UNREAD = 16
"""Limit of unread messages; above it a rank waits before it sends the next one."""
_LOG = logging.getLogger("gradparity.watch")


@dataclass
class _Message:
    """Numbers of one step that were sent and not yet read."""

    step: int
    parts: Sequence[tuple[int, Read]]
    """(number of consecutive numbers, reader of their answers) of each topic."""
    landing: Landing
    """(n,) int64: numbers of this rank. (2, n) int64: the largest over all ranks, of
    numbers and of their complements."""

    def read(self) -> Iterator[str]:
        """Pass the answers to the topics, and yield their messages."""
        own, both = (tensor.tolist() for tensor in self.landing.read())
        answers = [
            Answer(number, *((None, None) if NONE in pair else (pair[0], ~pair[1])))
            for number, pair in zip(own, zip(*both, strict=True), strict=False)
        ]
        rest = iter(answers)
        for count, read in self.parts:
            yield from read([*islice(rest, count)])


@dataclass
class Watch:
    """Comparison of ranks during training, made by :func:`watch`; runs until closed."""

    topics: Sequence[Topic]
    act: Callable[[str], None]
    device: torch.device
    group: Any
    joinable: Sequence[Any] = ()
    """Models and optimizers that can run under torch's ``join()``."""
    patience: float = 60.0
    """Longest time in seconds that a step waits for a message of another rank."""
    step: int = 0
    handles: list[Any] = field(default_factory=list)
    """Handles of the hooks of models and optimizers."""
    _sent: deque[_Message] = field(default_factory=deque)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the job's own error must reach the user
            self._stop()
            self.act = _LOG.error
            self._read(len(self._sent), 0.0)
            self._abandon()

    def close(self) -> None:
        """Read the last messages and stop watching; all ranks must call it."""
        if not self.step and self.handles:
            text = "no step of the watched optimizer was seen: watch the one that steps"
            warn(0, text)
        if self.step and self.handles:  # the weights after the last step
            self._send(only_weights=True)
        self._stop()
        self._read(0, LAST_S)

    def stepped(self, *_: Any) -> None:
        """Send this step's numbers and read messages that arrived; a step hook."""
        if in_join(self.joinable):
            self._stop()
            text = "within join() ranks take other numbers of steps"
            warn(self.step, f"the watch ends: {text}")
            return
        # send before reading, which may raise: no rank falls behind if the job goes on
        self._send()
        self.step += 1
        self._read(UNREAD, self.patience)

    def _stop(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    def _read(self, most: int, seconds: float) -> None:
        """Read messages that have arrived.

        Args:
            most: number of messages that may stay unread; with more the rank waits.
            seconds: longest time to wait; then the watch ends.
        """
        ends = time.monotonic() + seconds
        while self._sent:
            if self._sent[0].landing.is_there:
                message = self._sent.popleft()
                try:
                    texts = [*message.read()]
                except RuntimeError as error:  # raised if the other process has ended
                    self._end(message.step, str(error))
                    return
                for text in texts:
                    self.act(f"gradparity.watch: step {message.step}: {text}")
            elif len(self._sent) <= most:
                return
            elif time.monotonic() > ends:
                self._end(self._sent[0].step, f"none within {seconds:g} s")
                return
            else:
                time.sleep(0.001)

    def _abandon(self) -> None:
        """Drop messages that never arrived, and let the process exit without them.

        A process group of gloo waits for its messages when it is destroyed. So it is
        never destroyed: it gets a reference that nothing drops.
        """
        if self._sent:
            for pending in (self.group, *(message.landing for message in self._sent)):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(pending))
        self._sent.clear()

    def _end(self, step: int, why: str) -> None:
        """Stop watching, and report that a message of another rank is missing."""
        self._abandon()
        self._stop()
        self.act(
            "gradparity.watch: ranks have taken other numbers of steps: rank "
            f"{rank_here()} lacks a message of another rank for step {step} ({why}). "
            "The watch ends"
        )

    def _send(self, *, only_weights: bool = False) -> None:
        """Send this step's numbers to the other ranks without waiting.

        Args:
            only_weights: true after the last step: other topics have no numbers then.
        """
        numbers, parts = list[Number](), list[tuple[int, Read]]()
        for topic in self.topics:
            own: Sequence[Number] = [Number(is_given=False)] * topic.size
            read: Read = _ignored
            if not only_weights or isinstance(topic, Weights):
                own, read = topic.give(self.step)
            numbers += own
            parts.append((len(own), read))
        if not numbers:
            return
        values = [each.value for each in numbers]
        lacking = [not each.is_given for each in numbers]
        mine, absent = send([*values, *lacking], self.device).chunk(2)
        coded = ((mine * ODD) & -65536) | rank_here()
        # the same on all ranks and at all steps
        size = sum(topic.size for topic in self.topics)
        both = torch.full((2, size), NONE, device=self.device)
        both[:, : len(numbers)] = torch.stack([coded, ~coded]).masked_fill(
            absent.bool(), NONE
        )
        works = []
        if self.group is not None:
            largest = dist.ReduceOp.MAX
            works.append(dist.all_reduce(both, largest, self.group, async_op=True))
        self._sent.append(_Message(self.step, parts, Landing([mine, both], works)))


def _ignored(_: Sequence[Answer]) -> Iterator[str]:
    return iter(())


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _raise(text: str) -> None:
    raise RanksDifferError(text)


def watch(
    model: nn.Module,
    *optimizers: Optimizer,
    mesh: DeviceMesh | None = None,
    data: Sequence[str] = (),
    period: int = 64,
    act: Callable[[str], None] = _raise,
    apart: Sequence[str] = (),
    equal: Mapping[str, Callable[[], float | Tensor]] | None = None,
    clipped: Callable[[], tuple[float | Tensor, float]] | None = None,
) -> Watch:
    """Compare ranks at each step: replicas, optimizer settings, rows and numbers.

    All ranks of the default process group must call this function, after the model is
    laid out and before the first step. One message of less than 1 KB is sent after each
    step, on a process group of its own, and no rank waits for it. Each weight is
    checked once in ``period`` steps; a weight that did not move since its last check is
    logged. Ranks with different rows that draw the same random numbers in forward are
    logged once.

    Args:
        model: model that the optimizers train.
        optimizers: optimizers, in the order in which each step calls them.
        mesh: mesh of all ranks; needed to compare rows.
        data: axes of the mesh along which ranks train on different rows. Along all
            other axes ranks train on the same rows.
        period: number of steps in which each parameter is checked once. The number is
            raised if the parameters do not fit into the messages.
        act: called on every rank with each report. The default raises
            :class:`RanksDifferError`; use ``logging.getLogger("train").error`` to log.
        apart: name prefixes of parameters that are different tensors on each rank, such
            as ``("experts.",)``.
        equal: name -> function whose result must be the same on all ranks, such as
            ``{"scale": scaler.get_scale, "norm": lambda: norm}``. Called after each
            step of the last optimizer. A result on the device is not waited for.
        clipped: function that returns the norm before clipping, as a number or tensor,
            and the limit: ``lambda: (norm, 1.0)``. The norm of the clipped gradients
            over all shards must be the smaller of both. One step in ``period`` is
            checked, by a message of 8 bytes.

    Returns:
        The watch. Use it as a context manager, or call ``close``.

    Raises:
        RanksDifferError: if replicas begin with different weights.
        TypeError: if an argument has another type.
        ValueError: if a layout hides which elements a rank holds, no parameter is
            trained, or ``equal`` has more than 16 names. Also if ``clipped`` is given
            with ``apart`` or several optimizers: clipped gradients are then unknown.
    """
    apart, data = ((each,) if isinstance(each, str) else each for each in (apart, data))
    _check(model, optimizers, mesh, data, period, equal or {}, clipped)
    if clipped is not None and (apart or len(optimizers) > 1):
        raise ValueError(
            "clipped= needs one optimizer of all parameters, and no apart="
        )
    named, boxes = _named(model, apart)
    device = next(p.device for p in named.values() if p.requires_grad)
    own = {
        name: (boxes[name], int(digest_of(place(parameter)[0])))
        for name, parameter in named.items()
    }
    here = tuple(mesh.get_local_rank(axis) for axis in data) if mesh is not None else ()
    everyone: list[Any] = [(own, here)]
    group = None
    if _world() > 1:
        group = dist.new_group()
        everyone = [None] * _world()
        dist.all_gather_object(everyone, (own, here), group)
    topics: list[Topic] = []
    handles = []
    if mesh is not None:
        sets: dict[tuple[int, ...], list[int]] = {}
        for rank, (_, coordinate) in enumerate(everyone):
            sets.setdefault(coordinate, []).append(rank)
        topics.append(rows := Data([tuple(r) for _, r in sorted(sets.items())], device))
        enters = _Enters(rows)
        handles.append(model.register_forward_pre_hook(enters, with_kwargs=True))
    weights = weights_of([held for held, _ in everyone])
    if clipped is not None:
        rank = rank_here()
        mine = [named[each.name] for each in weights if each.is_counted_by(rank)]
        topics.append(Clipped(mine, clipped, period, group, device))
    numbers = Numbers(equal or {})
    room = (MOST - numbers.size - sum(topic.size for topic in topics)) // 2
    turn = max(1, min(-(-len(weights) // period), room))
    replicas = Weights(named, optimizers, weights, turn)
    watching = Watch(
        # causes first: other numbers and settings lead to other weights
        [numbers, replicas, *topics],
        act,
        device,
        group,
        joinable([*model.modules(), *optimizers]),
    )
    handles += [
        each.register_step_pre_hook(lambda *_: replicas.begin(watching.step))
        for each in optimizers
    ]
    handles.append(optimizers[-1].register_step_post_hook(watching.stepped))
    watching.handles = handles
    return watching


def _check(
    model: Any,
    optimizers: Sequence[Any],
    mesh: Any,
    data: Sequence[str],
    period: int,
    equal: Mapping[str, Any],
    clipped: Any,
) -> None:
    """Raise for arguments of the wrong type or value; see `watch`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch needs a torch.nn.Module, and got {_kind(model)}")
    if not optimizers:
        raise ValueError("give the optimizers that train the model")
    for optimizer in optimizers:
        if not _takes_hooks(optimizer):
            raise TypeError(
                f"watch needs optimizers of torch, and got {_kind(optimizer)}: give "
                "each as an argument, and of a wrapper the optimizer inside of it"
            )
    if data and mesh is None:
        raise ValueError(
            "data= has axes of a device mesh, and there is no mesh=: give the mesh"
        )
    axes = () if mesh is None else mesh.mesh_dim_names or ()
    if unknown := [axis for axis in data if isinstance(axis, str) and axis not in axes]:
        raise ValueError(f"data= has {unknown[0]!r}, and the axes of mesh= are {axes}")
    if period < 1:
        raise ValueError(f"period= is a number of steps, and got {period}")
    if len(equal) > 16:
        raise ValueError(f"equal= has {len(equal)} names: at most 16 fit a message")
    functions = equal if clipped is None else {**equal, "clipped=": clipped}
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(
                f"{name} needs a function, and got {function!r}: write lambda: ..."
            )


def _takes_hooks(optimizer: Any) -> bool:
    """Return True if an optimizer takes torch's step hooks; some wrappers do not."""
    if not isinstance(optimizer, Optimizer):
        return False
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except (AttributeError, TypeError):  # such as torch's PostLocalSGDOptimizer
        return False
    return True


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


class _Enters:
    """Forward pre-hook of the model; in a saved or copied model it does nothing."""

    def __init__(self, rows: Data) -> None:
        self._rows = rows

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not is_traced():
            self._rows.enters(module, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # a call that accepts any arguments, returns None, and loads nothing of
        # gradparity
        return partial, (sys.audit, "gradparity.watch")


def _named(
    model: nn.Module, apart: Sequence[str]
) -> tuple[dict[str, nn.Parameter], dict[str, Box]]:
    """Return the watched parameters by name, and the box of each in the whole model.

    A parameter with several pieces, such as a gated layer, is represented by its first
    piece: ranks that share the first piece share all pieces.
    """
    roots = Roots()
    roots.add(model)
    named: dict[str, nn.Parameter] = {}
    boxes: dict[str, Box] = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_tensor") or hasattr(parameter, "_hp_mapping"):
            raise ValueError("DeepSpeed's parameters hide the shard of a rank")
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device: fill it before watch")
        name = bare(name)
        local, box = place(parameter)
        # a class without plain storage, such as a quantized weight, has no bits to
        # compare
        if (parameter.requires_grad or type(local) is Tensor) and not name.startswith(
            tuple(apart)
        ):
            piece = roots.pieces(name, parameter, box)[0]
            named[piece.name], boxes[piece.name] = parameter, piece.box
    handles = (getattr(module, "_handle", None) for module in model.modules())
    if any(hasattr(handle, "flat_param") for handle in handles):
        raise ValueError("FSDP1's parameters hide the shard of a rank: use FSDP2")
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ValueError("the model has no trained parameter outside of apart=")
    return named, boxes
