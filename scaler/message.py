"""What the ranks tell each other in one agreement, and what they read from the answer.

[Note: One message, always the same]
The message has the same length, dtype and device type on every rank, whatever this rank
has: no gradients, no scale yet, several dtypes, devices, meshes. So the sequence of
collectives follows from the sequence of calls alone. Flags go in as they are: their
maximum is "any rank". Everything all ranks must share goes in twice, as ``x`` and
``-x``: the maxima are then the highest and minus the lowest, and a difference shows on
every rank at once, without a second collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .errors import PeerFailedError, RanksDisagreeError

__all__ = [
    "CLOSING",
    "FLAGS",
    "LOADING",
    "SHARED",
    "Holding",
    "Verdict",
    "as_message",
    "as_numbers",
]

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

CLOSING = 0
"""``agreement`` of a closing message; those of an iteration count from 1."""

LOADING = -1
"""``agreement`` of the message about a state that is about to be loaded."""


class Holding(NamedTuple):
    """What one rank brings to an agreement.

    Attributes:
        found_inf: (), fp32, this rank's finding; any device, or None for "nothing".
        scale: (), fp32, any device.
        growth_tracker: (), int32, any device.
        growth_factor: as set on this rank.
        backoff_factor: as set on this rank.
        growth_interval: as set on this rank.
        policy: a number that stands for the policy set on this rank, and for what
            clip_grad_norm_ was asked for.
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

    Args:
        message: as it is, or will be once ``arrive`` has returned.
        sent: what this rank had written into it.
        rank: of this process in its group.
        size: of that group.
        call: name of the calling method, for messages.
        arrive: waits for a message that is still on its way.

    Attributes:
        gathered: (number of ranks, ...), fp64: what the ranks attached, if they did.
    """

    def __init__(
        self,
        message: torch.Tensor,
        sent: list[float],
        rank: int,
        size: int,
        call: str,
        arrive: Callable[[], None] | None = None,
    ) -> None:
        self._message, self._arrive = message, arrive
        self._sent, self._rank, self._size, self._call = sent, rank, size, call
        self._values: list[float] | None = None
        self._copy: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self.gathered: torch.Tensor | None = None

    @property
    def message(self) -> torch.Tensor:
        """(size,), fp64, on its device; waits for it if need be."""
        if self._arrive is not None:
            self._arrive()
            self._arrive = None
        return self._message

    @property
    def is_on_its_way(self) -> bool:
        """Whether reading waits for the other ranks."""
        return self._arrive is not None

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

    @property
    def is_readable(self) -> bool:
        """Whether reading waits for nothing but its own copy."""
        return self._copy is not None or self._values is not None

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
        if "policy" in differ:
            way_out = _POLICY + way_out
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
_POLICY = (
    "policy is a number: it stands for the scaler's policy and, when clipping, for "
    "max_norm and norm_type. "
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
        other = {CLOSING: "update()", LOADING: "load_state_dict()"}
        return other.get(int(value), f"step {value:g} of the iteration")
    return f"{value:g}"


def as_numbers(holding: Holding, iteration: int, position: int) -> list[float]:
    """Return the message in numbers; what is on an accelerator stays nan.

    Args:
        holding: what this rank brings.
        iteration: number of this iteration of the scaler.
        position: which agreement of the iteration it is, from 1, CLOSING or LOADING.
    """
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


def as_message(
    sent: list[float], holding: Holding, device: torch.device
) -> torch.Tensor:
    """Return the message, (size,), fp64, on ``device``, without a synchronisation.

    Args:
        sent: what `as_numbers` wrote of ``holding``.
        holding: fills in what is on an accelerator.
        device: where it is exchanged.
    """
    message = torch.tensor(sent, dtype=torch.float64).to(device, non_blocking=True)
    for name in _MAYBE_ON_DEVICE:
        if math.isnan(sent[index := _PLACE[name]]):
            tensor = getattr(holding, name)
            message[index].copy_(tensor, non_blocking=True)
            if name in SHARED:
                message[index + 1].copy_(-tensor, non_blocking=True)
    return message
