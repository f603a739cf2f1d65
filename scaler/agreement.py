"""All ranks agree on overflow: one all-reduce of one small message.

1. Each rank writes what it found and what it holds into a message of fixed size.
2. One all-reduce (MAX) over the ranks of :class:`~.groups.Reach`.
3. Every rank reads the same verdict from the result, or raises the same error.

[Note: One message, always the same]
The message has the same length, dtype and device type on every rank, whatever this rank
has: no gradients, no scale yet, several dtypes, devices, meshes. So the sequence of
collectives follows from the sequence of calls alone. Flags go in as they are: their
maximum is "any rank". Everything all ranks must share goes in twice, as ``x`` and
``-x``: the maxima are then the highest and minus the lowest, and a difference shows on
every rank at once, without a second collective.

[Note: Closing an iteration]
Ranks may call `step` a different number of times (a stage without parameters, a
forgotten optimizer). A rank that has fewer agreements would leave the others waiting,
or worse: their message would pair with the next collective of the training itself. So
`update` sends a closing message whenever this iteration had another number of
agreements than the largest number seen so far; the first iteration always closes. A
closing message that meets a step differs in ``agreement``, and all ranks raise. When
every iteration is alike, no closing message is sent: one collective per step and no
more. One case is out of reach without a second collective in every iteration: a rank
that suddenly has *more* agreements than ever before, alone.

[Note: An error on one rank]
Reading gradients can fail on one rank alone (an fp16 gradient that is not allowed).
That rank still sends its message, with ``failed`` set, and then raises its own error;
the others raise PeerFailedError instead of waiting. Wrong call order raises without a
message: it is the same mistake on every rank, and nothing was under way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from .errors import PeerFailedError, RanksDisagreeError
from .groups import Reach, message_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["FLAGS", "SHARED", "Agreement", "Holding", "Verdict"]

FLAGS = ("found_inf", "failed", "has_gradients", "was_scaled", "culprit")
"""Fields of which the verdict is the largest of any rank, in message order."""

SHARED = (
    "scale",
    "growth_tracker",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "policy",
    "hysteresis_left",
    "divisor",
    "iteration",
    "agreement",
)
"""Fields that all ranks must share, in message order, each as ``x`` and ``-x``."""

_FIRST_SHARED = len(FLAGS)
_PLACE = {name: place for place, name in enumerate(FLAGS)}
_PLACE |= {name: _FIRST_SHARED + 2 * place for place, name in enumerate(SHARED)}
"""Where a field begins in the message."""

_MAYBE_ON_DEVICE = (
    "found_inf",
    "scale",
    "growth_tracker",
    "hysteresis_left",
    "divisor",
)
"""Fields that are tensors, which the host need not know."""

_CLOSING = 0
"""``agreement`` of a closing message; those of an iteration count from 1."""

_LOADING = -1
"""``agreement`` of the message about a state that is about to be loaded."""

# Its name before torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Holding(NamedTuple):
    """What one rank brings to an agreement.

    Attributes:
        found_inf: (), fp32, this rank's finding; any device, or None for "nothing".
        scale: (), fp32, any device.
        growth_tracker: (), int32, any device.
        growth_factor: as set on this rank.
        backoff_factor: as set on this rank.
        growth_interval: as set on this rank.
        policy: a number that stands for the policy set on this rank.
        hysteresis_left: (), int32, any device, or None without hysteresis.
        divisor: (), fp32, any device: what this rank's gradients were scaled by, or
            None without gradients, which fits what the others hold.
        has_gradients: this rank had at least one gradient to look at.
        was_scaled: the scale came from `scale()` or a checkpoint on this rank.
        failed: this rank is about to raise.
        culprit: a number that stands for the first bad gradient; 0 for none.
    """

    found_inf: torch.Tensor | None
    scale: torch.Tensor
    growth_tracker: torch.Tensor
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    policy: float = 0.0
    hysteresis_left: torch.Tensor | None = None
    divisor: torch.Tensor | None = None
    has_gradients: bool = True
    was_scaled: bool = True
    failed: bool = False
    culprit: float = 0.0


class Verdict:
    """The reduced message of one agreement; the same on every rank.

    Attributes:
        message: (size,), fp64, on the device of the message.
        gathered: (number of ranks, ...), fp64: what the ranks attached, if they did.
    """

    def __init__(
        self, message: torch.Tensor, sent: list[float], rank: int, size: int, call: str
    ) -> None:
        self.message = message
        self._sent, self._rank, self._size, self._call = sent, rank, size, call
        self._values: list[float] | None = None
        self._copy: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self.gathered: torch.Tensor | None = None

    @property
    def found_inf(self) -> torch.Tensor:
        """(), fp32, exactly 0 or 1, on the device of the message."""
        return self.message[_PLACE["found_inf"]].float()

    def value(self, name: str) -> float:
        """Return a field of FLAGS; synchronises with the device."""
        return self.values()[_PLACE[name]]

    def values(self) -> list[float]:
        """Return the message on the host; synchronises at most once."""
        if self._values is None:
            message = self.message
            if self._copy is not None:
                message, event = self._copy
                event.synchronize()
            self._values = message.tolist()
        return self._values

    def start_reading(self) -> None:
        """Begin to copy the message to the host without waiting for it."""
        if self.message.is_cuda and not torch.cuda.is_current_stream_capturing():
            host = torch.empty_like(self.message, device="cpu", pin_memory=True)
            host.copy_(self.message, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._copy = (host, event)

    def check(self) -> None:
        """Raise if a rank failed or the ranks disagree.

        Raises:
            PeerFailedError: another rank raised while it read its gradients.
            RanksDisagreeError: a field of ``SHARED`` differs between ranks.
        """
        if self.value("failed"):
            raise PeerFailedError(
                f"{self._call} on rank {self._rank} of {self._size}: another rank "
                "raised while it read its gradients, so no rank steps. The cause is in "
                "that rank's traceback.",
                rank=self._rank,
                call=self._call,
            )
        pairs = self.values()[_FIRST_SHARED:]
        if any(map(_differ, pairs[0::2], pairs[1::2])):
            raise self._disagreement(pairs)

    def _disagreement(self, pairs: list[float]) -> RanksDisagreeError:
        here = dict(zip(SHARED, self._sent[_FIRST_SHARED::2], strict=True))
        highest = dict(zip(SHARED, pairs[0::2], strict=True))
        lowest = {name: -x for name, x in zip(SHARED, pairs[1::2], strict=True)}
        differ = [name for name in SHARED if _differ(highest[name], -lowest[name])]
        if "scale" in differ and "divisor" in differ:
            differ.remove("divisor")  # follows from the other
        found = "; ".join(
            f"{name} is {_told(name, here[name])} here, and over all ranks between "
            f"{_told(name, lowest[name])} and {_told(name, highest[name])}"
            for name in differ
        )
        way_out = _WAY_OUT_CALLS if "agreement" in differ else _WAY_OUT_STATE
        return RanksDisagreeError(
            f"{self._call} on rank {self._rank} of {self._size}: {found}. All ranks "
            f"must hold the same. {way_out}",
            rank=self._rank,
            world_size=self._size,
            call=self._call,
            here=here,
            lowest={name: lowest[name] for name in differ},
            highest={name: highest[name] for name in differ},
        )


_WAY_OUT_CALLS = (
    "Call step() for the same number of optimizers on every rank before update(); a "
    "rank without parameters calls step_without_optimizer() instead."
)
_WAY_OUT_STATE = (
    "Build the scaler with the same arguments on every rank and load the same "
    "state_dict on every rank; if these ranks train independent models, pass "
    'process_group=, mesh= or agree_over="mesh".'
)


def _differ(highest: float, minus_lowest: float) -> bool:
    # Minus infinity is what ranks write that hold nothing; all of them did here.
    return highest != -minus_lowest and highest != -math.inf


def _told(name: str, value: float) -> str:
    if name == "agreement":
        other = {_CLOSING: "update()", _LOADING: "load_state_dict()"}
        return other.get(int(value), f"step {value:g} of the iteration")
    return f"{value:g}"


class Agreement:
    """The agreements of one scaler: who takes part, and how many there were.

    Args:
        reach: the ranks that must agree.
        device_type: where to exchange messages if the process group can.
    """

    def __init__(self, reach: Reach, device_type: str) -> None:
        self.reach = reach
        self._device_type = device_type
        self._iteration = 0
        self._count = 0  # agreements in this iteration
        self._most = -1  # largest count of any iteration; -1: none is over yet
        self._unread: list[Verdict] = []

    def reset(self) -> None:
        """Forget the current iteration, after an error that ended it."""
        self._count = 0

    def group(self, parameters: Callable[[], Iterable[Any]]) -> ProcessGroup | None:
        """Return the group to agree over, None when this rank is on its own."""
        return self.reach.group(parameters)

    def agree(
        self,
        group: ProcessGroup,
        holding: Holding,
        call: str,
        attached: torch.Tensor | None = None,
    ) -> Verdict:
        """Exchange one message for one optimizer step.

        Args:
            group: what `group` returned.
            holding: what this rank brings.
            call: name of the calling method, for messages.
            attached: any fixed shape, fp64: gathered from all ranks on the way.

        Returns:
            The verdict, already checked where that costs no synchronisation.

        Raises:
            PeerFailedError: another rank raised.
            RanksDisagreeError: the ranks hold different state.
        """
        self._count += 1
        return self._exchange(group, holding, self._count, call, attached)

    def compare(self, group: ProcessGroup, holding: Holding, call: str) -> None:
        """Raise unless all ranks bring the same; synchronises.

        Raises:
            PeerFailedError: another rank raised.
            RanksDisagreeError: a field of ``SHARED`` differs between ranks.
        """
        verdict = self._exchange(group, holding, _LOADING, call)
        if not holding.failed:
            verdict.check()

    @property
    def is_like_others(self) -> bool:
        """Whether this iteration may end without a message."""
        return self._count == self._most

    def close(
        self, group: ProcessGroup | None, holding: Holding | None, call: str
    ) -> None:
        """End the iteration. See [Note: Closing an iteration].

        Args:
            group: what `group` returned; may be left out if `is_like_others`.
            holding: what this rank brings, to a group.
            call: name of the calling method, for messages.

        Raises:
            RanksDisagreeError: the ranks had different numbers of agreements.
        """
        count, self._count = self._count, 0
        if group is not None and holding is not None and count != self._most:
            self._exchange(group, holding, _CLOSING, call)
        self._most = max(self._most, count)
        self._iteration += 1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_unread": []}

    def _exchange(
        self,
        group: ProcessGroup,
        holding: Holding,
        position: int,
        call: str,
        attached: torch.Tensor | None = None,
    ) -> Verdict:
        self._check_unread()
        device = message_device(group, self._device_type)
        sent = _as_numbers(holding, self._iteration, position)
        message = _as_message(sent, holding, device)
        gathered = None
        with _explained(group, call):
            if attached is None:
                dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
            else:
                message, gathered = _gather(message, attached.to(device), group)
        verdict = Verdict(message, sent, group.rank(), group.size(), call)
        verdict.gathered = gathered
        if holding.failed:
            return verdict
        if device.type == "cpu":
            verdict.check()
        else:
            # Reading now would synchronise; every rank reads at its next agreement.
            verdict.start_reading()
            self._unread.append(verdict)
        return verdict

    def _check_unread(self) -> None:
        unread, self._unread = self._unread, []
        for verdict in unread:
            if verdict._copy is not None or verdict._values is not None:
                verdict.check()


def _as_numbers(holding: Holding, iteration: int, position: int) -> list[float]:
    # What is on an accelerator stays nan here: writing it down would synchronise.
    flags = [
        _if_on_host(holding.found_inf),
        float(holding.failed),
        float(holding.has_gradients),
        float(holding.was_scaled),
        holding.culprit,
    ]
    shared = [
        _if_on_host(holding.scale),
        _if_on_host(holding.growth_tracker),
        holding.growth_factor,
        holding.backoff_factor,
        float(holding.growth_interval),
        holding.policy,
        _if_on_host(holding.hysteresis_left),
        _if_on_host(holding.divisor),
        float(iteration),
        float(position),
    ]
    message = flags + [signed for x in shared for signed in (x, -x)]
    if holding.divisor is None:
        place = _PLACE["divisor"]
        message[place : place + 2] = [-math.inf, -math.inf]
    return message


def _if_on_host(tensor: torch.Tensor | None) -> float:
    if tensor is None:
        return 0.0
    if not tensor.is_cpu:
        return math.nan
    value: Any = tensor.tolist()
    return float(value)


def _as_message(
    sent: list[float], holding: Holding, device: torch.device
) -> torch.Tensor:
    message = torch.tensor(sent, dtype=torch.float64).to(device, non_blocking=True)
    for name in _MAYBE_ON_DEVICE:
        if math.isnan(sent[index := _PLACE[name]]):
            tensor = getattr(holding, name)
            message[index].copy_(tensor, non_blocking=True)
            if name in SHARED:
                message[index + 1].copy_(-tensor, non_blocking=True)
    return message


def _gather(
    message: torch.Tensor, attached: torch.Tensor, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    # One collective still: the maximum is then taken here.
    row = torch.cat([message, attached.flatten()])
    rows = row.new_empty(group.size(), len(row))
    _all_gather(rows.flatten(), row, group=group)
    gathered = rows[:, len(message) :].reshape(-1, *attached.shape)
    return rows[:, : len(message)].amax(0), gathered


@contextmanager
def _explained(group: ProcessGroup, call: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        error.add_note(
            f"gradparity: in the agreement of {call} on rank {group.rank()} of "
            f"{group.size()}. All ranks of the group must call step() and update() in "
            'step; independent models need process_group=, mesh= or agree_over="mesh".'
        )
        raise
