"""Topics of a watch: weights, data and numbers, each with its part of a message."""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..status import counted, rank_list
from .kept import Box, digest_of
from .landing import Landing
from .parts import place
from .rows import digests_of_floats, rows_of, tensors_in

__all__ = [
    "Answer",
    "Clipped",
    "Data",
    "Number",
    "Numbers",
    "RanksDifferError",
    "Read",
    "Topic",
    "Weights",
    "rank_here",
    "warn",
    "weights_of",
]

SLACK = 0.02
"""Relative tolerance of a norm: clipping rounds gradients, in bf16 by 0.2 %."""
UNSEEN = 4
"""Number of steps without rows before a warning; at least the number of sets of ranks
that train on different rows."""


class RanksDifferError(RuntimeError):
    """Error of a watch: ranks that must be equal differ."""


@dataclass(frozen=True)
class Number:
    """One number that this rank sends to the other ranks."""

    value: int | Tensor = 0
    is_given: bool = True
    """False if this rank has no number to send."""


@dataclass(frozen=True)
class Answer:
    """Largest and smallest number among ranks, each with a rank that sent it."""

    own: int
    """Number that this rank sent; meaningless if this rank sent none."""
    most: int | None
    """Largest number, with its rank in the lower 16 bits; None if no rank sent one."""
    least: int | None

    @property
    def number(self) -> int | None:
        """Largest number; None if no rank sent one."""
        return None if self.most is None else self.most >> 16

    @property
    def least_number(self) -> int | None:
        """Smallest number; None if no rank sent one."""
        return None if self.least is None else self.least >> 16

    @property
    def ranks(self) -> tuple[int, ...]:
        """Two ranks with different numbers, lower rank first; empty if all agree."""
        if self.most is None or self.least is None:
            return ()
        ranks = sorted((self.most & 65535, self.least & 65535))
        return tuple(ranks) if self.most >> 16 != self.least >> 16 else ()

    @property
    def where(self) -> str:
        """End of a sentence: ``on rank 3 than on rank 1``; empty if all agree."""
        return " than ".join(f"on rank {rank}" for rank in reversed(self.ranks))


Read = Callable[[Sequence[Answer]], Iterator[str]]
"""Takes the answers to a topic's numbers, and yields a message for each fault."""


class Topic(Protocol):
    """Part of a watch: provides its numbers of a step, and reads the answers."""

    size: int
    """Upper limit of the numbers that the topic sends at a step."""

    def give(self, step: int) -> tuple[Sequence[Number], Read]:
        """Return the numbers of a step, and a function that reads the answers.

        All ranks must return equally many numbers.
        """


@dataclass(frozen=True)
class _Weight:
    """A parameter, and the ranks that hold elements of it.

    Attributes:
        name: name of the parameter.
        ranks: ranks that hold elements of the parameter.
        same: true if all these ranks hold the same elements.
    """

    name: str
    ranks: tuple[int, ...]
    same: bool

    def is_counted_by(self, rank: int) -> bool:
        """Return True on the rank that counts these elements in a sum over ranks."""
        return rank in (self.ranks[:1] if self.same else self.ranks)


def weights_of(held: Sequence[Mapping[str, tuple[Box, int]]]) -> list[_Weight]:
    """Find out which ranks hold the same elements.

    Args:
        held: for each rank: name -> box and digest of its local elements.

    Raises:
        RanksDifferError: if replicas begin with different weights.
    """
    places: dict[tuple[str, Box], list[int]] = {}
    for rank, boxes in enumerate(held):
        for name, (box, _) in boxes.items():
            if box.size:
                places.setdefault((name, box), []).append(rank)
    weights = list[_Weight]()
    parts: dict[str, list[int]] = {}
    for (name, _), ranks in places.items():
        if len(ranks) == 1:
            parts.setdefault(name, []).extend(ranks)
            continue
        weights.append(_Weight(name, tuple(ranks), True))
        for rank in ranks:
            if held[rank][name][1] != held[ranks[0]][name][1]:
                raise RanksDifferError(
                    f"{name} begins with other values on rank {rank} than on rank "
                    f"{ranks[0]}. If these are different tensors, name them in apart="
                )
    weights += [_Weight(name, tuple(sorted(r)), False) for name, r in parts.items()]
    return sorted(weights, key=lambda each: (each.name, each.ranks))


