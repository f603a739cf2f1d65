"""What one rank brings to a sync, how it travels, and what all ranks read from it.

[Note: Two formats]
A message has the same length and dtype on every rank, whatever this rank has: no
gradients, no scale yet, several dtypes, devices, meshes. So the sequence of collectives
follows from the sequence of calls alone. All ranks take the maximum of each number.

The *full* message has a number for each field. Flags go in as they are: their maximum
is "any rank". What all ranks must share goes in twice, as ``x`` and ``-x``: the maxima
are then the highest and minus the lowest, and a difference shows on every rank at once.
What no rank compares is minus infinity in both.

gloo cuts a vector into a piece for each rank, and each piece travels around the ring by
itself: at 4 ranks a full message costs twice as much as one number. So on a CPU the
ranks exchange two integers of 63 bits, *packed* from the highest bit down:

    first:   26 bits of a hash      5 bits of the ordinal        32 bits of the finding
    second:  2**26 - 1 - the hash   32 - the 5 bits              was_scaled

The maximum of an integer is that of its highest bits first. If all hashes are equal,
the maxima of the ordinals are the highest and the lowest (a rank without an optimizer
writes 0 in both and compares nothing); if these are equal, too, the maximum of the
findings is that of all ranks with an optimizer. A rank that is about to raise writes
all ones. Every rank sees the same two maxima, so all of them know at once whether
something differs, and only then exchange full messages, to say what. The hash is of
the scale, the settings and the position of the sync; two that differ collide once in
2**26 syncs, and the position gives the next sync another hash.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .grads import host_value

FLAGS = ("found_inf", "failed", "has_gradients", "was_scaled", "first_nonfinite")
"""Fields of which the result is the largest of any rank, in message order."""

SHARED = (
    "scale",
    "growth_tracker",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "policy",
    "hysteresis_left",
    "iteration",
    "position",
    "optimizer",
    "max_norm",
    "norm_type",
)
"""Fields that all ranks must share, in message order, each as ``x`` and ``-x``."""

PLACES = {name: place for place, name in enumerate(FLAGS)}
PLACES |= {name: len(FLAGS) + 2 * place for place, name in enumerate(SHARED)}
"""Where a field begins in the full message."""

_TENSORS = ("found_inf", "scale", "growth_tracker", "hysteresis_left")
"""Fields that may be on an accelerator, where the host does not know them."""

CLOSING = 0
"""``position`` of a closing message; the syncs of an iteration count from 1."""

LOADING = -1
"""``position`` of the message about a state that is about to be loaded."""

_HASH_BITS, _ORDINAL_BITS, _FINDING_BITS = 26, 5, 32
_HASH_SHIFT = _ORDINAL_BITS + _FINDING_BITS
_HASHES, _ORDINALS = 2**_HASH_BITS, 2**_ORDINAL_BITS
_ALL_ONES = 2**63 - 1


class LocalState(NamedTuple):
    """What one rank brings to a sync.

    Attributes:
        found_inf: (), fp32, of this rank; any device, or None without gradients.
        scale: (), fp32, any device.
        growth_tracker: (), int32, any device.
        growth_factor: as set on this rank.
        backoff_factor: as set on this rank.
        growth_interval: as set on this rank.
        policy: a number that stands for the policy set on this rank.
        hysteresis_left: (), int32, any device, or None without hysteresis.
        optimizer: its place in the order of first use, None without an optimizer.
        max_norm: that this rank clips to, None if it does not clip.
        norm_type: likewise.
        was_scaled: the scale came from `scale()` or a checkpoint on this rank.
        failed: this rank is about to raise.
        first_nonfinite: 31 bits that stand for the first bad gradient; 0 for none.
    """

    found_inf: torch.Tensor | None
    scale: torch.Tensor
    growth_tracker: torch.Tensor
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    policy: int
    hysteresis_left: torch.Tensor | None = None
    optimizer: int | None = None
    max_norm: float | None = None
    norm_type: float | None = None
    was_scaled: bool = True
    failed: bool = False
    first_nonfinite: int = 0


class Summary(NamedTuple):
    """What a sync came to, on the host."""

    failed: bool
    differ: bool
    found_inf: bool
    has_gradients: bool
    was_scaled: bool
    first_nonfinite: int


class SyncResult:
    """The reduced message of one sync; the same on every rank.

    Args:
        message: reduced, or it will be once ``wait`` has returned; int64 if packed.
        sent: the numbers of this rank's full message.
        call: name of the calling method, for messages.
        wait: waits for a message that is still on its way.
    """

    def __init__(
        self,
        message: torch.Tensor,
        sent: list[float],
        call: str,
        wait: Callable[[], None] | None = None,
    ) -> None:
        self._message, self._wait = message, wait
        self.sent, self.call = sent, call
        self._summary: Summary | None = None
        self._copy: tuple[torch.Tensor, torch.cuda.Event] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether reading waits for the other ranks."""
        return self._wait is not None

    @property
    def is_packed(self) -> bool:
        """Whether it says that something differs, but not what."""
        return self._message.dtype is torch.int64

    @property
    def is_on_host(self) -> bool:
        """Whether reading costs no synchronisation with an accelerator."""
        return self._message.is_cpu

    @property
    def is_readable(self) -> bool:
        """Whether reading waits for nothing but its own copy."""
        return self._copy is not None or self._summary is not None

    @property
    def message(self) -> torch.Tensor:
        """The reduced numbers, on their device; waits for them if need be."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._message

    @property
    def found_inf(self) -> torch.Tensor:
        """(), fp32, exactly 0 or 1, on the device of the message."""
        if not self.is_on_host:
            return self.message[PLACES["found_inf"]].float()
        return torch.full((), float(self.summary.found_inf), device="cpu")

    @property
    def summary(self) -> Summary:
        """The result on the host; synchronises at most once."""
        if self._summary is None:
            numbers = self.numbers()
            decode = _decode_packed if self.is_packed else _decode_full
            self._summary = decode(numbers)
        return self._summary

    def numbers(self) -> list[Any]:
        """Return the message on the host."""
        message = self.message
        if self._copy is not None:
            message, event = self._copy
            event.synchronize()
        return list(message.tolist())

    def start_reading(self) -> None:
        """Begin to copy the message to the host without waiting for it."""
        if self.message.is_cuda and not torch.cuda.is_current_stream_capturing():
            host = torch.empty_like(self.message, device="cpu", pin_memory=True)
            host.copy_(self.message, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._copy = (host, event)

    def differences(self) -> dict[str, tuple[float, float, float]]:
        """Return this rank's number, the lowest and the highest of what differs.

        Of a full message only.
        """
        numbers = self.numbers()
        found = {}
        for name in SHARED:
            place = PLACES[name]
            highest, minus_lowest = numbers[place : place + 2]
            if _differ(highest, minus_lowest):
                found[name] = self.sent[place], -minus_lowest, highest
        return found


def _differ(highest: float, minus_lowest: float) -> bool:
    # Minus infinity is what ranks write that compare nothing; all of them did here.
    return highest != -minus_lowest and highest != -math.inf


def full_numbers(
    local: LocalState, iteration: int, position: int, device: torch.device
) -> list[float]:
    """Return the full message in numbers; what is on an accelerator stays nan.

    Args:
        local: what this rank brings.
        iteration: number of this iteration of the scaler.
        position: which sync of the iteration it is, from 1, CLOSING or LOADING.
        device: where it is exchanged. On a CPU all of it must be known: then what is on
            an accelerator is read, which synchronises.
    """

    def number(tensor: torch.Tensor | None) -> float:
        if tensor is None:
            return 0.0
        if tensor.is_cpu:
            return host_value(tensor)
        return math.nan if device.type != "cpu" else float(tensor.item())

    numbers = [
        # A rank that raises skips for all of them, also where no host reads the rest.
        1.0 if local.failed else number(local.found_inf),
        float(local.failed),
        float(local.found_inf is not None),
        float(local.was_scaled),
        float(local.first_nonfinite),
    ]
    for value in (
        number(local.scale),
        number(local.growth_tracker),
        local.growth_factor,
        local.backoff_factor,
        float(local.growth_interval),
        float(local.policy),
        number(local.hysteresis_left),
        float(iteration),
        float(position),
    ):
        numbers += [value, -value]
    for given in (local.optimizer, local.max_norm, local.norm_type):
        numbers += [-math.inf] * 2 if given is None else [float(given), -float(given)]
    return numbers


def full_message(
    numbers: list[float], local: LocalState, device: torch.device
) -> torch.Tensor:
    """Return the full message, fp64, on ``device``, without a synchronisation.

    Args:
        numbers: what `full_numbers` returned for ``local``.
        local: fills in what is on an accelerator.
        device: where it is exchanged.
    """
    message = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    message = message.to(device, non_blocking=True)
    for name in _TENSORS:
        if math.isnan(numbers[place := PLACES[name]]):
            tensor = getattr(local, name)
            message[place].copy_(tensor, non_blocking=True)
            if name in SHARED:
                message[place + 1].copy_(-tensor, non_blocking=True)
    return message


def _decode_full(numbers: list[float]) -> Summary:
    found_inf, failed, has_gradients, was_scaled, first_nonfinite = numbers[:5]
    pairs = numbers[len(FLAGS) :]
    return Summary(
        failed=bool(failed),
        differ=any(map(_differ, pairs[0::2], pairs[1::2])),
        found_inf=bool(found_inf),
        has_gradients=bool(has_gradients),
        was_scaled=bool(was_scaled),
        first_nonfinite=int(first_nonfinite),
    )


def packed_message(local: LocalState, numbers: list[float]) -> torch.Tensor:
    """Return the packed message: (2,), int64, on the CPU. See [Note: Two formats].

    Args:
        local: what this rank brings.
        numbers: what `full_numbers` returned for it, without nan.
    """
    if local.failed:
        return torch.tensor([_ALL_ONES, _ALL_ONES], device="cpu")
    digest = zlib.crc32(struct.pack(_FORMAT, *numbers[_HASHED]))
    hashed = digest >> (32 - _HASH_BITS)
    ordinal = minus_ordinal = 0
    if local.optimizer is not None:
        ordinal = 1 + local.optimizer % (_ORDINALS - 1)
        minus_ordinal = _ORDINALS - ordinal
    finding = int(local.found_inf is not None)
    if numbers[0]:
        finding = 2 + local.first_nonfinite
    first = hashed << _HASH_SHIFT | ordinal << _FINDING_BITS | finding
    second = (_HASHES - 1 - hashed) << _HASH_SHIFT | minus_ordinal << _FINDING_BITS
    return torch.tensor([first, second | local.was_scaled], device="cpu")


# Of each pair one; optimizer and norms are not in it.
_HASHED = slice(len(FLAGS), PLACES["optimizer"], 2)
_FORMAT = f"<{SHARED.index('optimizer')}d"


def _decode_packed(numbers: list[int]) -> Summary:
    first, second = numbers
    ordinal = first >> _FINDING_BITS & _ORDINALS - 1
    minus_ordinal = second >> _FINDING_BITS & _ORDINALS - 1
    finding = first & (1 << _FINDING_BITS) - 1
    failed = first == _ALL_ONES
    hashes = (first >> _HASH_SHIFT) + (second >> _HASH_SHIFT)
    return Summary(
        failed=failed,
        differ=hashes != _HASHES - 1 or ordinal + minus_ordinal not in (0, _ORDINALS),
        found_inf=failed or finding >= 2,
        has_gradients=finding >= 1,
        was_scaled=bool(second & 1),
        first_nonfinite=max(finding - 2, 0),
    )
