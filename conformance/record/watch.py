"""Watch a training job in production: ranks that must be equal are, at each step.

[Note: One small message]
After each step every rank puts some numbers into one vector, with the complement of
each beside it. The largest of a complement is the complement of the least. So one
all-reduce with MAX says for each number whether all ranks that gave one agree; a rank
without one gives the least number there is. A number is 48 bits of a digest, and the
rank in 16: the two that are compared are known. Messages have a process group of their
own, and nobody waits for them: each is read at the first step that finds it arrived. A
rank that skips a step falls behind by a message, and disturbs nobody; its weights are
others, which is told.
"""

from __future__ import annotations

import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from .kept import BITS
from .parts import bare, place
from .rows import rows_of

__all__ = ["RanksDifferError", "Watch", "watch"]

NONE = -(2**63)
"""Number of a rank that has none."""
ODD = 0x1E3779B97F4A7C15
"""Spreads the bits of a digest over the upper ones, which are sent."""
MOST = 60
"""Numbers in one message, which has two of 8 bytes for each: it stays below 1 KB."""
LAST_S = 5.0
"""Seconds to wait for the last messages."""
UNREAD = 16
"""Messages on their way; at one more a rank waits."""
_LOG = logging.getLogger("gradparity.watch")


class RanksDifferError(RuntimeError):
    """Ranks that must be equal are not."""


@dataclass(frozen=True)
class _Weight:
    """A parameter, and ranks that hold the same elements of it, or each its own."""

    name: str
    ranks: tuple[int, ...]
    same: bool


@dataclass
class _Sent:
    """One message, and what its numbers mean."""

    step: int
    about: list[tuple[str, Any]]
    """(kind, what) of each number: ``weight`` and ``settings`` of a weight, ``number``
    of a name in ``equal``; ``rows`` and ``draws`` of ranks that have the same rows: no
    two such sets may share them."""
    digests: list[Tensor]
    """Digests of the weights of this rank."""
    both: Tensor
    """(2, n) int64: the largest of the numbers and of their complements."""
    work: Any

    @property
    def has_arrived(self) -> bool:
        """True if the message can be read without waiting."""
        return self.work is None or bool(self.work.is_completed())