class Weights:
    """Topic that compares the bits of replicas and the settings of their param groups.

    Each step checks some of the weights in turn, as they are when the step begins: a
    job may make them equal after its optimizer's step. Weights that never move are
    logged.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        weights: Sequence[_Weight],
        turn: int,
    ) -> None:
        """Split the weights into turns.

        Args:
            named: parameters of this rank.
            optimizers: optimizers whose param groups hold the settings.
            weights: result of :func:`weights_of`.
            turn: number of weights that are checked at one step.
        """
        self.size = 2 * turn
        self.turns = [weights[n : n + turn] for n in range(0, len(weights), turn)]
        self._named, self._optimizers = named, optimizers
        self._bits: dict[str, int | Tensor] | None = None
        """Parameter -> digest, for the parameters that this step checks; None before
        the step begins."""
        self._trains: dict[str, bool] = {}
        """Parameter -> True if it was trained in the step of its last check."""
        self._groups: dict[int, tuple[int, int]] = {}
        self._known = set[int]()
        """ids of the unwatched parameters that optimizers have had so far."""
        self._last: dict[str, int] = {}
        """Parameter -> its digest when it was checked last."""
        self._still = set[str]()
        """Parameters that stood still when they were checked last."""

    def begin(self, step: int) -> None:
        """Read the weights in turn, when the first optimizer steps."""
        if self._bits is not None:
            return
        self._bits = {
            each.name: digest_of(place(self._named[each.name])[0])
            for each in self._turn(step)
            if rank_here() in each.ranks
        }

    def _turn(self, step: int) -> Sequence[_Weight]:
        return self.turns[step % len(self.turns)] if self.turns else []

    def give(self, step: int) -> tuple[Sequence[Number], Read]:
        """Return two numbers for each weight in turn: its bits, and its settings."""
        self.begin(step)  # if no step was called
        assert self._bits is not None
        rank, turn = rank_here(), self._turn(step)
        groups = dict[str, Mapping[str, Any]]()
        if not self.turns or step % len(self.turns) == 0:
            self._learn(step)
        numbers, trained = list[Number](), set[str]()
        for each in turn:
            if rank not in each.ranks:
                numbers += [Number(is_given=False)] * 2
                continue
            parameter = self._named[each.name]
            group = self._group(parameter)
            groups[each.name] = {**group}  # a schedule changes the group
            bits = self._bits[each.name]
            numbers.append(Number(bits, is_given=each.same))
            # with ZeRO a rank's optimizer may lack the parameter
            numbers.append(Number(_number(group), is_given=bool(group)))
            if parameter.requires_grad and not self._is_paused(parameter):
                trained.add(each.name)
        self._bits = None

        def read(answers: Sequence[Answer]) -> Iterator[str]:
            # settings first, because different settings lead to different bits
            for each, settings in zip(turn, answers[1::2], strict=True):
                if settings.ranks:
                    yield (
                        f"{rank_list(settings.ranks)} have different settings for "
                        f"{each.name}{_shown(groups.get(each.name, {}))}"
                    )
            for each, bits in zip(turn, answers[::2], strict=True):
                if rank in each.ranks:
                    self._moves(step, each, bits.own, each.name in trained)
                if bits.ranks:
                    # different tensors that begin as zeros or ones look like replicas
                    yield (
                        f"{each.name} has other bits {bits.where}. If these are "
                        "different tensors, name them in apart="
                    )

        return numbers, read

    def _moves(self, step: int, weight: _Weight, digest: int, trains: bool) -> None:
        """Warn of a trained weight with the same bits in two checks, until it moves."""
        speaks = not weight.same or rank_here() == weight.ranks[0]
        was_trained = self._trains.get(weight.name, False)
        self._trains[weight.name] = trains
        if self._last.get(weight.name) != digest:
            self._still.discard(weight.name)
        elif was_trained and speaks and weight.name not in self._still:
            self._still.add(weight.name)
            turns = len(self.turns)
            here = "" if weight.same else f", what rank {rank_here()} holds of it,"
            steps = counted(turns, "step")
            warn(step, f"{weight.name}{here} did not move in {steps}")
        self._last[weight.name] = digest

    def _learn(self, step: int) -> None:
        """Find each parameter's param group; warn of parameters that joined later."""
        self._groups = {
            id(parameter): (number, at)
            for number, optimizer in enumerate(self._optimizers)
            for at, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        watched = {id(parameter) for parameter in self._named.values()}
        later = self._groups.keys() - self._known - watched
        self._known |= later
        if later and step:
            warn(
                step,
                f"{counted(len(later), 'parameter')} joined an optimizer after watch "
                "was called. To watch all, close the watch and call watch again",
            )

    def _group(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """Return the param group of a parameter; empty if it has none."""
        optimizer, at = self._groups.get(id(parameter), (0, -1))
        groups = self._optimizers[optimizer].param_groups
        return groups[at] if 0 <= at < len(groups) else {}

    def _is_paused(self, parameter: nn.Parameter) -> bool:
        """Return True if the learning rate is 0, as at the start of a warm-up."""
        rate = self._group(parameter).get("lr")
        return not isinstance(rate, Tensor) and rate == 0


def _shown(group: Mapping[str, Any]) -> str:
    """Return the settings of a param group as text; empty if it has none."""
    values = ((key, _text_of(group[key])) for key in group if key != "params")
    numbers = ", ".join(f"{key} {text}" for key, text in values if text)
    return f" (rank {rank_here()} has {numbers})" if numbers else ""


class Numbers:
    """Topic that compares numbers given by the user's functions."""

    def __init__(self, equal: Mapping[str, Callable[[], float | Tensor]]) -> None:
        """Take the functions that return the numbers, by name."""
        self.size = len(equal)
        self._equal = equal

    def give(self, step: int) -> tuple[Sequence[Number], Read]:
        """Return the user's numbers."""
        own = {name: _given(name, number) for name, number in self._equal.items()}

        def read(answers: Sequence[Answer]) -> Iterator[str]:
            for (name, bits), answer in zip(own.items(), answers, strict=True):
                if answer.ranks:
                    (value,) = struct.unpack("d", struct.pack("q", int(bits)))
                    yield (
                        f"{name} differs between {rank_list(answer.ranks)} (it is "
                        f"{value:.9g} on rank {rank_here()})"
                    )

        return [*map(Number, own.values())], read


class Clipped:
    """Topic that compares the norm of clipped gradients with the job's own norm.

    The norm is computed over all shards; an element held by several ranks counts once.
    The job gives the norm before clipping and the limit. After clipping the norm should
    be the smaller of the two.
    """

    size = 0

    def __init__(
        self,
        own: Sequence[nn.Parameter],
        clipped: Callable[[], tuple[float | Tensor, float]],
        period: int,
        group: Any,
        device: torch.device,
    ) -> None:
        """Take the parameters that this rank counts, and the period of the check.

        Args:
            own: this rank's parameters; no other rank counts the same elements.
            clipped: function that returns the norm before clipping, and the limit.
            period: number of steps from one check to the next.
            group: group of all ranks; None for one process.
            device: device of the parameters.
        """
        self._own, self._clipped = own, clipped
        self._warned = False
        self._period, self._group, self._device = period, group, device

    def give(self, step: int) -> tuple[Sequence[Number], Read]:
        """Begin to add up the squares of the clipped gradients over ranks.

        The sum is a message of its own, of 8 bytes, sent only at steps with a check.
        """
        if step % self._period:
            return (), lambda _: iter(())
        norm, limit = self._clipped()
        norm = _plain("clipped=", norm)
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        hidden = 0
        for parameter in self._own:
            square = _square_of(parameter)
            hidden += square is None
            squares += math.nan if square is None else square
        if hidden and not self._warned:
            self._warned = True
            warn(
                step,
                f"clipped= checks nothing: rank {rank_here()} has "
                f"{counted(hidden, 'gradient')} not summed yet, or laid out otherwise "
                "than the weight",
            )
        works = []
        if self._group is not None:
            works.append(dist.all_reduce(squares, group=self._group, async_op=True))
        sums = [squares]
        if isinstance(norm, Tensor) and norm.device.type != "cpu":
            # a copy, because the job may write into the norm before it is read
            sums.append(norm.detach().to(squares, copy=True))
        else:
            norm = float(norm)
        landing = Landing(sums, works)

        def read(_: Sequence[Answer]) -> Iterator[str]:
            square, *norms = map(float, landing.read())
            whole = norms[0] if norms else float(norm)
            after, due = math.sqrt(square), min(whole, limit)
            if abs(after - due) > SLACK * due:  # the comparison is False for nan
                yield (
                    f"after clipping, the gradients of all shards have the norm "
                    f"{after:.4g} and should have {due:.4g}: clipped= gave on rank "
                    f"{rank_here()} a norm of {whole:.4g} and a limit of {limit:.4g}. "
                    "Is that the 2-norm of all shards, each replica counted once?"
                )

        return (), read


def _square_of(parameter: nn.Parameter) -> Tensor | None:
    """Return the sum of squares of a gradient; 0 if there is no gradient.

    Returns None if the gradient is a partial sum, or laid out otherwise than the
    parameter.
    """
    if parameter.grad is None:
        return torch.zeros((), device="cpu")
    part, box = place(parameter.grad)
    if box != place(parameter)[1]:
        return None
    if part.is_sparse:
        part = part.coalesce().values()
    norm: Tensor = torch.linalg.vector_norm(part, dtype=torch.float32)
    return norm.square()


class Data:
    """Topic for rows of the model's inputs, and for random numbers of its forward."""

    size = 6

    def __init__(self, sets: Sequence[tuple[int, ...]], device: torch.device) -> None:
        """Take the sets of ranks that train on the same rows, and the device."""
        self._sets = sets
        cpu = device.type == "cpu"
        self._generator: Any = torch if cpu else torch.get_device_module(device)
        self._rows: Tensor | None = None
        """Digest of the integer inputs of this step."""
        self._inputs: Tensor | None = None
        """Digest of all inputs of this step."""
        self._state: Tensor | None = None
        """State of the generator at the first call of the model in this step."""
        self._logged = False
        """True if it was logged that two sets of ranks draw the same numbers."""
        self._unseen = 0
        """Number of steps without rows on any rank; -1 once a rank had rows, or a
        DTensor."""

    def enters(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Read the rows of the model's inputs, as a forward pre-hook."""
        if not torch.is_grad_enabled():
            return
        # a DTensor may hold a part of a row
        tensors = [*tensors_in([*args, *kwargs.values()])]
        inputs = [tensor for tensor in tensors if not hasattr(tensor, "device_mesh")]
        if len(inputs) < len(tensors):
            self._unseen = -1
        # later stages of a pipeline get numbers that another stage computed
        for digests in rows_of(inputs):
            self._rows = _plus(self._rows, digests.sum())
            self._inputs = _plus(self._inputs, digests.sum())
        for digest in digests_of_floats(inputs):
            self._inputs = _plus(self._inputs, digest)
        if self._state is None:
            self._state = self._generator.get_rng_state()

    def _pair(self, step: int) -> list[tuple[int, ...]]:
        """Return the two sets of ranks to compare at a step.

        Early steps pair each set with the next one, later steps with sets further on.
        """
        count = len(self._sets)
        distance = 1 + step // count % max(1, count - 1)
        pair = dict.fromkeys((step % count, (step + distance) % count))
        return [self._sets[n] for n in pair]

    def give(self, step: int) -> tuple[Sequence[Number], Read]:
        """Return digests of rows and of random draws, to compare two sets of ranks."""
        rank, sets = rank_here(), self._pair(step)
        rows, inputs, state = self._rows, self._inputs, self._state
        self._rows = self._inputs = self._state = None
        draws = state is not None and not state.equal(self._generator.get_rng_state())
        drawn = digest_of(state) if state is not None and draws else 0
        numbers = list[Number]()
        for ranks in sets:
            here = rank in ranks
            for digest in (rows, inputs):
                is_given = here and digest is not None
                numbers.append(Number(0 if digest is None else digest, is_given))
            numbers.append(Number(drawn, here and draws))

        def read(answers: Sequence[Answer]) -> Iterator[str]:
            rows, inputs, draws = answers[::3], answers[1::3], answers[2::3]
            for answer in rows:
                if answer.ranks:
                    one, other = answer.ranks
                    yield f"rank {one} and rank {other} train on different rows"
            if _are_equal(inputs) and not any(answer.ranks for answer in rows):
                yield (
                    f"{rank_list(sets[0])} and {rank_list(sets[1])} train on the same "
                    "rows"
                )
            self._sees(step, any(answer.number is not None for answer in inputs))
            if _are_equal(draws) and not self._logged:
                # only a warning: many trainers seed all ranks alike, which weakens
                # dropout
                self._logged = True
                who = " and ".join(map(rank_list, sets))
                warn(step, f"{who} draw the same numbers, as in dropout")

        return numbers, read

    def _sees(self, step: int, has_rows: bool) -> None:
        """Warn once if no rank has had rows since the watch began."""
        if has_rows:
            self._unseen = -1
        if self._unseen < 0:
            return
        self._unseen += 1
        if self._unseen == max(UNSEEN, len(self._sets)):
            self._unseen = -1
            if rank_here() == 0:
                warn(
                    step,
                    "rows are not compared, because no rank called the watched model "
                    "with rows. Give watch the module that the training loop calls: "
                    "DDP's, or the one that torch.compile returned, not one that "
                    "model.compile() changed",
                )


def _plus(total: Tensor | None, digest: Tensor) -> Tensor:
    return digest if total is None else total + digest


def _are_equal(answers: Sequence[Answer]) -> bool:
    """Return True if two sets of ranks sent the same numbers."""
    numbers = {(answer.number, answer.least_number) for answer in answers}
    return len(answers) == 2 and len(numbers) == 1 and answers[0].number is not None


def _number(group: Mapping[str, Any]) -> int | Tensor:
    """Hash the settings of a param group into one number, without device waits."""
    total: int | Tensor = 0
    for at, (key, value) in enumerate(sorted(group.items())):
        values = value if isinstance(value, tuple | list) else (value,)
        for each in values if key != "params" else ():
            if isinstance(each, Tensor) and each.numel() != 1:
                continue
            if isinstance(each, Real | Tensor):
                number = each if isinstance(each, Tensor) else float(each)
                total = _wrapped(total * 31) + _wrapped(_bits(number) * (2 * at + 1))
    return _wrapped(total)


def _text_of(value: Any) -> str:
    """Return a number of a param group, or several, as text; "" for other values.

    Flags are shown only if they are set.
    """
    if isinstance(value, tuple | list):
        texts = [*map(_text_of, value)]
        return f"({', '.join(texts)})" if texts and all(texts) else ""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = float(value)
    if isinstance(value, bool):
        return "True" if value else ""
    # 9 digits distinguish all numbers of fp32
    return f"{value:.9g}" if isinstance(value, Real) else ""


def _given(name: str, number: Callable[[], float | Tensor]) -> int | Tensor:
    """Return the bits of a number that a function of ``equal=`` returned.

    Raises:
        TypeError: if the function returned no number.
    """
    value = _plain(f"equal= has {name}, which", number())
    if isinstance(value, Tensor) and value.numel() != 1:
        got = f"a tensor of {value.numel()} elements"
    elif isinstance(value, Tensor) or hasattr(value, "__float__"):
        return _bits(value)
    else:
        got = repr(value)
    raise TypeError(
        f"equal= has {name}, whose function returned {got} on rank {rank_here()}: "
        "return a number, or a tensor of one element"
    )


def _plain(what: str, value: Any) -> Any:
    """Return the local tensor of a replicated DTensor, such as FSDP2's norm.

    On an accelerator one message cannot hold a DTensor beside plain tensors.

    Raises:
        TypeError: if a rank holds a part of the DTensor.
    """
    if not hasattr(value, "placements"):
        return value
    if all(each.is_replicate() for each in value.placements):
        return value.to_local()
    raise TypeError(
        f"{what} returned a DTensor with placements {value.placements}, of which a "
        "rank holds a part: return its full_tensor()"
    )


def _bits(number: float | Tensor) -> int | Tensor:
    """Return the bits of a number in fp64, without waiting for a device."""
    # 0.0 turns -0 into 0; below, each nan gets the same bits
    if isinstance(number, Tensor):
        doubles = number.detach().reshape(1).double() + 0.0
        doubles = doubles.masked_fill(doubles.isnan(), math.nan)
        return doubles.view(torch.int64)[0]
    double = float(number) + 0.0
    double = math.nan if math.isnan(double) else double
    (bits,) = struct.unpack("q", struct.pack("d", double))
    return int(bits)


def _wrapped(number: int | Tensor) -> int | Tensor:
    """Return an integer modulo 2^64, in the range of int64."""
    if isinstance(number, Tensor):
        return number
    return (number + 2**63) % 2**64 - 2**63


def warn(step: int, text: str) -> None:
    """Log a warning of the watch."""
    logging.getLogger("gradparity.watch").warning(
        "gradparity.watch: step %d: %s", step, text
    )


def rank_here() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0
