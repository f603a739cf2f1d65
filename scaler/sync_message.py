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
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .grads import Number, tensor_of

CLOSING, LOADING = 0, -1
"""``position`` of a closing message, and of one about a state that is about to be
loaded; the syncs of an iteration count from 1."""

_HASH_BITS, _ORDINAL_BITS, _FINDING_BITS = 26, 5, 32
_HASH_SHIFT = _ORDINAL_BITS + _FINDING_BITS
_HASHES, _ORDINALS = 2**_HASH_BITS, 2**_ORDINAL_BITS
_ALL_ONES = 2**63 - 1


class LocalState(NamedTuple):
    """What one rank brings to a sync. A `Number` is a float where the host knows it.

    The scale, its tracker and the settings are those of this rank.

    Attributes:
        found_inf: 1 if a gradient of this rank is not finite; None without gradients.
        policy: a number that stands for the policy set on this rank.
        hysteresis_left: 0 without hysteresis.
        optimizer: its place in the order of first use, None without an optimizer.
        max_norm: that this rank clips to, None if it does not clip.
        norm_type: likewise.
        was_scaled: the scale came from `scale()` or a checkpoint on this rank.
        failed: this rank is about to raise.
        first_nonfinite: 31 bits that stand for the first bad gradient; 0 for none.
    """

    found_inf: Number | None
    scale: Number
    growth_tracker: Number
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    policy: int
    hysteresis_left: Number = 0.0
    optimizer: int | None = None
    max_norm: float | None = None
    norm_type: float | None = None
    was_scaled: bool = True
    failed: bool = False
    first_nonfinite: int = 0


SHARED = (*LocalState._fields[1:11], "iteration", "position")
"""What all ranks must share, in message order, each as ``x`` and ``-x``."""

Sent = tuple[int, int]
"""Number of this iteration of the scaler, and the position of the sync in it."""


def _shared(local: LocalState, sent: Sent) -> tuple[Number | None, ...]:
    # In the order of SHARED; None is not compared.
    return (*local[1:11], *sent)


def shared_values(local: LocalState, sent: Sent) -> dict[str, float]:
    """Return what a rank brings of ``SHARED``, without what it does not compare."""
    pairs = zip(SHARED, _shared(local, sent), strict=True)
    return {name: float(value) for name, value in pairs if value is not None}


class Summary(NamedTuple):
    """What a sync came to, on the host; the first five as they are in a message."""

    found_inf: bool
    failed: bool
    has_gradients: bool
    was_scaled: bool
    first_nonfinite: int
    differ: bool


# - The full message


def full_message(
    local: LocalState, sent: Sent, device: torch.device, row: Sequence[Number] = ()
) -> torch.Tensor:
    """Return the full message, and the row behind it, as `tensor_of` does."""
    # A rank that raises skips for all of them, also where no host reads the rest.
    found_inf = 1.0 if local.failed else local.found_inf
    numbers: list[Number] = [
        0.0 if found_inf is None else found_inf,
        local.failed,
        local.found_inf is not None,
        local.was_scaled,
        local.first_nonfinite,
    ]
    for value in _shared(local, sent):
        numbers += [-math.inf] * 2 if value is None else [value, -value]
    return tensor_of([*numbers, *row], device)


def decode_full(numbers: list[float]) -> Summary:
    """Return what a reduced full message says."""
    found_inf, failed, has_gradients, was_scaled = map(bool, numbers[:4])
    bad, differ = int(numbers[4]), bool(differences(numbers))
    return Summary(found_inf, failed, has_gradients, was_scaled, bad, differ)


def differences(numbers: list[float]) -> dict[str, tuple[float, float]]:
    """Return the lowest and the highest of what differs in a reduced full message."""
    pairs = numbers[5:]
    # Minus infinity is what ranks write that compare nothing; all of them did here.
    return {
        name: (-minus_lowest, highest)
        for name, highest, minus_lowest in zip(
            SHARED, pairs[0::2], pairs[1::2], strict=True
        )
        if highest != -minus_lowest and highest != -math.inf
    }


# - The packed message


def packed_message(local: LocalState, sent: Sent) -> torch.Tensor:
    """Return the packed message: (2,), int64, on the CPU. See [Note: Two formats].

    What is on an accelerator is read, which synchronises.
    """
    if local.failed:
        return torch.tensor([_ALL_ONES, _ALL_ONES], device="cpu")
    # All of SHARED but what follows from the call, which not every rank compares.
    hashed = zlib.crc32(struct.pack("<9d", *map(float, local[1:8]), *sent))
    hashed >>= 32 - _HASH_BITS
    ordinal = minus_ordinal = finding = 0
    if local.optimizer is not None:
        ordinal = 1 + local.optimizer % (_ORDINALS - 1)
        minus_ordinal = _ORDINALS - ordinal
    if local.found_inf is not None:
        finding = 2 + local.first_nonfinite if float(local.found_inf) else 1
    first = hashed << _HASH_SHIFT | ordinal << _FINDING_BITS | finding
    second = (_HASHES - 1 - hashed) << _HASH_SHIFT | minus_ordinal << _FINDING_BITS
    return torch.tensor([first, second | local.was_scaled], device="cpu")


def decode_packed(numbers: list[int]) -> Summary:
    """Return what a reduced packed message says."""
    first, second = numbers
    ordinal = first >> _FINDING_BITS & _ORDINALS - 1
    minus_ordinal = second >> _FINDING_BITS & _ORDINALS - 1
    finding = first & (1 << _FINDING_BITS) - 1
    failed = first == _ALL_ONES
    hashes = (first >> _HASH_SHIFT) + (second >> _HASH_SHIFT)
    return Summary(
        found_inf=failed or finding >= 2,
        failed=failed,
        has_gradients=finding >= 1,
        was_scaled=bool(second & 1),
        first_nonfinite=max(finding - 2, 0),
        differ=hashes != _HASHES - 1 or ordinal + minus_ordinal not in (0, _ORDINALS),
    )