@dataclass
class Watch:
    """Watches until it is closed; made by :func:`watch`."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    mesh: DeviceMesh | None
    data: Sequence[str]
    period: int
    act: Callable[[str], None]
    apart: Sequence[str]
    equal: Mapping[str, Callable[[], float | Tensor]]
    step: int = 0
    _named: dict[str, nn.Parameter] = field(default_factory=dict)
    _turns: list[list[_Weight]] = field(default_factory=list)
    _alike: list[tuple[int, ...]] = field(default_factory=list)
    """Sets of ranks that have the same rows."""
    _groups: dict[int, tuple[int, int]] = field(default_factory=dict)
    """id of a parameter -> numbers of its optimizer and of its param group."""
    _rows: Tensor | None = None
    _state: Tensor | None = None
    """The generator's state when the model was entered first in this step."""
    _sent: deque[_Sent] = field(default_factory=deque)
    _handles: list[Any] = field(default_factory=list)
    _last: dict[str, int] = field(default_factory=dict)
    """Parameter -> its digest when its turn came last."""
    _size: int = 0
    """Numbers in a message."""
    _group: Any = None
    _drawn_alike: bool = False
    """True if it was logged that two sets of ranks draw the same numbers."""

    def __post_init__(self) -> None:
        self._learn(self._exchanged())
        for number, optimizer in enumerate(self.optimizers):
            for place_of, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    self._groups[id(parameter)] = number, place_of
        seen = self.model.register_forward_pre_hook(self._enters, with_kwargs=True)
        stepped = self.optimizers[-1].register_step_post_hook(self._stepped)
        self._handles = [seen, stepped]

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Read the last messages, and watch no more; all ranks call it."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        ends = time.monotonic() + LAST_S
        while self._sent:
            if self._sent[0].has_arrived:
                self._read(self._sent.popleft())
            elif time.monotonic() > ends:
                self.act("gradparity.watch: ranks have taken other numbers of steps")
                return
            else:
                time.sleep(0.001)

    def _exchanged(self) -> list[Any]:
        """Places and digests of the weights of all ranks, and which rows they have."""
        for name, parameter in self.model.named_parameters():
            if hasattr(parameter, "ds_tensor") or hasattr(parameter, "_hp_mapping"):
                raise ValueError("DeepSpeed's parameters hide what a rank holds")
            name = bare(name)
            if parameter.requires_grad and not name.startswith(tuple(self.apart)):
                self._named[name] = parameter
        if any(hasattr(module, "_handle") for module in self.model.modules()):
            raise ValueError("FSDP1's parameters hide what a rank holds: use FSDP2")
        if not self._named:
            raise ValueError("the model has no parameter that is trained and not apart")
        own = {}
        for name, parameter in self._named.items():
            part, box = place(parameter)
            own[name] = box, int(_digest(part))
        if _world() == 1:
            return [(own, ())]
        self._group = dist.new_group()
        everyone: list[Any] = [None] * _world()
        dist.all_gather_object(everyone, (own, self._data_coordinate()), self._group)
        return everyone

    def _learn(self, everyone: Sequence[Any]) -> None:
        """Learn which ranks hold the same, and give each weight its turn."""
        places: dict[Any, list[int]] = {}
        for rank, (theirs, _) in enumerate(everyone):
            for name, (box, _) in theirs.items():
                if box.size:
                    places.setdefault((name, box), []).append(rank)
        weights = [
            _Weight(name, tuple(ranks), True)
            for (name, _), ranks in places.items()
            if len(ranks) > 1
        ]
        for each in weights:
            starts = [everyone[rank][0][each.name][1] for rank in each.ranks]
            for rank, start in zip(each.ranks, starts, strict=True):
                if start != starts[0]:
                    raise RanksDifferError(
                        f"{each.name} begins with other values on rank {rank} than on "
                        f"rank {each.ranks[0]}. If these are other tensors, name them "
                        "in apart="
                    )
        parts: dict[str, list[int]] = {}
        for (name, _), ranks in places.items():
            if len(ranks) == 1:
                parts.setdefault(name, []).extend(ranks)
        weights += [_Weight(n, tuple(sorted(r)), False) for n, r in parts.items()]
        weights.sort(key=lambda each: (each.name, each.ranks))
        # two numbers for each of them, two of rows, two of draws
        others = 4 + len(self.equal)
        size = max(1, min(-(-len(weights) // self.period), (MOST - others) // 2))
        self._size = others + 2 * size
        self._turns = [weights[n : n + size] for n in range(0, len(weights), size)]
        sets: dict[Any, list[int]] = {}
        for rank, (_, coordinate) in enumerate(everyone):
            sets.setdefault(coordinate, []).append(rank)
        if self.mesh is not None:
            self._alike = [tuple(ranks) for _, ranks in sorted(sets.items())]

    def _data_coordinate(self) -> tuple[int, ...]:
        if self.mesh is None:
            return ()
        return tuple(self.mesh.get_local_rank(axis) for axis in self.data)

    def _enters(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or not self._alike:
            return
        tokens, _floats = rows_of([*args, *kwargs.values()])
        for digests in tokens:  # in a pipeline later stages are given numbers
            total = digests.sum()
            self._rows = total if self._rows is None else self._rows + total
        if self._state is None:
            self._state = self._generator_state()

    def _generator_state(self) -> Tensor:
        device = next(iter(self._named.values())).device
        cpu = device.type == "cpu"
        of_device = torch if cpu else torch.get_device_module(device)
        state: Tensor = of_device.get_rng_state()
        return state

    def _stepped(self, *_: Any) -> None:
        while self._sent and (len(self._sent) > UNREAD or self._sent[0].has_arrived):
            self._read(self._sent.popleft())
        self._send()
        self.step += 1

    def _send(self) -> None:
        """Give this step's numbers to the other ranks, and do not wait."""
        about = list[tuple[str, Any]]()
        own = list[Tensor | int]()
        gives = list[bool]()
        digests, rank = list[Tensor](), _rank()
        for each in self._turns[self.step % len(self._turns)] if self._turns else ():
            about += [("weight", each), ("settings", each)]
            gives += [rank in each.ranks and each.same, rank in each.ranks]
            if rank not in each.ranks:
                own += [0, 0]
                continue
            parameter = self._named[each.name]
            digests.append(_digest(place(parameter)[0]))
            own += [digests[-1], self._settings(parameter)]
        for name, number in self.equal.items():
            about.append(("number", name))
            gives.append(True)
            own.append(_bits(number()))
        if self._alike:
            here = next(n for n, ranks in enumerate(self._alike) if rank in ranks)
            # neighbours, each pair in turn
            pair = dict.fromkeys((self.step + n) % len(self._alike) for n in (0, 1))
            state = self._state
            draws = state is not None and not state.equal(self._generator_state())
            drawn = _digest(state) if state is not None and draws else 0
            for place_of in pair:
                ranks = self._alike[place_of]
                about += [("rows", ranks), ("draws", ranks)]
                gives += [self._rows is not None and here == place_of]
                gives += [draws and here == place_of]
                own += [0 if self._rows is None else self._rows, drawn]
        self._rows = self._state = None
        if not about:
            return
        device = next(iter(self._named.values())).device
        values = [torch.as_tensor(v, dtype=torch.int64, device=device) for v in own]
        coded = ((torch.stack(values) * ODD) & -65536) | rank
        absent = ~torch.tensor(gives, device=device)
        both = torch.full((2, self._size), NONE, device=device)  # alike in all turns
        both[:, : len(own)] = torch.stack([coded, ~coded]).masked_fill(absent, NONE)
        work = None
        if self._group is not None:
            work = dist.all_reduce(both, dist.ReduceOp.MAX, self._group, async_op=True)
        self._sent.append(_Sent(self.step, about, digests, both, work))

    def _read(self, sent: _Sent) -> None:
        if sent.work is not None:
            sent.work.wait()
        largest, complements = sent.both.tolist()
        digests = iter(sent.digests)
        sets: dict[tuple[str, int], tuple[int, ...]] = {}
        for (kind, what), most, least in zip(
            sent.about, largest, complements, strict=False
        ):
            if kind == "weight" and _rank() in what.ranks:
                self._moves(sent.step, what, int(next(digests)))
            if NONE in (most, least):
                continue  # nobody gave one
            text = ""
            first = what
            if kind in ("rows", "draws"):
                first = sets.setdefault((kind, most >> 16), what)
            if kind == "draws":
                self._log_draws(sent.step, first, what)
            elif most >> 16 != ~least >> 16:
                text = _words(kind, what, *sorted((most & 65535, ~least & 65535)))
            elif first != what:
                text = f"ranks {first} train on the same rows as ranks {what}"
            if text:
                self.act(f"gradparity.watch: step {sent.step}: {text}")

    def _log_draws(self, step: int, one: Sequence[int], other: Sequence[int]) -> None:
        """Log, once, ranks with other rows that draw the same numbers in forward.

        Many trainers seed all ranks alike: dropout is weaker then, and not wrong.
        """
        if one == other or self._drawn_alike:
            return
        self._drawn_alike = True
        text = "step %d: ranks %s and ranks %s draw the same numbers, as in dropout"
        _LOG.warning(text, step, one, other)

    def _moves(self, step: int, what: _Weight, digest: int) -> None:
        """Log a weight that is what it was when its turn came last."""
        speaks = not what.same or _rank() == what.ranks[0]
        if self._last.get(what.name) == digest and speaks:
            turns = len(self._turns)
            here = "" if what.same else f", what rank {_rank()} holds of it,"
            text = "step %d: %s%s did not move in %d steps"
            _LOG.warning(text, step, what.name, here, turns)
        self._last[what.name] = digest

    def _settings(self, parameter: nn.Parameter) -> int | Tensor:
        """A number for the settings of the param group of a parameter."""
        optimizer, place_of = self._groups.get(id(parameter), (0, -1))
        groups = self.optimizers[optimizer].param_groups
        return _number(groups[place_of]) if 0 <= place_of < len(groups) else 0


def _words(kind: str, what: Any, one: int, other: int) -> str:
    """A sentence about two ranks that differ."""
    if kind == "rows":
        return f"rank {one} and rank {other} train on other rows"
    if kind == "number":
        return f"{what} is another number on rank {other} than on rank {one}"
    if kind == "weight":
        return f"{what.name} has other bits on rank {other} than on rank {one}"
    return f"the settings for {what.name} are others on rank {other} than on rank {one}"


def _number(group: Mapping[str, Any]) -> int | Tensor:
    """One number for all numbers of a param group; a tensor is not read."""
    total: int | Tensor = 0
    for at, (key, value) in enumerate(sorted(group.items())):
        values = value if isinstance(value, tuple | list) else (value,)
        for each in values if key != "params" else ():
            if isinstance(each, Tensor) and each.numel() != 1:
                continue
            if isinstance(each, bool | int | float | Tensor):
                total = total * 31 + _bits(each) * (2 * at + 1)
                total = total if isinstance(total, Tensor) else _wrapped(total)
    return total


def _bits(number: float | Tensor) -> int | Tensor:
    """The bits of a number in fp64; a tensor is not read."""
    if isinstance(number, Tensor):
        return number.detach().reshape(1).double().view(torch.int64)[0]
    (bits,) = struct.unpack("q", struct.pack("d", float(number)))
    return int(bits)


def _wrapped(number: int) -> int:
    """The number modulo 2^64, as int64 has it."""
    return (number + 2**63) % 2**64 - 2**63


def _digest(part: Tensor) -> Tensor:
    """Sum of the bits of elements times an odd word of their place, modulo 2^64."""
    flat = part.detach().reshape(-1)
    bits = flat.view(BITS[flat.element_size()]).to(torch.int64)
    places = torch.arange(flat.numel(), dtype=torch.int64, device=flat.device)
    return (bits * (places * 2 * 0x9E3779B1 + 1)).sum()


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


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
) -> Watch:
    """Watch a job: replicas, settings of optimizers, rows and numbers, at each step.

    All ranks of the default process group call it, after the model is laid out and
    before the first step. One message of less than 1 KB is sent after each step, on a
    process group of its own, and nobody waits for it. Each weight has its turn in
    ``period`` steps; one that did not move since its last turn is logged. So are ranks
    with other rows that draw the same numbers in forward, once.

    Args:
        model: as the optimizers train it.
        optimizers: called in this order at each step.
        mesh: the ranks, if rows are to be watched.
        data: axes of the mesh along which ranks train on other rows. Along all other
            axes ranks train on the same ones.
        period: steps in which each parameter has its turn; more, if there are too many
            for the messages.
        act: called on every rank with a text. It raises :class:`RanksDifferError` if
            none is given; ``logging.getLogger("train").error`` logs.
        apart: beginnings of the names of parameters that are other tensors on each
            rank, such as ``("experts.",)``.
        equal: name -> what gives a number that must be the same on all ranks, such as
            ``{"scale": scaler.get_scale, "norm": lambda: norm}``. Called after each
            step of the last optimizer; a tensor of one element costs no wait.

    Returns:
        The watch; a context manager, or closed by ``close``.

    Raises:
        RanksDifferError: if ranks begin with other weights under one name.
        ValueError: if a layout hides which elements a rank holds, no parameter is
            trained, or ``equal`` has more than 16 names.
    """
    if not optimizers:
        raise ValueError("give the optimizers that train the model")
    if data and mesh is None:
        raise ValueError("give mesh=, whose axes data= names")
    if equal and len(equal) > 16:
        raise ValueError(f"equal= has {len(equal)} names: at most 16 fit a message")
    return Watch(model, optimizers, mesh, data, period, act, apart, equal or {})
